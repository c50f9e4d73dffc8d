"""8 bits: speed of each form of accuracy, errors over the length and on peaked rows, quantize, masks and decoding.

q, k and v are quantised by `flashgen.quantize`.  Errors are those against float64 of what codes and scales stand for,
beside those of the same algorithm at its best: P in e4m3 beside the exact row max, sums exact.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flashgen.bench import contest, functions
from flashgen.bench.cells import cell
from flashgen.bench.contest import Setting
from flashgen.bench.flex import MASKS
from flashgen.bench.functions import Functions, problem
from flashgen.bench.inputs import NORMAL, draw
from flashgen.bench.suite import Contest, Ground, Row, Suite
from flashgen.bench.timers import Cold, Eager
from flashgen.lang.load import load_spec
from flashgen.ops import float8
from flashgen.ops.attention import attention
from flashgen.ops.quantize import quantize
from flashgen.ops.quantize_eager import Quantized
from flashgen.planning.float8 import OFFSET
from flashgen.runtime.reference import rms, softmax

if TYPE_CHECKING:
    import torch

    from flashgen.bench.cells import Cell

#: Forms, and how many times the error of the algorithm at its best each may have: on N(0, 1), and on peaked rows.
ERROR_BARS = {"exact": (1.1, 1.1), "default": (1.25, 1.6), "fast": (1.25, 2.5)}

#: Inputs whose rows of softmax few keys dominate.
PEAKED = ("std4", "std8", "sink")

#: Lengths of keys over which errors are to be flat, and means of V.
LENGTHS, MEANS = (2048, 16_384, 65_536, 131_072), (0.0, 0.5, 1.0)

#: What a peer's file may define: `fp8(cell, q, k, v, q_descale, k_descale, v_descale)` gives a call that gives o.
ENTRIES = ("fp8",)

#: Rows of queries whose errors are measured, and heads.
ROWS, HEADS = 128, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Error:
    """RMS of a result's error, and of that of the algorithm at its best, over the RMS of the result."""

    rms: float
    best: float

    @property
    def times(self) -> float:
        return self.rms / self.best if self.best else math.inf


def dequantised(codes: torch.Tensor, descale: torch.Tensor) -> torch.Tensor:
    """What codes [batch, heads, rows, columns] stand for, in float64."""
    import torch

    return float8.dequantised(codes, descale, torch.float64)


def error_of(
    o: torch.Tensor, x: Quantized, scale: float, sees: Callable[[Any, Any], Any] | None, rows: Sequence[int]
) -> Error:
    """Of o, on these rows of the first heads; `sees` says which keys a query sees."""
    import torch

    group, mine, best, right = x.q.shape[1] // x.k.shape[1], [], [], []
    for head in range(min(HEADS, x.q.shape[1])):
        at = torch.tensor(list(rows), device=o.device)
        head_k = head // group
        of = ((x.q, x.q_descale, head), (x.k, x.k_descale, head_k), (x.v, x.v_descale, head_k))
        q, k, v = (dequantised(codes[:1, h : h + 1], each[:1, h : h + 1])[0, 0] for codes, each, h in of)
        s = scale * (q[at] @ k.mT)
        if sees is not None:
            s = torch.where(sees(at[:, None], torch.arange(k.shape[0], device=o.device)), s, -torch.inf)
        p = softmax(s)[0]
        right.append(p @ v)
        raised = torch.exp2((s - s.amax(-1, keepdim=True)) * math.log2(math.e) + OFFSET)
        coarse = raised.float().to(torch.float8_e4m3fn).double()
        best.append((coarse @ v / raised.sum(-1, keepdim=True)).to(o.dtype))
        mine.append(o[0, head, at])
    whole = torch.cat(right)
    found, known = (rms(torch.cat(each).double() - whole) / rms(whole) for each in (mine, best))
    return Error(rms=found, best=known)


