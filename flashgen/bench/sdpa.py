"""PyTorch's call with masks that are tensors, beside its own backends that take them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from flashgen.bench import contest, functions, peers
from flashgen.bench.functions import Functions, Made, Mods, problem
from flashgen.bench.suite import Builder, Contest, Ground, Row, Suite
from flashgen.bench.timers import Eager
from flashgen.integrations.sdpa import scaled_dot_product_attention
from flashgen.planning.traffic_backward import useful_flops

if TYPE_CHECKING:
    import torch

    from flashgen.planning.problem import Problem

Maker = Callable[["Problem", str, "torch.Generator"], "torch.Tensor"]

#: PyTorch's backends that take such masks, by their names as peers.
BACKENDS = {"cudnn": peers.SDPA["cudnn"], "efficient": "EFFICIENT_ATTENTION"}

#: Backends that read a mask of another dtype than the query's as if it had that: their results are NaN.
OF_ITS_DTYPE = ("cudnn",)

#: The share of pairs that a random table shows.
SHOWN = 0.9


def causal(p: Problem, device: str, generator: torch.Generator) -> torch.Tensor:
    """A table of booleans, one for all."""
    import torch

    return torch.ones(p.q_len, p.kv_len, dtype=torch.bool, device=device).tril()


def padding(p: Problem, device: str, generator: torch.Generator) -> torch.Tensor:
    """What tokenizers give, expanded to all pairs as models do it; the last sequence is full."""
    import torch

    lengths = torch.linspace(0.5, 1.0, p.batch + 1, device=device)[1:, None] * p.kv_len
    seen = torch.arange(p.kv_len, device=device) < lengths
    return seen[:, None, None].expand(p.batch, 1, p.q_len, p.kv_len)


def pairs(p: Problem, device: str, generator: torch.Generator) -> torch.Tensor:
    """Random booleans of each pair and sequence: no tile is all or nothing."""
    import torch

    return torch.rand(p.batch, 1, p.q_len, p.kv_len, device=device, generator=generator) < SHOWN


def _bias(batch: bool, heads: bool, dtype: str) -> Maker:
    """Numbers for each pair; of each sequence and of each head, or the same for all."""

    def made(p: Problem, device: str, generator: torch.Generator) -> torch.Tensor:
        import torch

        shape = p.batch if batch else 1, p.heads if heads else 1, p.q_len, p.kv_len
        return torch.randn(shape, device=device, generator=generator).to(getattr(torch, dtype))

    return made


#: Masks by name.
MASKS: Mapping[str, Maker] = {
    "causal table": causal,
    "padding": padding,
    "random pairs": pairs,
    "bias": _bias(True, True, "bfloat16"),
    "bias of heads": _bias(False, True, "bfloat16"),
    "bias for all": _bias(False, False, "bfloat16"),
    "float32 bias": _bias(True, True, "float32"),
}

#: One long sequence, and several whose columns are few.
PROBLEMS = (problem(4096, batch=1), problem(2048, batch=4, head_dim=64))


def _made(name: str, at: Problem, ground: Ground) -> tuple[torch.Tensor, Made]:
    """The mask, and the same as a variant, by which results are judged."""
    mask = MASKS[name](at, ground.device, functions.random(ground.seed, ground.device))
    whole = mask.expand(at.batch, at.heads, at.q_len, at.kv_len)

    def mods(*_: object) -> Mods:
        if whole.dtype.is_floating_point:
            return Mods(score=lambda s, b, h, q, k: s + whole[b, h, q, k])
        return Mods(mask=lambda b, h, q, k: whole[b, h, q, k])

    return mask, functions.make(Functions(name=name, problem=at, make=mods), ground)


def forward(name: str, at: Problem, ground: Ground) -> Contest:
    """o."""
    mask, made = _made(name, at, ground)
    q, k, v = made.tensors[:3]
    run = functools.partial(scaled_dot_product_attention, q, k, v, attn_mask=mask)

    def wrong(who: str, found: torch.Tensor) -> list[str]:
        return made.wrong(found) if who == "flashgen" else contest.difference(who, found, run())

    return Contest(
        forms={"flashgen": run},
        peers=_peers(ground, mask, lambda attend: functools.partial(attend, q, k, v)),
        wrong=wrong,
        flops=2 * (at.head_dim + at.v_head_dim) * _visible(made, mask),
    )


def backward(name: str, at: Problem, ground: Ground) -> Contest:
    """dq, dk and dv."""
    mask, made = _made(name, at, ground)
    leaves, do = [x.detach().requires_grad_() for x in made.tensors[:3]], made.tensors.do
    run = functions.gradient(functools.partial(scaled_dot_product_attention, attn_mask=mask), leaves, do)

    def wrong(who: str, found: tuple[torch.Tensor, ...]) -> list[str]:
        return made.wrong_gradients(found) if who == "flashgen" else functions.same_gradients(who, found, run())

    return Contest(
        forms={"flashgen": run},
        peers=_peers(ground, mask, lambda attend: functions.gradient(attend, leaves, do)),
        wrong=wrong,
        flops=useful_flops(at, _visible(made, mask)),
    )


def _visible(made: Made, mask: torch.Tensor) -> int:
    p = made.of.problem
    whole = p.batch * p.heads * p.q_len * p.kv_len
    return whole if mask.dtype.is_floating_point else int(mask.sum()) * (whole // mask.numel())


def _peers(
    ground: Ground, mask: torch.Tensor, call: Callable[[Callable[..., torch.Tensor]], Callable[[], object]]
) -> dict[str, Builder]:
    """Builders of calls of PyTorch's own function, by one backend each."""

    def build(name: str) -> Callable[[], object] | None:
        import torch

        if name in OF_ITS_DTYPE and mask.dtype is torch.float32:
            return None

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            with peers.on(BACKENDS[name]):
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)

        return call(attend)

    return {name: functools.partial(build, name) for name in ground.names}


def _rows(backwards: bool) -> list[Row]:
    make, part = (backward, "backward") if backwards else (forward, "forward")
    return [
        Row(
            part=part,
            name=f"{name} b{at.batch} s{at.q_len} d{at.head_dim}",
            make=functools.partial(make, name, at),
            timer=Eager(),
        )
        for at in PROBLEMS
        for name in MASKS
    ]


SUITE = Suite(
    name="sdpa",
    doc="PyTorch's scaled_dot_product_attention with masks that are tensors, beside its own backends",
    rows=_rows,
    backward=True,
    peers=tuple(BACKENDS),
    minutes=1,
)
