"""What the planner asks of a pipeline; a module for each pass of each pipeline answers it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol, TypeVar

from flashgen.planning.arch import Arch
from flashgen.planning.integers import Allowed
from flashgen.planning.plan import KernelPlan, Part, Tile
from flashgen.planning.problem import Problem
from flashgen.planning.request import Fixed, KernelRequest


class Candidate(Protocol):
    """One way to serve a request: a frozen dataclass, with a field for each of the pipeline's integers."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def tile(self) -> Tile: ...

    @property
    def stages(self) -> int: ...

    @property
    def warps(self) -> int: ...


C = TypeVar("C", bound=Candidate)

#: Predicted seconds of a plan, by the problem and the number of SMs; O(1).
Predictor = Callable[[Problem, int], float]


class Pipeline(Protocol[C]):
    """One pass of a pipeline: its candidates, what they cost, and how long they take."""

    @property
    def NAME(self) -> str: ...

    @property
    def HEAD_DIM_STEP(self) -> int:
        """Head dims that it emits lie in steps of so many from MIN_HEAD_DIM to MAX_HEAD_DIM."""

    @property
    def MIN_HEAD_DIM(self) -> int: ...

    @property
    def MAX_HEAD_DIM(self) -> int: ...

    @property
    def TILE_RULE(self) -> str:
        """Which tiles its instructions allow, for a person."""

    @property
    def INTEGERS(self) -> Mapping[str, Allowed]:
        """The integers that its candidates have, and their values."""

    @property
    def COPIES(self) -> str:
        """The instruction that loads q, k and v."""

    def cannot_address(
        self, sizes: Sequence[int], strides: Sequence[int], itemsize: int, *, in_pages: bool = False
    ) -> str | None:
        """Why that cannot load a tensor [batch, heads, rows, columns] with these strides in elements, or None; rows are
        known to start at multiples of 16 bytes.  `in_pages`: it is a cache, of as many pages as its batch says."""

    def cannot_page(self, page_size: int) -> str | None:
        """Why that cannot load tiles of keys from pages of so many rows, or None."""

    @property
    def EXAMPLES(self) -> Sequence[tuple[int, int]]:
        """Tiles whose sums a message shows where a head dim is too large."""

    def unsupported_reason(self, request: KernelRequest) -> str | None:
        """Why it has no such kernels, or None: another pipeline of the architecture may have."""

    def nearest_tile(self, tile: tuple[int, int]) -> tuple[int, int]:
        """The tile that TILE_RULE allows and that comes closest."""

    def candidates(self, fixed: Fixed) -> Iterator[C]:
        """Every candidate that has what is fixed, and else what the planner may choose freely; of those with the same
        tile, stages and warps the one that needs least is the first."""

    def does_not_fit_reason(self, c: C, request: KernelRequest) -> str | None:
        """Why the candidate cannot run, or None."""

    def plan(self, c: C, request: KernelRequest) -> KernelPlan:
        """The plan of a candidate that fits."""

    def clocks(self, plan: KernelPlan, arch: Arch) -> dict[str, float]:
        """Clocks that an SM spends on one score (one query, one key), by the unit that spends them."""

    def seconds_per_score(self, plan: KernelPlan, arch: Arch) -> tuple[float, ...]:
        """Seconds that it needs for one score while 1, 2 ... blocks share it; the last one ranks the plan."""

    def predictor(self, plan: KernelPlan, seconds_per_score: tuple[float, ...]) -> Predictor:
        """Seconds of the SM with most to do; what follows from the plan alone is worked out here."""


class BackwardPipeline(Pipeline[C], Protocol[C]):
    """A backward."""

    def for_short(self, found: KernelPlan, request: KernelRequest) -> KernelPlan | None:
        """The form of a plan for short sequences, or None where it has no other."""


class ForwardPipeline(Pipeline[C], Protocol[C]):
    """A forward: a plan of it shows which tiles and stages are too large."""

    @property
    def QUERIES(self) -> Sequence[int]:
        """Queries of a tile, ascending."""

    @property
    def SMALL_QUERIES(self) -> int | None:
        """Those of a tile of problems that leave SMs without a block, fewer than any of QUERIES."""

    @property
    def FEW_QUERIES(self) -> Sequence[int]:
        """Rows of tiles of calls whose rows fill one of them, ascending."""

    @property
    def FEW_BYTES(self) -> int | None:
        """Bytes of keys and values in shared memory that are enough for these: more stages bring nothing."""

    @property
    def SHARES_SM(self) -> bool:
        """Whether several blocks may share an SM."""

    @property
    def KEY_STEP(self) -> int:
        """Tiles of keys grow by so many."""

    def smem(self, c: C, request: KernelRequest) -> tuple[Part, ...]:
        """Bytes of shared memory of a block."""


class Packing(Protocol):
    """A forward whose tiles can hold all heads that share keys."""

    def cannot_pack(self, request: KernelRequest) -> str | None:
        """Why no tile of a request can, or None."""

    def packed(self, plan: KernelPlan) -> KernelPlan | None:
        """The packed form of a plan, or None where registers do not allow it."""

    def packing_gain(
        self,
        packed: KernelPlan,
        plan: KernelPlan,
        seconds_per_score: Callable[[KernelPlan], tuple[float, ...]],
        problem: Problem,
        sms: int,
    ) -> float:
        """How many times as long as with a packed form the SM with most to do works with `plan`; O(1)."""