def evenly(total: int) -> list[int]:
    count = min(ROWS, total)
    return [i * (total - 1) // max(count - 1, 1) for i in range(count)]


#: Which keys a query sees, by spec.
SEES: Mapping[str, Callable[[Any, Any], Any] | None] = {"full": None, "causal": lambda q, k: k <= q}


def speed(at: Cell, accuracy: str, ground: Ground, *, name: str = NORMAL) -> Contest:
    """One form beside the same call in bfloat16, and beside peers of files."""
    setting = contest.prepare(at, None, ground.seed, device=ground.device)
    if name != NORMAL:
        setting = dataclasses.replace(setting, **draw(at.problem, ground.seed, name, device=ground.device)._asdict())
    x = quantize(setting.q, setting.k, setting.v, hadamard=False)
    forms = {
        "flashgen": functools.partial(attention, x.q, x.k, x.v, setting.variant, **x.descales, accuracy=accuracy),
        "bfloat16": functools.partial(attention, setting.q, setting.k, setting.v, setting.variant),
    }
    p, told = at.problem, {}
    bar = ERROR_BARS[accuracy][name != NORMAL]

    def wrong(who: str, o: torch.Tensor) -> list[str]:
        if who == "bfloat16":
            return []  # a yardstick, which `flashgen bench hopper` checks
        error = error_of(o, x, setting.scale, SEES[at.specs[0]], evenly(p.q_len))
        told[who] = {"rms": float(f"{error.rms:.4g}"), "best": float(f"{error.best:.4g}")}
        if who != "flashgen":  # what a peer loses is a fact about it, unless it computes something else
            return [] if error.rms < 0.5 else [f"{who} is off by {error.rms:.3g} of the RMS"]
        return [] if error.times <= bar else [f"its error is {error.times:.3g} times that of the best, more than {bar}"]

    given = at, x.q, x.k, x.v, *x.descales.values()
    flops = 2 * (p.head_dim + p.v_head_dim) * _visible(setting)
    return Contest(forms=forms, peers=ground.of_files("fp8", *given), wrong=wrong, flops=flops, about={"errors": told})


def _visible(setting: Setting) -> int:
    p = setting.cell.problem
    each = p.q_len * p.kv_len if setting.cell.specs == ("full",) else p.q_len * (p.q_len + 1) // 2
    return p.batch * p.heads * each


def long(keys: int, mean: float, accuracy: str, ground: Ground, *, queries: int = 128, head_dim: int = 128) -> Contest:
    """Errors over many keys, where V has a mean."""
    at = cell("full", head_dim, queries, batch=1, heads=HEADS, kv_len=keys)
    q, k, v, _ = draw(at.problem, ground.seed, device=ground.device)
    x = quantize(q, k, (v.float() + mean).to(v.dtype), hadamard=False)
    told: dict[str, object] = {"mean of v": mean, "keys": keys}

    def wrong(who: str, o: torch.Tensor) -> list[str]:
        error = error_of(o, x, head_dim**-0.5, None, evenly(queries))
        told[who] = {"rms": float(f"{error.rms:.4g}"), "best": float(f"{error.best:.4g}")}
        bar = ERROR_BARS[accuracy][0] * 1.05
        if who != "flashgen" or error.times <= bar:
            return []
        return [f"its error is {error.times:.3g} times that of the best, more than {bar:.3g}"]

    run = functools.partial(attention, x.q, x.k, x.v, load_spec("full"), **x.descales, accuracy=accuracy)
    given = at, x.q, x.k, x.v, *x.descales.values()
    return Contest(forms={"flashgen": run}, peers=ground.of_files("fp8", *given), wrong=wrong, about=told)


def outliers(at: Cell, ground: Ground) -> Contest:
    """Blocks and a rotation beside one scale a head, of the input that FlashAttention-3 was measured on, against
    float64 of what was quantised."""
    q, k, v, _ = draw(at.problem, ground.seed, "outliers", device=ground.device)
    scale, rows, told = at.problem.head_dim**-0.5, evenly(at.problem.q_len), {}
    given = {
        "flashgen": quantize(q, k, v, block=128),
        "one scale": quantize(q, k, v, hadamard=False),
    }

    def wrong(who: str, o: torch.Tensor) -> list[str]:
        wide = [x[0, :HEADS].double() for x in (q[:, :, rows], k, v)]
        right = softmax(scale * (wide[0] @ wide[1].mT))[0] @ wide[2]
        told[who] = float(f"{rms(o[0, :HEADS, rows].double() - right):.4g}")
        if "one scale" not in told or "flashgen" not in told or who != "one scale":
            return []
        told["times lower"] = float(f"{told['one scale'] / told['flashgen']:.4g}")
        return []

    forms = {
        name: functools.partial(attention, x.q, x.k, x.v, load_spec(at.specs[0]), **x.descales, accuracy="exact")
        for name, x in given.items()
    }
    return Contest(forms=forms, wrong=wrong, about={"rms": told, "must be lower": 2.6})


def quantising(
    head_dim: int, block: int | None, ground: Ground, *, elements: int = 1 << 25, turned: bool = False
) -> Contest:
    """quantize of one tensor's worth of q, k and v beside a copy of them, at the copy's rate: 3 bytes an element
    instead of 4.  With `turned` by cos and sin in bfloat16, as models have them, whose bytes count once for q and once
    for k; and beside quantize without."""
    import torch

    heads = max(1, 2048 // head_dim)
    length = elements // 3 // (heads * head_dim)
    q, k, v, _ = draw(problem(length, batch=1, heads=heads, head_dim=head_dim), ground.seed, device=ground.device)
    made = [torch.empty_like(x) for x in (q, k, v)]
    per_row = 10_000.0 ** -(torch.arange(head_dim // 2, device=q.device) * 2 / head_dim)
    angles = torch.arange(length, device=q.device)[:, None] * per_row
    of = {"cos": angles.cos().to(q.dtype), "sin": angles.sin().to(q.dtype)} if turned else {}

    def copy() -> list[torch.Tensor]:
        return [to.copy_(x) for to, x in zip(made, (q, k, v), strict=True)]

    def wrong(who: str, found: Any) -> list[str]:
        if who == "copy":
            return []
        again = dequantised(found.v[:, :1], found.v_descale[:, :1])
        error = rms(again - v[:, :1].double()) / rms(v[:, :1])
        return [] if error < 0.05 else [f"values are off by {error:.3g} of their RMS"]

    plain = functools.partial(quantize, q, k, v, block=block)
    copied = 4 * (q.numel() + k.numel() + v.numel())
    moved = copied * 3 // 4 + sum(2 * x.numel() * x.itemsize for x in of.values())
    return Contest(
        forms={"flashgen": functools.partial(plain, **of), **({"without": plain} if turned else {}), "copy": copy},
        wrong=wrong,
        sums={"the copy's rate": {"copy": moved / copied}},
        bytes=moved,
    )


def masked(of: Functions, accuracy: str, ground: Ground) -> Contest:
    """A mask in 8 bits beside the same in bfloat16."""
    made = functions.make(of, ground)
    q, k, v, _ = made.tensors
    x = quantize(q, k, v, hadamard=False)
    wide = functools.partial(attention, q, k, v, made.variant)
    narrow = functools.partial(attention, x.q, x.k, x.v, made.variant, **x.descales, accuracy=accuracy)

    def wrong(who: str, o: torch.Tensor) -> list[str]:
        if who == "bfloat16":
            return made.wrong(o)
        other = wide().float()
        error = float((o.float() - other).norm() / other.norm())
        return [] if error < 0.1 else [f"it differs from bfloat16 by {error:.3g}"]

    p = of.problem
    flops = 2 * (p.head_dim + p.v_head_dim) * made.visible()
    return Contest(forms={"flashgen": narrow, "bfloat16": wide}, wrong=wrong, flops=flops)


def decoding(
    batch: int, keys: int, ground: Ground, *, heads: int = 32, kv_heads: int = 8, wide: bool = False
) -> Contest:
    """One query a sequence, of 8 bits or of 16 (`wide`), over a cache of 8 bits beside one of 16."""
    import torch

    at = cell("full", 128, 1, batch=batch, heads=heads, kv_heads=kv_heads, kv_len=keys)
    q, k, v, _ = draw(at.problem, ground.seed, device=ground.device)
    x = quantize(q, k, v, hadamard=not wide)  # queries would be rotated too
    given = {name: found for name, found in x.descales.items() if not (wide and name == "q_descale")}
    if wide:
        x = dataclasses.replace(x, q=q, q_descale=torch.ones(q.shape[:2], device=q.device))
    full, told = load_spec("full"), {}

    def wrong(who: str, o: torch.Tensor) -> list[str]:
        error = error_of(o, x, 128**-0.5, None, [0])
        told[who] = float(f"{error.rms:.4g}")
        return [] if error.rms < 0.5 else [f"{who} is off by {error.rms:.3g} of the RMS"]

    return Contest(
        forms={
            "flashgen": functools.partial(attention, x.q, x.k, x.v, full, **given),
            "bfloat16": functools.partial(attention, q, k, v, full),
        },
        wrong=wrong,
        bytes=2 * batch * kv_heads * keys * 128,
        about={"errors": told},
    )


def _bars(accuracy: str, head_dim: int, mask: str, length: int) -> dict[str, float]:
    """How many times faster than others a form must be."""
    if accuracy == "exact":
        return {"fa3": 0.85} if head_dim == 128 else {}
    if accuracy == "default":
        return {"fa3": 1.0} if head_dim == 128 else {}
    of_fa3 = {(64, "full"): 1.3, (64, "causal"): 1.2, (128, "full"): 1.2, (128, "causal"): 1.15}
    bars = {"fa3": of_fa3.get((head_dim, mask), 0.97)}
    if head_dim in (128, 256):
        bars["fa3_two_levels"] = {128: 1.25, 256: 2.5}[head_dim]
    if head_dim == 128:
        bars["cudnn"] = 0.97
    if head_dim in (128, 256) and length >= 8192:
        bars["bfloat16"] = {128: 1.3, 256: 1.4}[head_dim]
    return bars


def _rows(_: bool = False) -> list[Row]:
    eager, cold = Eager(), Cold()

    def row(part: str, name: str, make: Callable, timer: Any = eager, bars: Mapping[str, float] | None = None) -> Row:
        return Row(part=part, name=name, make=make, timer=timer, bars=bars or {})

    rows = []
    for accuracy in reversed(ERROR_BARS):
        for head_dim in (64, 128, 256):
            for mask in ("full", "causal"):
                for n in (2048, 8192, 16_384):
                    at = cell(mask, head_dim, n)
                    make = functools.partial(speed, at, accuracy)
                    rows.append(row(accuracy, f"{accuracy} {at}", make, bars=_bars(accuracy, head_dim, mask, n)))
    for accuracy in ERROR_BARS:
        for name in PEAKED:
            at = cell("full", 128, 8192, batch=1, heads=HEADS)
            rows.append(row("peaked", f"{accuracy} {name}", functools.partial(speed, at, accuracy, name=name)))
        for mean in MEANS:
            for n in LENGTHS:
                make = functools.partial(long, n, mean, accuracy)
                rows.append(row("length", f"{accuracy} mean {mean:g} {n // 1024}k", make))
    at = cell("full", 128, 8192, batch=1, heads=HEADS)
    rows.append(row("outliers", str(at), functools.partial(outliers, at)))
    for head_dim in (64, 96, 128, 192, 256):
        for block in (128, None):
            make = functools.partial(quantising, head_dim, block)
            rows.append(row("quantize", f"d{head_dim} block {block}", make, cold, {"the copy's rate": 0.8}))
        make = functools.partial(quantising, head_dim, 128, turned=True)
        rows.append(row("quantize", f"d{head_dim} block 128 rope", make, cold, {"the copy's rate": 0.8}))
    for named in MASKS:
        if named.__name__ in ("window", "document", "alibi", "softcap"):
            of = Functions(name=named.__name__, problem=problem(), make=named)
            for accuracy in ("fast", "default"):
                make = functools.partial(masked, of, accuracy)
                rows.append(row("masks", f"{accuracy} {of.name}", make, bars={"bfloat16": 1.2}))
    for wide, said in ((False, ""), (True, ", 16-bit queries")):
        for batch, n in ((8, 32_768), (32, 8192)):
            make = functools.partial(decoding, batch, n, wide=wide)
            rows.append(row("decode", f"b{batch} 32:8 {n // 1024}k{said}", make, cold, {"bfloat16": 1 / 0.62}))
    return rows


SUITE = Suite(
    name="fp8",
    doc="attention in 8 bits and quantize; errors are against float64 of what codes and scales stand for",
    rows=_rows,
    peers=(),
    entries=ENTRIES,
    minutes=6,
)
