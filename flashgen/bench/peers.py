"""The kernels flashgen is measured beside, as calls on one set of tensors; each computes the same attention."""

from __future__ import annotations

import functools
import runpy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashgen.errors import LaunchError

if TYPE_CHECKING:
    import torch

    from flashgen.bench.cells import Cell

Call = Callable[[], "torch.Tensor"]

#: SDPA's backends by the name they have in a table: FLASH is FlashAttention-2, CUDNN is cuDNN's fused kernel.
SDPA = {"fa2": "FLASH_ATTENTION", "cudnn": "CUDNN_ATTENTION"}

#: flashgen's own form beside the one that drops.
UNDROPPED = "no dropout"

#: Those whose results and speed are what others have at best: the bars of `flashgen bench data`.
BEST = ("cudnn", "fa3")

#: Cells that SDPA's kernels compute, and whether they are causal there.
KERNELS = {("full",): False, ("causal",): True}

#: Cells whose score function SDPA lacks: it costs a kernel time, and SDPA's causal kernel is the yardstick.
YARDSTICK = {("alibi",): True, ("causal", "softcap"): True}


def has_kernel(cell: Cell) -> bool:
    """Whether SDPA has a kernel for exactly this attention."""
    return cell.specs in KERNELS


def same_maths(name: str, cell: Cell) -> bool:
    """Whether a peer that takes part in a cell computes what flashgen does there."""
    return name not in SDPA or has_kernel(cell)


def of(name: str) -> Callable[..., Call | None]:
    """The peer of a name in a table: called with (cell, q, k, v, inputs) it gives its forward, or None."""
    return flex if name == "flex" else functools.partial(sdpa, name)


def builders(
    names: Sequence[str],
    cell: Cell,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    inputs: Mapping[str, object],
    dropout: float = 0.0,
) -> dict[str, Callable[[], Call | None]]:
    """What makes the forward of each of these packages; of those alone that can drop, where that is asked for."""
    if dropout:
        return {name: functools.partial(sdpa, name, cell, q, k, v, inputs, dropout) for name in names if name in SDPA}
    return {name: functools.partial(of(name), cell, q, k, v, inputs) for name in names}


def bare(name: str) -> Callable[..., Call | None]:
    """As `of`, but the forward belongs into `with backend(name)`: choosing a backend takes the host longer than it."""
    return flex if name == "flex" else unchosen


def backend(name: str) -> AbstractContextManager:
    """Where a peer that is a backend of SDPA is the chosen one."""
    return on(SDPA[name]) if name in SDPA else nullcontext()


def on(backend: str) -> AbstractContextManager:
    """Where a backend of SDPA, by PyTorch's name, is the chosen one."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel(getattr(SDPBackend, backend))


def sdpa(
    name: str,
    cell: Cell,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    inputs: Mapping[str, object],
    dropout: float = 0.0,
) -> Call | None:
    """Scaled-dot-product attention on one backend; None where SDPA has no such mask."""
    call = unchosen(cell, q, k, v, inputs, dropout)
    if call is None:
        return None

    def chosen() -> torch.Tensor:
        with backend(name):
            return call()

    return chosen


def unchosen(
    cell: Cell,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    inputs: Mapping[str, object],
    dropout: float = 0.0,
) -> Call | None:
    """Scaled-dot-product attention on whichever backend is the chosen one; None where SDPA has no such mask."""
    import torch

    causal = {**KERNELS, **YARDSTICK}.get(cell.specs)
    if causal is None:
        return None
    gqa = cell.problem.group > 1

    def call() -> torch.Tensor:
        attend = torch.nn.functional.scaled_dot_product_attention
        return attend(q, k, v, is_causal=causal, enable_gqa=gqa, dropout_p=dropout)

    return call


def flex(cell: Cell, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, inputs: Mapping[str, object]) -> Call | None:
    """Compiled FlexAttention, its block mask built beforehand; None where the variant is not written here for it."""
    import torch
    import torch._functorch.config
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def causal(b: Any, h: Any, i: Any, j: Any) -> Any:
        return i >= j

    def window(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (i >= j) & (i - j < inputs["window"])

    def alibi(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s - inputs["slopes"][h] * (i - j)

    def packed(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (i >= j) & (inputs["doc"][b, i] == inputs["doc"][b, j])

    def softcap(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return inputs["cap"] * torch.tanh(s / inputs["cap"])

    known = {
        ("full",): (None, None),
        ("causal",): (causal, None),
        ("sliding_window",): (window, None),
        ("alibi",): (causal, alibi),
        ("causal", "softcap"): (causal, softcap),
        ("causal", "document"): (packed, None),
    }
    if cell.specs not in known:
        return None
    mask, score = known[cell.specs]
    p = cell.problem
    batch = p.batch if cell.variant().uses("b") else None
    block_mask = mask and create_block_mask(mask, batch, None, p.q_len, p.kv_len, device=q.device)
    torch._dynamo.reset()  # after a few shapes it would no longer compile, and run unfused
    torch._functorch.config.donated_buffer = False  # else a backward frees what another one of the same o reads
    compiled = torch.compile(flex_attention, dynamic=False)

    def call() -> torch.Tensor:
        return compiled(q, k, v, score_mod=score, block_mask=block_mask, enable_gqa=p.group > 1)

    return call


def lse(name: str, cell: Cell, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Call | None:
    """lse of one of SDPA's backends, by the operator below SDPA; None where there is none, and of FlexAttention."""
    import torch

    causal = KERNELS.get(cell.specs)
    if causal is None or cell.problem.group > 1:
        return None
    match name:
        case "fa2":
            return lambda: torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[1]
        case "cudnn":
            return lambda: torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal)[1]
    return None


def from_file(path: Path, entry: str) -> Callable[..., Callable[[], object] | None]:
    """A peer that is no package: a function of a Python file that gives a call, or None for a cell it lacks.

    Raises LaunchError where the file cannot be read or has no function of the name `entry`.
    """
    return functions(path, entry)[entry]


def some(path: Path, entries: Sequence[str]) -> dict[str, Callable[..., Callable[[], object] | None]]:
    """Those of these functions that a peer's file has, by name.  Raises LaunchError where it has none of them."""
    made = _run(path)
    if not (found := {name: made[name] for name in entries if name in made}):
        known = ", ".join(entries)
        raise LaunchError(
            f"{path} defines none of the functions that this benchmark calls\n  nearest: {known}"
            if known
            else f"this benchmark calls no function of a peer's file, and was given {path}"
        )
    return found


def _run(path: Path) -> dict[str, Any]:
    """What a peer's file defines."""
    try:
        return runpy.run_path(str(path))
    except OSError as error:
        raise LaunchError(f"the peer {path} cannot be read: {error.strerror or error}") from error
    except Exception as error:  # whatever a person's file raises
        raise LaunchError(f"the peer {path} cannot be run: {type(error).__name__}: {error}") from error


def functions(path: Path, entry: str, *optional: str) -> dict[str, Callable[..., Callable[[], object] | None]]:
    """As `from_file`, with those of the `optional` names that the file has: by name."""
    made = _run(path)
    if entry not in made:
        raise LaunchError(f"{path} defines no function {entry}")
    return {name: made[name] for name in (entry, *optional) if name in made}
