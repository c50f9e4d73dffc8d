"""The predicted traffic beside the GPU's own counters, which Nsight Compute reads.

Run as a module this file is the program that is profiled: it launches the kernels of each cell once.
"""

from __future__ import annotations

import csv
import io
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from flashgen.bench.cells import Cell, cell
from flashgen.bench.contest import prepare
from flashgen.errors import LaunchError
from flashgen.planning import traffic
from flashgen.planning.prediction import Bytes

#: Bytes that the SMs got from L2 and sent to it (by cp.async, TMA and plain accesses alike), and DRAM's.
L2 = ("l1tex__m_xbar2l1tex_read_bytes.sum", "l1tex__m_l1tex2xbar_write_bytes.sum")
DRAM = ("dram__bytes_read.sum", "dram__bytes_write.sum")

#: Sectors that L2 adds to on its own: the bytes go there as written, and the sum that is read never leaves L2.  A
#: prediction, which knows no L2, counts each addition as a read and a write.
ADDED, SECTOR = "lts__t_sectors_srcunit_tex_op_red.sum", 32
METRICS = (*L2, *DRAM, ADDED)

#: Each kind of schedule, head dims of one and of several swizzled boxes, groups, a length off the tile.
CELLS = (
    cell("full", 128, 4096, batch=2, heads=16),
    cell("causal", 128, 4096, batch=2, heads=16),
    cell("causal", 64, 8192, batch=1, heads=16),
    cell("causal", 256, 4096, batch=1, heads=8),
    cell("causal", 128, 4001, batch=2, heads=16),
    cell("causal", 128, 8192, batch=1, heads=32, kv_heads=8),
    cell("sliding_window", 128, 16_384, batch=1, heads=16, window=1024),
    cell("sink_window", 128, 8192, batch=1, heads=16),
    cell("document", 128, 8192, batch=1, heads=16),
    cell("softcap", 64, 4096, batch=2, heads=16),
)

#: The first kernel of a cell.
FIRST = "attention_forward"

#: Input of the profiled program and of the prediction.
SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """The kernels of one pass of a cell: predicted bytes beside counted ones.

    predicted   `hbm` of the Prediction, as if there were no L2: what SMs and L2 exchange
    compulsory  what DRAM and L2 exchange at least, where the caches start cold
    """

    cell: Cell
    tile: str
    predicted: Bytes
    compulsory: Bytes
    l2: Bytes
    dram: Bytes

    @property
    def read_ratio(self) -> float:
        """Bytes that SMs read (or L2, to add to them) / bytes that were predicted."""
        return self.l2.read_bytes / self.predicted.read_bytes

    @property
    def write_ratio(self) -> float:
        """Bytes that SMs wrote / bytes that were predicted."""
        return self.l2.write_bytes / self.predicted.write_bytes

    def as_json(self) -> dict[str, object]:
        return {
            "cell": str(self.cell),
            "tile": self.tile,
            **{name: getattr(self, name).as_json() for name in ("predicted", "compulsory", "l2", "dram")},
            "read_ratio": round(self.read_ratio, 4),
            "write_ratio": round(self.write_ratio, 4),
        }


def count(cells: Sequence[Cell], pipeline: str, *, backward: bool = False) -> list[Counted]:
    """Profile one call of each cell with cold caches, clocks left alone; the forward, or the kernels of its backward.

    Raises LaunchError where ncu is missing or cannot read the counters, with what it printed.
    """
    if shutil.which("ncu") is None:
        raise LaunchError("the counters are read by ncu of Nsight Compute, and there is none on the PATH")
    names = [str(each) for each in cells]
    program = (sys.executable, "-m", "flashgen.bench.counters", pipeline, "backward" if backward else "forward", *names)
    options = ("--csv", "--print-units=base", "--clock-control=none", "--cache-control=all")
    kernels = ("--kernel-name=regex:^attention_", f"--metrics={','.join(METRICS)}")
    done = subprocess.run(("ncu", *options, *kernels, *program), capture_output=True, text=True)
    if done.returncode:
        raise LaunchError(f"ncu ended with {done.returncode}:\n{(done.stdout + done.stderr)[-2000:]}")
    seen = list(passes(done.stdout, backward=backward))
    if len(seen) != len(cells):
        raise LaunchError(f"ncu saw {len(seen)} calls of {len(cells)}:\n{done.stdout[-2000:]}")
    return [_beside(each, pipeline, metrics, backward) for each, metrics in zip(cells, seen, strict=True)]


def passes(text: str, *, backward: bool) -> Iterator[Mapping[str, int]]:
    """The metrics of each call, of what `ncu --csv --print-units=base` prints of a forward and perhaps a backward.

    A call begins with the launch of its forward; where `backward`, the launches after it are summed, else they are not
    there.
    """
    launches: dict[str, dict[str, str | int]] = {}
    lines = [line for line in text.splitlines() if line.startswith('"')]
    for row in csv.DictReader(io.StringIO("\n".join(lines))):
        launch = launches.setdefault(row["ID"], {"kernel": row["Kernel Name"]})
        launch[row["Metric Name"]] = int(float(row["Metric Value"].replace(",", "")))
    calls: list[list[dict[str, str | int]]] = []
    for launch in launches.values():
        if str(launch["kernel"]).startswith(FIRST):
            calls.append([])
        calls[-1].append(launch)
    for call in calls:
        yield {metric: sum(int(launch[metric]) for launch in call[backward:]) for metric in METRICS}


def _beside(cell: Cell, pipeline: str, seen: Mapping[str, int], backward: bool) -> Counted:
    at = prepare(cell, pipeline, SEED)
    plan = at.plan(backward=True) if backward else at.plan()
    predicted = traffic.predict(plan, cell.problem, at.case)
    return Counted(
        cell=cell,
        tile=str(plan.tile),
        predicted=predicted.hbm,
        compulsory=predicted.compulsory,
        l2=Bytes(read_bytes=seen[L2[0]] + SECTOR * seen[ADDED], write_bytes=seen[L2[1]]),
        dram=Bytes(read_bytes=seen[DRAM[0]], write_bytes=seen[DRAM[1]]),
    )


def launch(cells: Sequence[Cell], pipeline: str, *, backward: bool) -> None:
    """One call of each cell, and its backward where asked."""
    import torch

    from flashgen.ops.attention import attention

    for each in cells:
        at = prepare(each, pipeline, SEED)
        inputs = [x.requires_grad_(backward) for x in (at.q, at.k, at.v)]
        o = attention(*inputs, at.variant, **at.inputs)
        if backward:
            torch.autograd.grad(o, inputs, at.do)
        torch.cuda.synchronize()


if __name__ == "__main__":
    by_name = {str(each): each for each in CELLS}
    launch([by_name[name] for name in sys.argv[3:]], sys.argv[1], backward=sys.argv[2] == "backward")
