"""What results are checked against: attention in float64, the kernels' algorithm at its best, and the rule.

Both are plain PyTorch over whole rows, in blocks of queries, on the tensors' own device.  They share nothing with the
kernels or the tile walk but the variant: expressions are evaluated here by a table of PyTorch functions, which makes
this an independent reading of the language too.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from flashgen.lang import expr
from flashgen.lang.loops import LOOPS, index_node

if TYPE_CHECKING:
    import torch

    from flashgen.analysis.tiles import Case
    from flashgen.lang.variant import Variant
    from flashgen.runtime.philox import Dropout

#: Scores held at once, in elements: what bounds the memory of a reference.
_BLOCK = {"cpu": 1 << 22, "cuda": 1 << 25}

#: A verdict wants at least this many output elements; tiny shapes are drawn again until they are reached.
POOL = 65_536

#: The share of the elements whose errors are the tail; it is asked for of `POOL` elements.
TAIL = 1e-3

#: Keys that the baseline takes at a time: those of a tile of FlashAttention-3.
KEYS_AT_A_TIME = 128

#: How many times the baseline's an error may be: the largest, the 99.9th percentile, the RMS.  All results are held to
#: these, the walk's on a CPU and those of emitted kernels.
LARGEST, OF_TAIL, OF_RMS = 2.0, 1.15, 1.05

#: What it may be beside a baseline that errs nowhere, in ulp of the dtype at the RMS of the result: the RMS of half an
#: ulp in one element of 4,096, as a tie that is rounded the other way.
TIES = 2.0**-7

#: Bits of a significand after its leading one.
_FRACTION_BITS = {"float16": 10, "bfloat16": 7, "float32": 23, "float64": 52}


def reference(
    variant: Variant,
    case: Case,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    dropout: Dropout | None = None,
    pairs: Pairs | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """o [batch, heads, q_len, v_head_dim] and lse [batch, heads, q_len] in float64; lse is that of no dropout.

    With `pairs` the tensors are of these batches and heads of the case's problem.
    """
    import torch

    return _attend(variant, case, q, k, v, scale, dropout, pairs, torch.float64, softmax)


def baseline(
    variant: Variant,
    case: Case,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    dropout: Dropout | None = None,
    pairs: Pairs | None = None,
    p_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """FlashAttention-3's forward: p and o rounded to q's dtype, all else in float32 (float64), the running max too;
    p to another, `p_dtype`, where that is given.

    p is rounded as P V takes it, beside the largest score so far; its sum is that of unrounded p.
    """
    import torch

    precision = torch.float64 if q.dtype == torch.float64 else torch.float32
    o, lse = _attend(
        variant,
        case,
        q,
        k,
        v,
        scale,
        dropout,
        pairs,
        precision,
        functools.partial(online_softmax, dtype=p_dtype or q.dtype),
    )
    return o.to(q.dtype), lse


def softmax(s: torch.Tensor, sink: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities of scores (-inf: masked) and lse, over the last axis; of a row that sees nothing 0 and -inf.

    A sink is one column more, which is dropped from the probabilities.  Source: transformers, gpt-oss's
    `eager_attention_forward`.
    """
    import torch

    if sink is not None:
        p, lse = softmax(torch.cat([s, sink.expand(*s.shape[:-1], 1)], -1))
        return p[..., :-1], lse
    m = s.amax(-1, keepdim=True)
    p = torch.exp(s - _finite(m))
    total = p.sum(-1, keepdim=True)
    return p / torch.where(total == 0, 1.0, total), (m + torch.log(total)).squeeze(-1)


