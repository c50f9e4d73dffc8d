"""`flashgen show`: a mask and the classes of its tiles, in the terminal and as a picture."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import typer
from rich.columns import Columns
from rich.panel import Panel
from rich.text import Text

from flashgen.cli import options
from flashgen.cli.console import err, out, share
from flashgen.cli.options import Request, Resolved, Spec
from flashgen.errors import PlanError

if TYPE_CHECKING:
    from flashgen.planning.plan import Tile

#: Elements of the mask that are held at once, and that are evaluated at most.
_BLOCK, _LARGEST = 1 << 22, 1 << 28

#: Columns and lines of a panel; a character is about twice as high as wide.
_COLUMNS, _LINES = 48, 24

_SHADES = " ░▒▓█"
_CLASSES = "·▒█"
_NAMES = ("empty", "partial", "full")
_COLOURS = ("#f4f4f4", "#f2a65a", "#2f6690")


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A mask of one batch and head by tiles.

    `density` [q_tiles * n, kv_tiles * m] or finer is the visible share of each cell of the picture, `classes` what the
    analysis says of each tile (EMPTY 0, PARTIAL 1, FULL 2) and `truth` what brute force says.
    """

    density: np.ndarray
    classes: np.ndarray
    truth: np.ndarray

    @property
    def misclassified(self) -> float:
        """The share of tiles whose class is not the one that brute force finds."""
        return float((self.classes != self.truth).mean()) if self.truth.size else 0.0


@options.shared
def command(
    spec: Spec,
    request: Request,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Also draw to this .png or .svg file.")
    ] = None,
    b: Annotated[int, typer.Option("--b", help="Batch whose mask is drawn.")] = 0,
    h: Annotated[int, typer.Option("--h", help="Query head whose mask is drawn.")] = 0,
) -> None:
    """Draw a mask and its tile classes, with the share that the analysis misjudges."""
    if output is not None and output.suffix not in (".png", ".svg"):
        raise PlanError(f"show cannot draw to {output}: it writes .png and .svg\n  nearest: {output.stem}.png")
    resolved = options.resolve(spec, request)
    problem = resolved.problem
    for name, value, count in (("--b", b, problem.batch), ("--h", h, problem.heads)):
        if not 0 <= value < count:
            raise PlanError(f"{name} {value} is not one of the {count} of this problem\n  nearest: {name} 0")
    picture = look(resolved, b, h)
    out.print(f"[bold]{resolved}[/]")
    if resolved.variant.doc:
        out.print(Text(resolved.variant.doc.strip().splitlines()[0]))
    out.print(render(picture, resolved.plan.tile))
    out.print(summary(picture))
    if output is not None:
        draw(picture, resolved, output)
        err.print(f"wrote {output}")


