"""Where a call's dropout draws from: torch's generator of the tensors' device, or a seed that the caller gives."""

from __future__ import annotations

from typing import Any

import torch

from flashgen.errors import LaunchError, shown
from flashgen.locks import Lock
from flashgen.ops.tracing import drawn_for_each
from flashgen.ops.values import WORD, no_number, no_seed
from flashgen.runtime.philox import Dropout

#: By how much a call moves torch's CUDA generator on, whose offsets are multiples of 4.
_STEP = 4

_generators = Lock()


def drawn(p: Any, seed: Any, like: torch.Tensor) -> Dropout | None:
    """The dropout of one call on tensors like this; None where nothing is dropped.

    Without a seed the numbers follow from torch's default generator of the device, which moves on: torch.manual_seed
    repeats them, and a checkpoint that restores the generator's state draws the same mask again.  Raises LaunchError.
    """
    if type(p) is float and p == 0.0 and seed is None:
        return None
    check(p)
    if wrong := no_seed(seed):
        raise LaunchError(wrong)
    if p == 0:
        return None
    if seed is None and drawn_for_each():
        raise LaunchError(
            "dropout under torch.func.vmap draws once, for all elements alike\n"
            '  nearest: torch.func.vmap(..., randomness="same"), or seed=...'
        )
    return dropout_of(float(p), *state(like, seed))


def check(p: Any) -> None:
    """Raise LaunchError for what is no probability in [0, 1)."""
    if wrong := no_number("dropout", p):
        raise LaunchError(wrong)
    if not 0 <= p < 1:  # a NaN neither
        nearest = 0.0 if not p > 0 else 0.99
        raise LaunchError(
            f"dropout is {shown(p)}: the probability of dropping lies in [0, 1), as what is kept grows by"
            f" 1 / (1 - dropout)\n  nearest: dropout={nearest}"
        )


def dropout_of(p: float, seed: int, offset: int) -> Dropout:
    """Of numbers that may be signed."""
    return Dropout(p=p, seed=seed & WORD, offset=offset & WORD)


def state(like: torch.Tensor, seed: int | None) -> tuple[int, int]:
    """Seed and offset for one call: of the caller's seed, else of torch's generator, which moves on.

    An offset drawn from a CUDA generator is one more than its own, a multiple of 4: the last word of the counter is
    then never 0, which it always is where torch's own kernels draw.
    """
    if seed is not None:
        return seed, 0
    if not getattr(like, "is_cuda", False):
        return int(torch.randint(-(1 << 63), (1 << 63) - 1, (), dtype=torch.int64, device="cpu")), 0
    if torch.cuda.is_current_stream_capturing():
        raise LaunchError(
            "dropout is being captured into a CUDA graph: seed and offset are numbers of the launch, so that every"
            " replay would drop the same pairs\n"
            "  nearest: give seed=... if that is meant, or capture without dropout"
        )
    generator = torch.cuda.default_generators[like.device.index]
    with _generators:
        packed = generator.get_state()
        words = packed.view(torch.int64)
        drawn_seed, offset = words.tolist()
        words[1] = offset + _STEP
        generator.set_state(packed)
    return drawn_seed, offset + 1
