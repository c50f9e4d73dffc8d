"""torch's functions and methods on traced values: one table by name, for `torch.f(x)`, `x.f()` and operators alike."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Any

import torch

from flashgen.frontends.arrays import (
    BINARY,
    ELEMENTS,
    NARROW,
    Array,
    cast,
    filled,
    known_as,
    lift,
    of_language,
    pointwise,
    promoted,
    within,
)
from flashgen.frontends.names import ALIASES, CURES
from flashgen.frontends.rows import INDEXING, REDUCTIONS
from flashgen.lang import functions as fg
from flashgen.lang.proxies import Expr, refused

Operation = Callable[..., Any]


def operation(name: str) -> Operation | None:
    """The function of torch's function, method or operator of that name."""
    plain = name.split(".")[0]
    of_python = plain.startswith("__") and plain.endswith("__")
    plain = plain[2:-2] if of_python else plain
    found = FUNCTIONS.get(ALIASES.get(plain, plain))
    if found is not None:
        return found
    if plain[1:] in _OPERATORS and (plain == "rsub" or (of_python and plain[0] == "r")):  # x is on the right
        forward = FUNCTIONS[ALIASES.get(plain[1:], plain[1:])]
        return lambda x, y, **options: forward(y, x, **options)
    return None


def unsupported(name: str) -> str:
    """Why a function of torch is refused, and what to write instead."""
    plain = name.split(".")[0].strip("_") or name
    inplace = plain[1:] if name.startswith("__i") and plain[1:] in _OPERATORS else plain
    if (inplace != plain or (name.endswith("_") and not name.startswith("__"))) and operation(inplace) is not None:
        return f"torch's {name!r} changes a tensor, and a mask or score changes none: write x = x.{inplace}(...)"
    cure = CURES.get(plain) or CURES.get(name) or CURES.get(ALIASES.get(plain, ""))
    if cure is not None:
        return f"torch's {plain!r} cannot be traced: {cure}"
    served = [*FUNCTIONS, *(other for other in ALIASES if operation(other) is not None)]
    close = get_close_matches(plain, served, n=1)
    nearest = f"; the nearest is torch's {close[0]!r}" if close else "; docs/frontends.md lists what can"
    return f"torch's {plain!r} cannot be traced{nearest}"


# ---------------------------------------------------------------------------------------------------------------------
# Arithmetic


def _arithmetic(
    sign: str, build: Operation, known: Operation | None, *, of_bools: Operation | None = None, wraps: bool = True
) -> Operation:
    """An operation on numbers of one type; on two conditions what torch makes of them, or nothing."""

    def call(x: Any, y: Any, *, alpha: Any = 1, out: None = None) -> Array:
        _changes_nothing(out=out)
        a, b = lift(x), lift(y)
        if alpha != 1:
            b = FUNCTIONS["mul"](b, alpha)
        dtype = promoted(a, b)
        if dtype is torch.bool:
            if of_bools is None:
                raise refused(f"`{sign}` of two conditions is an error in torch: write x.int() {sign} y.int()")
            return pointwise(of_bools, a, b, dtype=dtype, given=dtype, known=known)
        if wraps:
            _check_width(dtype, sign)
        return pointwise(build, a, b, dtype=dtype, given=dtype, known=known)

    return call


def _changes_nothing(*, inplace: bool = False, out: object = None) -> None:
    """SpecError where a function of torch is asked to change a tensor."""
    if out is not None:
        raise refused("out= changes a tensor, and a mask or score changes none: use what the function returns")
    if inplace:
        raise refused("inplace=True changes a tensor, and a mask or score changes none: leave it out")


