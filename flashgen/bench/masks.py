"""Masks that data decide, and such as no range of keys says, beside compiled FlexAttention, whose block mask is made
beforehand and not counted."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flashgen.bench import contest, functions
from flashgen.bench.functions import Functions, Made, Mods, problem
from flashgen.bench.suite import Contest, Ground, Row, Suite, said
from flashgen.bench.timers import Eager
from flashgen.ops.attention import attention
from flashgen.planning import order, summaries
from flashgen.planning.traffic_backward import useful_flops

if TYPE_CHECKING:
    import torch

    from flashgen.lang.variant import Variant
    from flashgen.planning.problem import Problem

#: The share of blocks that a random layout shows.
SHOWN = 0.25

#: Queries that decode together in a tree, keys that a rotated cache shows, and how an image lies.
DRAFTS, WINDOW, WIDTH, REACH = 64, 512, 64, 6


def blocks(size: int, p: Problem, device: str, seed: int) -> Mods:
    """Random blocks, and those of the diagonal."""
    import torch

    rows, columns = (-(-n // size) for n in (p.q_len, p.kv_len))
    drawn = torch.rand(rows, columns, device=device, generator=functions.random(seed, device))
    layout = (drawn < SHOWN) | torch.eye(rows, columns, dtype=torch.bool, device=device)
    return Mods(mask=lambda b, h, q, k: layout[q // size, k // size])


def dilated(p: Problem, device: str, seed: int) -> Mods:
    """Every fourth key before a query."""
    return Mods(mask=lambda b, h, q, k: (k <= q) & ((q - k) % 4 == 0))


def key_padding(p: Problem, device: str, seed: int) -> Mods:
    """A mask as tokenizers give it: the last sequence is full, others end before."""
    import torch

    lengths = torch.linspace(0.5, 1.0, p.batch, device=device)[:, None] * p.kv_len
    attend = torch.arange(p.kv_len, device=device) < lengths
    return Mods(mask=lambda b, h, q, k: attend[b, k])


def ancestors(count: int, device: str, seed: int) -> torch.Tensor:
    """Which drafts of a random tree see which: themselves and those above."""
    import torch

    generator = functions.random(seed, "cpu")
    seen = torch.eye(count, dtype=torch.bool)
    for i in range(1, count):
        seen[i] |= seen[int(torch.randint(i, (), generator=generator))]
    return seen.to(device)


def tree_by_table(p: Problem, device: str, seed: int) -> Mods:
    """One tree of all tokens, as a table of pairs."""
    seen = ancestors(p.q_len, device, seed)
    return Mods(mask=lambda b, h, q, k: seen[q, k])


def tree_at_end(p: Problem, device: str, seed: int) -> Mods:
    """Trees of drafts, side by side behind a cache which all of them see."""
    seen, before = ancestors(DRAFTS, device, seed), p.kv_len - p.q_len

    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        draft = (k - before).clamp(min=0)
        return (k < before) | (seen[q % DRAFTS, draft % DRAFTS] & (q // DRAFTS == draft // DRAFTS))

    return Mods(mask=mask)


def neighbourhood(p: Problem, device: str, seed: int) -> Mods:
    """NATTEN: each patch of an image sees those around it."""

    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (abs(q // WIDTH - k // WIDTH) <= REACH) & (abs(q % WIDTH - k % WIDTH) <= REACH)

    return Mods(mask=mask)


def permuted(p: Problem, device: str, seed: int) -> Mods:
    """Causal by position, in blocks of positions whose order is random."""
    import torch

    size = min(256, p.kv_len)
    order = torch.randperm(-(-p.kv_len // size), device=device, generator=functions.random(seed, device))
    position = (order[:, None] * size + torch.arange(size, device=device)).flatten()[: p.kv_len].int()
    return Mods(mask=lambda b, h, q, k: position[k] <= position[q])


def rotated(p: Problem, device: str, seed: int) -> Mods:
    """A cache that goes round: slots hold positions, of which a window counts."""
    import torch

    position = torch.arange(p.kv_len, device=device).roll(p.kv_len // 3).int()
    return Mods(mask=lambda b, h, q, k: (position[k] <= q) & (q - position[k] < WINDOW))


def flags(p: Problem, device: str, seed: int) -> Mods:
    """A window to both sides, and tokens by flag that see all and are seen by all."""
    import torch

    flag = (torch.arange(p.kv_len, device=device) % 700 < 3).expand(p.batch, -1).contiguous()
    return Mods(mask=lambda b, h, q, k: (abs(q - k) <= 128) | flag[b, q] | flag[b, k])


def alibi(wanted: bool, p: Problem, device: str, seed: int) -> Mods:
    """Learned slopes, with their gradient or without."""
    import torch

    slopes = torch.linspace(0.01, 0.5, p.heads, device=device).requires_grad_(wanted)
    return Mods(score=lambda s, b, h, q, k: s - slopes[h] * (q - k).abs(), wanted=(slopes,) * wanted)


def bias(wanted: bool, p: Problem, device: str, seed: int) -> Mods:
    """A learned bias by distance, as T5's and Swin's are, with its gradient or without."""
    last = p.kv_len - 1
    table = _learned(wanted, (p.heads, p.q_len + p.kv_len - 1), device, seed)
    return Mods(score=lambda s, b, h, q, k: s + table[h, q - k + last], wanted=(table,) * wanted)


def clipped(wanted: bool, p: Problem, device: str, seed: int) -> Mods:
    """A learned bias by distance, all that is further than 128 alike."""
    import torch

    bias = _learned(wanted, (p.heads, 257), device, seed)
    return Mods(score=lambda s, b, h, q, k: s + bias[h, torch.clamp(k - q, -128, 128) + 128], wanted=(bias,) * wanted)


def buckets(wanted: bool, p: Problem, device: str, seed: int) -> Mods:
    """T5's: 32 buckets of distances, of which those far away are wide."""
    import torch

    last = p.kv_len - 1
    away = torch.arange(-last, p.q_len, device=device)
    near, far = away.abs(), 8 + (torch.log(away.abs().clamp(min=8) / 8) / math.log(128 / 8) * 8).int()
    bucket = torch.where(near < 8, near, far.clamp(max=15)).int() + 16 * (away < 0).int()
    bias = _learned(wanted, (32, p.heads), device, seed)
    return Mods(score=lambda s, b, h, q, k: s + bias[bucket[q - k + last], h], wanted=(bias,) * wanted)


