"""Calls that torch.compile leaves as they are; imported where it is under way, as torch._dynamo takes seconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


@torch.compiler.disable
def apart(function: Callable[..., Any], *args: Any) -> Any:
    """What a function returns, called between graphs."""
    return function(*args)
