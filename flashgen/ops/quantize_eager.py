"""What an eager call of `flashgen.quantize` does: checks, plans, and kernels or the CPU, with the same bits."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from flashgen.codegen.quantize import SIGN_WORDS, pack
from flashgen.errors import LaunchError
from flashgen.ops import nested, own_rows
from flashgen.ops import rope as ropes
from flashgen.ops.call import check_rows
from flashgen.ops.layouts import check_memory, stacked
from flashgen.ops.own_rows import Own
from flashgen.ops.rope import Rope
from flashgen.ops.sequences import Sequences
from flashgen.ops.tracing import IN_JIT_TRACE
from flashgen.ops.values import no_number, no_tensor
from flashgen.planning import quantize as planning
from flashgen.planning.arch import of_device
from flashgen.planning.layout import DENSE, Dense, Padded, Varlen
from flashgen.planning.quantize import QuantizePlan
from flashgen.runtime import driver
from flashgen.runtime.quantize import Sizes, grid, in_turn, launch

#: What 8-bit elements are at most, and what a peak counts as at least (2^-100).
_LARGEST, _LEAST = 448.0, 2.0**-100

_DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantized:
    """q, k and v as float8_e4m3fn and the scales that make them what they were: x is about code * descale.

    Descales are float32, [batch, heads] or, by blocks, [batch, heads, blocks].  `k_mean` [batch, kv_heads, head_dim]
    was subtracted from the keys, or is None.  `signs` [head_dim] of 1 and -1 and a rotation changed q and k alike, or
    it is None; `seed` drew them.  By `rope` q turned before all that, if it did.  A batch is `sequences` where these
    have rows of their own.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    q_descale: torch.Tensor
    k_descale: torch.Tensor
    v_descale: torch.Tensor
    k_mean: torch.Tensor | None
    seed: int | None
    rope: Rope | None = None
    sequences: Sequences | None = None

    @property
    def signs(self) -> torch.Tensor | None:
        """Made when asked for, on the device itself: a CUDA graph takes no copy from the host."""
        if self.seed is None:
            return None
        device, head_dim = self.q.device, self.q.shape[-1]
        words = [torch.full((32,), word, device=device) for word in sign_words(_signs(head_dim, self.seed))]
        changed = torch.cat(words).bitwise_right_shift(torch.arange(32 * SIGN_WORDS, device=device) % 32).bitwise_and(1)
        return (1 - 2 * changed[:head_dim]).float()

    @property
    def descales(self) -> dict[str, torch.Tensor]:
        """What `flashgen.attention(x.q, x.k, x.v, variant, **x.descales)` takes."""
        return {"q_descale": self.q_descale, "k_descale": self.k_descale, "v_descale": self.v_descale}

    def corrected_lse(self, lse: torch.Tensor, q: torch.Tensor, scale: float | None = None) -> torch.Tensor:
        """lse [batch, heads, q_len], as attention gave it, as it is without the subtracted mean: more by
        scale * q . k_mean of the q that was quantised, as it was given, or of some of its rows where neither `rope`
        nor a length counts them.  o needs no correction without a sink.  For scores that are scale * (q . k) plus what
        does not depend on it.  Raises LaunchError for what does not belong together.
        """
        self._check_corrected(lse, q, scale)
        if self.k_mean is None or self.k_mean.shape[1] == 0:
            return lse
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        given = self.k_mean, self.sequences, self.rope, scale
        if nested.is_jagged(q):
            rows = nested.apart("q", q).rows
            found = self.corrected_lse(lse.transpose(1, 2).values().transpose(0, 1), rows, scale)
            return nested.like(found.transpose(0, 1), q)
        if q.dim() == 3:
            return own_rows.with_mean(lse[None], own_rows.in_heads("q", q), *given).squeeze(0)
        return own_rows.with_mean(lse, q, *given)

    def _check_corrected(self, lse: torch.Tensor, q: torch.Tensor, scale: float | None) -> None:
        for name, x in (("lse", lse), ("q", q)):
            if not isinstance(x, torch.Tensor):
                raise LaunchError(f"corrected_lse: {no_tensor(name, x)}")
        if scale is not None and (wrong := no_number("scale", scale)):
            raise LaunchError(f"corrected_lse: {wrong}")
        if q.dtype not in _DTYPES:
            said = f"corrected_lse: q is {str(q.dtype).removeprefix('torch.')}"
            raise LaunchError(
                f"{said}: it is the bfloat16 or float16 that was quantised\n  nearest: q as quantize got it"
            )
        if nested.is_jagged(q) or nested.is_jagged(lse) or nested.is_jagged(self.q):
            return  # their rows come again by themselves
        # Of [batch, heads, q_len, head_dim] some rows may be left out.
        given, quantised = ((*s[:2], *s[3:]) if q.dim() == 4 else tuple(s) for s in (q.shape, self.q.shape))
        if given != quantised:
            raise LaunchError(
                f"corrected_lse: q is {list(q.shape)}, and {list(self.q.shape)} was quantised\n"
                "  nearest: q as quantize got it"
            )
        wanted = q.shape[1::-1] if q.dim() == 3 else q.shape[:-1]
        if lse.shape != wanted:
            raise LaunchError(
                f"corrected_lse: lse is {list(lse.shape)} beside q {list(q.shape)}, of which attention gives"
                f" {list(wanted)}\n  nearest: lse and q of the same rows"
            )