def offsets(wanted: bool, p: Problem, device: str, seed: int) -> Mods:
    """A learned bias by the offset in an image, as Swin's and ViTDet's."""
    last = WIDTH - 1
    bias = _learned(wanted, (p.heads, (2 * WIDTH - 1) ** 2), device, seed)

    def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        down, across = q // WIDTH - k // WIDTH + last, q % WIDTH - k % WIDTH + last
        return s + bias[h, down * (2 * WIDTH - 1) + across]

    return Mods(score=score, wanted=(bias,) * wanted)


def of_queries(wanted: bool, p: Problem, device: str, seed: int) -> Mods:
    """A learned bias of each query."""
    bias = _learned(wanted, (p.heads, p.q_len), device, seed)
    return Mods(score=lambda s, b, h, q, k: s + bias[h, q], wanted=(bias,) * wanted)


def of_keys(wanted: bool, p: Problem, device: str, seed: int) -> Mods:
    """A learned bias of each key."""
    bias = _learned(wanted, (p.batch, p.kv_len), device, seed)
    return Mods(score=lambda s, b, h, q, k: s + bias[b, k], wanted=(bias,) * wanted)


def of_pairs(wanted: bool, p: Problem, device: str, seed: int) -> Mods:
    """A bias that a model computes for each pair: its gradient alone is 4 bytes a score."""
    bias = _learned(wanted, (p.heads, p.q_len, p.kv_len), device, seed)
    return Mods(score=lambda s, b, h, q, k: s + bias[h, q, k], wanted=(bias,) * wanted)


