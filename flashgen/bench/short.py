"""Short problems, which one wave of blocks does not fill a GPU with: ten calls in a CUDA graph, beside the peers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from flashgen.bench import backward, contest, forward, peers
from flashgen.bench.cells import Cell, cell
from flashgen.bench.suite import Builder, Contest, Ground, Row, Suite
from flashgen.bench.timers import Graph
from flashgen.ops.attention import attention
from flashgen.planning.traffic_backward import useful_flops
from flashgen.runtime.gradients import OF_INPUTS

if TYPE_CHECKING:
    import torch

#: Full and causal: batch, heads, length, head_dim.
FORWARD = tuple(
    cell(specs, 64, length, batch=batch, heads=heads)
    for specs in ("causal", "full")
    for batch, heads, length in ((1, 8, 128), (1, 8, 512), (2, 12, 197))
)

#: The shortest lengths of training: 16,384 tokens in all.
BACKWARD = tuple(
    cell(specs, head_dim, length) for head_dim in (64, 128) for length in (512, 1024) for specs in ("full", "causal")
)

#: Peers whose backward a CUDA graph cannot hold, from this head_dim on, and why.
UNGRAPHED = {"cudnn": (128, "its backward makes an illegal access in a CUDA graph at head_dim 128")}


class LeftOut(Exception):
    """A peer is known to fail at a cell in a way that would end the run."""


def of_forward(at: Cell, ground: Ground) -> Contest:
    """o of a short problem."""
    setting = contest.prepare(at, None, ground.seed, device=ground.device)
    q, k, v = setting.q, setting.k, setting.v
    run = functools.partial(attention, q, k, v, setting.variant, **setting.inputs)

    def wrong(name: str, found: torch.Tensor) -> list[str]:
        if name == "flashgen":
            return forward.check(setting, *run(return_lse=True))
        return contest.difference(name, found, run())

    builders = {name: functools.partial(peers.of(name), at, q, k, v, setting.inputs) for name in ground.names}
    p = at.problem
    return Contest(
        forms={"flashgen": run},
        peers={**builders, **ground.of_files("peer", at, q, k, v)},
        wrong=wrong,
        flops=2 * (p.head_dim + p.v_head_dim) * setting.visible(setting.plan()),
    )


def of_backward(at: Cell, ground: Ground) -> Contest:
    """dq, dk and dv of a short problem, from o and lse."""
    import torch

    setting = contest.prepare(at, None, ground.seed, device=ground.device)
    leaves = [x.detach().requires_grad_() for x in (setting.q, setting.k, setting.v)]

    def gradient(o: torch.Tensor) -> Callable[[], tuple[torch.Tensor, ...]]:
        return functools.partial(torch.autograd.grad, o, leaves, setting.do, retain_graph=True)

    def package(name: str) -> Callable[[], object] | None:
        first, why = UNGRAPHED.get(name, (1 << 30, ""))
        if at.problem.head_dim >= first:
            raise LeftOut(why)
        call = peers.of(name)(at, *leaves, setting.inputs)
        return call and gradient(call())

    ours = gradient(attention(*leaves, setting.variant, **setting.inputs))
    pairs = backward.sample(at.problem, backward.CHECKED_SCORES)

    def wrong(name: str, found: Sequence[torch.Tensor]) -> list[str]:
        if name == "flashgen":
            return backward.check(setting, {"": tuple(found)}, pairs)
        return [
            reason
            for what, one, other in zip(OF_INPUTS, found, ours(), strict=True)
            for reason in contest.difference(name, one, other, f"{what}: ")
        ]

    builders: dict[str, Builder] = {name: functools.partial(package, name) for name in ground.names}
    builders |= ground.of_files("backward", at, setting.q, setting.k, setting.v, setting.do)
    flops = useful_flops(at.problem, setting.visible(setting.plan(backward=True)))
    return Contest(forms={"flashgen": ours}, peers=builders, wrong=wrong, flops=flops)


def _rows(backward: bool) -> list[Row]:
    part, cells, make = ("backward", BACKWARD, of_backward) if backward else ("forward", FORWARD, of_forward)
    bars = {"cudnn": 1.0, "fa2": 1.0, "fa3": 1.0}
    return [Row(part=part, name=str(at), make=functools.partial(make, at), timer=Graph(), bars=bars) for at in cells]


SUITE = Suite(
    name="short",
    doc="problems that one wave of blocks does not fill a GPU with, ten calls in a CUDA graph",
    rows=_rows,
    backward=True,
    peers=("cudnn", "fa2"),
    entries=("peer", "backward"),
    minutes=1,
)
