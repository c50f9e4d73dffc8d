"""Masks and scores as FlexAttention's users write them: what flashgen and compiled FlexAttention are both given."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from flashgen.analysis.tiles import Case
from flashgen.bench import contest
from flashgen.bench.backward import sample
from flashgen.bench.inputs import Drawn, draw
from flashgen.bench.suite import Builder, Ground
from flashgen.frontends.flex import from_flex
from flashgen.planning.problem import Problem
from flashgen.runtime.gradients import (
    OF_INPUTS,
    baseline_gradients,
    judge_captured,
    judge_gradients,
    reference_gradients,
)
from flashgen.runtime.reference import Pairs, baseline, judge, reference

if TYPE_CHECKING:
    import torch

    from flashgen.lang.variant import Variant

Function = Callable[..., Any]

#: Scores of the (batch, head) pairs that are compared with float64.
CHECKED_SCORES = 1 << 28

#: FlexAttention's backends by their names as peers, with what its kernel_options say.
BACKENDS: Mapping[str, dict[str, str] | None] = {"flex": None, "flex_flash": {"BACKEND": "FLASH"}}


class Mods(NamedTuple):
    """A mask_mod and a score_mod, either of which may be missing, and tensors of theirs that want gradients."""

    mask: Function | None = None
    score: Function | None = None
    wanted: tuple[torch.Tensor, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Functions:
    """Functions by a name, made for a problem: `make` is given it, a device and a seed; `bars` are a row's."""

    name: str
    problem: Problem
    make: Callable[[Problem, str, int], Mods]
    bars: Mapping[str, float] = field(default_factory=dict)


