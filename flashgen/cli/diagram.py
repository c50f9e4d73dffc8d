"""A kernel's program as a diagram: its roles side by side, and a line for each ring that says who waits for whom."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from flashgen.cli.console import encodable
from flashgen.planning.program import IDLE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from flashgen.planning.plan import KernelPlan
    from flashgen.planning.program import NamedBarrier, Party, Program, Ring, Role

#: Who fills, who waits to the right and to the left of that, who does both, and the line between them; the second of
#: each for an output that cannot show the first.
_SIGNS = tuple("●▶◀◆─"), tuple("*><@-")

#: Colours of the lanes of producers and of consumers, of what is handed on, and of stages that are free again.
_PRODUCER, _CONSUMER, _FULL, _EMPTY = "#f2a65a", "#2f6690", "#222222", "#999999"


def headline(plan: KernelPlan) -> str:
    """Which kernel the program is of."""
    program = plan.program
    return (
        f"{plan.pipeline} {plan.pass_name} on {plan.arch}: {program.warps} warps, {program.threads} threads,"
        f" {plan.smem_bytes} bytes of shared memory"
    )


def as_json(plan: KernelPlan) -> dict[str, object]:
    """The program as plain numbers, strings, lists and dicts."""
    program = plan.program

    def parties(of: Iterable[Party]) -> list[dict[str, object]]:
        return [{"role": party.role, "arrivals": party.arrivals} for party in of]

    return {
        "pipeline": plan.pipeline,
        "pass": plan.pass_name,
        "arch": plan.arch,
        "threads": program.threads,
        "smem_bytes": plan.smem_bytes,
        "roles": [
            {"name": role.name, "warps": role.warps, "threads": role.threads, "registers": role.registers}
            for role in program.roles
        ],
        "rings": [
            {
                "name": ring.name,
                "carries": ring.carries,
                "stages": ring.stages.size,
                "count": ring.each.size if ring.each else 1,
                "producers": parties(ring.producers),
                "consumers": parties(ring.consumers),
                "freed": ring.freed or None,
            }
            for ring in program.rings
        ],
        "named_barriers": [
            {"name": b.name, "id": b.id, "threads": b.threads, "roles": list(b.roles), "why": b.why}
            for b in program.named_barriers
        ],
    }


def render(program: Program) -> tuple[Table, ...]:
    """The program for a terminal: roles, rings with a lane for each role, their stages, named barriers."""
    roles = _table("roles", "warps", "role", "threads", "registers per thread")
    first = 0
    for role in program.roles:
        last = first + role.warps - 1
        warps = f"{first}" if first == last else f"{first}-{last}"
        roles.add_row(warps, role.name, str(role.threads), str(role.registers or "the compiler's choice"))
        first = last + 1
    signs = _SIGNS[0] if encodable("".join(_SIGNS[0])) else _SIGNS[1]
    legend = f"{signs[0]} fills a stage, {signs[1]} {signs[2]} waits for it or releases it, {signs[3]} both"
    rings = _table(f"rings: {legend}", "ring", _lanes(program)[0], "carries")
    stages = _table("stages", "ring", "stages", "free again")
    for ring in program.rings:
        rings.add_row(ring.name, _line(program, ring, signs), ring.carries)
        stages.add_row(ring.name, _stages(ring), _freed(ring))
    meetings = _table("named barriers", "id", "threads", "who meets", "why")
    for barrier in program.named_barriers:
        who = "all warps" if barrier.warps == program.warps else ", ".join(barrier.roles)
        meetings.add_row(str(barrier.id), str(barrier.threads), who, barrier.why)
    return roles, rings, stages, meetings


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(Text(column), no_wrap=True)
    return table


def _working(program: Program) -> list[Role]:
    return [role for role in program.roles if role.name != IDLE]


def _lanes(program: Program) -> tuple[str, dict[str, int]]:
    """The names of the roles side by side, and the column of each in the lines below."""
    text, columns = "", {}
    for role in _working(program):
        columns[role.name] = len(text) + len(role.name) // 2
        text += role.name + "   "
    return text.rstrip(), columns


def _line(program: Program, ring: Ring, signs: tuple[str, ...]) -> str:
    """From who fills a stage to who waits for it."""
    names, columns = _lanes(program)
    fill, right, left, both, between = signs
    producers = {columns[party.role] for party in ring.producers}
    consumers = {columns[party.role] for party in ring.consumers}
    ends = producers | consumers
    line = [between if min(ends) <= at <= max(ends) else " " for at in range(len(names))]
    for at in ends:
        if at in producers:
            line[at] = both if at in consumers else fill
        else:
            line[at] = right if at > min(producers) else left
    return "".join(line)


def _stages(ring: Ring) -> str:
    return f"{ring.stages.size}" + (f" x {ring.each.size} warpgroups" if ring.each else "")


def _freed(ring: Ring) -> str:
    """Who says that a stage may be filled again."""
    arriving = [
        f"{party.arrivals} {party.role} warp{'s' * (party.arrivals > 1)}" for party in ring.consumers if party.arrivals
    ]
    return f"when {_listed(arriving)} arrive{'s' * (ring.empty == 1)}" if arriving else ring.freed


def _listed(words: list[str]) -> str:
    """As a person lists them: "a, b and c"."""
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def draw(plan: KernelPlan, title: str, suffix: str) -> bytes:
    """The diagram as a ".png" or ".svg" file holds it."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    program = plan.program
    roles = _working(program)
    rows = [*program.rings, *program.named_barriers]
    figure = Figure(figsize=(4 + 2.2 * len(roles), 2.2 + 0.62 * len(rows)), layout="constrained")
    canvas = FigureCanvasSVG(figure) if suffix == ".svg" else FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.set(xlim=(-1.9, len(roles) - 0.5), ylim=(-len(rows), 1.2))
    axes.axis("off")
    lanes = {role.name: at for at, role in enumerate(roles)}
    for role in roles:
        registers = f"{role.registers} registers per thread" if role.registers else "registers: the compiler's choice"
        said = f"{role.name}\n{role.warps} warp{'s' * (role.warps > 1)}, {registers}"
        consumes = role in program.consumers
        box = {"boxstyle": "round", "facecolor": _CONSUMER if consumes else _PRODUCER, "edgecolor": "none"}
        colour = "white" if consumes else "black"
        axes.text(lanes[role.name], 0.7, said, ha="center", va="center", fontsize=8, color=colour, bbox=box)
        axes.plot([lanes[role.name]] * 2, [0.35, -len(rows)], color="#dddddd", zorder=0)
    for row, one in enumerate(rows):
        at = -row - 0.4
        if one in program.rings:
            _draw_ring(axes, one, lanes, at)
        else:
            _draw_barrier(axes, one, lanes, at)
    figure.suptitle(f"{title}\n{headline(plan)}", fontsize=10)
    drawing = io.BytesIO()
    with rc_context({"svg.fonttype": "none"}):  # letters stay letters: they can be searched and copied
        canvas.print_figure(drawing, dpi=150, format=suffix[1:])
    return drawing.getvalue()