def _learned(wanted: bool, shape: tuple[int, ...], device: str, seed: int) -> torch.Tensor:
    import torch

    return torch.randn(shape, device=device, generator=functions.random(seed, device)).requires_grad_(wanted)


#: Scores whose captured tensor has a gradient: by the name of a row.
LEARNED: Mapping[str, Callable[..., Mods]] = {
    "alibi": alibi,
    "bias": bias,
    "bias, clipped": clipped,
    "bias, buckets": buckets,
    "bias of queries": of_queries,
    "bias of keys": of_keys,
    "bias in an image": offsets,
    "bias of pairs": of_pairs,
}


def table(backward: bool) -> list[Functions]:
    """The masks of both passes, with what the subject must be beside others."""
    own = {"ampere": 1.3} if backward else {}
    of_blocks = {"flex": 1.5, "flex_flash": 1.0, **own}
    others = {"flex": 1.15, "flex_flash": 1.15, **own}
    long, image = problem(), problem(4096)

    def one(name: str, make: Callable, at: Problem = long, bars: Mapping[str, float] = others) -> Functions:
        return Functions(name=name, problem=at, make=make, bars=bars)

    return [
        one("blocks of 128", functools.partial(blocks, 128), bars=of_blocks),
        one("blocks of 64", functools.partial(blocks, 64), bars=of_blocks),
        one("dilated", dilated),
        one("key padding", key_padding),
        one("tree by table", tree_by_table, problem(2048, batch=8)),
        one("trees over a cache", tree_at_end, problem(512, batch=8, keys=8192)),
        one("neighbourhood", neighbourhood, image),
        one("permuted", permuted),
        one("rotated", rotated),
        one("flags", flags),
    ]


def short_table() -> list[Functions]:
    """Problems whose summaries must not cost more than microseconds."""
    return [
        Functions(name=f"{made.__name__} s{n}", problem=problem(n), make=made)
        for made in (key_padding, flags)
        for n in (512, 4096)
    ]


def forward(of: Functions, ground: Ground) -> Contest:
    """o of a mask, and how much of the call its summaries take."""
    made = functions.make(of, ground)
    q, k, v, _ = made.tensors
    run = functools.partial(attention, q, k, v, made.variant)

    def wrong(name: str, found: torch.Tensor) -> list[str]:
        return made.wrong(found) if name == "flashgen" else contest.difference(name, found, run())

    p = of.problem
    return Contest(
        forms={"flashgen": run},
        peers=functions.compiled(made, ground, (q, k, v)),
        wrong=wrong,
        flops=2 * (p.head_dim + p.v_head_dim) * made.visible(),
        about={**_shape(made), **kernel_times(run, ground.device)},
    )


def backward(of: Functions, ground: Ground) -> Contest:
    """dq, dk and dv of a mask, beside those of pipeline ampere."""
    made = functions.make(of, ground)
    leaves = [x.detach().requires_grad_() for x in made.tensors[:3]]
    do = made.tensors.do
    ours = functions.gradient(functools.partial(attention, variant=made.variant), leaves, do)
    pinned = functools.partial(attention, variant=on_pipeline(made.variant, "ampere"))
    forms = {"flashgen": ours, "ampere": functions.gradient(pinned, leaves, do)}

    def wrong(name: str, found: tuple[torch.Tensor, ...]) -> list[str]:
        if name in forms:
            return [f"{name}: {reason}" for reason in made.wrong_gradients(found)]
        return functions.same_gradients(name, found, ours())

    builders = functions.compiled(made, ground, tuple(leaves))
    peers = {name: functools.partial(_gradient_of, build, leaves, do) for name, build in builders.items()}
    about = {**_shape(made), **kernel_times(ours, ground.device)}
    flops = useful_flops(of.problem, made.visible())
    return Contest(forms=forms, peers=peers, wrong=wrong, flops=flops, about=about)


