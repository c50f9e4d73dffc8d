"""The terminal: one console for results, one for complaints and progress, and numbers as a person reads them."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import typer
from rich.console import Console
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from flashgen import files

if TYPE_CHECKING:
    from flashgen.bench.protocol import Ratio

#: Results; plain text where the output is a file or a pipe.
out = Console(highlight=False, soft_wrap=True)
#: Errors and progress, so that a pipe holds results alone.
err = Console(stderr=True, highlight=False, soft_wrap=True)

#: Columns of a table at most.
_WIDEST = 400


def complain(message: str) -> None:
    """An error on stderr: the kind of error in red, the rest as it is."""
    head, _, rest = message.partition("\n")
    err.print(Text(head, style="bold red") + (Text(f"\n{rest}") if rest else Text()))


def progress() -> Progress:
    """A progress bar on stderr that leaves nothing behind."""
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=err,
        transient=True,
    )


def times_faster(ratio: Ratio, bar: float = 0.0) -> str:
    """A ratio with its spread over the rounds, red below a bar."""
    text = f"{ratio.median:.3f} \\[{ratio.low:.2f}, {ratio.high:.2f}]"
    return text if ratio.median >= bar else f"[red]{text}[/]"


def write(path: Path, content: bytes | str) -> None:
    """Write a result file, whole or not at all, and say so."""
    files.write(path, content)
    err.print(f"wrote {path}", markup=False)


def encodable(text: str) -> bool:
    """Whether the output can show a text as it is."""
    try:
        text.encode(out.encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True


#: Where an object goes, if not to what stdout is then.
_objects: list[TextIO] = []


@contextlib.contextmanager
def json_alone() -> Iterator[None]:
    """Of what a verb prints, `write_json` alone reaches stdout: what a spec file prints goes to stderr."""
    _objects.append(sys.stdout)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        _objects.pop()


def write_json(data: object) -> None:
    """One JSON object on stdout; a number that is not finite is null."""
    typer.echo(json.dumps(_finite(data), indent=2), file=_objects[-1] if _objects else None)


def _finite(data: object) -> object:
    if isinstance(data, dict):
        return {name: _finite(value) for name, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def tabulate(table: Table) -> None:
    """A table on stdout, as wide as its text: nothing is cut where the output is narrow, or a pipe of 80 columns."""
    table.width = Measurement.get(out, out.options.update(width=_WIDEST), table).maximum
    out.print(table, crop=False)


def size(count: float) -> str:
    """Bytes in binary units: 1536 -> 1.5 KiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"


def many(count: float) -> str:
    """A count in decimal units: 68719476736 -> 68.7 G."""
    for unit in ("", " k", " M", " G", " T"):
        if abs(count) < 1000:
            return f"{count:.3g}{unit}" if unit else f"{count:g}"
        count /= 1000
    return f"{count:.3g} P"


def seconds(value: float) -> str:
    """A duration: 0.0123 -> 12.3 ms."""
    if value >= 1:
        return f"{value:.2f} s"
    return f"{value * 1e3:.3g} ms" if value >= 1e-3 else f"{value * 1e6:.3g} us"


def share(part: float, whole: float) -> str:
    """A percentage; of nothing it is 0."""
    return f"{100 * part / whole:.1f}%" if whole else "0%"


def joined(names: Iterable[object]) -> str:
    return ", ".join(map(str, names)) or "none"