def _check_width(dtype: torch.dtype, what: str) -> None:
    if dtype not in NARROW:
        return
    name = str(dtype).removeprefix("torch.")
    if what == "~" and not dtype.is_signed:
        raise refused(
            f"`~` of {name} is {torch.iinfo(dtype).max} - x in torch: write {torch.iinfo(dtype).max} - x.int()"
        )
    if what in ("~", ">>"):
        raise refused(f"`{what}` of {name} is not traced: write x.int() first, which has the same value")
    raise refused(f"`{what}` of {name} wraps in torch beyond its {dtype.itemsize * 8} bits: write x.int() first")


def _comparison(build: Operation) -> Operation:
    def call(x: Any, y: Any) -> Array:
        a, b = lift(x), lift(y)
        given = promoted(a, b)
        if given is torch.bool and build not in (operator.eq, operator.ne):
            given = torch.int32
        return pointwise(build, a, b, dtype=torch.bool, given=given, known=build)

    return call


def _bits(sign: str, build: Operation) -> Operation:
    def call(x: Any, y: Any) -> Array:
        a, b = lift(x), lift(y)
        dtype = promoted(a, b)
        if dtype.is_floating_point:
            raise refused(f"`{sign}` of {str(dtype).removeprefix('torch.')}: torch has it for integers and conditions")
        return pointwise(build, a, b, dtype=dtype, given=dtype, known=build)

    return call


def _logical(build: Operation) -> Operation:
    return lambda x, y: pointwise(build, lift(x), lift(y), dtype=torch.bool, given=torch.bool)


def _shift(name: str, build: Operation) -> Operation:
    def call(x: Any, y: Any) -> Array:
        a, b = lift(x), lift(y)
        dtype = promoted(a, b)
        if dtype is torch.bool or dtype.is_floating_point:
            raise refused(f"`{name}` shifts integers")
        _check_width(dtype, name)
        most = 63 if dtype is torch.int64 else 31

        def shifted(value: Expr, count: Expr) -> Expr:
            value = cast(value, dtype)
            if within(count).lo >= 0 and within(count).hi <= most:
                return build(value, count)
            if build is operator.rshift:  # by a count that is out of range all bits go, but for the sign
                return build(value, fg.clamp(fg.where(count < 0, most, count), 0, most))
            return fg.where((count >= 0) & (count <= most), build(value, fg.clamp(count, 0, most)), 0)

        return pointwise(shifted, a, b, dtype=dtype, given=dtype)

    return call


def _whole(x: Expr, y: Expr) -> tuple[Expr, Expr, Expr | None]:
    """x and a divisor of integers that is above 0, and where both were turned round for it."""
    low, high = within(y).lo, within(y).hi
    if low > 0 or high < 0 or y.node.op == "const":
        return x, y, None
    if low >= 0:
        return x, fg.maximum(y, 1), None  # by 0 torch raises, or gives anything
    turned = y < 0
    return fg.where(turned, -x, x), fg.maximum(fg.absolute(y), 1), turned


def _floor_divided(x: Expr, y: Expr) -> Expr:
    a, b, _ = _whole(x, y)
    return a // b


def _remainder(x: Expr, y: Expr) -> Expr:
    a, b, turned = _whole(x, y)
    return a % b if turned is None else fg.where(turned, -(a % b), a % b)


def _truncated(x: Expr, y: Expr) -> Expr:
    if within(y).lo > 0:
        negative, magnitude = x < 0, fg.absolute(x) // y
    else:
        negative, magnitude = (x < 0) ^ (y < 0), fg.absolute(x) // fg.maximum(fg.absolute(y), 1)
    return fg.where(negative, -magnitude, magnitude)


def _by_kind(sign: str, of_ints: Operation, of_floats: Operation, known: Operation | None = None) -> Operation:
    def call(x: Any, y: Any) -> Array:
        a, b = lift(x), lift(y)
        dtype = promoted(a, b)
        if dtype is torch.bool:
            raise refused(f"`{sign}` of two conditions: write x.int() {sign} y.int()")
        _check_width(dtype, sign)
        numbers = known if b.known != 0 else None
        build = of_floats if dtype.is_floating_point else of_ints
        return pointwise(build, a, b, dtype=dtype, given=dtype, known=numbers)

    return call


