"""The kernels of another checkout, such as the parent commit's, beside those of this one in the same rounds.

Two versions of a package cannot live in one process.  The other one's calls run in a process of its own, which waits
while this one works, and times a slot when it is asked for one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from flashgen.errors import LaunchError

if TYPE_CHECKING:
    from flashgen.bench.cells import Cell

#: The contender's name.
BEFORE = "before"

#: What the other process runs, with its own flashgen: it makes the call, says so, and gives milliseconds for each line.
PROGRAM = """
import json, sys, time
import torch
from flashgen.bench import contest
from flashgen.bench.cells import Cell
from flashgen.ops.attention import attention
from flashgen.planning.problem import Problem

asked = json.loads(sys.argv[1])
params = tuple((name, value) for name, value in asked["params"])
cell = Cell(specs=tuple(asked["specs"]), problem=Problem(**asked["problem"]), params=params)
device = "cuda" if torch.cuda.is_available() else "cpu"
at = contest.prepare(cell, asked["pipeline"], asked["seed"], device=device)
if asked["backward"]:
    leaves = [x.detach().requires_grad_() for x in (at.q, at.k, at.v)]
    o = attention(*leaves, at.variant, **at.inputs)
    call = lambda: torch.autograd.grad(o, leaves, at.do, retain_graph=True)
else:
    call = lambda: attention(at.q, at.k, at.v, at.variant, **at.inputs)

def settle():
    if device == "cuda":
        torch.cuda.synchronize()

def timed(count):
    if device == "cpu":
        start = time.perf_counter()
        for _ in range(count):
            call()
        return 1e3 * (time.perf_counter() - start) / count
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / count

call(), settle()
once = timed(3)
print("ready", flush=True)
for line in sys.stdin:
    count = max(3, min(500, round(float(line) / max(once, 1e-3))))
    for _ in range(max(2, count // 2)):
        call()
    print(timed(count), flush=True)
"""


class Against:
    """A call of another checkout at a cell, in a process that ends with the context."""

    def __init__(self, folder: Path, cell: Cell, pipeline: str, *, backward: bool, seed: int) -> None:
        self._folder = folder
        self._asked = json.dumps(
            {
                "specs": cell.specs,
                "problem": cell.problem._asdict(),
                "params": cell.params,
                "pipeline": pipeline,
                "backward": backward,
                "seed": seed,
            }
        )
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Against:
        """Start it and wait until it has made its call.  Raises LaunchError with what it complained of."""
        environment = {**os.environ, "PYTHONPATH": str(self._folder)}
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, self._asked],
            cwd=self._folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        if self._answer() != "ready":
            raise self._failed()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        process = self._running()
        process.stdin.close()
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
        process.stderr.close()

    def slot(self, slot_ms: float) -> float:
        """Milliseconds of one call, as `protocol.interleave` asks for them, once this process's GPU is idle."""
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()
        process = self._running()
        try:
            process.stdin.write(f"{slot_ms}\n")
            process.stdin.flush()
        except BrokenPipeError:
            raise self._failed() from None
        if not (told := self._answer()):
            raise self._failed()
        return float(told)

    def _running(self) -> Any:
        assert self._process is not None  # the context has begun
        return self._process

    def _answer(self) -> str:
        return self._running().stdout.readline().strip()

    def _failed(self) -> LaunchError:
        process = self._running()
        process.kill()
        complaint = (process.stderr.read().strip().splitlines() or ["nothing"])[-1]
        return LaunchError(f"the process of {self._folder} ended: {complaint}")


def check(folder: Path) -> None:
    """Raise LaunchError for a folder that is no checkout."""
    if not (folder / "flashgen" / "__init__.py").is_file():
        raise LaunchError(
            f"{folder} is no checkout of flashgen: it has no flashgen/__init__.py\n"
            "  nearest: git worktree add ../before HEAD~1, and --against ../before"
        )
