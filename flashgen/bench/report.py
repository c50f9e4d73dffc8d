"""What the records of `flashgen bench` say, for a person: one table of ratios, and curves over the sequence length."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flashgen import jsonfile
from flashgen.bench import cells
from flashgen.bench.peers import BEST, same_maths
from flashgen.errors import FlashgenError, shown

if TYPE_CHECKING:
    from flashgen.bench.cells import Cell

#: Peers that a reader can install or build, as a record names them, in the order of the columns.
PEERS = {"cudnn": "cuDNN", "fa2": "FlashAttention-2", "fa3": "FlashAttention-3", "flex": "FlexAttention"}

#: The measures of errors in the table of `flashgen bench data`.
MEASURES = {"rms": "RMS error", "largest": "largest error", "tail": "99.99th percentile"}

#: The masks of the main table.
MAIN = (("full",), ("causal",))


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A file that `flashgen bench` wrote: a pass of a pipeline on one GPU, cell by cell; `card` is what stands behind
    both in its name, where records of several cards lie side by side."""

    pass_name: str
    pipeline: str
    card: str
    gpu: str
    cells: tuple[tuple[Cell, Mapping[str, object]], ...]

    @property
    def stem(self) -> str:
        """Of its file's name."""
        return "_".join(filter(None, (self.pass_name, self.pipeline, self.card)))

    def main(self, specs: tuple[str, ...], head_dim: int) -> list[tuple[int, Mapping[str, object]]]:
        """(seqlen, numbers) of the main table's cells of one mask and head_dim, by seqlen."""
        found = {
            cell.problem.q_len: numbers
            for cell, numbers in self.cells
            if (cell.specs, cell.problem.head_dim, cell.problem.dtype, cell.problem.group)
            == (specs, head_dim, "bfloat16", 1)
        }
        return sorted(found.items())

    def others(self) -> list[tuple[Cell, Mapping[str, object]]]:
        """The cells of other masks and scores."""
        return [(cell, numbers) for cell, numbers in self.cells if cell.specs not in MAIN]

    def head_dims(self) -> list[int]:
        """Those of the main table, ascending."""
        return sorted({cell.problem.head_dim for cell, _ in self.cells if self.main(MAIN[0], cell.problem.head_dim)})


def read(folder: Path) -> Iterator[Record]:
    """The whole runs in a folder, `<pass>_<pipeline>.json` and with a card behind, `forward_hopper_h100.json`, by name.

    Raises FlashgenError for one that is damaged.
    """
    tables = {"forward": cells.FORWARD, "backward": cells.BACKWARD}
    for path in sorted(folder.glob("*.json")):
        pass_name, _, rest = path.stem.partition("_")
        pipeline, _, card = rest.partition("_")
        known = {str(cell): cell for cell in tables.get(pass_name, {}).get(pipeline, ())}
        if not known:
            continue
        record, rows = _rows(path)
        try:
            gpu = jsonfile.member(jsonfile.member(record, "gpu", dict), "name", str)
            if card and not _is_card(card, gpu):
                continue  # a part of a run
            found = tuple((known[row["cell"]], _checked(row)) for row in rows if row["cell"] in known)
        except ValueError as error:
            raise _damaged(path, error) from None
        yield Record(pass_name=pass_name, pipeline=pipeline, card=card, gpu=gpu, cells=found)


def _rows(path: Path) -> tuple[dict, list[dict]]:
    """A record and its cells, each with its name; FlashgenError for a file that is none."""
    try:
        record = jsonfile.checked(jsonfile.read(path), dict, "it")
        rows = jsonfile.member(record, "cells", list)
        for row in rows:
            jsonfile.member(jsonfile.checked(row, dict, "a cell"), "cell", str)
    except ValueError as error:
        raise _damaged(path, error) from None
    return record, rows


def _damaged(path: Path, error: ValueError) -> FlashgenError:
    return FlashgenError(f"{path} is no record of flashgen bench: {error}\n  nearest: measure it again, or remove it")


def _checked(row: dict) -> dict:
    """A cell whose ratios and TFLOP/s can be shown; ValueError for another one."""
    for peer, ratio in jsonfile.member(row, "ratio", dict).items():
        if not jsonfile.checked(ratio, list, f"the ratio of {peer!r}") or not _positive(ratio):
            raise ValueError(f"the ratio of {peer!r} is {shown(ratio)}, and must be numbers above 0")
    if not _positive(tflops := list(jsonfile.member(row, "tflops", dict).values())):
        raise ValueError(f"'tflops' holds {shown(tflops)}, and must hold numbers above 0")
    return row


