"""Cold start: seconds from a spec file to its first result in a fresh process, with an empty cache and a warm one.

`python -m flashgen.bench.cold REQUEST` is such a process: it prints what it measured as JSON.
"""

from __future__ import annotations

import compileall
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import flashgen
from flashgen.errors import LaunchError
from flashgen.planning.problem import Problem
from flashgen.runtime import captured

CACHES = ("empty", "warm")

#: What a process reports.
MARK = "cold start: "


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Seconds of one process after its imports and CUDA's initialisation.

    inputs  until q, k and v lie in memory: PyTorch's context and its first kernels
    result  from there, reading the spec included, until o is written
    """

    spec: str
    cache: str
    inputs: float
    result: float


def bytecode() -> bool:
    """Compile this package's modules, as pip does when it installs one: whether every process finds them so.

    Where a process may not write beside them it compiles them again, for about 60 ms.
    """
    return bool(compileall.compile_dir(Path(flashgen.__file__).parent, quiet=2))


def starts(specs: list[str], problem: Problem, *, rounds: int, device: str = "cuda") -> Iterator[Start]:
    """Each round runs every spec twice, with a cache folder that is empty and then with what the first run left.

    Raises LaunchError with what a process complained of.
    """
    for _ in range(rounds):
        for spec in specs:
            with tempfile.TemporaryDirectory() as folder:
                for cache in CACHES:
                    inputs, result = process(spec, problem, device, Path(folder))
                    yield Start(spec=spec, cache=cache, inputs=inputs, result=result)


def process(spec: str, problem: Problem, device: str, folder: Path) -> tuple[float, float]:
    """(inputs, result) of `Start` in a fresh process with a cache folder.  Raises LaunchError as `starts` does."""
    request = json.dumps({"spec": spec, "device": device, **problem._asdict()})
    done = subprocess.run(
        [sys.executable, "-m", "flashgen.bench.cold", request],
        capture_output=True,
        text=True,
        env={**os.environ, "FLASHGEN_CACHE_DIR": str(folder)},
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode or len(lines) != 1:
        complaint = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        raise LaunchError(f"a fresh process ended with {done.returncode} on {spec}: {complaint}")
    return tuple(json.loads(lines[0].removeprefix(MARK)))


def _measured(spec: str, device: str, problem: Problem) -> tuple[float, float]:
    """What one process measures of itself: (inputs, result) of `Start`."""
    import torch

    if device == "cuda":
        torch.cuda.init()
    begin = time.perf_counter()
    p, dtype = problem, getattr(torch, problem.dtype)
    q = torch.randn(p.batch, p.heads, p.q_len, p.head_dim, device=device).to(dtype)
    k = torch.randn(p.batch, p.kv_heads, p.kv_len, p.head_dim, device=device).to(dtype)
    v = torch.randn(p.batch, p.kv_heads, p.kv_len, p.v_head_dim, device=device).to(dtype)
    _settle(device)
    made = time.perf_counter()
    variant = flashgen.load_spec(spec)
    named = captured.on_device(variant, captured.examples(variant, p, seed=0), device) if variant.tensors else {}
    flashgen.attention(q, k, v, variant, **named)
    _settle(device)
    return made - begin, time.perf_counter() - made


def _settle(device: str) -> None:
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    print(MARK + json.dumps(_measured(asked.pop("spec"), asked.pop("device"), Problem(**asked))))
