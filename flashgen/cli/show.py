"""`flashgen show`: a mask and the classes of its tiles, or a kernel's program, in the terminal and as a picture."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import typer
from rich.columns import Columns
from rich.panel import Panel
from rich.text import Text

from flashgen.cli import diagram, masks, options
from flashgen.cli.console import encodable, err, out, share, tabulate, write, write_json
from flashgen.cli.options import Pass, Request, Spec
from flashgen.cli.resolve import Resolved, resolve
from flashgen.errors import PlanError

if TYPE_CHECKING:
    from flashgen.analysis.counts import Loss
    from flashgen.planning.plan import Tile

#: Pairs that are evaluated at most.
_LARGEST = 1 << 28

#: Columns and lines of a panel; a character is about twice as high as wide.
_COLUMNS, _LINES = 48, 24
#: Cells of a picture for each line and column of a panel.
_FINER = 16

#: Shades of a share and signs of the classes; the second of each for an output that cannot show the first.
_SHADES = " ░▒▓█", " .:+#"
_CLASSES = "·▒█", ".+#"
_NAMES = ("empty", "partial", "full")
_COLOURS = ("#f4f4f4", "#f2a65a", "#2f6690")


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A mask of one batch and head by tiles.

    `density` is the visible share of each cell of the picture and `visible` the number of pairs, `classes` [Q tiles,
    KV tiles] what the analysis says of each tile (EMPTY 0, PARTIAL 1, FULL 2) and `truth` what brute force says.
    """

    density: np.ndarray
    visible: int
    classes: np.ndarray
    truth: np.ndarray

    @property
    def misclassified(self) -> float:
        """The share of tiles whose class is not the one that brute force finds."""
        return float((self.classes != self.truth).mean())

    @property
    def loss(self) -> Loss:
        """How the tiles compare with those of a block mask."""
        from flashgen.analysis import counts

        return counts.loss(self.classes, self.truth)


@options.shared
def command(
    spec: Spec,
    request: Request,
    which: Pass,
    output: options.output("Also draw to this .png or .svg file.") = None,
    as_json: options.as_json(
        "dtype, shape, params, b, h, formula, visible (a share), pairs, tile, tiles (empty, partial, full),"
        " misclassified (a share), block_mask (tiles visited, seen, masked, cut), judged_whole (notes), decided"
        " (condition, way), hint; with"
        " --program: pipeline, pass, arch, threads, smem_bytes,"
        " roles, rings, named_barriers"
    ) = False,
    program: Annotated[
        bool,
        typer.Option("--program", help="The kernel's roles, its rings and who waits for whom, instead of the mask."),
    ] = False,
    b: Annotated[int, typer.Option("--b", help="Batch whose mask is drawn.")] = 0,
    h: Annotated[int, typer.Option("--h", help="Query head whose mask is drawn.")] = 0,
) -> None:
    """Draw a mask and its tile classes, with its formula and the share of tiles that the analysis misjudges.

    Or, with --program, what the warps of its kernel do and who waits for whom.
    """
    from flashgen.analysis.formula import formula

    if output is not None and output.suffix not in (".png", ".svg"):
        nearest = shlex.quote(str(output.with_suffix(".png")))
        raise PlanError(f"show cannot draw to {output}: it writes .png and .svg\n  nearest: {nearest}")
    if program:
        if b or h:
            raise PlanError("--b and --h choose a mask, and --program draws none\n  nearest: leave them out")
        _show_program(resolve(spec, request, which, data=False), output, as_json)
        return
    with err.status("evaluating the mask"):
        resolved = resolve(spec, request, which)
        problem = resolved.problem
        for name, value, count, many in (("--b", b, problem.batch, "batch"), ("--h", h, problem.heads, "heads")):
            if not count:
                raise PlanError(f"there is nothing to show: {many} is 0\n  nearest: --{many} 1")
            if not 0 <= value < count:
                raise PlanError(f"{name} {value} is not one of the {count} of this problem\n  nearest: {name} 0")
        picture = look(resolved, b, h)
    written = formula(resolved.variant)
    if as_json:
        write_json(_described(picture, resolved, b, h) | {"formula": written.text()})
    else:
        out.print(Text(str(resolved), style="bold"))
        if resolved.variant.doc:
            out.print(Text(resolved.variant.doc.strip().splitlines()[0]))
        pretty = written.pretty()
        out.print(Text(pretty if encodable(pretty) else written.text()))
        out.print(render(picture, resolved.plan.tile))
        out.print(summary(picture, resolved, b, h))
        for note in resolved.facts.notes():
            out.print(note, markup=False)
        for line in masks.told(resolved.variant):
            out.print(line, markup=False)
        if (advice := hint(picture, resolved, b, h)) is not None:
            out.print(advice, markup=False)
    if output is not None:
        with err.status("drawing"):
            drawing = draw(picture, resolved, output.suffix, drawn(resolved, b, h))
        write(output, drawing)


