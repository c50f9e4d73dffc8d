"""What kernels are asked for: one value, built and checked once, that goes through planner, pipelines and records."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

from flashgen.analysis.derivative import differentiable_of, elements, loads
from flashgen.errors import PlanError
from flashgen.lang.symbols import line_of
from flashgen.lang.variant import Variant
from flashgen.planning import arch as archs
from flashgen.planning.arch import Arch
from flashgen.planning.float8 import FLOAT8, Float8, float8_of, no_backward_in_8_bits
from flashgen.planning.integers import INTEGERS, Integers
from flashgen.planning.layout import DENSE, Layout
from flashgen.planning.members import ALL_KEYS, Keys
from flashgen.planning.plan import KernelPlan, Tile, without_sink
from flashgen.planning.profile import Profile, profile

#: Elements that one read of a captured tensor may be for one score, in the rounds of a loop, and have gradients.
MAX_ELEMENTS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """A forward; `packed`: the form alone whose tiles hold all heads that share keys; `keys`: those that a block
    visits."""

    dropout: bool = False
    packed: bool = False
    keys: Keys = ALL_KEYS


@dataclass(frozen=True, slots=True, kw_only=True)
class Backward:
    """A backward: in one order of sums (`deterministic`), with the gradients of captured tensors by name."""

    dropout: bool = False
    deterministic: bool = False
    gradients: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed(Integers):
    """What is fixed that the planner would choose: it is checked and never changed."""

    pipeline: str | None = None
    tile: Tile | None = None

    def among(self, name: str, free: Iterable[int]) -> Iterable[int]:
        """The values of an integer to try: the one that is fixed, else those that the planner tries freely."""
        value: int | None = getattr(self, name)
        return free if value is None else (value,)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRequest:
    """The kernels of a variant (constants bound) that serve one pass at any length."""

    variant: Variant
    arch: Arch
    dtype: str
    head_dim: int
    v_head_dim: int
    asked: Forward | Backward = Forward()
    fixed: Fixed = Fixed()
    layout: Layout = DENSE
    float8: Float8 | None = None  # of keys and values of 8 bits

    @classmethod
    def of(
        cls,
        variant: Variant,
        arch: str,
        dtype: str,
        head_dim: int,
        v_head_dim: int | None = None,
        *,
        backward: bool = False,
        dropout: bool = False,
        packed: bool = False,
        deterministic: bool = False,
        gradients: Iterable[str] = (),
        pipeline: str | None = None,
        tile: tuple[int, int] | None = None,
        layout: Layout = DENSE,
        keys: Keys = ALL_KEYS,
        k_dtype: str | None = None,
        v_dtype: str | None = None,
        out_dtype: str | None = None,
        accuracy: str | None = None,
        **integers: int | None,
    ) -> KernelRequest:
        """The request for what a call names; `tile` is (query rows, key rows), `integers` are those of `INTEGERS`.

        `dtype` is that of q, and of k and v unless theirs are given, of 8 bits beside queries of 8 or 16; `out_dtype`
        and `accuracy` are of 8 bits.

        A forward that leaves pipeline, tile or stages open has them from the variant's pins; so has a backward its
        best pipeline alone, since tile and stages are the forward's.  Raises PlanError for an option of the other pass,
        a captured tensor without a gradient, and an architecture that is not in the table or not the pinned one.
        """
        fixed = Fixed(pipeline=pipeline, tile=None if tile is None else Tile(q=tile[0], kv=tile[1]), **integers)
        asked: Forward | Backward
        float8 = float8_of(dtype, k_dtype, v_dtype, out_dtype, accuracy)
        if backward:
            _only_of(
                "forward", "backward", {"packed": packed, "kv_splits": keys.turns, "invariant": keys.invariant}, fixed
            )
            if float8 is not None:
                raise no_backward_in_8_bits(float8.out)
            if layout.paged:
                raise PlanError(
                    "keys and values in the pages of a cache have no gradients\n"
                    "  nearest: a forward under torch.no_grad(), or k and v without pages"
                )
            asked = Backward(
                dropout=dropout,
                deterministic=deterministic,
                gradients=_differentiable(variant, tuple(gradients)),
            )
        else:
            _only_of("backward", "forward", {"deterministic": deterministic, "gradients": gradients}, fixed)
            asked = Forward(dropout=dropout, packed=packed, keys=keys)
            fixed = _with_pins(fixed, variant)
        return cls(
            variant=variant,
            arch=_arch(variant, arch),
            dtype=dtype,
            head_dim=head_dim,
            v_head_dim=head_dim if v_head_dim is None else v_head_dim,
            asked=asked,
            fixed=fixed,
            layout=layout,
            float8=float8,
        )

    @classmethod
    def of_plan(cls, plan: KernelPlan) -> KernelRequest:
        """The request that a plan serves, with nothing fixed."""
        asked: Forward | Backward
        if plan.backward is None:
            asked = Forward(dropout=plan.dropout, packed=plan.packed, keys=plan.keys)
        else:
            asked = Backward(dropout=plan.dropout, deterministic=plan.deterministic, gradients=plan.gradients)
        return cls(
            variant=plan.variant,
            arch=archs.find(plan.arch),
            dtype=plan.dtype,
            head_dim=plan.head_dim,
            v_head_dim=plan.v_head_dim,
            asked=asked,
            layout=plan.layout,
            float8=plan.float8,
        )

    @property
    def pass_name(self) -> str:
        return "forward" if isinstance(self.asked, Forward) else "backward"

    @property
    def dropout(self) -> bool:
        return self.asked.dropout

    @property
    def packed(self) -> bool:
        return isinstance(self.asked, Forward) and self.asked.packed

    @property
    def keys(self) -> Keys:
        """The keys that a block visits."""
        return self.asked.keys if isinstance(self.asked, Forward) else ALL_KEYS

    @property
    def deterministic(self) -> bool:
        return isinstance(self.asked, Backward) and self.asked.deterministic

    @property
    def gradients(self) -> tuple[str, ...]:
        return self.asked.gradients if isinstance(self.asked, Backward) else ()

    @property
    def score_gradients(self) -> tuple[str, ...]:
        """Those of what the score reads, which kernels find tile by tile; that of a sink is found by rows."""
        return without_sink(self.variant, self.gradients)

    @property
    def widest(self) -> int:
        """The larger head dim."""
        return max(self.head_dim, self.v_head_dim)

    @property
    def profile(self) -> Profile:
        """What pipelines ask of the variant."""
        return profile(self.variant, self.gradients)

    def fixing(self, **fixed: Any) -> KernelRequest:
        """The same with these fixed in place of what was; None: left to the planner."""
        return replace(self, fixed=replace(self.fixed, **fixed))

    def visiting(self, keys: Keys) -> KernelRequest:
        """The same forward with blocks that visit these keys."""
        assert isinstance(self.asked, Forward)
        return replace(self, asked=replace(self.asked, keys=keys))

    def with_float8(self, float8: Float8) -> KernelRequest:
        """The same with other options of 8 bits."""
        return replace(self, float8=float8)

    def less(self) -> dict[str, KernelRequest]:
        """The requests that leave out one option, or leave open one thing that is fixed, by how a call writes that."""
        fixed: dict[str, object] = {"tile": self.fixed.tile, **self.fixed.integers()}
        found = {f"{name}=None": self.fixing(**{name: None}) for name, value in fixed.items() if value is not None}
        for option in fields(self.asked):
            default: dict[str, Any] = {option.name: option.default}
            if getattr(self.asked, option.name) != option.default:
                said = f"{option.name}={option.default}"
                if option.name == "keys":
                    said = "invariant=False" if self.keys.invariant else "kv_splits=1"
                found[said] = replace(self, asked=replace(self.asked, **default))
        if self.layout.own:
            found["sequences that fill their tensors and begin at position 0"] = replace(self, layout=DENSE)
        if self.float8 is not None:
            if self.float8.accuracy != self.float8.exactly.accuracy:
                found[f"accuracy={self.float8.exactly.accuracy!r}"] = self.with_float8(self.float8.exactly)
            change = f"tensors dequantised to {self.float8.out}"
            found[change] = replace(self, dtype=self.float8.out, float8=None)
        return found

    def __str__(self) -> str:
        dims = f"head_dim {self.head_dim}"
        if self.v_head_dim != self.head_dim:
            dims += f", v_head_dim {self.v_head_dim}"
        of_keys = "" if self.float8 is None or self.float8.q in FLOAT8 else f", k {self.float8.k}, v {self.float8.v}"
        return f"{self.variant.name!r} ({dims}, {self.dtype}{of_keys})"


def _only_of(other: str, this: str, options: dict[str, object], fixed: Fixed) -> None:
    """Refuse options and integers of the other pass."""
    for name, value in options.items():
        if value:
            nearest = "backward=True" if other == "backward" else f"{name}={None if name == 'kv_splits' else False}"
            raise PlanError(f"{name} is of a {other}, and a {this} was asked for\n  nearest: {nearest}")
    for name in fixed.integers():
        if this not in INTEGERS[name].passes:
            raise PlanError(f"{name} is of a {other}, and a {this} was asked for\n  nearest: {name}=None")


def _differentiable(variant: Variant, gradients: tuple[str, ...]) -> tuple[str, ...]:
    """The names, each once and in order, where the score has derivatives by them."""
    known = differentiable_of(variant) if gradients else ()
    for name in gradients:
        if name not in known:
            what = "the score" if variant.sink is None else "the softmax"
            those = f"{what} of {variant.name!r} has derivatives by {', '.join(known) or 'no captured tensor'}"
            raise PlanError(f"{name!r} has no gradient: {those}\n  nearest: gradients={known}")
        for load in loads(variant.score_node, name):
            if elements(load) > MAX_ELEMENTS:
                raise PlanError(
                    f"{name!r} has no gradient: for one score a loop reads up to {elements(load)} elements of it"
                    f"{line_of(load)}, and at most {MAX_ELEMENTS} have one\n"
                    f"  nearest: loops of at most {MAX_ELEMENTS} rounds in all, or no gradient of {name!r}"
                )
    return tuple(sorted(set(gradients)))


def _with_pins(fixed: Fixed, variant: Variant) -> Fixed:
    """What a call fixes, else the variant's pin; None stands for nothing, and nothing else does."""
    pins = variant.pins
    return replace(
        fixed,
        pipeline=pins.pipeline if fixed.pipeline is None else fixed.pipeline,
        tile=Tile(q=pins.tile[0], kv=pins.tile[1]) if fixed.tile is None and pins.tile else fixed.tile,
        stages=pins.stages if fixed.stages is None else fixed.stages,
    )


def _arch(variant: Variant, name: str) -> Arch:
    found, pinned = archs.find(name), variant.pins.arch
    if pinned is not None and archs.find(pinned) is not found:
        pinned = archs.find(pinned).name
        raise PlanError(f"{variant.name!r} is pinned to {pinned}\n  asked: {found.name}\n  nearest: {pinned}")
    return found
