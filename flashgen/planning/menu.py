"""The menu of kernels for a variant: what planning gives, and what a call picks from."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from flashgen.planning.once import Remembered, once
from flashgen.planning.plan import Fallback, KernelPlan, Tile
from flashgen.planning.problem import Problem
from flashgen.planning.records import Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """A candidate that is not in the menu, and why."""

    tile: Tile
    stages: int
    warps: int
    reason: str

    def __str__(self) -> str:
        return f"{self.tile.q} x {self.tile.kv}, {self.stages} stages, {self.warps} warps: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The record that a menu was taken from: `ms[i][j]` is what plan i of the menu took on shape j, and `least[j]` what
    the fastest of all `candidates` took there."""

    record: str
    shapes: tuple[Shape, ...]
    ms: tuple[tuple[float, ...], ...]
    least: tuple[float, ...]
    candidates: int

    @property
    def losses(self) -> tuple[float, ...]:
        """By how much the menu's fastest plan is slower than the fastest candidate, on each shape: 0.01 is 1%."""
        return tuple(
            min(column) / least - 1 for column, least in zip(zip(*self.ms, strict=True), self.least, strict=True)
        )

    @property
    def covers(self) -> str:
        """How near the menu comes to the fastest candidate, for a person."""
        within = f"within {max(self.losses):.2%} of the fastest of {self.candidates} candidates"
        return f"{len(self.shapes)} shapes, each {within}"

    def best(self, problem: Problem) -> int:
        """The fastest plan on the measured shape that is most like the problem, by lengths and number of heads."""
        heads, known = problem.batch * problem.heads, _known(self)
        shapes = known.get(heads) or known.keep(heads, self._beside(heads))
        q, kv = _log2(problem.q_len), _log2(problem.kv_len)
        unlike = [abs(a - q) + abs(b - kv) + c for a, b, c, _ in shapes]
        return shapes[unlike.index(min(unlike))][3]

    def _beside(self, heads: int) -> list[_Shape]:
        """The shapes that may be most like a problem of so many heads: of equal lengths those of the nearest number."""
        found = []
        for j, s in enumerate(self.shapes):
            fastest = min(range(len(self.ms)), key=lambda i: self.ms[i][j])
            unlike = abs(_log2(s.batch * s.heads) - _log2(heads))
            found.append((_log2(s.q_len), _log2(s.kv_len), unlike, fastest))
        return [a for a in found if not any(a[:2] == b[:2] and a[2] - b[2] > ROUNDING for b in found)]


#: Differences of logarithms that are none.
ROUNDING = 1e-9

#: Logarithms of lengths, how unlike the number of heads is, and the plan that is fastest there.
_Shape = tuple[float, float, float, int]


@once
def _known(measured: Measured) -> Remembered[int, list[_Shape]]:
    """What shapes are compared by, by the number of heads of a problem."""
    return Remembered()


def _log2(number: int) -> float:
    return math.log2(number) if number > 1 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Menu:
    """At most four plans for (variant, arch, dtype, head dims), that for long sequences first, and forms beside them.

    `seconds_per_score[i][n - 1]` is the time in seconds that an SM needs for one score while n blocks of plans[i] share
    it, times the share of scores that its tiles are expected to visit (`visits.share`).  Beside them stand `packed`,
    for queries of heads that share keys, `small`, of fewer rows, for problems that leave SMs without a block (of a
    backward the form for short sequences), both None where there is no such form, and `few` for calls whose rows fill
    one tile, packed where heads can be, ascending.
    """

    plans: tuple[KernelPlan, ...]
    seconds_per_score: tuple[tuple[float, ...], ...]
    rejected: tuple[Rejected, ...]
    packed: KernelPlan | None = None
    small: KernelPlan | None = None
    few: tuple[KernelPlan, ...] = ()
    measured: Measured | None = None  # None: the order is predicted

    @property
    def forms(self) -> tuple[KernelPlan, ...]:
        """Every plan that a call may pick."""
        beside = dict.fromkeys(plan for plan in (self.small, self.packed, *self.few) if plan is not None)
        return (*self.plans, *(plan for plan in beside if plan not in self.plans))

    @property
    def record(self) -> str | None:
        """The record that decided, or None where the model did."""
        return self.measured.record if self.measured else None

    @property
    def fallbacks(self) -> tuple[Fallback, ...]:
        """The better pipelines of the architecture that do not serve what the menu is of; each plan has them."""
        return self.plans[0].fallbacks

    def instead_of(self, *fallbacks: Fallback) -> Menu:
        """The same menu, of plans that stand in for these pipelines."""
        if not fallbacks:
            return self

        def of(plan: KernelPlan | None) -> KernelPlan | None:
            return plan and replace(plan, fallbacks=fallbacks)

        plans = tuple(replace(plan, fallbacks=fallbacks) for plan in self.plans)
        few = tuple(replace(plan, fallbacks=fallbacks) for plan in self.few)
        return replace(self, plans=plans, packed=of(self.packed), small=of(self.small), few=few)