class Asked(NamedTuple):
    """What a call asks for beside q, k and v; `named` is what its sequences have of their own."""

    block: int | None
    hadamard: bool
    smooth_k: bool | torch.Tensor
    seed: int | None
    cos: ropes.Given
    sin: ropes.Given
    interleaved: bool
    named: Mapping[str, Any]

    @property
    def drawn_by(self) -> int | None:
        """The seed of signs, where there are any."""
        return (0 if self.seed is None else self.seed) if self.hadamard else None


def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, asked: Asked) -> Quantized:
    """An eager call."""
    if torch.jit.is_tracing():
        raise LaunchError(IN_JIT_TRACE)
    block, joined = asked.block, own_rows.JOINED[0] in asked.named
    if joined:
        q, k, v = (own_rows.in_heads(name, x) for name, x in (("q", q), ("k", k), ("v", v)))
    _check(q, k, v)
    found, own_q, own_k = own_rows.checked(asked.named, q, k)
    bounds = ((own_q.sequences, own_q.most), (own_k.sequences, own_k.most)) if joined and own_q and own_k else None
    of_q, of_k = ropes.checked(asked.cos, asked.sin, asked.interleaved, q, k, bounds)
    mean = _mean(k, asked.smooth_k, of_k, own_k)
    signs = None if asked.drawn_by is None else _signs(q.shape[-1], asked.drawn_by)
    made = {
        "q": Rows.of(q.detach(), block, signs=signs, rope=of_q, own=own_q),
        "k": Rows.of(k.detach(), block, signs=signs, mean=mean, rope=of_k, own=own_k),
        "v": Rows.of(v.detach(), block, own=own_k),
    }
    for plan, rows in planned(list(made.values()), block):
        if q.is_cuda:
            _on_gpu(plan, rows)
        else:
            for of in rows:
                _on_cpu(plan, of)
    return Quantized(
        **{name: own_rows.in_rows(rows.codes) if joined else rows.codes for name, rows in made.items()},
        **{f"{name}_descale": rows.scales for name, rows in made.items()},
        k_mean=mean,
        seed=asked.drawn_by,
        rope=of_q,
        sequences=found,
    )


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if isinstance(x, torch.Tensor):
            check_memory(name, name, x, "quantize")
        if not isinstance(x, torch.Tensor) or x.dim() != 4:
            cure = f"{name}.unsqueeze(0), or cu_seqlens_q and max_seqlen_q for sequences behind each other"
            joined = isinstance(x, torch.Tensor) and x.dim() == 3
            raise LaunchError(
                f"{name} is no tensor of [batch, heads, seqlen, head_dim]" + f"\n  nearest: {cure}" * joined
            )
        if x.dtype not in _DTYPES:
            raise LaunchError(
                f"{name} is {str(x.dtype).removeprefix('torch.')}: bfloat16 and float16 can be quantised\n"
                f"  nearest: {name}.bfloat16()"
            )
        if x.device.type not in ("cpu", "cuda"):
            raise LaunchError(
                f"{name} is on {x.device}: kernels run on NVIDIA GPUs and on a CPU\n  nearest: {name}.cpu()"
            )
        if x.device != q.device:
            raise LaunchError(f"{name} is on {x.device} and q on {q.device}\n  nearest: {name}.to(q.device)")
        check_rows(name, x)
    if q.shape[-1] != k.shape[-1] or k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0]:
        raise LaunchError(
            f"q {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)} do not belong together: q and k have one"
            " head_dim, k and v their batch, kv_heads and kv_len"
        )
    heads, kv_heads = q.shape[1], k.shape[1]
    if heads and (kv_heads == 0 or heads % kv_heads):
        cure = f"\n  nearest: {max(1, heads // kv_heads) * kv_heads} heads of q" if kv_heads else ""
        raise LaunchError(
            f"{heads} heads of q cannot share {kv_heads} kv_heads: heads must be a multiple of kv_heads{cure}"
        )


