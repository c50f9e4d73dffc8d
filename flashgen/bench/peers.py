"""The kernels flashgen is measured beside, as calls on one set of tensors; each computes the same attention."""

from __future__ import annotations

import runpy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from flashgen.errors import LaunchError

if TYPE_CHECKING:
    import torch

    from flashgen.bench.cells import Cell

Call = Callable[[], "torch.Tensor"]

#: SDPA's backends by the name they have in a table: FLASH is FlashAttention-2, CUDNN is cuDNN's fused kernel.
SDPA = {"fa2": "FLASH_ATTENTION", "cudnn": "CUDNN_ATTENTION"}


def sdpa(name: str, cell: Cell, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Call | None:
    """Scaled-dot-product attention on one backend; None where SDPA has no such mask or score."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    # A score function costs a kernel time and SDPA has none: its causal kernel is the yardstick there.
    causal = cell.specs[0] in ("causal", "alibi")
    if not causal and cell.specs != ("full",):
        return None
    backend, gqa = getattr(SDPBackend, SDPA[name]), cell.problem.group > 1

    def call() -> torch.Tensor:
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=gqa)

    return call


def flex(cell: Cell, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, inputs: Mapping[str, object]) -> Call | None:
    """Compiled FlexAttention, its block mask built beforehand; None where the variant is not written here for it."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def causal(b, h, i, j):
        return i >= j

    def window(b, h, i, j):
        return (i >= j) & (i - j < inputs["window"])

    def alibi(s, b, h, i, j):
        return s - inputs["slopes"][h] * (i - j)

    def softcap(s, b, h, i, j):
        return inputs["cap"] * torch.tanh(s / inputs["cap"])

    known = {
        ("full",): (None, None),
        ("causal",): (causal, None),
        ("sliding_window",): (window, None),
        ("alibi",): (causal, alibi),
        ("causal", "softcap"): (causal, softcap),
    }
    if cell.specs not in known:
        return None
    mask, score = known[cell.specs]
    p = cell.problem
    block_mask = mask and create_block_mask(mask, None, None, p.q_len, p.kv_len, device=q.device)
    torch._dynamo.reset()  # after a few shapes it would no longer compile, and run unfused
    compiled = torch.compile(flex_attention, dynamic=False)

    def call() -> torch.Tensor:
        return compiled(q, k, v, score_mod=score, block_mask=block_mask, enable_gqa=p.group > 1)

    return call


def from_file(path: Path) -> Callable[[Cell, torch.Tensor, torch.Tensor, torch.Tensor], Call | None]:
    """A peer that is no package: `peer(cell, q, k, v)` of a Python file gives a call, or None for a cell it lacks.

    Raises LaunchError where the file cannot be run or has no `peer`.
    """
    try:
        made = runpy.run_path(str(path))
    except OSError as error:
        raise LaunchError(f"the peer {path} cannot be read: {error.strerror}") from error
    if "peer" not in made:
        raise LaunchError(f"{path} defines no peer(cell, q, k, v)")
    return made["peer"]