def _show_program(resolved: Resolved, output: Path | None, as_json: bool) -> None:
    """The program of the kernel that the problem gets."""
    plan = resolved.plan
    if as_json:
        write_json({**options.posed(resolved.problem), **diagram.as_json(plan)})
    else:
        out.print(Text(str(resolved), style="bold"))
        out.print(Text(diagram.headline(plan)))
        for table in diagram.render(plan.program):
            out.print()
            tabulate(table)
    if output is not None:
        with err.status("drawing"):
            drawing = diagram.draw(plan, str(resolved), output.suffix)
        write(output, drawing)


def _described(picture: Picture, resolved: Resolved, b: int, h: int) -> dict[str, object]:
    counts, tile = np.bincount(picture.classes.ravel(), minlength=3), resolved.plan.tile
    pairs = resolved.problem.q_len * resolved.problem.kv_len
    return {
        **options.posed(resolved.problem),
        "params": dict(resolved.case.params),
        "b": b,
        "h": h,
        "visible": picture.visible / pairs,
        "pairs": pairs,
        "tile": {"q": tile.q, "kv": tile.kv},
        "tiles": {name: int(count) for name, count in zip(_NAMES, counts, strict=True)},
        "misclassified": picture.misclassified,
        "block_mask": picture.loss.as_json(),
        "judged_whole": list(resolved.facts.notes()),
        "decided": masks.decided(resolved.variant),
        "hint": hint(picture, resolved, b, h),
    }


def look(resolved: Resolved, b: int, h: int) -> Picture:
    """Evaluate the mask of batch `b` and head `h`, and classify its tiles; PlanError where it is too large to draw."""
    from flashgen.analysis import tiles

    problem, facts, case, tile = resolved.problem, resolved.facts, resolved.case, resolved.plan.tile
    if problem.q_len * problem.kv_len > _LARGEST:
        raise PlanError(
            f"show evaluates every pair and {problem.q_len} x {problem.kv_len} are too many\n  nearest: --seqlen 16384"
        )
    if 0 in (problem.q_len, problem.kv_len):
        raise PlanError(f"there is nothing to show: {problem.q_len} queries and {problem.kv_len} keys")
    density, visible = _density(resolved, b, h)
    return Picture(
        density=density,
        visible=visible,
        classes=tiles.grid(facts, case, tile, b, h),
        truth=tiles.true_grid(facts, case, tile, b, h),
    )


