"""compute-sanitizer finds nothing in a small set of kernels."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from gpu_checks import PIPELINES, on
from sanitized import SET

from flashgen.lang.load import load_spec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="compute-sanitizer is not installed"),
]

HERE = Path(__file__).parent


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_the_set_is_clean(pipeline, tool):
    on(load_spec("full"), pipeline)  # or skip
    if (pipeline, tool) == ("hopper", "racecheck"):
        pytest.skip("racecheck does not know the order that an mbarrier gives to bulk copies")
    done = subprocess.run(
        [
            *("compute-sanitizer", "--tool", tool, "--error-exitcode", "9", "--kernel-name", "kns=attention"),
            *(sys.executable, str(HERE / "sanitized.py"), pipeline),
        ],
        capture_output=True,
        text=True,
        timeout=500,
        # Every tensor an allocation of its own: reading past its end is then no reading of another one.
        env={
            **os.environ,
            "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
            "PYTHONPATH": f"{HERE.parent}:{HERE}:{HERE.parents[1]}",
        },
    )
    print(done.stdout, done.stderr)
    assert done.returncode == 0, done.stdout[-4000:]
    assert done.stdout.count("\nran ") + done.stdout.startswith("ran ") == len(SET)