def look(resolved: Resolved, b: int, h: int) -> Picture:
    """Evaluate the mask of batch `b` and head `h`, and classify its tiles; PlanError where it is too large to draw."""
    from flashgen.analysis import tiles

    problem, tile = resolved.problem, resolved.plan.tile
    if problem.q_len * problem.kv_len > _LARGEST:
        raise PlanError(
            f"show evaluates every pair and {problem.q_len} x {problem.kv_len} are too many"
            "\n  nearest: --seqlen 16384"
        )
    q_tiles, kv_tiles = -(-problem.q_len // tile.q), -(-problem.kv_len // tile.kv)
    classes = np.zeros((q_tiles, kv_tiles), np.int8)
    truth = np.zeros_like(classes)
    # Cells of the picture, at least one element each.
    lines, columns = min(4 * _LINES, problem.q_len), min(4 * _COLUMNS, problem.kv_len)
    of_line = np.arange(problem.q_len) * lines // max(problem.q_len, 1)
    of_column = np.arange(problem.kv_len) * columns // max(problem.kv_len, 1)
    visible, pairs = np.zeros((lines, columns)), np.zeros((lines, columns))
    starts = np.arange(kv_tiles) * tile.kv
    for i in range(q_tiles):
        rows = np.arange(i * tile.q, min((i + 1) * tile.q, problem.q_len))
        for kv_tile, tile_class in tiles.schedule(resolved.facts, resolved.case, tile, i, b, h):
            classes[i, kv_tile] = tile_class
        mask = resolved.mask(b, h, rows)
        if mask.size:
            some = np.logical_or.reduceat(mask, starts, axis=1).any(axis=0)
            every = np.logical_and.reduceat(mask, starts, axis=1).all(axis=0)
            truth[i] = np.where(every, 2, some)
            by_column = np.add.reduceat(mask, np.searchsorted(of_column, np.arange(columns)), axis=1)
            np.add.at(visible, of_line[rows], by_column)
            np.add.at(pairs, of_line[rows], np.bincount(of_column, minlength=columns))
    return Picture(density=visible / np.maximum(pairs, 1), classes=classes, truth=truth)


def render(picture: Picture, tile: Tile) -> Columns:
    """Two panels: how much of each cell is visible, and the class of the tile at its centre."""
    shades = np.ceil(_shrunk(picture.density) * (len(_SHADES) - 1)).astype(int)
    mask = "\n".join("".join(_SHADES[i] for i in line) for line in shades)
    classes = "\n".join("".join(_CLASSES[i] for i in line) for line in _spread(picture.classes))
    return Columns(
        [
            Panel.fit(Text(mask), title="mask: queries down, keys across"),
            Panel.fit(Text(classes), title=f"tiles {tile.q} x {tile.kv}"),
        ]
    )


def summary(picture: Picture) -> str:
    counts = np.bincount(picture.classes.ravel(), minlength=3)
    tiles = picture.classes.size
    named = ", ".join(f"{_CLASSES[i]} {counts[i]:,} {_NAMES[i]}" for i in range(3))
    visible = share(float(picture.density.sum()), picture.density.size)
    return (
        f"{visible} of the mask is visible; {tiles:,} tiles: {named}; "
        f"{share(picture.misclassified * tiles, tiles)} misclassified"
    )


def draw(picture: Picture, resolved: Resolved, path: Path) -> None:
    """The picture as a PNG or SVG file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    problem, tile = resolved.problem, resolved.plan.tile
    figure = Figure(figsize=(11, 5.4), layout="constrained")
    canvas = FigureCanvasSVG(figure) if path.suffix == ".svg" else FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharex=True, sharey=True)
    extent = (0, problem.kv_len, problem.q_len, 0)
    left.imshow(picture.density, cmap="Greys", vmin=0, vmax=1, extent=extent, aspect="auto", interpolation="nearest")
    left.set(title="visible pairs", xlabel="key", ylabel="query")
    whole = (0, picture.classes.shape[1] * tile.kv, picture.classes.shape[0] * tile.q, 0)
    right.imshow(
        picture.classes, cmap=ListedColormap(_COLOURS), vmin=0, vmax=2, extent=whole, aspect="auto",
        interpolation="nearest",
    )  # fmt: skip
    right.set(title=f"tiles of {tile.q} x {tile.kv}", xlabel="key", xlim=extent[:2], ylim=extent[2:])
    counts = np.bincount(picture.classes.ravel(), minlength=3)
    handles = [
        Patch(facecolor=colour, edgecolor="#888888", label=f"{name} {n:,}")
        for colour, name, n in zip(_COLOURS, _NAMES, counts, strict=True)
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle(f"{resolved}\n{share(picture.misclassified, 1)} of the tiles misclassified", fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    canvas.print_figure(path, dpi=150)


def _shrunk(density: np.ndarray) -> np.ndarray:
    """The density averaged down to at most the size of a panel."""
    for axis, most in ((0, _LINES), (1, _COLUMNS)):
        n = density.shape[axis]
        if n > most:
            starts = np.arange(most) * n // most
            counts = np.diff(np.append(starts, n))
            shape = (-1, 1) if axis == 0 else (1, -1)
            density = np.add.reduceat(density, starts, axis=axis) / counts.reshape(shape)
    return density


def _spread(classes: np.ndarray) -> np.ndarray:
    """The classes at the centres of a panel's cells."""
    lines, columns = (np.floor((np.arange(n) + 0.5) * size / n).astype(int) if size else np.zeros(0, int)
                      for n, size in zip((_LINES, _COLUMNS), classes.shape, strict=True))  # fmt: skip
    return classes[np.ix_(lines, columns)]
