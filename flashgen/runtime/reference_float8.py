"""What results in 8 bits are checked against: the kernels' algorithm with an exact row max, whose products are added up
as Hopper does or in float32, and random inputs with their descales."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from flashgen.lang.float8 import taken_by_bits
from flashgen.planning.float8 import ACCUMULATOR_BITS, CODE_BIAS, FAR, OFFSET, WORDS_BY_BITS
from flashgen.planning.operands import Widened
from flashgen.runtime import reference
from flashgen.runtime.reference import KEYS_AT_A_TIME, Evaluator, blocks

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from flashgen.analysis.tiles import Case
    from flashgen.lang.variant import Variant
    from flashgen.planning.plan import KernelPlan

#: Products that Hopper adds up in one step, and how many fewer scores are held at once than elsewhere.
_STEP = 32


class Quantised(NamedTuple):
    """A tensor [batch, heads, rows, columns] of 8-bit elements and its descales [batch, heads]."""

    codes: torch.Tensor
    descale: torch.Tensor

    @property
    def values(self) -> torch.Tensor:
        """In float32."""
        return self.codes.float() * self.descale[..., None, None]


def quantised(x: torch.Tensor, dtype: torch.dtype) -> Quantised:
    """Values as 8 bits hold them best: a descale for each head, by which its largest value is the dtype's largest; of
    16 bits they are rounded, and count by 1."""
    import torch

    if dtype.itemsize > 1:
        return Quantised(x.to(dtype), x.new_ones(x.shape[:2]))

    most = x.abs().amax((-2, -1)).clamp(min=torch.finfo(torch.float32).tiny) if x.numel() else x.new_ones(x.shape[:2])
    descale = most.float() / torch.finfo(dtype).max
    return Quantised((x / descale[..., None, None]).to(dtype), descale)


def beside(
    plan: KernelPlan, variant: Variant, case: Case, inputs: Sequence[Quantised], *, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a plan's kernel is checked against: its algorithm with an exact row max, on q, k and v."""
    import torch

    out = getattr(torch, plan.out_dtype)
    if isinstance(plan.operands, Widened):
        p_dtype = getattr(torch, plan.p_dtype)
        o, lse = reference.baseline(variant, case, *(x.values for x in inputs), scale=scale, p_dtype=p_dtype)
        return o.to(out), lse
    return baseline(variant, case, *inputs, scale=scale, out=out, **alike(plan))