def _positive(values: list) -> bool:
    return all(0 < jsonfile.checked(value, (int, float), "a number") < 1e30 for value in values)


def markdown(records: list[Record]) -> str:
    """How many times faster than each peer: geometric mean over the sequence lengths, the lowest and highest; of other
    masks and scores the cell, beside peers that compute the same."""
    lines = []
    for record in records:
        peers = [peer for peer in PEERS if any(peer in row["ratio"] for _, row in record.cells)]
        lines += [
            f"Pipeline {record.pipeline}, {record.pass_name}, {record.gpu}:",
            "",
            f"| head_dim | mask | {' | '.join(PEERS[p] for p in peers)} |",
            f"|{'---|' * (2 + len(peers))}",
        ]
        for head_dim in record.head_dims():
            for specs in MAIN:
                rows = [numbers["ratio"] for _, numbers in record.main(specs, head_dim)]
                ratios = [[row[peer][0] for row in rows if peer in row] for peer in peers]
                if any(ratios):
                    lines.append(f"| {head_dim} | {'+'.join(specs)} | {' | '.join(map(summary, ratios))} |")
        for cell, numbers in record.others():
            told = {peer for peer in numbers["ratio"] if same_maths(peer, cell)}
            ratios = [[numbers["ratio"][peer][0]] if peer in told else [] for peer in peers]
            name = ", ".join(["+".join(cell.specs), *(f"{name} {value:g}" for name, value in cell.params)])
            if any(ratios):
                lines.append(f"| {cell.problem.head_dim} | {name} | {' | '.join(map(summary, ratios))} |")
        lines.append("")
    return "\n".join(lines)