def _mean(k: torch.Tensor, smooth_k: bool | torch.Tensor, rope: Rope | None, own: Own | None) -> torch.Tensor | None:
    """What keys lose, in float32: summed in float64, so that no order of sums shows; 0 where there is no key."""
    if smooth_k is False:
        return None
    if smooth_k is True and own is not None:
        return own_rows.mean(k.detach(), own, rope)
    if smooth_k is True and not k.shape[2]:
        return torch.zeros((k.shape[0], k.shape[1], k.shape[3]), device=k.device)
    if smooth_k is True:
        k = k.detach() if rope is None else rope.turned(k.detach())
        return k.mean(2, dtype=torch.float64).float().contiguous()
    shape = (k.shape[0] if own is None else own.sequences, k.shape[1], k.shape[3])
    cure = "the k_mean of an earlier call"
    if isinstance(smooth_k, torch.Tensor):
        check_memory("smooth_k", "smooth_k", smooth_k, "quantize", nested=stacked("smooth_k"))
        if not smooth_k.is_floating_point():
            dtype = str(smooth_k.dtype).removeprefix("torch.")
            raise LaunchError(f"smooth_k is {dtype}: a mean has real floats\n  nearest: smooth_k=True, or {cure}")
    if not isinstance(smooth_k, torch.Tensor) or tuple(smooth_k.shape) != shape or smooth_k.device != k.device:
        raise LaunchError(
            f"smooth_k is neither True, False nor a mean {list(shape)} on {k.device}\n"
            f"  nearest: smooth_k=True, or {cure}"
        )
    mean = smooth_k.detach().float().contiguous()
    return mean.clone() if mean.data_ptr() % 16 else mean  # kernels load four at a time


