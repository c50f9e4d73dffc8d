"""Random input of a problem on the current GPU, as a model has it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from flashgen.planning.problem import Problem


def draw(problem: Problem, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v and do, [batch, heads, length, dim] with heads and dim next to each other in memory."""
    import torch

    p = problem
    generator = torch.Generator("cuda").manual_seed(seed)
    shapes = (
        (p.heads, p.q_len, p.head_dim),
        (p.kv_heads, p.kv_len, p.head_dim),
        (p.kv_heads, p.kv_len, p.v_head_dim),
        (p.heads, p.q_len, p.v_head_dim),
    )
    return tuple(
        torch.randn(p.batch, length, heads, dim, device="cuda", generator=generator)
        .to(getattr(torch, p.dtype))
        .transpose(1, 2)
        for heads, length, dim in shapes
    )
