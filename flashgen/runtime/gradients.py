"""What gradients are checked against: PyTorch's autograd in float64, and the kernels' algorithm at its best.

As `runtime.reference`, in blocks of queries on the tensors' own device, and sharing nothing with kernels and walk but
the variant.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from flashgen.analysis.derivative import differentiable, differentiable_of
from flashgen.runtime.reference import (
    Block,
    Evaluator,
    Pairs,
    Verdict,
    blocks,
    judge,
    kept,
    online_softmax,
    products,
)

if TYPE_CHECKING:
    import torch

    from flashgen.analysis.tiles import Case
    from flashgen.lang.variant import Variant
    from flashgen.runtime.philox import Dropout


#: The gradients of q, k and v, as `Gradients` has them first.
OF_INPUTS = ("dq", "dk", "dv")


class Gradients(NamedTuple):
    """dq, dk and dv of the shapes of q, k and v, and those of the captured tensors that the score reads, by name."""

    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    captured: dict[str, torch.Tensor]


def reference_gradients(
    variant: Variant,
    case: Case,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    do: torch.Tensor,
    *,
    scale: float,
    dlse: torch.Tensor | None = None,
    dropout: Dropout | None = None,
    pairs: Pairs | None = None,
) -> Gradients:
    """Gradients of sum(o * do) + sum(lse * dlse) in float64, by autograd through `runtime.reference`'s maths.

    A row that attends to nothing has none, through lse neither.  With `pairs` the tensors are of these batches and
    heads of the case's problem, and gradients of captured tensors are what these add to them.
    """
    import torch

    evaluator, wanted = _evaluator(variant, case, q.device, torch.float64)
    k, v = (x.detach().double().requires_grad_() for x in (k, v))
    dq = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    with torch.enable_grad():
        for block in blocks(q, k, pairs):
            rows = block.rows_of(q.detach()).double().requires_grad_()
            s, _ = _scores(variant, evaluator, block, scale * products(rows, k))
            sink = evaluator.row_sinks(variant, torch.float64, block.symbols)
            m = s.detach().amax(-1)
            if sink is not None:
                m = torch.maximum(m, sink.detach()[..., 0])
            base = torch.where(m == -math.inf, 0.0, m)
            p = torch.exp(s - base[..., None])
            total = p.sum(-1)
            if sink is not None:
                total = total + torch.exp(sink[..., 0] - base)
            total = torch.where(total == 0, 1.0, total)  # of a row that sees nothing: log 1 has no gradient in p = 0
            p = p / total[..., None]
            if dropout is not None:
                p = torch.where(kept(dropout, **block.symbols, heads=case.sizes["heads"]), p * dropout.scale, 0.0)
            loss = (products(p, v.mT) * block.rows_of(do).double()).sum()
            if dlse is not None:
                loss = loss + (torch.log(total) * block.rows_of(dlse).double()).sum()
            loss.backward()
            block.rows_of(dq).copy_(_grad(rows))
    return Gradients(dq, *(_grad(x) for x in (k, v)), {name: _grad(x) for name, x in wanted.items()})


def baseline_gradients(
    variant: Variant,
    case: Case,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    do: torch.Tensor,
    *,
    scale: float,
    dlse: torch.Tensor | None = None,
    dropout: Dropout | None = None,
    pairs: Pairs | None = None,
) -> Gradients:
    """FlashAttention's backward behind `runtime.reference.baseline`: o, p, ds and the results rounded to q's dtype, all
    else in float32 (float64).

    delta = rowsum(do * o) - dlse and ds = p (dp - delta), as FlashAttention writes the backward of softmax (Dao et al.
    2022, appendix B.2).  Gradients of captured tensors stay in float32 (float64).  `pairs` as for the reference.
    """
    import torch

    precision = torch.float64 if q.dtype == torch.float64 else torch.float32
    factor = 1.0 if dropout is None else dropout.scale
    evaluator, wanted = _evaluator(variant, case, q.device, precision)
    captured = {name: torch.zeros_like(x) for name, x in wanted.items()}
    wide_k, wide_v = k.detach().to(precision), v.detach().to(precision)
    dq = torch.zeros(q.shape, dtype=precision, device=q.device)
    dk, dv = torch.zeros_like(wide_k), torch.zeros_like(wide_v)

    def rounded(x: torch.Tensor) -> torch.Tensor:
        return x.to(q.dtype).to(precision)

    for block in blocks(q, k, pairs):
        rows, do_rows = (block.rows_of(x.detach()).to(precision) for x in (q, do))
        with torch.enable_grad():
            raw = (scale * products(rows, wide_k)).requires_grad_()
            s, visible = _scores(variant, evaluator, block, raw)
        shown = s.detach()
        sink = evaluator.row_sinks(variant, precision, block.symbols)
        sink = None if sink is None else sink.detach()
        weights, lse = online_softmax(shown, q.dtype, sink)
        lse = lse[..., None]
        p = torch.where(lse == -math.inf, 0.0, torch.exp(shown - torch.where(lse == -math.inf, 0.0, lse)))
        dp, p_kept = products(do_rows, wide_v), p
        if dropout is not None:
            keep = kept(dropout, **block.symbols, heads=case.sizes["heads"])
            dp, p_kept, weights = (torch.where(keep, x, 0.0) for x in (dp * factor, p, weights))
        o = rounded(factor * products(weights, wide_v.mT))
        delta = (do_rows * o).sum(-1, keepdim=True)
        if dlse is not None:
            delta = delta - block.rows_of(dlse).to(precision)[..., None]
        ds = p * (dp - delta)
        if sink is not None:
            with torch.enable_grad():
                of_rows = evaluator.row_sinks(variant, precision, block.symbols).expand(*delta.shape)
            taken = torch.exp(sink - torch.where(lse == -math.inf, 0.0, lse))
            (found,) = torch.autograd.grad(of_rows, [wanted[variant.sink.name]], -taken * delta)
            captured[variant.sink.name] += found
        if s.requires_grad and s is not raw:
            by_score = {name: wanted[name] for name in differentiable(variant.score_node)}
            ds, *by_name = torch.autograd.grad(s, [raw, *by_score.values()], ds, allow_unused=True)
            ds = torch.zeros_like(raw) if ds is None else ds
            for name, found in zip(by_score, by_name, strict=True):
                captured[name] += found
        ds = rounded(ds if visible is None else torch.where(visible, ds, 0.0))
        block.rows_of(dq).copy_(scale * products(ds, wide_k.mT))
        dk += scale * _transposed_products(ds, rows)
        dv += factor * _transposed_products(rounded(p_kept), do_rows)
    return Gradients(dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype), captured)


def judge_gradients(
    found: Iterable[torch.Tensor],
    base: Sequence[torch.Tensor],
    ref: Sequence[torch.Tensor],
    dtype: str,
) -> dict[str, Verdict]:
    """dq, dk and dv by the tolerance rule of `runtime.reference.judge`, by name; `base` and `ref` begin with them."""
    each = zip(OF_INPUTS, found, base[:3], ref[:3], strict=True)
    return {name: judge(*tensors, dtype) for name, *tensors in each}


def judge_captured(found: torch.Tensor, base: torch.Tensor, ref: torch.Tensor) -> Verdict:
    """The gradient of a captured tensor, some draws stacked: its largest error is at most 4 times that of the baseline.

    It may have few elements, each a sum over very many pairs: too few for the rule of `runtime.reference.judge`.
    """
    import torch

    if not found.numel():
        return Verdict()
    largest = float(ref.abs().max())
    error, of_base = (float((x.double() - ref).abs().max()) for x in (found, base))
    ulp = torch.finfo(found.dtype).eps * largest
    limit = max(4 * of_base + ulp, 1e-12 * max(1.0, largest))
    reasons = [] if error <= limit else [f"largest error {error:.3g} exceeds {limit:.3g}"]
    if not math.isfinite(largest):
        reasons = ["the float64 reference itself is not finite"]
    return Verdict(
        max_error=error,
        baseline_max_error=of_base,
        max_limit=limit,
        elements=found.numel(),
        reasons=tuple(reasons),
    )


def _evaluator(
    variant: Variant, case: Case, device: torch.device, precision: torch.dtype
) -> tuple[Evaluator, dict[str, torch.Tensor]]:
    """What evaluates the variant, and of its captured tensors those whose gradients are found, which it reads."""
    evaluator = Evaluator(case, device)
    for name in differentiable_of(variant):
        evaluator.tensors[name] = evaluator.tensors[name].to(precision).requires_grad_()
    return evaluator, {name: evaluator.tensors[name] for name in differentiable_of(variant)}


def _scores(
    variant: Variant, evaluator: Evaluator, block: Block, s: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The scores of a block, -inf where masked, and which are visible (None: all).

    A score function sees visible pairs only, so that what it does elsewhere reaches no gradient.
    """
    import torch

    symbols: Mapping[str, torch.Tensor] = block.symbols
    visible = None
    if variant.mask is not None:
        visible = evaluator(variant.mask, torch.float32, symbols).expand_as(s)
    if variant.score_node is None:
        return (s if visible is None else torch.where(visible, s, -math.inf)), visible
    if visible is None:
        return evaluator(variant.score_node, s.dtype, {**symbols, "s": s}).expand_as(s), None
    seen = {name: x.expand_as(s)[visible] for name, x in symbols.items()}
    score = evaluator(variant.score_node, s.dtype, {**seen, "s": s[visible]})
    nothing = torch.full_like(s, -math.inf)
    return nothing.masked_scatter(visible, score.expand(int(visible.sum()))), visible


def _transposed_products(scores: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The transpose of [batch, kv_heads, group, queries, keys] times [batch, kv_heads, group, queries, n], summed over
    the group."""
    return scores.flatten(2, 3).mT @ rows.flatten(2, 3)


def _grad(x: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.zeros_like(x) if x.grad is None else x.grad