def _density(resolved: Resolved, b: int, h: int) -> tuple[np.ndarray, int]:
    """The visible share of each cell of a grid that is finer than a panel, at least one pair a cell; and all pairs."""
    variant, problem = resolved.variant, resolved.problem
    lines, columns = min(_FINER * _LINES, problem.q_len), min(_FINER * _COLUMNS, problem.kv_len)
    if variant.mask is None:
        return np.ones((lines, columns)), problem.q_len * problem.kv_len
    keys = np.arange(problem.kv_len)
    starts = np.arange(columns) * problem.kv_len // columns
    density, visible = np.empty((lines, columns)), 0
    for line in range(lines):
        rows = np.arange(line * problem.q_len // lines, (line + 1) * problem.q_len // lines)
        kept = resolved.case.evaluate(variant.mask, b=b, h=h, q=rows[:, None], k=keys)
        kept = np.broadcast_to(kept, (len(rows), len(keys)))
        visible += int(np.count_nonzero(kept))
        density[line] = np.add.reduceat(kept.mean(axis=0), starts) / np.diff(np.append(starts, len(keys)))
    return density, visible


def render(picture: Picture, tile: Tile) -> Columns:
    """Two panels: how much of each cell is visible, and the class of the tile at its centre."""
    signs, classes = map(_shown, (_SHADES, _CLASSES))
    shades = np.ceil(_shrunk(picture.density) * (len(signs) - 1)).astype(int)
    mask = "\n".join("".join(signs[i] for i in line) for line in shades)
    classes = "\n".join("".join(classes[i] for i in line) for line in _spread(picture.classes))
    return Columns(
        [
            Panel.fit(Text(mask), title="mask: queries down, keys across"),
            Panel.fit(Text(classes), title=f"tiles {tile.q} x {tile.kv}"),
        ]
    )


def _shown(signs: tuple[str, str]) -> str:
    return signs[0] if encodable("".join(signs[0] for signs in (_SHADES, _CLASSES))) else signs[1]


def drawn(resolved: Resolved, b: int, h: int) -> str:
    """Which batch and head a picture shows, where the mask differs between them; else nothing."""
    facts = resolved.facts
    places = ((f"batch {b} (--b)", facts.uses_batch), (f"head {h} (--h)", facts.uses_head))
    return ", ".join(place for place, differs in places if differs)


def summary(picture: Picture, resolved: Resolved, b: int, h: int) -> str:
    counts = np.bincount(picture.classes.ravel(), minlength=3)
    signs = _shown(_CLASSES)
    named = ", ".join(f"{signs[i]} {counts[i]:,} {_NAMES[i]}" for i in range(3))
    visible = share(picture.visible, resolved.problem.q_len * resolved.problem.kv_len)
    of = "".join(f" of {place}" for place in [drawn(resolved, b, h)] if place)
    return (
        f"{visible} of the mask{of} is visible; {picture.classes.size:,} tiles: {named}; "
        f"{share(picture.misclassified, 1)} misclassified" + ("" if picture.loss.exact else f": {picture.loss}")
    )


def hint(picture: Picture, resolved: Resolved, b: int, h: int) -> str | None:
    """The one change that would settle more tiles of this picture."""
    from flashgen.analysis import ways

    return ways.cure(resolved.variant, resolved.case, resolved.plan.tile, picture.loss, b=b, h=h)


def draw(picture: Picture, resolved: Resolved, suffix: str, place: str) -> bytes:
    """The picture of a batch and head as a ".png" or ".svg" file holds it."""
    import io

    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    problem, tile = resolved.problem, resolved.plan.tile
    figure = Figure(figsize=(11, 5.4), layout="constrained")
    canvas = FigureCanvasSVG(figure) if suffix == ".svg" else FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharex=True, sharey=True)
    extent = (0, problem.kv_len, problem.q_len, 0)
    left.imshow(picture.density, cmap="Greys", vmin=0, vmax=1, extent=extent, aspect="auto", interpolation="nearest")
    left.set(title="visible pairs", xlabel="key", ylabel="query")
    whole = (0, picture.classes.shape[1] * tile.kv, picture.classes.shape[0] * tile.q, 0)
    right.imshow(
        picture.classes,
        cmap=ListedColormap(_COLOURS),
        vmin=0,
        vmax=2,
        extent=whole,
        aspect="auto",
        interpolation="nearest",
    )
    right.set(title=f"tiles of {tile.q} x {tile.kv}", xlabel="key", xlim=extent[:2], ylim=extent[2:])
    counts = np.bincount(picture.classes.ravel(), minlength=3)
    handles = [
        Patch(facecolor=colour, edgecolor="#888888", label=f"{name} {n:,}")
        for colour, name, n in zip(_COLOURS, _NAMES, counts, strict=True)
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
    below = "; ".join(filter(None, (place, f"{share(picture.misclassified, 1)} of the tiles misclassified")))
    figure.suptitle(f"{resolved}\n{below}", fontsize=11)
    drawing = io.BytesIO()
    with rc_context({"svg.fonttype": "none"}):  # letters stay letters: they can be searched and copied
        canvas.print_figure(drawing, dpi=150, format=suffix[1:])
    return drawing.getvalue()


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
    lines, columns = (
        ((np.arange(n) + 0.5) * size / n).astype(int) for n, size in zip((_LINES, _COLUMNS), classes.shape, strict=True)
    )
    return classes[np.ix_(lines, columns)]