_floor_divide = _by_kind("//", _floor_divided, lambda x, y: fg.floor(x / y), operator.floordiv)
_modulo = _by_kind("%", _remainder, lambda x, y: x - y * fg.floor(x / y), operator.mod)
_fmod = _by_kind("fmod", lambda x, y: x - y * _truncated(x, y), lambda x, y: x - y * _trunc_of(x / y))
_divide_truncated = _by_kind("div", _truncated, lambda x, y: _trunc_of(x / y))


def _div(x: Any, y: Any, *, rounding_mode: str | None = None) -> Array:
    if rounding_mode == "floor":
        return _floor_divide(x, y)
    if rounding_mode == "trunc":
        return _divide_truncated(x, y)
    if rounding_mode is not None:
        raise refused(f"rounding_mode is 'floor', 'trunc' or None, and got {rounding_mode!r}")
    a, b = lift(x), lift(y)
    dtype = _floating(promoted(a, b))
    known = operator.truediv if b.known != 0 else None
    return pointwise(operator.truediv, a, b, dtype=dtype, given=dtype, known=known)


def _floating(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype.is_floating_point else torch.float32


def _negative(x: Any) -> Array:
    a = lift(x)
    if a.dtype is torch.bool:
        raise refused("`-` of a condition is an error in torch: write ~x")
    _check_width(a.dtype, "-")
    return pointwise(operator.neg, a, dtype=a.dtype, known=operator.neg)


def _inverted(x: Any) -> Array:
    a = lift(x)
    if a.dtype.is_floating_point:
        raise refused("`~` of a float: torch has it for integers and conditions")
    if a.dtype is not torch.bool:
        _check_width(a.dtype, "~")
    return pointwise(operator.invert, a, dtype=a.dtype)


def _absolute(x: Any) -> Array:
    a = lift(x)
    if a.dtype is torch.bool:
        raise refused("abs() of a condition is an error in torch: write x.int()")
    return pointwise(fg.absolute, a, dtype=a.dtype, known=abs)


def _power(x: Any, y: Any) -> Array:
    a, b = lift(x), lift(y)
    dtype = promoted(a, b)
    if b.known is not None:
        if dtype is torch.bool:
            raise refused("`**` of two conditions")
        _check_width(dtype, "**")
        if not dtype.is_floating_point and b.known < 0:
            raise refused("integers to negative powers are an error in torch: write x.float() first")
        exponent = b.known
        b.fixed()
        return pointwise(lambda base: fg.pow(base, exponent), a, dtype=dtype, given=dtype)
    if a.known is not None and a.known > 0 and dtype.is_floating_point:
        factor = math.log2(a.known)
        return pointwise(lambda power: fg.exp2(power * factor if factor != 1 else power), b, dtype=dtype, given=dtype)
    if a.known is None:
        raise refused("a power of two traced values: write torch.exp2(y * torch.log2(x)) for x > 0")
    raise refused(f"{a.known!r} to the power of a traced value: {_power_of(a.known)}")


def _power_of(base: float) -> str:
    """What to write instead of a power of a number that no kernel computes: of integers, or of none above 0."""
    if base > 0:
        shift = " (or, of y from 0 to 62, torch.bitwise_left_shift(1, y))" if base == 2 else ""
        return f"integers have none here; write {float(base)!r} ** y{shift}"
    if base == 0:
        return "write torch.where(y == 0, 1, 0)"
    size = "" if base == -1 else f" * {float(-base)!r} ** y"
    return f"write torch.where(y % 2 == 0, 1, -1){size} for whole y"


def _float_power(x: Any, y: Any) -> Array:
    """A power in floats, of integers too."""
    a = lift(x)
    return _power(a if a.dtype.is_floating_point else _to(a, torch.float32), y)


# ---------------------------------------------------------------------------------------------------------------------
# Functions of one number


def _function(build: Operation, *, keeps_ints: bool = False) -> Operation:
    """A function to floats; or one that leaves integers as they are."""

    def call(x: Any, *, inplace: bool = False, out: None = None) -> Array:
        _changes_nothing(inplace=inplace, out=out)
        a = lift(x)
        if keeps_ints and not a.dtype.is_floating_point:
            return a
        dtype = _floating(a.dtype)
        return pointwise(build, a, dtype=dtype, given=dtype)

    return call


def _numeric(build: Operation) -> Operation:
    """A function of numbers to numbers of their type."""

    def call(x: Any, *, inplace: bool = False) -> Array:
        _changes_nothing(inplace=inplace)
        a = lift(x)
        if a.dtype is torch.bool:
            raise refused("this is a condition, where torch wants a number: write x.int()")
        return pointwise(build, a, dtype=a.dtype)

    return call


def _trunc_of(x: Expr) -> Expr:
    return fg.where(x < 0, -fg.floor(-x), fg.floor(x))


def _round_of(x: Expr) -> Expr:
    """To the nearest whole number, ties to even ones."""
    down = fg.floor(x)
    above = x - down  # exact where it counts, which x + 0.5 is not beyond 2**23
    odd = fg.floor(down * 0.5) * 2.0 != down
    return fg.where((above > 0.5) | ((above == 0.5) & odd), down + 1.0, down)


def _round(x: Any, *, decimals: int = 0) -> Array:
    if decimals:
        raise refused("round(decimals=) is not in the language: write torch.round(x * 10**d) / 10**d")
    return _function(_round_of, keeps_ints=True)(x)


def _expm1_of(x: Expr) -> Expr:
    """exp(x) - 1: near 0, where the difference would lose digits, by its series."""
    series: Any = 1 / math.factorial(7)
    for n in range(6, 0, -1):
        series = series * x + 1 / math.factorial(n)
    return fg.where(fg.absolute(x) < 0.5, series * x, fg.exp(x) - 1.0)


def _rectified(x: Expr) -> Expr:
    return fg.where(x <= 0, 0, x)


def _silu(x: Expr) -> Expr:
    return x * fg.sigmoid(x)


def _gelu(x: Any, *, approximate: str = "none") -> Array:
    if approximate == "none":
        return _function(lambda x: 0.5 * x * (1.0 + fg.erf(x * math.sqrt(0.5))))(x)
    inner = math.sqrt(2 / math.pi)
    return _function(lambda x: 0.5 * x * (1.0 + fg.tanh(inner * (x + 0.044715 * x * x * x))))(x)


def _softplus(x: Any, beta: float = 1.0, threshold: float = 20.0) -> Array:
    def soft(x: Expr) -> Expr:
        scaled = x * float(beta)
        far = scaled > float(threshold)
        small = fg.log1p(fg.exp(fg.where(far, float(threshold), scaled))) / float(beta)
        return fg.where(far, x, small)

    return _function(soft)(x)


def _leaky_relu(x: Any, negative_slope: float = 0.01, inplace: bool = False) -> Array:
    return _function(lambda x: fg.where(x > 0, x, x * float(negative_slope)))(x, inplace=inplace)


def _hardtanh(x: Any, low: float, high: float, inplace: bool) -> Array:
    """A clamp whose gradient is 0 at its ends, as torch's is; integers stay integers, and so do their ends."""
    if not lift(x).dtype.is_floating_point:
        low, high = int(low), int(high)
    return _numeric(lambda x: fg.where(x <= low, low, fg.where(x >= high, high, x)))(x, inplace=inplace)


def _sign_of(x: Expr) -> Expr:
    return fg.where(x > 0, 1, fg.where(x < 0, -1, 0))


# ---------------------------------------------------------------------------------------------------------------------
# Choices


def _where(condition: Any, x: Any, y: Any) -> Array:
    c, a, b = lift(condition), lift(x), lift(y)
    if c.dtype is not torch.bool:
        raise refused(
            f"the condition of torch.where is {str(c.dtype).removeprefix('torch.')}: compare it, as in x != 0"
        )
    dtype = promoted(a, b)
    return pointwise(lambda c, a, b: fg.where(c, cast(a, dtype), cast(b, dtype)), c, a, b, dtype=dtype)


def _masked_fill(x: Any, mask: Any, value: Any) -> Array:
    a, number = lift(x), lift(value)
    return _to(_where(mask, number, a), a.dtype)


def _clamp(x: Any, min: Any = None, max: Any = None) -> Array:
    if min is None and max is None:
        raise refused("torch.clamp needs min= or max=")
    given = [lift(bound) for bound in (min, max) if bound is not None]
    a = lift(x)
    dtype = promoted(a, *given)
    if dtype is torch.bool:
        raise refused("torch.clamp of conditions is an error in torch: write x.int()")

    def clamped(value: Expr, *limits: Expr) -> Expr:
        low = limits[0] if min is not None else None
        return fg.clamp(value, low, limits[-1] if max is not None else None)

    return pointwise(clamped, a, *given, dtype=dtype, given=dtype)


def _extremum(build: Operation, of_bools: Operation, known: Operation) -> Operation:
    def call(x: Any, y: Any) -> Array:
        a, b = lift(x), lift(y)
        dtype = promoted(a, b)
        return pointwise(of_bools if dtype is torch.bool else build, a, b, dtype=dtype, given=dtype, known=known)

    return call


_minimum = _extremum(fg.minimum, operator.and_, min)
_maximum = _extremum(fg.maximum, operator.or_, max)
_fmin = _extremum(lambda x, y: fg.clamp(x, None, y), operator.and_, min)  # the first operand has the gradient of a tie
_fmax = _extremum(lambda x, y: fg.clamp(x, y, None), operator.or_, max)


def _of_one_or_two(pairwise: Operation, reduction: str) -> Operation:
    """torch.min and torch.max: of two tensors, or of all elements of one."""

    def call(x: Any, other: Any = None, *, dim: Any = None, keepdim: bool = False) -> Array:
        if isinstance(other, (Array, torch.Tensor)):
            return pairwise(x, other)
        if other is not None or dim is not None:
            raise refused(f"x.{reduction[1:]}(dim) gives indices too: write x.{reduction}(dim)")
        return REDUCTIONS[reduction](x)

    return call


def _isin(elements: Any, tests: Any, *, assume_unique: bool = False, invert: bool = False) -> Array:
    x, found = lift(elements), lift(tests)
    if x.rank:
        raise refused("torch.isin of a row: give it one number, as in torch.isin(q_idx, t)")
    result = REDUCTIONS["any"](FUNCTIONS["eq"](x, found))
    return _inverted(result) if invert else result


def _embedding(x: Any, weight: Any, *, norm_type: float = 2.0, **options: Any) -> Array:
    """Rows of a table; `norm_type` says nothing without max_norm."""
    for name, value in options.items():
        if value is not None and value is not False:  # 0 is a row
            raise refused(f"{name} of an embedding changes its table or its gradient otherwise: leave it out")
    return INDEXING["getitem"](weight, x)


def _searchsorted(
    boundaries: Any, x: Any, *, right: bool = False, side: str | None = None, out_int32: bool = False
) -> Array:
    below = "le" if right or side == "right" else "lt"
    smaller = FUNCTIONS[below](boundaries, FUNCTIONS["unsqueeze"](x, -1))
    return _to(REDUCTIONS["sum"](smaller, -1), torch.int32 if out_int32 else torch.int64)


def _bucketize(x: Any, boundaries: Any, *, right: bool = False, out_int32: bool = False) -> Array:
    return _searchsorted(boundaries, x, right=right, out_int32=out_int32)


# ---------------------------------------------------------------------------------------------------------------------
# Types, and new tensors


def _to(x: Any, *args: Any, dtype: torch.dtype | None = None, **options: Any) -> Array:
    a = lift(x)
    for given in args:
        if isinstance(given, torch.dtype):
            dtype = given
        elif isinstance(given, (Array, torch.Tensor)):
            dtype = given.dtype
    if dtype is None or dtype is a.dtype:
        return a if not a.weak else filled(a, ())
    return _converted(a, dtype)


def _converted(a: Array, dtype: torch.dtype) -> Array:
    dtype = of_language(dtype)
    same = ELEMENTS[dtype] is ELEMENTS[a.dtype] and not (a.dtype in NARROW and dtype in NARROW)
    if dtype in (*NARROW, torch.float16, torch.bfloat16) and not (a.dtype is torch.bool or (same and a.dtype is dtype)):
        name = str(dtype).removeprefix("torch.")
        nearest = "float" if dtype.is_floating_point else "int"
        raise refused(f"a value rounded to {name} is not in the language: write x.{nearest}()")
    return pointwise(lambda x: cast(x, dtype), a, dtype=dtype, known=lambda value: known_as(value, dtype))


def _as(dtype: torch.dtype) -> Operation:
    return lambda x, **options: _to(x, dtype)


def _type_as(x: Any, other: Any) -> Array:
    return _to(x, lift(other).dtype)


def _tensor(x: Any, *, dtype: torch.dtype | None = None, **options: Any) -> Array:
    if isinstance(x, (list, tuple)):
        return _to(INDEXING["stack"]([_tensor(item) for item in x]), dtype=dtype)
    a = lift(x)
    a = Array(a.at, a._extents, a.dtype, known=a.known, of=a.of)
    return a if dtype is None else _to(a, dtype)


def _new(value: Any = None) -> Operation:
    """new_ones and its like: `size`, then the value where it is not fixed."""

    def call(x: Any, *size: Any, fill_value: Any = None, dtype: torch.dtype | None = None, **options: Any) -> Array:
        number = value
        if value is None:
            *size, number = size if fill_value is None else (*size, fill_value)  # type: ignore[assignment]
        given = options.pop("size", None)
        shape = size[0] if len(size) == 1 and isinstance(size[0], (tuple, list, torch.Size)) else size
        shape = given if given is not None else shape
        return filled(number, [operator.index(n) for n in shape], dtype or lift(x).dtype)

    return call


def _like(value: Any = None) -> Operation:
    def call(x: Any, *fill: Any, fill_value: Any = None, dtype: torch.dtype | None = None, **options: Any) -> Array:
        a = lift(x)
        number = value if value is not None else fill[0] if fill else fill_value
        return filled(number, a.extents, dtype or a.dtype)

    return call


def _full(size: Sequence[Any], fill_value: Any, *, dtype: torch.dtype | None = None, **options: Any) -> Array:
    return filled(fill_value, [operator.index(n) for n in size], dtype)


def _same(x: Any, *args: Any, **options: Any) -> Array:
    return lift(x)


def _detached(x: Any) -> Array:
    a = lift(x)
    if a.dtype.is_floating_point:
        raise refused(f"torch's 'detach' cannot be traced: {CURES['detach']}")
    return a


# ---------------------------------------------------------------------------------------------------------------------
# The table

_OPERATORS = (*BINARY, "div")

FUNCTIONS: dict[str, Operation] = {
    **{name: _comparison(getattr(operator, name)) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    "add": _arithmetic("+", operator.add, operator.add, of_bools=operator.or_),
    "sub": _arithmetic("-", operator.sub, operator.sub),
    "mul": _arithmetic("*", operator.mul, operator.mul, of_bools=operator.and_),
    "div": _div,
    "floor_divide": _floor_divide,
    "remainder": _modulo,
    "fmod": _fmod,
    "pow": _power,
    "float_power": _float_power,
    "neg": _negative,
    "pos": _same,
    "abs": _absolute,
    "square": lambda x: FUNCTIONS["mul"](x, x),
    "reciprocal": lambda x: _div(1.0, x),
    "and": _bits("&", operator.and_),
    "or": _bits("|", operator.or_),
    "xor": _bits("^", operator.xor),
    "invert": _inverted,
    "lshift": _shift("<<", operator.lshift),
    "rshift": _shift(">>", operator.rshift),
    "logical_and": _logical(operator.and_),
    "logical_or": _logical(operator.or_),
    "logical_xor": _logical(operator.xor),
    "logical_not": lambda x: pointwise(operator.invert, lift(x), dtype=torch.bool, given=torch.bool),
    **{
        name: _function(getattr(fg, name))
        for name in ("exp", "exp2", "log", "log2", "log1p", "tanh", "sigmoid", "sqrt", "rsqrt", "sin", "cos", "erf")
    },
    "tan": _function(lambda x: fg.sin(x) / fg.cos(x)),
    "expm1": _function(_expm1_of),
    "log10": _function(lambda x: fg.log2(x) * math.log10(2)),
    "logsigmoid": lambda x: _negative(_softplus(_negative(x))),
    "floor": _function(fg.floor, keeps_ints=True),
    "ceil": _function(lambda x: -fg.floor(-x), keeps_ints=True),
    "trunc": _function(_trunc_of, keeps_ints=True),
    "round": _round,
    "relu": _numeric(_rectified),
    "sign": _numeric(_sign_of),
    "silu": _function(_silu),
    "gelu": _gelu,
    "softplus": _softplus,
    "leaky_relu": _leaky_relu,
    "hardtanh": lambda x, min_val=-1.0, max_val=1.0, inplace=False: _hardtanh(x, min_val, max_val, inplace),
    "relu6": lambda x, inplace=False: _hardtanh(x, 0.0, 6.0, inplace),
    "where": _where,
    "masked_fill": _masked_fill,
    "clamp": _clamp,
    "clamp_min": lambda x, min: _clamp(x, min),
    "clamp_max": lambda x, max: _clamp(x, None, max),
    "minimum": _minimum,
    "maximum": _maximum,
    "fmin": _fmin,
    "fmax": _fmax,
    "min": _of_one_or_two(_minimum, "amin"),
    "max": _of_one_or_two(_maximum, "amax"),
    "isin": _isin,
    "isneginf": lambda x: FUNCTIONS["eq"](x, -math.inf),
    "isinf": lambda x: FUNCTIONS["eq"](_absolute(x), math.inf),
    "searchsorted": _searchsorted,
    "embedding": _embedding,
    "bucketize": _bucketize,
    "to": _to,
    "type": _to,
    "type_as": _type_as,
    "float": _as(torch.float32),
    "long": _as(torch.int64),
    "int": _as(torch.int32),
    "bool": _as(torch.bool),
    "tensor": _tensor,
    "full": _full,
    "ones": lambda *size, dtype=None, **options: _full(_sizes(size), 1.0, dtype=dtype),
    "zeros": lambda *size, dtype=None, **options: _full(_sizes(size), 0.0, dtype=dtype),
    "new_ones": _new(1),
    "new_zeros": _new(0),
    "new_full": _new(),
    "new_tensor": lambda x, data, *, dtype=None, **options: _tensor(data, dtype=dtype or lift(x).dtype),
    "ones_like": _like(1),
    "zeros_like": _like(0),
    "full_like": _like(),
    "clone": _same,
    "contiguous": _same,
    "detach": _detached,
    **INDEXING,
    **REDUCTIONS,
}


def _sizes(size: Sequence[Any]) -> Sequence[Any]:
    return size[0] if len(size) == 1 and isinstance(size[0], (tuple, list)) else size
