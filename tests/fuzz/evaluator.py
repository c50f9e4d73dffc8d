"""What a spec means, read a second time: its text runs against a stand-in `fg` whose objects compute at once.

Nothing of the compiler is used here.  Integers are int64 tensors (they wrap there), conditions bool, floats float32 in
a mask and float64 in a score; the rules are those of the table in docs/language.md and of the docstrings of
`lang/ops.py`.  Attention is written by its definition in float64, so that autograd gives the gradients.

Rounding.  A kernel computes scores in float32 with quick functions, and a mask's functions too.  A `World` with a
`wobble` moves the result of each such operation by a random part of what it may be off (stochastic arithmetic): where
wobbled evaluations disagree, float arithmetic does not decide, and no judge asks.
"""

from __future__ import annotations

import builtins
import math
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import torch

INT32, INT64 = torch.iinfo(torch.int32), torch.iinfo(torch.int64)
FLOAT32 = torch.finfo(torch.float32)

#: Dimension names of captured tensors; such a dimension of size 1 broadcasts, which clamping an index does too.
SIZES = ("batch", "heads", "kv_heads", "q_len", "kv_len")

#: What sin and cos may be of arguments whose turns a kernel loses count of: of whole turns one of the last three.
WILD = (None, -1.0, 0.0, 1.0)


@dataclass(frozen=True)
class Wobble:
    """Random errors: `arithmetic` and `functions` are relative sizes, and the second is an absolute one as well.

    `alike` is what two floats that differ by no more than that are said to be, equal or not; None: what they are.
    `wild` is what sin and cos of arguments are for which a kernel promises nothing; None: those of others near them.
    """

    random: torch.Generator
    arithmetic: float
    functions: float
    alike: bool | None = None
    wild: float | None = None

    def moved(self, x: torch.Tensor, relative, absolute: float = 0.0) -> torch.Tensor:
        sign = torch.randint(0, 2, x.shape, generator=self.random, dtype=torch.int8) * 2 - 1
        return torch.where(x.isfinite(), x + sign * (relative * x.abs() + absolute), x)


@dataclass
class World:
    """All that an expression reads, and in which precision its floats are.

    narrow  whether floats overflow where float32 does and integers are rounded to it: a kernel, not float64 on a CPU
    rough   set where an operation is not exactly rounded in a kernel's mask
    """

    sizes: Mapping[str, int]
    params: Mapping[str, int | float]
    tensors: Mapping[str, torch.Tensor]
    precision: torch.dtype = torch.float32
    narrow: bool = True
    wobble: Wobble | None = None
    rough: bool = field(default=False, init=False)

    # -- values

    def value(self, x) -> Value:
        """A Python number or a value, as a value."""
        if isinstance(x, Value):
            return x
        if isinstance(x, (bool, np.bool_)):
            return Value(self, torch.tensor(bool(x)), "bool")
        if isinstance(x, (int, np.integer)):
            x = int(x)
            return Value(self, torch.tensor(x), "int32" if INT32.min <= x <= INT32.max else "int64")
        return self.number(float(x))

    def number(self, x: float) -> Value:
        held = torch.tensor(x, dtype=torch.float32 if self.narrow else self.precision)
        return Value(self, held.to(self.precision), "float")

    def floats(self, x: Value) -> torch.Tensor:
        if x.kind == "float":
            return x.x
        if x.kind == "bool":
            return x.x.to(self.precision)
        return (x.x.to(torch.float32) if self.narrow else x.x).to(self.precision)

    def settled(self, x: torch.Tensor, functions: float = 0.0, absolute: float = 0.0) -> Value:
        """The result of a float operation, as far off as it may be: `functions` of a quick function, else arithmetic
        (which is exact in a mask)."""
        if self.precision is torch.float64 and self.narrow:
            x = torch.where(x.abs() > FLOAT32.max, x.sign() * math.inf, x)
        self.rough |= bool(functions or absolute)
        if self.wobble is not None:
            by = self.wobble.functions * functions + self.wobble.arithmetic
            x = self.wobble.moved(x, by, self.wobble.functions * absolute)
            if self.narrow:
                x = torch.where(x.abs() < FLOAT32.tiny, x * torch.randint(0, 2, (), generator=self.wobble.random), x)
        return Value(self, x, "float")


