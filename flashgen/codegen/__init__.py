"""KernelPlans as CUDA: expressions printed, templates filled, one self-contained file a kernel."""

from __future__ import annotations

from flashgen.codegen.emit import emit

__all__ = ["emit"]
