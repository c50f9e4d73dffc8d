"""Where graphs of torch.compile break: calls that none of them holds.  Whoever imports this imports torch._dynamo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


@torch.compiler.disable  # type: ignore[untyped-decorator]
def run(attend: Callable[..., Any], *given: Any) -> Any:
    """What `attend` gives, eagerly."""
    return attend(*given)
