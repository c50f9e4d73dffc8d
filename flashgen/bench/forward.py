"""The forward beside its peers: every cell checked against float64 and timed in the same run."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashgen.bench import peers
from flashgen.bench.protocol import Ratio, Timings, interleave
from flashgen.errors import FlashgenError

if TYPE_CHECKING:
    import torch

    from flashgen.bench.cells import Cell

#: Relative error of a peer against flashgen above which they do not compute the same attention.
SAME = 2e-2


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One cell: its timings, the ratios to each peer, useful TFLOP/s, and what the check found (empty: right)."""

    cell: Cell
    timings: Timings
    flops: int
    tile: str
    reasons: tuple[str, ...]
    absent: Mapping[str, str]

    def tflops(self, name: str) -> float:
        """Useful TFLOP/s of a contender: masked pairs do not count."""
        return self.flops / self.timings.median_ms(name) * 1e-9

    def ratio(self, peer: str) -> Ratio:
        return self.timings.ratio("flashgen", peer)

    def as_json(self) -> dict[str, object]:
        names = list(self.timings.rounds)
        return {
            "cell": str(self.cell),
            "tile": self.tile,
            "reasons": list(self.reasons),
            "tflops": {name: round(self.tflops(name), 1) for name in names},
            "ratio": {
                name: [round(x, 4) for x in dataclasses.astuple(self.ratio(name))]
                for name in names
                if name != "flashgen"
            },
            "ms": {name: [round(x, 5) for x in rounds] for name, rounds in self.timings.rounds.items()},
            "absent": dict(self.absent),
        }


def measure(
    cell: Cell,
    pipeline: str,
    *,
    rounds: int,
    names: tuple[str, ...],
    files: Mapping[str, Callable[..., peers.Call | None]],
    seed: int = 0,
) -> Measured:
    """Check and time one cell on the current GPU, with fresh random input."""
    import numpy as np
    import torch

    from flashgen.analysis.counts import count
    from flashgen.analysis.facts import analyse
    from flashgen.analysis.tiles import Case
    from flashgen.ops.attention import attention
    from flashgen.ops.stages import plan as plan_of
    from flashgen.runtime.reference import baseline, judge, judge_lse, reference

    p = cell.problem
    variant = cell.variant()
    variant = dataclasses.replace(variant, pins=dataclasses.replace(variant.pins, pipeline=pipeline))
    values = variant.values(dict(cell.params))
    examples = {t.name: np.asarray(t.example(p, np.random.default_rng(seed))) for t in variant.tensors}
    case = Case(sizes=p.sizes(), params=values, tensors=examples)
    captured = {t.name: torch.as_tensor(examples[t.name]).to("cuda", getattr(torch, t.dtype)) for t in variant.tensors}
    inputs = {**values, **captured}
    generator = torch.Generator("cuda").manual_seed(seed)

    def draw(heads: int, length: int, dim: int) -> torch.Tensor:
        """[batch, heads, length, dim] as a model has it: heads and dim next to each other in memory."""
        x = torch.randn(p.batch, length, heads, dim, device="cuda", generator=generator)
        return x.to(getattr(torch, p.dtype)).transpose(1, 2)

    q = draw(p.heads, p.q_len, p.head_dim)
    k, v = (draw(p.kv_heads, p.kv_len, dim) for dim in (p.head_dim, p.v_head_dim))

    def flashgen() -> torch.Tensor:
        return attention(q, k, v, variant, **inputs)

    o, lse = attention(q, k, v, variant, return_lse=True, **inputs)
    scale = 1 / math.sqrt(p.head_dim)
    ref, ref_lse = reference(variant.bind(), case, q, k, v, scale=scale)
    base, _ = baseline(variant.bind(), case, q, k, v, scale=scale)
    reasons = [*judge(o, base, ref, p.dtype).reasons, *judge_lse(lse, ref_lse)]
    del ref, base, lse, ref_lse

    contenders: dict[str, Callable[[], object]] = {"flashgen": flashgen}
    absent: dict[str, str] = {}
    for name in [*names, *files]:
        try:
            if name in files:
                call = files[name](cell, q, k, v)
            elif name == "flex":
                call = peers.flex(cell, q, k, v, inputs)
            else:
                call = peers.sdpa(name, cell, q, k, v)
            if call is None:
                continue
            theirs = call()
        except FlashgenError:
            raise
        except Exception as error:  # a peer that refuses a cell is a fact about the peer, and is recorded
            absent[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else ''}"
            continue
        same_maths = variant.score_node is None or name == "flex"
        if same_maths and not (error := float((theirs.float() - o.float()).norm() / o.float().norm())) <= SAME:
            reasons.append(f"{name} differs by {error:.3g}")
        contenders[name] = call
    plan = plan_of(
        variant, batch=p.batch, heads=p.heads, kv_heads=p.kv_heads, seqlen=p.q_len, head_dim=p.head_dim, dtype=p.dtype
    )
    return Measured(
        cell=cell,
        timings=interleave(contenders, rounds=rounds),
        flops=2 * (p.head_dim + p.v_head_dim) * count(analyse(variant.bind()), case, plan.tile).visible,
        tile=str(plan.tile),
        reasons=tuple(reasons),
        absent=absent,
    )