def baseline(
    variant: Variant,
    case: Case,
    q: Quantised,
    k: Quantised,
    v: Quantised,
    *,
    scale: float,
    out: torch.dtype,
    words: int = 0,
    tile_kv: int = KEYS_AT_A_TIME,
    slack: float = 0.0,
    headroom: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """o, rounded to `out`, and lse: P in e4m3 beside the exact maximum of the keys taken so far, tile after tile from
    the last to the first, of `tile_kv` keys each; partial sums of a tile and scores as the hardware adds them up, all
    else in float32.

    Of P's words of eight `words` are made of the scores' bits; its sum is then that of rounded P, a product with ones,
    which the hardware adds up too: what it cuts off there makes o longer.  A maximum follows scores that are more than
    `slack` above it, as a power of two.  In the first two tiles of a row it follows all, is taken for `headroom` more
    than it is, and no longer so where the second tile shows that it stands out.
    """
    import torch

    (batch, heads, q_len, _), kv_heads = q.codes.shape, k.codes.shape[1]
    group, dim = heads // max(kv_heads, 1), v.codes.shape[3]
    o = torch.zeros((batch, kv_heads, group, q_len, dim), device=q.codes.device)
    lse = torch.full(o.shape[:-1], -math.inf, device=o.device)
    evaluator, precision = Evaluator(case, o.device), torch.float32
    keys, values = k.codes.float()[:, :, None], v.codes.float()[:, :, None]
    factor = scale * q.descale.unflatten(1, (kv_heads, group)) * k.descale[:, :, None] if heads else q.descale
    for block in blocks(q.codes, k.codes, fewer=_STEP):
        s = cut_products(block.rows_of(q.codes).float(), keys, k.codes.dtype) * factor[..., None, None]
        if variant.score_node is not None:
            s = evaluator(variant.score_node, precision, {**block.symbols, "s": s}).expand_as(s)
        if variant.mask is not None:
            s = torch.where(evaluator(variant.mask, precision, block.symbols), s, -math.inf)
        found, total, m = accumulated(s, values, words, block.symbols["q"], v.codes.dtype, tile_kv, slack, headroom)
        found = found * v.descale[:, :, None, None, None]
        sink = evaluator.row_sinks(variant, precision, block.symbols)
        if sink is not None:
            top = torch.maximum(m, sink)
            base = torch.where(top == -math.inf, 0.0, top)
            decay = torch.exp(m - base)
            total, found, m = total * decay + torch.exp(sink - base), found * decay, top
        o[..., block.at, :] = found / torch.where(total == 0, 1.0, total)
        lse[..., block.at] = (m + torch.log(total)).squeeze(-1)
    return o.flatten(1, 2).to(out), lse.flatten(1, 2)


def alike(plan: KernelPlan) -> dict[str, Any]:
    """What `baseline` is to have in common with a plan's kernel, by the names of its arguments."""
    assert plan.float8 is not None
    words = WORDS_BY_BITS[plan.float8.accuracy]
    return {"words": words, "slack": plan.p_slack, "headroom": plan.p_headroom, "tile_kv": plan.tile.kv}


def accumulated(
    s: torch.Tensor,
    values: torch.Tensor,
    words: int,
    rows: torch.Tensor,
    dtype: torch.dtype,
    tile_kv: int = KEYS_AT_A_TIME,
    slack: float = 0.0,
    headroom: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """P V of scores [..., rows, keys] and V [..., keys, columns] of `dtype`, the sums of P and what was subtracted;
    `rows` [rows, 1] count them, and sums are folded every `tile_kv` keys."""
    import torch

    m = torch.full((*s.shape[:-1], 1), -math.inf, device=s.device)
    total, found = torch.zeros_like(m), s.new_zeros((*s.shape[:-1], values.shape[-1]))
    seen, room = torch.zeros_like(m), headroom * math.log(2)  # tiles that a row has seen keys of
    for first in reversed(range(0, s.shape[-1], tile_kv)):
        at = slice(first, min(first + tile_kv, s.shape[-1]))
        highest = s[..., at].amax(-1, keepdim=True)
        above = (highest - m) * math.log2(math.e)
        young = (seen < 2) & (headroom > 0)
        top = torch.where(above > torch.where(young, -headroom, slack), highest + torch.where(young, room, 0.0), m)
        top = torch.where((seen == 1) & (above < -headroom - FAR), m - room, top)
        seen += top > -math.inf
        base = torch.where(top == -math.inf, 0.0, top)
        p, decay = torch.exp(s[..., at] - base), torch.exp(m - base)
        rounded = (p * 2.0**OFFSET).to(torch.float8_e4m3fn).float()
        if words:
            power = (s[..., at] - base) * math.log2(math.e) + OFFSET
            codes = (8 * (power + 7) + CODE_BIAS).round().clamp(0, 0x7E).to(torch.uint8)
            columns = torch.arange(p.shape[-1], device=p.device)
            by_bits = codes.view(torch.float8_e4m3fn).float()
            rounded = torch.where(taken_by_bits(rows, columns, words), by_bits, rounded)
            ones = rounded.new_ones((1, rounded.shape[-1]))
            added = cut_products(rounded, ones, torch.float8_e4m3fn) * 2.0**-OFFSET
        else:
            added = p.sum(-1, keepdim=True)
        partial = cut_products(rounded, values[..., at, :].mT, dtype) * 2.0**-OFFSET
        total, m = total * decay + added, top
        found = found * decay + partial
    return found, total, m


def cut_products(a: torch.Tensor, b: torch.Tensor, of_b: torch.dtype, bits: int = ACCUMULATOR_BITS) -> torch.Tensor:
    """a [..., m, n] times the transpose of b [..., l, n] as Hopper adds up products of 8 bits: numbers that e4m3 and
    `of_b` hold, in float32.

    Of 32 at a time each addend, the sum so far among them, is cut off toward zero at 2^-bits of the largest power of
    two among them; that of a product is the product of its factors', a subnormal counting as the least normal number.
    The sum is cut off at 2^-bits of its own.
    """
    import torch

    total = a.new_zeros((*torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-2]))
    power_a, power_b = _power(a, torch.float8_e4m3fn), _power(b, of_b)
    for first in range(0, a.shape[-1], _STEP):
        at = slice(first, first + _STEP)
        largest = (power_a[..., :, None, at] * power_b[..., None, :, at]).amax(-1)
        unit = torch.maximum(largest, _power(total)) * 2.0**-bits
        addends = a[..., :, None, at] * b[..., None, :, at]
        inverse = torch.where(unit > 0, 1 / unit, 0.0)
        added = ((addends * inverse[..., None]).trunc().sum(-1) + (total * inverse).trunc()) * unit
        own = torch.where(added == 0, 1.0, _power(added) * 2.0**-bits)
        total = (added / own).trunc() * own
    return total


def _power(x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The largest power of two that is no more than |x|, which float32's exponent alone stands for, and no less than
    the least normal number of `dtype`; 0 of 0."""
    import torch

    power = (x.view(torch.int32) & 0x7F800000).view(torch.float32)
    return power if dtype is None else torch.where(x == 0, 0.0, power.clamp(min=torch.finfo(dtype).smallest_normal))
