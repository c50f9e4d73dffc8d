"""Numbers for the places where a traced model draws a dropout.

Imported while torch.compile traces, and then only: `torch.compiler.assume_constant_result` brings torch._dynamo, for
which an eager process would wait seconds.
"""

from __future__ import annotations

import itertools

import torch

_numbers = itertools.count()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def site() -> int:
    """A number that no other place has; a graph keeps the one it was traced with."""
    return next(_numbers)
