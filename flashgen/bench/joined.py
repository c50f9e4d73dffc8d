"""Sequences behind each other beside the dense kernel's rate for the length of each, forward and backward."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flashgen.analysis.tiles import Case
from flashgen.bench import sampled
from flashgen.bench.sampled import Sample
from flashgen.bench.suite import Contest, Ground, Row
from flashgen.bench.timers import Eager
from flashgen.frontends.flex import from_flex
from flashgen.lang.load import load_spec
from flashgen.ops.attention import attention, attention_varlen
from flashgen.planning.problem import Problem
from flashgen.runtime.gradients import baseline_gradients, judge_gradients, reference_gradients
from flashgen.runtime.reference import Pairs

if TYPE_CHECKING:
    import torch

    from flashgen.lang.variant import Variant

#: Documents of 32k tokens in all, and the width of blocks that see each other in the mask of that name.
DOCUMENTS = (16_384, 512, 4096, 1024, 8192, 512, 2048)
BLOCK = 256

#: What documents would take by themselves.
ALONE = "documents alone"


@dataclass(frozen=True, slots=True, kw_only=True)
class Documents:
    """Lengths of sequences that lie behind each other, and their heads."""

    lengths: tuple[int, ...] = DOCUMENTS
    heads: int = 16
    head_dim: int = 128

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def starts(self) -> list[int]:
        return [sum(self.lengths[:b]) for b in range(len(self.lengths) + 1)]


def causal_blocks(b: Any, h: Any, q: Any, k: Any) -> Any:
    """Blocks of positions see themselves and those before."""
    return k // BLOCK <= q // BLOCK


#: Masks by the name of a row, with how many of a length's pairs they keep.
MASKS: dict[str, tuple[Callable[[], Variant], Callable[[Any, Any], Any]]] = {
    "causal": (lambda: load_spec("causal"), lambda q, k: k <= q),
    "block-causal": (lambda: from_flex(causal_blocks), lambda q, k: causal_blocks(None, None, q, k)),
}


def forward(of: Documents, mask: str, ground: Ground) -> Contest:
    """o of all documents in one call."""
    make, sees = MASKS[mask]
    variant, tensors = make(), draw(of, ground)
    together = functools.partial(joint, of, tensors[:3], variant)
    samples, places = [], []
    for b in range(0, len(of.lengths), 2):
        n, first, head = of.lengths[b], of.starts[b], b % of.heads
        rows = [i * (n - 1) // min(63, n - 1) for i in range(min(64, n))]
        positions = [first + i for i in rows]
        q, k, v = (x[at, head] for x, at in zip(tensors, (positions, *2 * (slice(first, first + n),)), strict=False))
        row = _arange(rows, q)[:, None]
        samples.append(Sample(q=q, k=k, v=v, visible=sees(row, _arange(range(n), q))))
        places.append((positions, head))

    def wrong(name: str, o: torch.Tensor) -> list[str]:
        if name != "flashgen":
            return []  # a yardstick of the dense kernel, which `flashgen bench hopper` checks
        return sampled.wrong([o[place] for place in places], samples, of.head_dim**-0.5)

    alone = {n: apart(of, n, variant, ground) for n in set(of.lengths)}
    return Contest(
        forms={"flashgen": together, **{f"dense {n}": call for n, (call, _) in alone.items()}},
        wrong=wrong,
        sums=shares(of, {n: batch for n, (_, batch) in alone.items()}),
        flops=4 * of.head_dim * of.heads * _pairs(of, sees, ground),
        about={"documents": list(of.lengths)},
    )


def backward(of: Documents, mask: str, ground: Ground) -> Contest:
    """dq, dk and dv of all documents in one call."""
    import torch

    make, sees = MASKS[mask]
    variant, (q, k, v, do) = make(), draw(of, ground)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]

    def gradient(leaves: Sequence[torch.Tensor], call: Callable, do: torch.Tensor) -> Callable:
        """Its forward runs when the first gradient is asked for, so that a refusal is this call's."""
        made: list[torch.Tensor] = []

        def run() -> tuple[torch.Tensor, ...]:
            if not made:
                made.append(call())
            return torch.autograd.grad(made[0], leaves, do, retain_graph=True)

        return run

    together = gradient(leaves, functools.partial(joint, of, leaves, variant), do)
    forms = {"flashgen": together}
    batches = {}
    for n in set(of.lengths):
        call, batches[n] = apart(of, n, variant, ground)
        own = [x.detach().requires_grad_() for x in call.args[:3]]
        given = torch.randn_like(own[0])
        forms[f"dense {n}"] = gradient(own, functools.partial(attention, *own, variant), given)

    def wrong(name: str, found: Sequence[torch.Tensor]) -> list[str]:
        if name != "flashgen":
            return []
        b = min(range(len(of.lengths)), key=of.lengths.__getitem__)
        span = slice(of.starts[b], of.starts[b + 1])
        sizes = {"batch": 1, "heads": 1, "kv_heads": 1, "q_len": of.lengths[b], "kv_len": of.lengths[b]}
        problem = Problem(**sizes, head_dim=of.head_dim, v_head_dim=of.head_dim)
        case = Case(sizes=problem.sizes(), params={}, tensors={})
        asked = [x[None, span, :1].transpose(1, 2) for x in (q, k, v, do)]
        pairs = Pairs((0,), (0,))
        right, exact = (
            make(variant.bind(), case, *asked, scale=of.head_dim**-0.5, pairs=pairs)[:3]
            for make in (reference_gradients, baseline_gradients)
        )
        ours = [x[None, span, :1].transpose(1, 2) for x in found]
        verdicts = judge_gradients(ours, exact, right, "bfloat16")
        return [f"{what}: {reason}" for what, verdict in verdicts.items() for reason in verdict.reasons]

    return Contest(
        forms=forms,
        wrong=wrong,
        sums=shares(of, batches),
        flops=10 * of.head_dim * of.heads * _pairs(of, sees, ground),
        about={"documents": list(of.lengths)},
    )


