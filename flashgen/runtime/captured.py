"""Captured tensors for those who have no caller to bring them: what a spec's examples make, and on a device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from flashgen.lang import source

if TYPE_CHECKING:
    import numpy as np
    import torch

    from flashgen.lang.variant import Variant
    from flashgen.planning.problem import Problem


def examples(variant: Variant, problem: Problem, seed: int) -> dict[str, np.ndarray]:
    """The arrays that the `example` of each captured tensor makes for a problem; SpecError, at its own line, where one
    ends the process."""
    import numpy as np

    try:
        return {t.name: np.asarray(t.example(problem, np.random.default_rng(seed))) for t in variant.tensors}
    except SystemExit as error:
        raise source.as_spec_error(error) from None


def on_device(
    variant: Variant, arrays: Mapping[str, np.ndarray], device: str | torch.device
) -> dict[str, torch.Tensor]:
    """The captured tensors as PyTorch tensors of their declared types."""
    import torch

    return {t.name: torch.as_tensor(arrays[t.name]).to(device, getattr(torch, t.dtype)) for t in variant.tensors}
