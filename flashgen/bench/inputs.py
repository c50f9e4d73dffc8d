"""Inputs of a problem, by name: N(0, 1) as most measurements have it, and such as make a softmax peaked."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

    from flashgen.planning.problem import Problem

#: What every query has in its last channel where an input uses that one to add to scores; exact in every dtype.
STEADY = 8.0

#: Nats of each input of such a kind.
SINK, OWN, RISE = 12.0, 9.0, 60.0

#: Outliers: their share, and the standard deviation of what is added to them.
RARE, OUTLIER = 1e-3, 10.0

#: The input that commands use where no other is asked for.
NORMAL = "normal"


class Drawn(NamedTuple):
    """q, k, v and do: [batch, heads, length, dim] with heads and dim next to each other in memory."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    do: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """What a problem's tensors hold: `of` makes it of N(0, 1) in float32, for scores q . k / sqrt(head_dim)."""

    doc: str
    of: Callable[[Drawn, torch.Generator], Drawn]


def draw(problem: Problem, seed: int, name: str = NORMAL, *, device: str = "cuda") -> Drawn:
    """The tensors of a problem in its dtype."""
    import torch

    p = problem
    generator = torch.Generator(device).manual_seed(seed)
    shapes = (
        (p.heads, p.q_len, p.head_dim),
        (p.kv_heads, p.kv_len, p.head_dim),
        (p.kv_heads, p.kv_len, p.v_head_dim),
        (p.heads, p.q_len, p.v_head_dim),
    )
    normal = Drawn(
        *(
            torch.randn(p.batch, length, heads, dim, device=device, generator=generator).transpose(1, 2)
            for heads, length, dim in shapes
        )
    )
    return Drawn(*(x.to(getattr(torch, p.dtype)) for x in INPUTS[name].of(normal, generator)))


def _spread(std: float, x: Drawn, _: torch.Generator) -> Drawn:
    return x._replace(q=x.q * std**0.5, k=x.k * std**0.5)


def _added(x: Drawn, nats: torch.Tensor) -> Drawn:
    """Scores of each key raised by `nats` [kv_len] for every query, by the last channel, which has nothing else."""
    q, k = x.q.clone(), x.k.clone()
    q[..., -1] = STEADY
    k[..., -1] = nats * (q.shape[-1] ** 0.5 / STEADY)
    return x._replace(q=q, k=k)


def _sink(x: Drawn, _: torch.Generator) -> Drawn:
    nats = x.k.new_zeros(x.k.shape[2])
    nats[:1] = SINK
    return _added(x, nats)


def _rising(walk: int, x: Drawn, _: torch.Generator) -> Drawn:
    """The last key (walk: 1) or the first (-1) has most."""
    import torch

    nats = torch.linspace(0, RISE, x.k.shape[2], device=x.k.device)
    return _added(x, nats if walk > 0 else nats.flip(0))


def _own(x: Drawn, _: torch.Generator) -> Drawn:
    import torch

    at = torch.arange(x.q.shape[2], device=x.q.device) % x.k.shape[2]
    own = x.k[:, :, at].repeat_interleave(x.q.shape[1] // x.k.shape[1], dim=1)
    return x._replace(q=x.q + OWN * x.q.shape[-1] ** 0.5 * own / own.square().sum(-1, keepdim=True))


def _outliers(x: Drawn, generator: torch.Generator) -> Drawn:
    import torch

    def rarely(part: torch.Tensor) -> torch.Tensor:
        shape = {"device": part.device, "generator": generator}
        rare = torch.rand(part.shape, **shape) < RARE
        return part + OUTLIER * rare * torch.randn(part.shape, **shape)

    return x._replace(q=rarely(x.q), k=rarely(x.k), v=rarely(x.v))


#: Every input by its name.
INPUTS: Mapping[str, Input] = {
    NORMAL: Input(doc="q, k, v and do of N(0, 1)", of=lambda x, _: x),
    **{
        f"std{std}": Input(doc=f"scores of standard deviation {std}", of=functools.partial(_spread, std))
        for std in (2, 4, 8, 16)
    },
    "sink": Input(doc=f"the first key {SINK:g} nats above the rest", of=_sink),
    "own": Input(doc=f"each query's own key {OWN:g} nats above the rest", of=_own),
    "rising": Input(
        doc=f"scores that rise by {RISE:g} nats from the last key, where kernels begin, to the first",
        of=functools.partial(_rising, -1),
    ),
    "falling": Input(
        doc=f"scores that rise by {RISE:g} nats from the first key to the last", of=functools.partial(_rising, 1)
    ),
    "outliers": Input(doc=f"N(0, 1) + N(0, {OUTLIER**2:g}) x Bernoulli({RARE:g}) in q, k and v", of=_outliers),
}