def draw(of: Documents, ground: Ground) -> list[torch.Tensor]:
    """q, k, v and do, [tokens, heads, head_dim]."""
    import torch

    generator = torch.Generator(ground.device).manual_seed(ground.seed)
    made = {"device": ground.device, "generator": generator, "dtype": torch.bfloat16}
    return [torch.randn(of.tokens, of.heads, of.head_dim, **made) for _ in range(4)]


def joint(of: Documents, tensors: Sequence[torch.Tensor], variant: Variant) -> torch.Tensor:
    """One call for all documents."""
    starts = _starts(tuple(of.starts), tensors[0].device)
    return attention_varlen(*tensors, variant, starts, max_seqlen_q=max(of.lengths))


@functools.cache
def _starts(starts: tuple[int, ...], device: torch.device) -> torch.Tensor:
    import torch

    return torch.tensor(starts, dtype=torch.int32, device=device)


def apart(of: Documents, length: int, variant: Variant, ground: Ground) -> tuple[functools.partial, int]:
    """The dense call of as many documents of one length as have all tokens together, and their number."""
    import torch

    batch = max(1, of.tokens // length)
    shape = (batch, length, of.heads, of.head_dim)
    made = {"device": ground.device, "dtype": torch.bfloat16}
    q, k, v = (torch.randn(shape, **made).transpose(1, 2) for _ in range(3))
    return functools.partial(attention, q, k, v, variant), batch


def shares(of: Documents, batches: dict[int, int]) -> dict[str, dict[str, float]]:
    """What documents would take at the rate of the dense kernel for each length."""
    return {ALONE: {f"dense {n}": of.lengths.count(n) / batch for n, batch in batches.items()}}


def _pairs(of: Documents, sees: Callable, ground: Ground) -> int:
    """Pairs that the mask keeps, of one head."""
    import torch

    total = 0
    for n in of.lengths:
        k = torch.arange(n, device=ground.device)
        total += sum(int(sees(rows[:, None], k).sum()) for rows in k.split(1024))
    return total


def _arange(values: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.tensor(list(values), device=like.device)


def rows(of: Documents | None = None) -> list[Row]:
    """Both masks, both passes."""
    of = of or Documents()
    return [
        Row(
            part="varlen",
            name=f"{mask} {passing.__name__} d{of.head_dim} {of.tokens} tokens",
            make=functools.partial(passing, of, mask),
            timer=Eager(),
            bars={ALONE: 0.93},
        )
        for passing in (forward, backward)
        for mask in MASKS
    ]
