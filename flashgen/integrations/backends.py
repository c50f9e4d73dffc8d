"""Who served the last call of a thread that came in by another library's entrance."""

from __future__ import annotations

import functools
import threading
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """Who served a call: `name` is "flashgen", or "torch" for whoever serves without it, then with the `reason`."""

    name: str
    call: str
    reason: str | None = None


class _Last(threading.local):
    backend: Backend | None = None


_last = _Last()


def last_backend() -> Backend | None:
    """Who served this thread's last call that came in by an entrance of another library, and what the call was.

    These are scaled_dot_product_attention and what `activate` serves, flashgen.compat's functions, and attention of
    transformers.  None where there was none yet; calls in a compiled graph are not noted, but for those that PyTorch
    gives to its flash backend.
    """
    return _last.backend


def note(call: str, *, reason: str | None = None) -> None:
    """Remember that flashgen served a call, or with a `reason` that it did not."""
    if not torch.compiler.is_compiling():
        _last.backend = _served(call) if reason is None else Backend(name="torch", call=call, reason=reason)


@functools.lru_cache(maxsize=64)
def _served(call: str) -> Backend:
    """flashgen, of a call that has one name: models ask in each layer."""
    return Backend(name="flashgen", call=call)