def _draw_ring(axes: Axes, ring: Ring, lanes: dict[str, int], at: float) -> None:
    """Solid from who fills a stage to who waits for it, dashed back from who frees it."""
    said = f"{ring.name}: {ring.carries}\nstages: {_stages(ring)}; free again: {_freed(ring)}"
    axes.text(-1.85, at, said, va="center", fontsize=7)
    for producer in ring.producers:
        start = lanes[producer.role]
        axes.plot([start], [at], marker="o", color=_FULL, markersize=5)
        for consumer in ring.consumers:
            end = lanes[consumer.role]
            if start == end:
                axes.plot([start], [at], marker="D", color=_FULL, markersize=7)
                continue
            axes.annotate("", (end, at), (start, at), arrowprops={"arrowstyle": "-|>", "color": _FULL})
            if consumer.arrivals:
                back = {"arrowstyle": "-|>", "color": _EMPTY, "linestyle": "--"}
                axes.annotate("", (start, at - 0.22), (end, at - 0.22), arrowprops=back)


def _draw_barrier(axes: Axes, barrier: NamedBarrier, lanes: dict[str, int], at: float) -> None:
    """A bar over those who meet."""
    meeting = [lanes[name] for name in barrier.roles if name in lanes]
    said = f"barrier {barrier.id}, {barrier.threads} threads:\n{barrier.why}"
    axes.text(-1.85, at, said, va="center", fontsize=7)
    axes.plot([min(meeting) - 0.1, max(meeting) + 0.1], [at, at], color=_FULL, linewidth=4, solid_capstyle="round")
    axes.plot(meeting, [at] * len(meeting), marker="|", color=_FULL, markersize=12, linestyle="none")