def _gradient_of(
    build: Callable[[], Callable[[], Any]], leaves: Sequence[torch.Tensor], do: torch.Tensor
) -> Callable[[], tuple[torch.Tensor, ...]]:
    call = build()
    return functions.gradient(lambda *_: call(), leaves, do)


def captured(make: Callable, at: Problem, ground: Ground) -> Contest:
    """Gradients with those of a captured tensor beside the same without."""
    forms, judges = {}, {}
    for name, wanted in (("flashgen", True), ("without", False)):
        of = Functions(name=name, problem=at, make=functools.partial(make, wanted))
        made = functions.make(of, ground)
        leaves = [x.detach().requires_grad_() for x in made.tensors[:3]]
        attend = functools.partial(attention, variant=made.variant)
        forms[name] = functions.gradient(attend, leaves, made.tensors.do, made.mods.wanted)
        judges[name] = made.wrong_gradients

    def wrong(name: str, found: tuple[torch.Tensor, ...]) -> list[str]:
        return [f"{name}: {reason}" for reason in judges[name](found)]

    return Contest(forms=forms, wrong=wrong, flops=useful_flops(at, at.batch * at.heads * at.q_len * at.kv_len))


def on_pipeline(variant: Variant, name: str) -> Variant:
    """The same variant, with a pipeline pinned."""
    pinned = dataclasses.replace(variant.bare, pins=dataclasses.replace(variant.pins, pipeline=name))
    return pinned.giving(variant.given) if variant.given else pinned


def _shape(made: Made) -> dict[str, object]:
    p = made.of.problem
    return {"batch": p.batch, "heads": p.heads, "q_len": p.q_len, "kv_len": p.kv_len, "head_dim": p.head_dim}


def kernel_times(call: Callable[[], object], device: str) -> dict[str, object]:
    """Microseconds of each kernel of a call by torch's profiler, and the share of summaries; why not, where the
    profiler sees none."""
    if device == "cpu":
        return {}
    import torch
    from torch.profiler import ProfilerActivity, profile

    call()
    torch.cuda.synchronize()
    try:
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            call()
            torch.cuda.synchronize()
        us = {event.key: event.device_time_total for event in seen.key_averages() if event.device_time_total}
    except Exception as error:  # a machine may forbid profiling, which is no fault of the row
        return {"kernels": said(error)}
    return shares(us)


def shares(us: Mapping[str, float]) -> dict[str, object]:
    """What the record holds of kernels' times: those of summaries and of the order that they give, and their share."""
    if not us:
        return {"kernels": "the profiler saw no kernel"}
    before = sum(value for name, value in us.items() if name in (summaries.ENTRY, order.ENTRY))
    total = sum(us.values())
    return {
        "kernels_us": {name[:60]: round(value, 3) for name, value in us.items()},
        "summaries_us": round(before, 3),
        "summaries_share": round(before / total, 5),
    }


def _rows(backwards: bool) -> list[Row]:
    timer, part = Eager(), "backward" if backwards else "forward"
    make = backward if backwards else forward
    rows = [
        Row(part=part, name=of.name, make=functools.partial(make, of), timer=timer, bars=of.bars)
        for of in table(backwards)
    ]
    if not backwards:
        for of in short_table():
            rows.append(Row(part="summaries", name=of.name, make=functools.partial(forward, of), timer=timer))
        return rows
    at = problem(4096, batch=1)
    for name, learned in LEARNED.items():
        contest_of = functools.partial(captured, learned, at)
        rows.append(
            Row(part="captured", name=f"gradient of {name}", make=contest_of, timer=timer, bars={"without": 0.85})
        )
    return rows


SUITE = Suite(
    name="masks",
    doc="masks that data decide, and such as no range of keys says; FlexAttention's block mask is not counted",
    rows=_rows,
    backward=True,
    peers=tuple(functions.BACKENDS),
    minutes=5,
)