@functools.cache
def _signs(head_dim: int, seed: int) -> np.ndarray:
    """1 for each column that changes its sign."""
    return np.random.default_rng(seed).integers(0, 2, head_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """One tensor x that is quantised, what is done to it first, and what it becomes."""

    x: torch.Tensor
    sizes: Sizes
    signs: np.ndarray | None
    mean: torch.Tensor | None
    rope: Rope | None
    codes: torch.Tensor
    descales: torch.Tensor
    own: Own | None = None

    @classmethod
    def of(
        cls,
        x: torch.Tensor,
        block: int | None,
        *,
        signs: np.ndarray | None = None,
        mean: torch.Tensor | None = None,
        rope: Rope | None = None,
        own: Own | None = None,
    ) -> Rows:
        """With codes of x's shape and layout, and descales, which nothing fills yet but where there is no row."""
        planning.check(x.shape[3], block)
        batch, heads, length, _ = x.shape
        sizes = Sizes(batch=batch, heads=heads, length=length, block=block or 0)
        if own is not None and own.joined:
            sizes = Sizes(batch=own.sequences, heads=heads, length=own.most, block=block or 0, rows=length)
        codes = torch.empty_like(x, dtype=torch.float8_e4m3fn)
        descales = torch.empty((sizes.batch, heads, sizes.scales), dtype=torch.float32, device=x.device)
        if own is not None and own.spans is not None:
            codes.view(torch.uint8).zero_()
        if not sizes.all_tiles or (own is not None and own.spans is not None):
            descales.fill_(_LEAST / _LARGEST)
        return cls(x=x, sizes=sizes, signs=signs, mean=mean, rope=rope, codes=codes, descales=descales, own=own)

    @property
    def scales(self) -> torch.Tensor:
        """Descales as calls have them: without blocks where a head has one."""
        return self.descales if self.sizes.block else self.descales.squeeze(2)

    @property
    def layout(self) -> Dense | Padded | Varlen:
        if self.own is None:
            return DENSE
        return Varlen() if self.own.joined else Padded()

    def alone(self, b: int) -> Rows:
        """One sequence's rows, with their places in these codes and descales; on a CPU, which knows where they lie."""
        assert self.own is not None and self.own.spans is not None
        span = self.own.spans[b]
        sizes = Sizes(batch=1, heads=self.sizes.heads, length=span[2], block=self.sizes.block)
        return replace(
            self,
            x=own_rows.alone(self.x, span),
            sizes=sizes,
            mean=None if self.mean is None else self.mean[b : b + 1],
            rope=None if self.rope is None else self.rope.of(b, span[2]),
            codes=own_rows.alone(self.codes, span),
            descales=self.descales[b : b + 1, :, : sizes.scales],
            own=None,
        )

    @property
    def angles(self) -> planning.Angles | None:
        return None if self.rope is None else self.rope.angles(self.x.shape[3])

    def fits(self, other: Rows) -> bool:
        """Whether one kernel has both."""
        alike = self.x.dtype == other.x.dtype and self.x.shape[3] == other.x.shape[3]
        return alike and (self.rope is None or other.rope is None or self.angles == other.angles)


def planned(given: list[Rows], block: int | None) -> list[tuple[QuantizePlan, list[Rows]]]:
    """Kernels, and the tensors that each has: all that have rows, where their dtypes, head dims and angles agree."""
    groups: list[list[Rows]] = []
    for rows in filter(lambda rows: rows.sizes.all_tiles, given):
        group = next((group for group in groups if all(map(rows.fits, group))), None)
        if group is None:
            groups.append([rows])
        else:
            group.append(rows)
    return [(_plan(group, block), group) for group in groups]


def _plan(group: list[Rows], block: int | None) -> QuantizePlan:
    x = group[0].x
    return planning.plan(
        of_device(*driver.gpu(x.device.index).capability).name if x.is_cuda else "sm_90a",
        str(x.dtype).removeprefix("torch."),
        x.shape[3],
        block=block,
        rotated=any(rows.signs is not None for rows in group),
        centred=any(rows.mean is not None for rows in group),
        angles=next((rows.angles for rows in group if rows.rope is not None), None),
        layout=group[0].layout,
    )


def _on_gpu(plan: QuantizePlan, group: list[Rows]) -> None:
    device = group[0].x.device.index
    with torch.cuda.device(device):
        blocks = grid(plan, [rows.sizes for rows in group], driver.gpu(device).sms)
        count = words(plan, group)
        zeros = torch.zeros(count, dtype=torch.int32, device=device) if count else None
        given = packed(
            plan, group, [told(plan, rows) for rows in group], 0 if zeros is None else zeros.data_ptr(), blocks
        )
        launch(plan, blocks, given, device=device, stream=torch._C._cuda_getCurrentRawStream(device))


def words(plan: QuantizePlan, group: list[Rows]) -> int:
    """Of 32 bits that are 0 before a launch: a ticket, and a peak of each tile."""
    return 1 + sum(rows.sizes.peaks for rows in group) if plan.scale.tickets else 0


def told(plan: QuantizePlan, rows: Rows, at: Mapping[str, int] | None = None) -> dict[str, int]:
    """What a kernel is told of a tensor, whose addresses are those of its own memory unless others are given."""
    given = {"mean": rows.mean, **({} if rows.rope is None else {"cos": rows.rope.cos, "sin": rows.rope.sin})}
    given |= {} if rows.own is None else {"starts" if rows.own.joined else "lengths": rows.own.numbers}
    if at is None:
        tensors = {"x": rows.x, "codes": rows.codes, "descales": rows.descales, **given}
        at = {name: x.data_ptr() for name, x in tensors.items() if x is not None}
    unknown = ("mean", "cos", "sin", "cos_batch", "cos_row", "sin_batch", "sin_row", "lengths")
    values = dict.fromkeys(unknown, 0) | dict(at)
    for name, tensor in (("x", rows.x), ("codes", rows.codes)):
        values |= {f"{name}_{of}": n for of, n in zip(("batch", "head", "row"), tensor.stride(), strict=False)}
        values |= {f"{name}_batch": 0} if rows.layout.joined else {}  # all lie in one
    values |= {} if rows.rope is None else rows.rope.strides
    return values | rows.sizes.values(plan) | {"rotated": int(rows.signs is not None)}


def packed(plan: QuantizePlan, group: list[Rows], tensors: list[dict[str, int]], zeros: int, blocks: int) -> bytes:
    """The parameters of a launch of so many thread blocks on what these are told, with the address of its words."""
    after = zeros + 4
    for rows, of in zip(group, tensors, strict=True):
        of["peaks"] = after
        after += 4 * rows.sizes.peaks
    values = {"ticket": zeros, **in_turn(plan, [rows.sizes for rows in group], blocks)}
    signs = next((rows.signs for rows in group if rows.signs is not None), None)
    return pack(plan, tensors, values, sign_words(signs))


def sign_words(signs: np.ndarray | None) -> tuple[int, ...]:
    """A bit a column, the first in the lowest place of the first word."""
    bits = np.zeros(32 * SIGN_WORDS, np.uint8)
    if signs is not None:
        bits[: len(signs)] = signs
    return tuple(int(word) for word in np.packbits(bits, bitorder="little").view("<u4"))


def _on_cpu(plan: QuantizePlan, of: Rows) -> None:
    """The kernel's arithmetic, float by float."""
    if of.own is not None:
        for each in map(of.alone, range(of.sizes.batch)):
            if each.sizes.length:
                _on_cpu(plan, each)
        return
    rows = of.x.float() if of.rope is None else of.rope.turned(of.x)
    if of.mean is not None:
        rows = rows - of.mean[:, :, None]
    if of.signs is not None:
        rows = _rotated(plan, torch.where(torch.from_numpy(of.signs).bool(), -rows, rows))
    count = planning.ROWS * of.sizes.tiles_of_scale
    size = torch.where(rows.isfinite(), rows.abs(), 0.0)
    for i, (part_of_rows, part_of_sizes) in enumerate(zip(rows.split(count, 2), size.split(count, 2), strict=True)):
        peak = part_of_sizes.amax((2, 3)).clamp(min=_LEAST)
        of.descales[..., i] = peak / _LARGEST
        factor = torch.full_like(peak, _LARGEST) / peak  # a number over a tensor is its reciprocal's product, in torch
        scaled = part_of_rows * factor[..., None, None]
        scaled = torch.where(scaled.isfinite(), scaled.clamp(-_LARGEST, _LARGEST), torch.nan)
        of.codes[:, :, i * count : i * count + part_of_rows.shape[2]] = scaled.to(torch.float8_e4m3fn)


def _rotated(plan: QuantizePlan, rows: torch.Tensor) -> torch.Tensor:
    """The transform of each part, in place of what it is of."""
    first = 0
    for part in plan.rotation:
        turned, apart = rows[..., first : first + part.columns].clone(), 1
        while apart < part.columns:
            low, high = turned.unflatten(-1, (-1, 2, apart)).unbind(-2)
            turned = torch.stack([low + high, low - high], -2).flatten(-3)
            apart *= 2
        rows[..., first : first + part.columns] = turned * part.factor
        first += part.columns
    return rows