class Value:
    """A number or condition at every position at once."""

    __slots__ = ("kind", "world", "x")
    __hash__ = None
    __array_ufunc__ = None

    def __init__(self, world: World, x: torch.Tensor, kind: str) -> None:
        self.world, self.x, self.kind = world, x, kind

    def pair(self, other) -> tuple[torch.Tensor, torch.Tensor, str]:
        """Both operands in the type that they share."""
        other = self.world.value(other)
        kinds = {self.kind, other.kind}
        if kinds == {"bool"}:
            return self.x, other.x, "bool"
        assert "bool" not in kinds, "a condition is no number"
        if "float" in kinds:
            return self.world.floats(self), self.world.floats(other), "float"
        return self.x, other.x, "int64" if "int64" in kinds else "int32"

    def made(self, x: torch.Tensor, kind: str) -> Value:
        return self.world.settled(x) if kind == "float" else Value(self.world, x, kind)

    def _equal(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        wobble = self.world.wobble
        if wobble is None or wobble.alike is None or not a.is_floating_point():
            return torch.eq(a, b)
        within = 8 * (wobble.arithmetic + wobble.functions) * (a.abs() + b.abs())
        return torch.where((a - b).abs() <= within, torch.tensor(wobble.alike), torch.eq(a, b))

    def compared(self, other, compare: Callable) -> Value:
        a, b, _ = self.pair(other)
        return Value(self.world, compare(a, b), "bool")

    def __eq__(self, other):
        return self.compared(other, self._equal)

    def __ne__(self, other):
        return self.compared(other, lambda a, b: ~self._equal(a, b))

    def __lt__(self, other):
        return self.compared(other, torch.lt)

    def __le__(self, other):
        return self.compared(other, torch.le)

    def __gt__(self, other):
        return self.compared(other, torch.gt)

    def __ge__(self, other):
        return self.compared(other, torch.ge)

    def bits(self, other, of_bits: Callable) -> Value:
        a, b, kind = self.pair(other)
        assert kind != "float", "a float has no bits"
        return Value(self.world, of_bits(a, b), kind)

    def __and__(self, other):
        return self.bits(other, torch.bitwise_and)

    def __or__(self, other):
        return self.bits(other, torch.bitwise_or)

    def __xor__(self, other):
        return self.bits(other, torch.bitwise_xor)

    __rand__, __ror__, __rxor__ = __and__, __or__, __xor__

    def __invert__(self):
        return Value(self.world, torch.bitwise_not(self.x), self.kind)

    def __lshift__(self, other):
        return Value(self.world, self.x << self.world.value(other).x, self.kind)

    def __rshift__(self, other):
        return Value(self.world, self.x >> self.world.value(other).x, self.kind)

    def __rlshift__(self, other):
        return self.world.value(other) << self

    def __rrshift__(self, other):
        return self.world.value(other) >> self

    def __add__(self, other):
        a, b, kind = self.pair(other)
        return self.made(a + b, kind)

    __radd__ = __add__

    def __sub__(self, other):
        a, b, kind = self.pair(other)
        return self.made(a - b, kind)

    def __rsub__(self, other):
        return self.world.value(other) - self

    def __mul__(self, other):
        a, b, kind = self.pair(other)
        return self.made(a * b, kind)

    __rmul__ = __mul__

    def __truediv__(self, other):
        other = self.world.value(other)
        quotient = self.world.floats(self) / self.world.floats(other)
        if self.world.precision is torch.float32:
            return self.world.settled(quotient)  # exactly rounded in a mask
        return self.world.settled(quotient, functions=1.0)

    def __rtruediv__(self, other):
        return self.world.value(other) / self

    def __floordiv__(self, other):
        a, b, kind = self.pair(other)
        minus = b == -1  # of the least int64 the processor traps; the language wraps
        quotient = torch.div(a, torch.where(minus, 1, b), rounding_mode="floor")
        return Value(self.world, torch.where(minus, -a, quotient), kind)

    def __rfloordiv__(self, other):
        return self.world.value(other) // self

    def __mod__(self, other):
        a, b, kind = self.pair(other)
        minus = b == -1
        return Value(self.world, torch.where(minus, 0, torch.remainder(a, torch.where(minus, 1, b))), kind)

    def __rmod__(self, other):
        return self.world.value(other) % self

    def __pow__(self, c):
        """Of whole exponents a product, which keeps integers."""
        if self.kind != "float" and isinstance(c, int) and c >= 0:
            return Value(self.world, self.x**c, self.kind)
        x = self.world.floats(self)
        away = 1.0 + abs(c) * float(x.detach().abs().log2().nan_to_num(0, 0, 0).abs().max()) if x.numel() else 1.0
        return self.world.settled(x**c, functions=4.0 * away)

    def __neg__(self):
        return Value(self.world, -self.x, self.kind)

    def __pos__(self):
        return self

    def __abs__(self):
        return Value(self.world, self.x.abs(), self.kind)

    def __bool__(self):
        raise AssertionError("a value at many positions is neither true nor false")


# ---------------------------------------------------------------------------------------------------------------------
# The stand-in for the module `flashgen`


class Captured:
    """A captured tensor: an index outside its dimension gives the nearest element, as in a kernel."""

    def __init__(self, world: World, name: str, dtype: str, index: tuple[Value, ...] = ()) -> None:
        self.world, self.name, self.dtype, self.index = world, name, dtype, index

    def __getitem__(self, index):
        array = self.world.tensors[self.name]
        given = index if isinstance(index, tuple) else (index,)
        sizes = array.shape[len(self.index) :]
        given = (size + i if isinstance(i, int) and i < 0 else i for i, size in zip(given, sizes, strict=False))
        index = (*self.index, *map(self.world.value, given))
        if len(index) < array.dim():
            return Captured(self.world, self.name, self.dtype, index)
        element = array[tuple(i.x.clamp(0, size - 1) for i, size in zip(index, array.shape, strict=True))]
        kind = {"bool": "bool", "int64": "int64"}.get(self.dtype, "int32" if "int" in self.dtype else "float")
        return Value(self.world, element.to(self.world.precision) if kind == "float" else element, kind)

    def size(self, dim: int) -> Value:
        return self.world.value(self.world.tensors[self.name].shape[dim])


class Variant:
    """Mask functions and score functions, combined as `fg.variant` combines them."""

    def __init__(self, mask: Callable | None = None, scores: tuple[Callable, ...] = ()) -> None:
        self.mask, self.scores = mask, scores

    def __call__(self, mask: Callable) -> Variant:
        return Variant(mask, self.scores)

    def score(self, function: Callable) -> Variant:
        return Variant(self.mask, (*self.scores, function))

    def then(self, after) -> Variant:
        if isinstance(after, Variant):
            return Variant(_joined(self.mask, after.mask, torch.logical_and), (*self.scores, *after.scores))
        return self.score(after)

    def __and__(self, other):
        return Variant(_joined(self.mask, other.mask, torch.logical_and), self.scores or other.scores)

    def __or__(self, other):
        everywhere = self.mask is None or other.mask is None
        return Variant(None if everywhere else _joined(self.mask, other.mask, torch.logical_or))

    def __invert__(self):
        mask = self.mask or (lambda *at: True)
        return Variant(lambda *at: ~_condition(mask(*at)))


def _condition(x) -> Value | torch.Tensor:
    return x.x if isinstance(x, Value) else torch.as_tensor(x)


def _joined(one: Callable | None, two: Callable | None, join: Callable) -> Callable | None:
    if one is None or two is None:
        return one or two
    return lambda *at: join(_condition(one(*at)), _condition(two(*at)))


def _extremum(world: World, x, y, pick: Callable) -> Value:
    """A NaN beside a number gives the number, and the number has the gradient; a tie shares it."""
    a, b, kind = world.value(x).pair(y)
    if kind == "float":
        a, b = torch.where(a.isnan(), b, a), torch.where(b.isnan(), a, b)
    return Value(world, pick(a, b), kind)


def _bounded(world: World, x, bound, pick: Callable, beyond: Callable) -> Value:
    """One side of fg.clamp: at the edge the gradient is x's."""
    a, b, kind = world.value(x).pair(bound)
    if kind != "float":
        return Value(world, pick(a, b), kind)
    return Value(world, torch.where(beyond(a, b) | a.isnan(), b, a), kind)


def _whole(x: torch.Tensor, limits: torch.iinfo) -> torch.Tensor:
    """A float as an integer: no fraction, saturating; NaN is 0, in 64 bits the least."""
    inside = (x > limits.min) & (x < limits.max)
    edge = torch.where(x < 0, limits.min, limits.max)
    edge = torch.where(x.isnan(), 0 if limits.bits == 32 else limits.min, edge)
    return torch.where(inside, torch.where(inside, x, 0).trunc().to(torch.int64), edge)


class _SlopeOfResult(torch.autograd.Function):
    """A function whose derivative is made from its result, as far off as that is: where tanh is all but 1, the slope
    that float32 gives is 0."""

    @staticmethod
    def forward(ctx, x, y, slope):
        ctx.slopes = slope(y)
        return y.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.slopes, None, None


def stand_in(world: World) -> types.ModuleType:
    """A module that spec files import as `flashgen`."""
    fg = types.ModuleType("flashgen")
    value = world.value

    def scalar(name, default=None, *, min=None, max=None, dtype=None, doc=""):
        given = [x for x in (default, min, max) if x is not None]
        dtype = {int: "int32", float: "float32"}.get(dtype, dtype)
        if dtype is None:
            dtype = "float32" if any(isinstance(x, float) for x in given) else "int32"
        number = world.params.get(name, default)
        return world.number(number) if dtype == "float32" else Value(world, torch.tensor(int(number)), dtype)

    def tensor(name, dims, dtype, *, min=None, max=None, sorted=False, example=None, doc=""):
        return Captured(world, name, dtype)

    def variant(mask=None, score=None, **described):
        return Variant(mask, () if score is None else (score,))

    def where(condition, x, y):
        a, b, kind = value(x).pair(y)
        return Value(world, torch.where(value(condition).x, a, b), kind)

    def clamp(x, low, high):
        if low is not None:
            x = _bounded(world, x, low, torch.maximum, torch.lt)
        return x if high is None else _bounded(world, x, high, torch.minimum, torch.gt)

    def any_of(n, condition):
        n, found = value(n), value(False)
        for i in range(int(n.x.max()) if n.x.numel() else 0):
            found = found | ((value(i) < n) & condition(value(i)))
        return found

    def sum_of(n, term):
        n, found = value(n), None
        for i in range(max(int(n.x.max()) if n.x.numel() else 0, 1)):  # the first says of what kind it is
            x = value(term(value(i)))
            x = where(value(i) < n, x, 0.0 if x.kind == "float" else 0)
            found = x if found is None else found + x
        return found

    def function(of, absolute=0.0, relative=lambda x: 1.0, slope=None):
        def call(x):
            x = world.floats(value(x))
            found = world.settled(of(x), functions=relative(x), absolute=absolute)
            if slope is not None and world.wobble is not None:
                found.x = _SlopeOfResult.apply(x, found.x.detach(), slope)
            return found

        return call

    def wave(of):
        def call(x):  # beyond 2^24 a kernel, which counts turns in float32, promises nothing
            x = world.floats(value(x))
            beyond, wobble = (x.abs() > 2.0**24) & x.isfinite(), world.wobble if world.narrow else None
            if wobble is not None:
                x = wobble.moved(x, torch.where(beyond, 0.5, 0.0))
            found = world.settled(of(x), functions=1.0, absolute=8.0)
            if wobble is not None and wobble.wild is not None:  # whole turns may be all that a kernel finds
                found.x = torch.where(beyond, torch.full_like(found.x, wobble.wild), found.x)
            return found

        return call

    def steep(x):  # the exponent is rounded first
        return 1.0 + float(x.detach().abs().nan_to_num(0, 0, 0).clamp(max=200).max()) if x.numel() else 1.0

    def cast(limits, kind):
        def call(x):
            x = value(x)
            if x.kind == "float":
                return Value(world, _whole(x.x, limits), kind)
            if x.kind == "int64" and kind == "int32":
                return Value(world, x.x.to(torch.int32).to(torch.int64), kind)
            return Value(world, x.x.to(torch.int64), kind if x.kind == "bool" or kind == "int64" else x.kind)

        return call

    vars(fg).update(
        param=scalar,
        constant=scalar,
        tensor=tensor,
        variant=variant,
        where=where,
        clamp=clamp,
        any=any_of,
        sum=sum_of,
        minimum=lambda x, y: _extremum(world, x, y, torch.minimum),
        maximum=lambda x, y: _extremum(world, x, y, torch.maximum),
        abs=lambda x: abs(value(x)),
        exp=function(torch.exp, relative=steep),
        exp2=function(torch.exp2, relative=steep),
        log=function(torch.log, absolute=1.0),
        log2=function(torch.log2, absolute=1.0),
        log1p=function(torch.log1p, relative=lambda x: 4.0),
        pow=lambda x, c: value(x) ** c,
        sin=wave(torch.sin),
        cos=wave(torch.cos),
        erf=function(torch.erf, absolute=8.0),
        tanh=function(torch.tanh, absolute=8.0, slope=lambda y: 1.0 - y * y),
        sigmoid=function(torch.sigmoid, absolute=8.0, slope=lambda y: y * (1.0 - y)),
        sqrt=function(torch.sqrt),
        rsqrt=function(torch.rsqrt),
        floor=lambda x: Value(world, torch.floor(world.floats(value(x))), "float"),
        int32=cast(INT32, "int32"),
        int64=cast(INT64, "int64"),
        float32=lambda x: Value(world, world.floats(value(x)), "float"),
        **{name: value(world.sizes[name]) for name in SIZES},
    )
    return fg


@lru_cache(maxsize=64)
def _code(text: str) -> types.CodeType:
    return compile(text, "<spec>", "exec")


def read(text: str, world: World) -> Variant:
    """The variant that a spec file assigns last, in a world."""
    fg = stand_in(world)
    usual = builtins.__import__

    def imported(name, *rest):
        return fg if name == "flashgen" else usual(name, *rest)

    namespace = {"__builtins__": vars(builtins) | {"__import__": imported}, "__name__": "spec"}
    exec(_code(text), namespace)
    return [x for x in namespace.values() if isinstance(x, Variant)][-1]


# ---------------------------------------------------------------------------------------------------------------------
# Attention by its definition


@dataclass(frozen=True)
class Spec:
    """A spec's text with the values that it reads; arrays as NumPy has them."""

    text: str
    sizes: Mapping[str, int]
    params: Mapping[str, int | float]
    tensors: Mapping[str, np.ndarray]

    def world(self, tensors: Mapping[str, torch.Tensor] | None = None, **options) -> World:
        held = {name: torch.from_numpy(np.ascontiguousarray(x)) for name, x in self.tensors.items()}
        held = {name: x if x.is_floating_point() or x.dtype is torch.bool else x.long() for name, x in held.items()}
        return World(self.sizes, self.params, held | dict(tensors or {}), **options)

    def positions(self) -> dict[str, torch.Tensor]:
        """b, h, q, k that broadcast to [batch, heads, q_len, kv_len]."""
        batch, heads, _, q_len, kv_len = (self.sizes[name] for name in SIZES)
        axes = {"b": batch, "h": heads, "q": q_len, "k": kv_len}
        return {name: torch.arange(n).view([-1] + [1] * (3 - i)) for i, (name, n) in enumerate(axes.items())}

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.sizes[name] for name in ("batch", "heads", "q_len", "kv_len"))

    def mask(self, rounds: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
        """Which pairs are visible, and of which of them float arithmetic decides that: bool [b, h, q, k]."""
        world = self.world()
        visible = self._mask(world)
        decided = torch.ones(self.shape, dtype=torch.bool)
        if world.rough:
            random = torch.Generator().manual_seed(0)
            for i in range(rounds):
                wobble = Wobble(random, arithmetic=0.0, functions=2.0**-19, wild=WILD[i % len(WILD)])
                decided &= self._mask(self.world(wobble=wobble)) == visible
        return visible, decided

    def _mask(self, world: World) -> torch.Tensor:
        mask = read(self.text, world).mask
        if mask is None:
            return torch.ones(self.shape, dtype=torch.bool)
        at = [Value(world, x, "int32") for x in self.positions().values()]
        return _condition(mask(*at)).expand(self.shape).clone()

    def scores(self, s: torch.Tensor, at: list[torch.Tensor], world: World) -> torch.Tensor:
        """What the score functions make of s at positions (b, h, q, k), all of one shape."""
        x = Value(world, s, "float")
        for function in read(self.text, world).scores:
            x = function(x, *(Value(world, i, "int32") for i in at))
            x = Value(world, world.floats(world.value(x)), "float")
        return x.x.expand(s.shape)


@dataclass(frozen=True)
class Attended:
    """o, lse and, where asked for, gradients by name; float64.

    `noise` is what a relative error of 1 in each p, o and ds would make of a result, at most; `mass` is what all ds add
    up to in size: reads of one captured element may cancel, and their sums in float32 do not.
    """

    o: torch.Tensor
    lse: torch.Tensor
    gradients: Mapping[str, torch.Tensor]
    noise: Mapping[str, float] = field(default_factory=dict)
    mass: float = 0.0

    def finite(self) -> bool:
        seen = self.lse != -math.inf
        return all(bool(x.isfinite().all()) for x in (self.o, self.lse[seen], *self.gradients.values()))


@dataclass(frozen=True)
class Call:
    """One call of attention: inputs (values of the problem's dtype), what the mask sees, and gradients of its results.

    `captured` names the tensors whose gradients are asked for; without `d_o` there are none.
    """

    spec: Spec
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scale: float
    visible: torch.Tensor
    d_o: torch.Tensor | None = None
    dlse: torch.Tensor | None = None
    captured: tuple[str, ...] = ()
    narrow: bool = True

    def attend(self, wobble: Wobble | None = None) -> Attended:
        """s = scale * q.k, score, mask, softmax, o; a score of -inf is masked; an empty row gives 0 and lse -inf."""
        backward = self.d_o is not None
        q, k, v = (x.double().requires_grad_(backward) for x in (self.q, self.k, self.v))
        wide_k, wide_v = self._wide(k, v)
        s = self.scale * (q @ wide_k.mT)
        if wobble is not None and s.numel():
            s = wobble.moved(s, wobble.arithmetic, wobble.arithmetic * float(s.detach().abs().max()))
        leaves = self._leaves()
        live, found = self._scores(s, leaves, wobble)
        s = torch.full(self.spec.shape, -math.inf, dtype=torch.float64).masked_scatter(live, found)
        p, total, lse = _softmax(s, live)
        o = (p / total) @ wide_v
        if not backward:
            return Attended(o, lse, {})
        loss = (o * self.d_o.double()).sum()
        if self.dlse is not None:
            loss = loss + (torch.where(live.any(-1), lse, 0.0) * self.dlse.double()).sum()
        wanted = {"q": q, "k": k, "v": v, **leaves}
        grads = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
        found = zip(wanted.items(), grads, strict=True)
        return Attended(o.detach(), lse.detach(), {n: torch.zeros_like(x) if g is None else g for (n, x), g in found})

    def rounded(self, dtype: torch.dtype) -> Attended:
        """The same by explicit formulas, with p, the gradient of s, o and results rounded to `dtype`: what any method
        that keeps them in 16 bits does."""

        def in_16_bits(x: torch.Tensor) -> torch.Tensor:
            return x.to(dtype).double()

        q, k, v = (x.double() for x in (self.q, self.k, self.v))
        wide_k, wide_v = self._wide(k, v)
        s = (self.scale * (q @ wide_k.mT)).requires_grad_(self.d_o is not None)
        leaves = self._leaves()
        live, found = self._scores(s, leaves, None)
        p, total, lse = _softmax(torch.full_like(s, -math.inf).masked_scatter(live, found.detach()), live)
        p = p / total
        o = in_16_bits(in_16_bits(p) @ wide_v)
        noise = {"o": _largest(p @ wide_v.abs())}
        if self.d_o is None:
            return Attended(o, lse, {}, noise)
        d_o = self.d_o.double()
        delta = (d_o * o).sum(-1, keepdim=True)
        if self.dlse is not None:
            delta = delta - self.dlse.double()[..., None]
        dp = d_o @ wide_v.mT
        by_s, by_name = _through(found, s, leaves, (p * (dp - delta))[live])
        size, by_size = _through(found, s, leaves, (p * (dp.abs() + delta.abs()))[live])
        mass = float((p * (dp.abs() + delta.abs()))[live].detach().sum())
        by_s, size = in_16_bits(by_s), self.scale * size.abs()
        noise |= {"q": _largest(size @ wide_k.abs()), "k": _largest(size.mT @ q.abs())}
        noise |= {"v": _largest(p.mT @ d_o.abs())} | {name: _largest(x) for name, x in by_size.items()}
        group = self.spec.sizes["heads"] // self.spec.sizes["kv_heads"]
        dk, dv = ((x.mT @ y).unflatten(1, (-1, group)).sum(2) for x, y in ((by_s, q), (in_16_bits(p), d_o)))
        found = {"q": self.scale * (by_s @ wide_k), "k": self.scale * dk, "v": dv}
        return Attended(o, lse, {n: in_16_bits(x) for n, x in found.items()} | by_name, noise, mass)

    def _wide(self, *keys: torch.Tensor) -> list[torch.Tensor]:
        group = self.spec.sizes["heads"] // self.spec.sizes["kv_heads"]
        return [x.repeat_interleave(group, dim=1) for x in keys]

    def _leaves(self) -> dict[str, torch.Tensor]:
        tensors = self.spec.world().tensors
        return {name: tensors[name].double().requires_grad_() for name in self.captured}

    def _scores(self, s: torch.Tensor, leaves: dict, wobble: Wobble | None) -> tuple[torch.Tensor, torch.Tensor]:
        """The pairs that are visible and whose score is not -inf, and their scores: what makes a score -inf has no
        gradient, nor has what a score function does at a hidden pair."""
        world = self.spec.world(leaves, precision=torch.float64, narrow=self.narrow, wobble=wobble)
        at = [x.expand(self.spec.shape) for x in self.spec.positions().values()]
        with torch.no_grad():
            found = self.spec.scores(s[self.visible], [x[self.visible] for x in at], world)
        live = self.visible.masked_scatter(self.visible, found != -math.inf)
        return live, self.spec.scores(s[live], [x[live] for x in at], world)


def _through(scores: torch.Tensor, s: torch.Tensor, leaves: dict, ds: torch.Tensor) -> tuple[torch.Tensor, dict]:
    """What becomes of the gradient of scores: that of s, and those of captured tensors by name."""
    wanted = [s, *leaves.values()]
    moved = [None] * len(wanted)
    if scores.requires_grad:
        moved = torch.autograd.grad(scores, wanted, ds, allow_unused=True, retain_graph=True)
    by_s, *by_name = (torch.zeros_like(x) if g is None else g for x, g in zip(wanted, moved, strict=True))
    return by_s, dict(zip(leaves, by_name, strict=True))


def _largest(x: torch.Tensor) -> float:
    return float(x.detach().abs().max()) if x.numel() else 0.0


def _softmax(s: torch.Tensor, live: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Probabilities before division, what divides them (1 in an empty row), and lse."""
    seen = live.any(-1)
    m = torch.where(seen, s.detach().amax(-1), 0.0) if s.shape[-1] else torch.zeros(s.shape[:-1], dtype=s.dtype)
    p = torch.where(live, torch.exp(torch.where(live, s - m[..., None], 0.0)), 0.0)
    total = torch.where(seen, p.sum(-1), 1.0)
    return p, total[..., None], torch.where(seen, m + torch.log(total), -math.inf)
