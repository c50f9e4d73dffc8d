"""FlexAttention's call, answered by flashgen, beside compiled FlexAttention: speed, the first call on a new mask, and
what another length, number or content costs the host."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from random import randrange
from typing import TYPE_CHECKING, Any

from flashgen.bench import contest, functions
from flashgen.bench.functions import Functions, Made, Mods, problem
from flashgen.bench.inputs import draw
from flashgen.bench.suite import Contest, Ground, Row, Suite
from flashgen.bench.timers import Eager, Host
from flashgen.frontends.flex import from_flex
from flashgen.integrations.flex_attention import flex_attention
from flashgen.ops.attention import attention
from flashgen.planning.traffic_backward import useful_flops

if TYPE_CHECKING:
    import torch

    from flashgen.planning.problem import Problem

WINDOW, PREFIX, SINKS, CAP, BLOCK, DOCUMENTS = 1024, 256, 4, 30.0, 128, 33

#: Lengths, numbers and contents that a row of the host's part goes through, before they come again.
OTHERS = 4096


def window(p: Problem, device: str, seed: int) -> Mods:
    return Mods(mask=lambda b, h, q, k: (k <= q) & (q - k < WINDOW))


def prefix(p: Problem, device: str, seed: int) -> Mods:
    return Mods(mask=lambda b, h, q, k: (k < PREFIX) | (k <= q))


def documents(p: Problem, device: str, seed: int) -> torch.Tensor:
    """Ids of documents that lie behind each other, [batch, keys]."""
    import torch

    count = max(1, min(DOCUMENTS, p.kv_len // 8))
    shape = (p.batch, p.kv_len)
    drawn = torch.randint(count, shape, device=device, generator=functions.random(seed, device))
    return drawn.sort(-1).values.int()


def document(p: Problem, device: str, seed: int) -> Mods:
    doc = documents(p, device, seed)
    return Mods(mask=lambda b, h, q, k: doc[b, q] == doc[b, k])


def sink_window(p: Problem, device: str, seed: int) -> Mods:
    return Mods(mask=lambda b, h, q, k: (k <= q) & ((q - k < WINDOW) | (k < SINKS)))


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return k <= q


def alibi(p: Problem, device: str, seed: int) -> Mods:
    import torch

    slopes = torch.exp2(-8 * torch.arange(1, p.heads + 1, device=device) / p.heads)
    return Mods(mask=causal, score=lambda s, b, h, q, k: s - slopes[h] * (q - k))


def softcap(p: Problem, device: str, seed: int) -> Mods:
    import torch

    return Mods(mask=causal, score=lambda s, b, h, q, k: CAP * torch.tanh(s / CAP))


def butterfly(p: Problem, device: str, seed: int) -> Mods:
    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        differ = (q // BLOCK) ^ (k // BLOCK)
        return (differ & (differ - 1)) == 0

    return Mods(mask=mask)


MASKS = (window, prefix, document, sink_window, alibi, softcap, butterfly)


def _call(made: Made) -> Callable[..., Any]:
    """flashgen's flex_attention with the functions, its block mask made beforehand, as FlexAttention's users do."""
    return functools.partial(flex_attention, score_mod=made.mods.score, block_mask=functions.block_mask(made))


def forward(of: Functions, ground: Ground) -> Contest:
    """o through flex_attention."""
    made = functions.make(of, ground)
    tensors = made.tensors[:3]
    run = functools.partial(_call(made), *tensors)

    def wrong(name: str, found: torch.Tensor) -> list[str]:
        return made.wrong(found) if name == "flashgen" else contest.difference(name, found, run())

    p = of.problem
    flops = 2 * (p.head_dim + p.v_head_dim) * made.visible()
    return Contest(forms={"flashgen": run}, peers=functions.compiled(made, ground, tensors), wrong=wrong, flops=flops)


def both(of: Functions, ground: Ground) -> Contest:
    """Forward and backward through flex_attention."""
    import torch

    made = functions.make(of, ground)
    leaves = tuple(x.detach().requires_grad_() for x in made.tensors[:3])
    do = made.tensors.do

    def step(call: Callable[..., torch.Tensor]) -> Callable[[], tuple[torch.Tensor, ...]]:
        return lambda: torch.autograd.grad(call(), leaves, do)

    run = step(functools.partial(_call(made), *leaves))
    builders = functions.compiled(made, ground, leaves)
    peers = {name: lambda build=build: step(build()) for name, build in builders.items()}

    def wrong(name: str, found: tuple[torch.Tensor, ...]) -> list[str]:
        return made.wrong_gradients(found) if name == "flashgen" else functions.same_gradients(name, found, run())

    p = of.problem
    visible = made.visible()
    flops = useful_flops(p, visible) + 2 * (p.head_dim + p.v_head_dim) * visible
    return Contest(forms={"flashgen": run}, peers=peers, wrong=wrong, flops=flops)


# The host's part


def first_call(at: Problem, ground: Ground) -> Contest:
    """Each call has a mask that nobody saw before: traced, planned, emitted, compiled, loaded, run."""
    import torch

    q, k, v, _ = draw(at, ground.seed, device=ground.device)
    widths = itertools.count(at.q_len + randrange(1 << 22))  # kernels of an earlier run are in the cache

    def run() -> torch.Tensor:
        width = next(widths)
        o = attention(q, k, v, from_flex(lambda b, h, i, j: (j <= i) & (i - j < width)))
        if o.is_cuda:
            torch.cuda.synchronize()
        return o

    def wrong(name: str, o: torch.Tensor) -> list[str]:
        right = attention(q, k, v, from_flex(causal))
        return contest.difference(name, o, right)

    return Contest(forms={"flashgen": run}, wrong=wrong)


def another_length(at: Problem, ground: Ground) -> Contest:
    """Calls of lengths that come for the first time, beside calls of the same."""
    q, k, v, _ = draw(at, ground.seed, device=ground.device)
    lengths = _in_turn(range(at.q_len, max(at.q_len - OTHERS, at.q_len // 2), -1))
    variant = from_flex(causal)

    def of(n: int) -> torch.Tensor:
        return attention(q[:, :, :n], k[:, :, :n], v[:, :, :n], variant)

    def wrong(name: str, o: torch.Tensor) -> list[str]:
        n = o.shape[2]
        right = attention(q, k, v, variant)[:, :, :n]  # causal: a row does not see what lies behind
        return contest.difference(name, o, right)

    forms = {"flashgen": lambda: of(next(lengths)), "the same": lambda: of(at.q_len)}
    return Contest(forms=forms, wrong=wrong)


def another_number(at: Problem, ground: Ground) -> Contest:
    """Calls with another value of a parameter, beside calls with the same."""
    q, k, v, _ = draw(at, ground.seed, device=ground.device)
    numbers = _in_turn(range(1, OTHERS))

    def of(width: int) -> torch.Tensor:
        return attention(q, k, v, from_flex(lambda b, h, i, j: (j <= i) & (i - j < width), names=["width"]))

    widest = at.q_len + OTHERS
    by = {"flashgen": lambda: of(at.q_len + next(numbers)), "the same": lambda: of(widest)}
    right = functools.cache(lambda: attention(q, k, v, from_flex(causal)))
    return Contest(forms=by, wrong=lambda name, o: contest.difference(name, o, right()))


def another_content(at: Problem, ground: Ground) -> Contest:
    """Calls whose captured tensor is another one, of the same shape, beside calls with the same."""
    q, k, v, _ = draw(at, ground.seed, device=ground.device)
    contents = _in_turn([documents(at, ground.device, seed) for seed in range(64)])

    def of(doc: torch.Tensor) -> torch.Tensor:
        return attention(q, k, v, from_flex(lambda b, h, i, j: doc[b, i] == doc[b, j]))

    first = documents(at, ground.device, 0)
    forms = {"flashgen": lambda: of(next(contents)), "the same": lambda: of(first)}

    def wrong(name: str, o: torch.Tensor) -> list[str]:
        if name == "flashgen":
            return []  # of whichever content came; the other form is compared
        seen = (first[:, None, :, None] == first[:, None, None, :]).expand(-1, q.shape[1], -1, -1)
        s = (q.float() @ k.float().mT * at.head_dim**-0.5).masked_fill(~seen, float("-inf"))
        return contest.difference(name, o, s.softmax(-1) @ v.float())

    return Contest(forms=forms, wrong=wrong)


def _in_turn(values: Any) -> Iterator[Any]:
    """These, again and again."""
    return itertools.cycle(values)


def _rows(backward: bool) -> list[Row]:
    make, part, bar = (both, "forward + backward", 1.5) if backward else (forward, "forward", 1.45)
    bars = {"flex": bar, "flex_flash": 1.1}
    rows = [
        Row(
            part=part,
            name=f"{named.__name__} d128 s8192 b2 h16",
            make=functools.partial(make, Functions(name=named.__name__, problem=problem(), make=named)),
            timer=Eager(),
            bars=bars,
        )
        for named in MASKS
    ]
    if backward:
        return rows
    small = problem(1024, batch=1, heads=4, head_dim=64)
    once, calls = Host(calls=1, warm=0), Host(calls=20, warm=2)
    for named, timer in (
        (first_call, once),
        (another_length, calls),
        (another_number, calls),
        (another_content, calls),
    ):
        name = named.__name__.replace("_", " ")
        rows.append(Row(part="host", name=name, make=functools.partial(named, small), timer=timer))
    return rows


SUITE = Suite(
    name="flex",
    doc="flashgen.flex_attention beside compiled FlexAttention, whose block mask is not counted",
    rows=_rows,
    backward=True,
    peers=tuple(functions.BACKENDS),
    minutes=4,
)