def on_data(folder: Path) -> str:
    """What `flashgen bench data` found, by dtype and input: the worst of flashgen's errors, as times the smaller of the
    peers' errors, and how many times faster it is than each."""
    lines = []
    for path in sorted(folder.glob("data*.json")):
        record, rows = _rows(path)
        try:
            gpu = jsonfile.member(jsonfile.member(record, "gpu", dict), "name", str)
            by_kind: dict[tuple[str, str], list[dict]] = {}
            for row in rows:
                kind = jsonfile.member(row, "dtype", str), jsonfile.member(row, "input", str)
                by_kind.setdefault(kind, []).append(_checked(row))
            table = [[*kind, *_worst_errors(found), *_speeds(found)] for kind, found in by_kind.items()]
        except ValueError as error:
            raise _damaged(path, error) from None
        heads = ["dtype", "input", *MEASURES.values(), *(f"faster than {PEERS[peer]}" for peer in BEST)]
        lines += [f"{_title(path, gpu)}:", "", f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
        lines += [f"| {' | '.join(cells)} |" for cells in table]
        lines.append("")
    return "\n".join(lines) or "There is no record of it yet.\n"


def _is_card(word: str, gpu: str) -> bool:
    """Whether a word of a file's name says which card the GPU is."""
    return word in gpu.lower().split()


def _title(path: Path, gpu: str) -> str:
    """A record by the name of its file, but for the card that tells it from others, and its GPU."""
    words = [word for word in path.stem.split("_") if not _is_card(word, gpu)]
    return f"{' '.join(words)}, {gpu}"


def _worst_errors(rows: list[dict]) -> list[str]:
    """Of each measure the worst over cells and results; of no lse, which has a bar of its own."""
    worst: dict[str, float] = {}
    for row in rows:
        for what, by in jsonfile.member(row, "times_error", dict).items():
            for peer in by if what != "lse" else ():
                if peer in BEST:
                    for measure in MEASURES:
                        ratio = jsonfile.member(by[peer], measure, (int, float))
                        worst[measure] = max(worst.get(measure, 0.0), ratio)
    return [f"{worst[measure]:.2f}" if measure in worst else "-" for measure in MEASURES]


def _speeds(rows: list[dict]) -> list[str]:
    return [summary([row["ratio"][peer][0] for row in rows if peer in row["ratio"]]) for peer in BEST]


def summary(ratios: list[float]) -> str:
    """Their geometric mean, the lowest and the highest."""
    if not ratios:
        return "-"
    mean = statistics.geometric_mean(ratios)
    return f"{mean:.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if len(ratios) > 1 else f"{mean:.2f}"


def of_suites(folder: Path, names: Iterable[str]) -> str:
    """What suites found, record by record: how many times faster than each contender their subjects are, by part; the
    least that a part must reach, and how many of its rows were refused."""
    lines = []
    for path in (path for name in names for path in sorted(folder.glob(f"{name}*.json"))):
        record, rows = _rows(path)
        try:
            gpu = jsonfile.member(jsonfile.member(record, "gpu", dict), "name", str)
            parts: dict[str, list[dict]] = {}
            for row in rows:
                parts.setdefault(jsonfile.member(row, "part", str), []).append(_with_ratios(row))
            table = [[part, *cells] for part, found in parts.items() for cells in _contenders(found)]
        except ValueError as error:
            raise _damaged(path, error) from None
        heads = ["part", "beside", "cells", "times faster", "must be", "below"]
        lines += [f"{_title(path, gpu)}:", "", f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
        lines += [f"| {' | '.join(cells)} |" for cells in table]
        lines.append("")
    return "\n".join(lines) or "There is no record of it yet.\n"


def _contenders(rows: list[dict]) -> Iterator[list[str]]:
    """Of a part: each contender with the number of cells, its ratios, the bars and how many are below; then the cells
    that have none: of a subject that was timed alone, or refused."""
    for name in dict.fromkeys(name for row in rows for name in row["ratio"]):
        beside = [row for row in rows if name in row["ratio"]]
        ratios = [row["ratio"][name][0] for row in beside]
        bars = [jsonfile.member(row, "bars", dict).get(name) for row in beside]
        known = [bar for bar in bars if bar is not None]
        below = sum(bar is not None and ratio < bar for ratio, bar in zip(ratios, bars, strict=True))
        span = f"{min(known):.3g}" + (f" to {max(known):.3g}" if max(known) > min(known) else "") if known else "-"
        yield [name, str(len(beside)), summary(ratios), span, str(below) if known else "-"]
    without = [bool(row.get("us")) for row in rows if not row["ratio"] and jsonfile.member(row, "absent", dict)]
    for said, timed in (("nobody", True), ("refused", False)):
        if count := without.count(timed):
            yield [said, str(count), "-", "-", "-"]


def _with_ratios(row: dict) -> dict:
    """A row whose ratios can be shown; ValueError for another one."""
    return _checked({**row, "tflops": {}})


def counted(folder: Path) -> str:
    """What the counters saw of each pass (`flashgen counters`): bytes read and written over those predicted."""
    lines = ["| kernels | cells | read / predicted | written / predicted |", "|---|---|---|---|"]
    for path in sorted(folder.glob("counters_*.json")):
        _, pass_name, pipeline = path.stem.split("_")
        _, rows = _rows(path)
        try:
            spans = [
                [jsonfile.member(row, name, (int, float)) for row in rows] for name in ("read_ratio", "write_ratio")
            ]
        except ValueError as error:
            raise _damaged(path, error) from None
        shown = " | ".join(f"{min(span, default=0):.3f} to {max(span, default=0):.3f}" for span in spans)
        lines.append(f"| {pipeline} {pass_name} | {len(rows)} | {shown} |")
    return "\n".join(lines)


def draw(record: Record, path: Path) -> None:
    """Useful TFLOP/s over the sequence length, a panel for each head_dim and mask, as PNG or SVG by the suffix."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "flashgen", "svg.fonttype": "none"})  # equal records, equal files
    from matplotlib import pyplot as plt

    dims = [d for d in record.head_dims() if len(record.main(MAIN[0], d)) > 1]
    size = (4 * len(dims), 3 * len(MAIN))
    figure, axes = plt.subplots(len(MAIN), len(dims), figsize=size, squeeze=False, sharey=True)
    for row, specs in zip(axes, MAIN, strict=True):
        for axis, head_dim in zip(row, dims, strict=True):
            for name, label in {"flashgen": "flashgen", **PEERS}.items():
                rows = [(n, numbers["tflops"]) for n, numbers in record.main(specs, head_dim)]
                points = [(n, tflops[name]) for n, tflops in rows if name in tflops]
                if points:
                    width = 2 if name == "flashgen" else 1
                    axis.plot(*zip(*points, strict=True), marker="o", label=label, linewidth=width)
            axis.set_xscale("log", base=2)
            axis.set_title(f"{'+'.join(specs)}, head_dim {head_dim}")
            axis.grid(alpha=0.3)
    for axis in axes[-1]:
        axis.set_xlabel("seqlen")
    for row in axes:
        row[0].set_ylabel("TFLOP/s")
    axes[0][0].legend()
    figure.suptitle(f"{record.pass_name} of pipeline {record.pipeline}, bfloat16, {record.gpu}")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else {})
    plt.close(figure)