def online_softmax(
    s: torch.Tensor, dtype: torch.dtype, sink: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `softmax`, of keys taken `KEYS_AT_A_TIME` from the last to the first (Milakov and Gimelshein 2018): each p is
    rounded to `dtype` beside the exact maximum of the keys taken so far, and rescaled to the row's in s's precision.
    A sink joins what they add up to."""
    import torch

    if sink is not None:
        p, alone = online_softmax(s, dtype)
        lse = torch.logaddexp(alone, sink[..., 0].expand_as(alone))
        return p * torch.exp(alone - _finite(lse))[..., None], lse
    keys = s.shape[-1]
    s = torch.nn.functional.pad(s, (0, -keys % KEYS_AT_A_TIME), value=-math.inf).unflatten(-1, (-1, KEYS_AT_A_TIME))
    so_far = s.amax(-1, keepdim=True).flip(-2).cummax(-2).values.flip(-2)
    m = so_far[..., :1, :]
    p, rescale = torch.exp(s - _finite(so_far)), torch.exp(so_far - _finite(m))
    total = (p.sum(-1, keepdim=True) * rescale).sum(-2, keepdim=True)
    p = p.to(dtype).to(s.dtype) * (rescale / torch.where(total == 0, 1.0, total))
    return p.flatten(-2)[..., :keys], (m + torch.log(total)).flatten(-3)


def _finite(m: torch.Tensor) -> torch.Tensor:
    """A maximum as what is subtracted: where nothing is visible 0, as exp(-inf - 0) is 0 and -inf - -inf is not."""
    import torch

    return torch.where(m == -math.inf, 0.0, m)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Errors of a result and of the baseline against float64, and what breaks the rule (empty: nothing)."""

    max_error: float = 0.0
    tail_error: float = 0.0
    rms_error: float = 0.0
    bias: float = 0.0
    baseline_max_error: float = 0.0
    baseline_tail_error: float = 0.0
    baseline_rms_error: float = 0.0
    max_limit: float = 0.0
    tail_limit: float = 0.0
    rms_limit: float = 0.0
    bias_limit: float = 0.0
    elements: int = 0
    reasons: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.reasons


def judge(out: torch.Tensor, base: torch.Tensor, ref: torch.Tensor, dtype: str) -> Verdict:
    """The tolerance rule, for `out` beside `base` against the float64 `ref`, all of one shape, of n elements.

    Of the baseline's errors at most twice the largest, 1.15 times the 99.9th percentile (asked of `POOL` elements) and
    1.05 times the RMS.  To the largest half an ulp of `dtype` at the RMS of `ref` is added, to the others `TIES`, and
    to the 1.05, of fewer elements than `POOL`, what chance makes of n, 4 / sqrt(n).  Signed bias
    |mean(err * sign(ref))| <= 4 RMS(err) / sqrt(n) + 2^-12 RMS(ref), or 1.05 times the baseline's where that is more:
    elements may round alike, as those of rows that attend to one key.  Where `dtype` is float32 sums round as much as
    results do, and an ulp is added to all.  Where it is float64 those of the reference do too: the limits are 64 ulp,
    at the largest value of `ref` and at its RMS.
    """
    err, base_err = (out.double() - ref).flatten(), (base.double() - ref).flatten()
    n = err.numel()
    if n == 0:
        return Verdict()
    ref_rms = rms(ref)
    ulp = _ulp(ref_rms, dtype)
    of_sums = ulp if dtype == "float32" else 0.0
    max_error, tail_error, rms_error = float(err.abs().max()), percentile(err, TAIL), rms(err)
    base_max, base_tail, base_rms = float(base_err.abs().max()), percentile(base_err, TAIL), rms(base_err)
    bias, base_bias = (abs(float((x * ref.flatten().sign()).mean())) for x in (err, base_err))
    max_limit = LARGEST * base_max + ulp / 2 + of_sums
    tail_limit = OF_TAIL * base_tail + TIES * ulp + of_sums if n >= POOL else max_limit
    chance = 4 / math.sqrt(n)
    rms_limit = math.hypot((OF_RMS + (chance if n < POOL else 0.0)) * base_rms, TIES * ulp) + of_sums
    if dtype == "float64":
        max_limit, rms_limit = 64 * _ulp(float(ref.abs().max()), dtype), 64 * ulp
        tail_limit = max_limit
    bias_limit = max(chance * rms_error + 2.0**-12 * ref_rms, OF_RMS * base_bias)
    reasons = []
    if not math.isfinite(ref_rms):
        reasons.append("the float64 reference itself is not finite")
    for name, value, limit in (
        ("largest error", max_error, max_limit),
        ("99.9th percentile of the error", tail_error, tail_limit),
        ("RMS error", rms_error, rms_limit),
        ("signed bias", bias, bias_limit),
    ):
        if not value <= limit:  # a NaN is no pass
            reasons.append(f"{name} {value:.3g} exceeds {limit:.3g}")
    return Verdict(
        max_error=max_error,
        tail_error=tail_error,
        rms_error=rms_error,
        bias=bias,
        baseline_max_error=base_max,
        baseline_tail_error=base_tail,
        baseline_rms_error=base_rms,
        max_limit=max_limit,
        tail_limit=tail_limit,
        rms_limit=rms_limit,
        bias_limit=bias_limit,
        elements=n,
        reasons=tuple(reasons),
    )


def judge_lse(lse: torch.Tensor, ref: torch.Tensor, base: torch.Tensor | None = None) -> tuple[str, ...]:
    """What is wrong with `lse` (natural log, float32 or wider) against float64: rows that see nothing, and values.  In
    8 bits scores are as exact as Hopper adds up products: the baseline's largest error is allowed beside the limit.
    """
    import torch

    lse = lse.double()
    if not torch.equal(lse == -math.inf, ref == -math.inf):
        rows = int(((lse == -math.inf) != (ref == -math.inf)).sum())
        return (f"lse says otherwise than float64 for {rows} rows whether they see any key",)
    seen = ref != -math.inf
    if not seen.any():
        return ()

    def largest(x: torch.Tensor) -> float:
        return float(((x.double() - ref).abs() / ref.abs().clamp(min=1.0))[seen].max())

    error, limit = largest(lse), 1e-4 + (0.0 if base is None else 1.25 * largest(base))
    return () if error <= limit else (f"lse is off by {error:.3g} of max(1, |lse|), more than {limit:.3g}",)


def _ulp(size: float, dtype: str) -> float:
    """The step between neighbouring numbers of `dtype` at this size."""
    return 2.0 ** (math.floor(math.log2(size)) - _FRACTION_BITS[dtype]) if 0 < size < math.inf else 0.0


def rms(x: torch.Tensor) -> float:
    """Root of the mean square."""
    return float(x.double().square().mean().sqrt())


def percentile(x: torch.Tensor, above: float) -> float:
    """The magnitude in x, which has elements, that at most this share of them is above."""
    return float(x.flatten().abs().kthvalue(x.numel() - int(above * x.numel())).values)


def _attend(
    variant: Variant,
    case: Case,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    dropout: Dropout | None,
    pairs: Pairs | None,
    precision: torch.dtype,
    weigh: Callable[..., tuple[torch.Tensor, torch.Tensor]],
) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    batch, heads, q_len, _ = q.shape
    kv_heads, dim = k.shape[1], v.shape[3]
    o = torch.zeros((batch, heads, q_len, dim), dtype=precision, device=q.device)
    lse = torch.full((batch, heads, q_len), -math.inf, dtype=precision, device=q.device)
    group = heads // max(kv_heads, 1)
    evaluator = Evaluator(case, q.device)
    k, v = k.to(precision), v.to(precision)
    grouped_o, grouped_lse = o.view(batch, kv_heads, group, q_len, dim), lse.view(batch, kv_heads, group, q_len)
    for block in blocks(q, k, pairs):
        s = scale * products(block.rows_of(q).to(precision), k)
        if variant.score_node is not None:
            s = evaluator(variant.score_node, precision, {**block.symbols, "s": s}).expand_as(s)
        if variant.mask is not None:
            # A mask's floats are float32 in every precision: it says which pairs count, not how well.
            s = torch.where(evaluator(variant.mask, torch.float32, block.symbols), s, -math.inf)
        p, grouped_lse[..., block.at] = weigh(s, sink=evaluator.row_sinks(variant, precision, block.symbols))
        if dropout is not None:
            keep = kept(dropout, **block.symbols, heads=case.sizes["heads"])
            p = torch.where(keep, p * dropout.scale, 0.0)
        grouped_o[..., block.at, :] = products(p, v.mT)
    return o, lse


class Block(NamedTuple):
    """Some queries of every batch and head; `symbols` broadcast to [batch, kv_heads, group, queries, keys]."""

    at: slice
    symbols: dict[str, torch.Tensor]
    kv_heads: int

    def rows_of(self, x: torch.Tensor) -> torch.Tensor:
        """Those rows of [batch, heads, q_len, ...], as [batch, kv_heads, group, queries, ...]."""
        return x.unflatten(1, (self.kv_heads, -1))[:, :, :, self.at]


class Pairs(NamedTuple):
    """Some batches and heads of a problem: each of these batches with each of these kv_heads and its query heads."""

    batches: tuple[int, ...]
    kv_heads: tuple[int, ...]

    def of(self, x: torch.Tensor, kv_heads: int) -> torch.Tensor:
        """Their part of [batch, heads or kv_heads, ...] of the whole problem, which has so many kv_heads."""
        return x.unflatten(1, (kv_heads, -1))[list(self.batches)][:, list(self.kv_heads)].flatten(1, 2)


def blocks(q: torch.Tensor, k: torch.Tensor, pairs: Pairs | None = None, fewer: int = 1) -> Iterator[Block]:
    """The queries of a problem in blocks that hold a bounded number of scores, so many times `fewer` than usual; none
    where nothing is to attend.

    With `pairs`, q and k are of these batches and heads of a larger problem, and `symbols` count as that does.
    """
    import torch

    batch, heads, q_len, _ = q.shape
    kv_heads, kv_len = k.shape[1], k.shape[2]
    if 0 in (batch, heads, q_len, kv_len):
        return
    group = heads // kv_heads
    pairs = Pairs(tuple(range(batch)), tuple(range(kv_heads))) if pairs is None else pairs
    first_heads = group * torch.tensor(pairs.kv_heads, device=q.device)[:, None]
    columns = {
        "b": torch.tensor(pairs.batches, device=q.device)[:, None, None, None, None],
        "h": (first_heads + torch.arange(group, device=q.device))[None, :, :, None, None],
        "k": torch.arange(kv_len, device=q.device),
    }
    rows = max(1, _BLOCK.get(q.device.type, _BLOCK["cpu"]) // (fewer * batch * heads * kv_len))
    for first in range(0, q_len, rows):
        at = slice(first, min(first + rows, q_len))
        yield Block(at, {**columns, "q": torch.arange(at.start, at.stop, device=q.device)[:, None]}, kv_heads)


def products(rows: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """[batch, kv_heads, group, queries, n] times the transpose of [batch, kv_heads, keys, n]."""
    return (rows.flatten(2, 3) @ keys.mT).unflatten(2, rows.shape[2:4])


def kept(dropout: Dropout, b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor, *, heads: int) -> Any:
    """Whether each pair is kept, by Philox-4x32-10 as `runtime.philox` lays out its counter; bool, broadcast."""
    import torch

    low = 0xFFFFFFFF
    counter = torch.broadcast_tensors(k // 4, q, b * heads + h, torch.as_tensor(dropout.offset & low, device=k.device))
    key = dropout.seed & low, (dropout.seed ^ dropout.offset) >> 32
    for i in range(10):
        # A product of two 32-bit words may pass 2^63: its bits are right all the same.
        first, second = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        x, y = ((word + i * weyl) & low for word, weyl in zip(key, (0x9E3779B9, 0xBB67AE85), strict=True))
        counter = (
            (second >> 32 & low) ^ counter[1] ^ x,
            second & low,
            (first >> 32 & low) ^ counter[3] ^ y,
            first & low,
        )
    drawn = torch.stack(counter, -1).gather(-1, (k % 4).expand(counter[0].shape)[..., None])
    return drawn[..., 0] >= dropout.threshold


class Evaluator:
    """A variant's expressions on PyTorch tensors: ints as int64, floats in the precision asked for."""

    def __init__(self, case: Case, device: torch.device) -> None:
        import torch

        self.case, self.device = case, device
        self.tensors = {name: torch.as_tensor(array, device=device) for name, array in case.tensors.items()}

    def __call__(self, root: expr.Node, precision: torch.dtype, symbols: Mapping[str, torch.Tensor]) -> torch.Tensor:
        import torch

        dtypes = {
            expr.DType.BOOL: torch.bool,
            expr.DType.INT32: torch.int64,
            expr.DType.INT64: torch.int64,
            expr.DType.FLOAT32: precision,
        }
        values: dict[expr.Node, torch.Tensor] = {}

        def typed(value: Any, dtype: expr.DType) -> torch.Tensor:
            return torch.as_tensor(value, dtype=dtypes[dtype], device=self.device)

        def compute(loops: tuple[expr.LoopIndex, ...], roots: tuple[expr.Node, ...]) -> None:
            """What is computed in the innermost of these loops."""
            for n in expr.layer(roots, loops):
                if n.op in expr.LEAVES:
                    value = values[n] if n.op == "loop_index" else self._leaf(n, symbols)
                elif n.op == "load":
                    value = self._load(n, [values[operand] for operand in n.operands])
                elif n.op in LOOPS:
                    value = looped(n, (*loops, n.attr))
                else:
                    value = functions()[n.op](*(values[operand] for operand in n.operands))
                    if n.op == "cast" and n.dtype.is_int:
                        value = whole(value, torch.int32 if n.dtype is expr.DType.INT32 else torch.int64)
                values[n] = typed(value, n.dtype)

        def looped(n: expr.Node, loops: tuple[expr.LoopIndex, ...]) -> torch.Tensor:
            (rounds, body), loop = n.operands, LOOPS[n.op]
            found, times = typed(loop.empty, n.dtype), values[rounds]
            for i in range(int(times.max()) if times.numel() else 0):
                values[index_node(n.attr)] = typed(i, expr.DType.INT32)
                compute(loops, (body,))
                found = torch.where(i < times, functions()[loop.combine](found, values[body]), found)
            return found

        compute((), (root,))
        return values[root]

    def row_sinks(
        self, variant: Variant, precision: torch.dtype, symbols: Mapping[str, torch.Tensor]
    ) -> torch.Tensor | None:
        """The sinks of rows, broadcast as b and h of `symbols` are; None: there is none."""
        return None if variant.sink_node is None else self(variant.sink_node, precision, symbols)

    def _leaf(self, n: expr.Node, symbols: Mapping[str, torch.Tensor]) -> Any:
        match n.op:
            case "const":
                return n.attr
            case "index":
                return symbols[n.attr]
            case "score":
                return symbols["s"]
            case "problem":
                return self.case.sizes[n.attr]
            case "param":
                return self.case.params[n.attr.name]
            case "size":
                tensor, dimension = n.attr
                return self.tensors[tensor.name].shape[dimension]
        raise ValueError(f"{n.op} is no leaf of a bound variant")

    def _load(self, n: expr.Node, index: list[torch.Tensor]) -> torch.Tensor:
        """Elements of a captured tensor; an index outside its dimension is clamped, as in a kernel.

        A named dimension of size 1 broadcasts, which clamping does too.
        """
        array = self.tensors[n.attr.name]
        return array[tuple(i.clamp(0, size - 1) for i, size in zip(index, array.shape, strict=True))]


def whole(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What a cast to int32 or int64 gives, as int64: a float saturates, an int64 wraps; NaN is 0, in 64 bits -2^63."""
    import torch

    if not x.dtype.is_floating_point:
        return x.to(dtype).to(torch.int64)
    limits = torch.iinfo(dtype)
    inside = (x > limits.min) & (x < limits.max)  # elsewhere a conversion says anything
    edge = torch.where(x < 0, limits.min, limits.max)
    edge = torch.where(x.isnan(), 0 if dtype == torch.int32 else limits.min, edge)
    return torch.where(inside, torch.where(inside, x, 0).to(torch.int64), edge)


@functools.cache
def functions() -> Mapping[str, Callable[..., torch.Tensor]]:
    """The PyTorch function of every op of the language."""
    import torch

    return {
        "eq": torch.eq,
        "ne": torch.ne,
        "lt": torch.lt,
        "le": torch.le,
        "gt": torch.gt,
        "ge": torch.ge,
        "logical_and": torch.logical_and,
        "logical_or": torch.logical_or,
        "logical_xor": torch.logical_xor,
        "logical_not": torch.logical_not,
        "bit_and": torch.bitwise_and,
        "bit_or": torch.bitwise_or,
        "bit_xor": torch.bitwise_xor,
        "bit_not": torch.bitwise_not,
        "shift_left": torch.bitwise_left_shift,
        "shift_right": torch.bitwise_right_shift,
        "add": operator.add,
        "sub": operator.sub,
        "mul": operator.mul,
        "neg": operator.neg,
        "div": operator.truediv,
        "floor_div": operator.floordiv,
        "mod": torch.remainder,
        "where": torch.where,
        "minimum": torch.fmin,
        "maximum": torch.fmax,
        "abs": torch.abs,
        "exp": torch.exp,
        "exp2": torch.exp2,
        "log": torch.log,
        "log2": torch.log2,
        "log1p": torch.log1p,
        "pow": torch.pow,
        "sin": torch.sin,
        "cos": torch.cos,
        "erf": torch.erf,
        "tanh": torch.tanh,
        "sigmoid": torch.sigmoid,
        "sqrt": torch.sqrt,
        "rsqrt": torch.rsqrt,
        "floor": torch.floor,
        "cast": lambda x: x,  # the node's dtype says to what
    }