def problem(length: int = 8192, *, batch: int = 2, heads: int = 16, head_dim: int = 128, keys: int = 0) -> Problem:
    """Of bfloat16; as many keys as queries unless given."""
    return Problem(
        batch=batch,
        heads=heads,
        kv_heads=heads,
        q_len=length,
        kv_len=keys or length,
        head_dim=head_dim,
        v_head_dim=head_dim,
        dtype="bfloat16",
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Made:
    """Functions, their variant, and tensors of their problem."""

    of: Functions
    mods: Mods
    variant: Variant
    tensors: Drawn
    case: Case

    @property
    def scale(self) -> float:
        return self.of.problem.head_dim**-0.5

    def visible(self) -> int:
        """Pairs that the mask keeps, over batch and heads, as torch's own mask has them."""
        import torch

        p, q = self.of.problem, self.tensors.q
        if self.mods.mask is None:
            return p.batch * p.heads * p.q_len * p.kv_len
        b, k = (torch.arange(n, device=q.device) for n in (p.batch, p.kv_len))
        b = b[:, None, None]
        rows = torch.arange(p.q_len, device=q.device).split(256)
        kept = (self.mods.mask(b, 0, each[:, None], k).expand(p.batch, len(each), p.kv_len) for each in rows)
        return p.heads * sum(int(x.sum()) for x in kept)

    def wrong(self, o: torch.Tensor) -> list[str]:
        """What the tolerance rule says of o, of some batches and heads."""
        p = self.of.problem
        pairs = sample(p, CHECKED_SCORES)
        asked = self._asked(pairs, self.tensors[:3])
        (right, _), (exact, _) = (make(*asked, scale=self.scale, pairs=pairs) for make in (reference, baseline))
        return list(judge(pairs.of(o, p.kv_heads), exact, right, p.dtype).reasons)

    def wrong_gradients(self, found: tuple[torch.Tensor, ...]) -> list[str]:
        """The same of dq, dk and dv; those of captured tensors behind them are compared where all pairs are."""
        p = self.of.problem
        pairs = sample(p, CHECKED_SCORES)
        asked = self._asked(pairs, self.tensors)
        right, exact = (
            make(*asked, scale=self.scale, pairs=pairs) for make in (reference_gradients, baseline_gradients)
        )
        verdicts = judge_gradients((pairs.of(x, p.kv_heads) for x in found[:3]), exact, right, p.dtype)
        if len(pairs.batches) * len(pairs.kv_heads) == p.batch * p.kv_heads:
            for given, name in zip(found[3:], self.captured(), strict=True):
                verdicts[f"d{name}"] = judge_captured(given, exact.captured[name], right.captured[name])
        return [f"{what}: {reason}" for what, verdict in verdicts.items() for reason in verdict.reasons]

    def captured(self) -> list[str]:
        """The names of the tensors that want gradients, in the order of `mods.wanted`."""
        return [name for x in self.mods.wanted for name, y in self.variant.given.items() if x is y]

    def _asked(self, pairs: Pairs, tensors: tuple[torch.Tensor, ...]) -> tuple[object, ...]:
        kv_heads = self.of.problem.kv_heads
        return self.variant.bare.bind(), self.case, *(pairs.of(x, kv_heads) for x in tensors)


def make(of: Functions, ground: Ground) -> Made:
    """Functions on a device, with random tensors."""
    import torch

    mods = of.make(of.problem, ground.device, ground.seed)
    variant = from_flex(mods.mask, mods.score)
    given = variant.given
    captured = {name: x.detach().cpu() for name, x in given.items() if isinstance(x, torch.Tensor)}
    arrays = {name: (x.float() if x.dtype is torch.bfloat16 else x).numpy() for name, x in captured.items()}
    arrays = {name: x.reshape(1) if x.ndim == 0 else x for name, x in arrays.items()}
    case = Case(sizes=of.problem.sizes(), params={n: x for n, x in given.items() if n not in arrays}, tensors=arrays)
    tensors = draw(of.problem, ground.seed, device=ground.device)
    return Made(of=of, mods=mods, variant=variant, tensors=tensors, case=case)


def compiled(made: Made, ground: Ground, tensors: tuple[torch.Tensor, ...]) -> dict[str, Builder]:
    """FlexAttention, compiled, by backend: its forward on these q, k and v."""
    return {
        name: functools.partial(_compiled, made, BACKENDS[name], tensors) for name in BACKENDS if name in ground.names
    }


def block_mask(made: Made) -> Any:
    """torch's own block mask of the functions, None without a mask."""
    from torch.nn.attention.flex_attention import create_block_mask

    p, mask = made.of.problem, made.mods.mask
    if mask is None:
        return None
    return create_block_mask(mask, p.batch, None, p.q_len, p.kv_len, device=made.tensors.q.device)


def _compiled(made: Made, options: dict[str, str] | None, tensors: tuple[torch.Tensor, ...]) -> Callable[[], Any]:
    import torch
    import torch._functorch.config
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.reset()  # after a few shapes it would no longer compile, and run unfused
    torch._functorch.config.donated_buffer = False  # else a backward frees what another one of the same o reads
    return functools.partial(
        torch.compile(flex_attention, dynamic=False),
        *tensors,
        score_mod=made.mods.score,
        block_mask=block_mask(made),
        kernel_options=options,
    )


def gradient(
    attend: Callable[..., Any], leaves: Sequence[torch.Tensor], do: torch.Tensor, more: Sequence[torch.Tensor] = ()
) -> Callable[[], tuple[torch.Tensor, ...]]:
    """The gradients of leaves and of captured tensors; the forward runs when they are first asked for."""
    import torch

    made: list[torch.Tensor] = []

    def run() -> tuple[torch.Tensor, ...]:
        if not made:
            made.append(attend(*leaves))
        return torch.autograd.grad(made[0], (*leaves, *more), do, retain_graph=True)

    return run


def same_gradients(name: str, found: tuple[Any, ...], ours: tuple[Any, ...]) -> list[str]:
    """What is wrong with a peer's dq, dk and dv beside flashgen's."""
    return [
        reason
        for what, one, other in zip(OF_INPUTS, found, ours, strict=False)
        for reason in contest.difference(name, one, other, f"{what}: ")
    ]


def random(seed: int, device: str) -> torch.Generator:
    """A generator of captured tensors."""
    import torch

    return torch.Generator(device).manual_seed(seed)
