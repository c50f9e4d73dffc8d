"""Kernels that quantise: compiled through the disk cache, and what a launch of one takes."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

from flashgen.codegen.quantize import emit
from flashgen.planning.quantize import QuantizePlan
from flashgen.runtime import cache, driver, nvrtc


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Of a launch: sequences, heads, rows of each, and rows that share a scale (0: all of a head)."""

    batch: int
    heads: int
    length: int
    block: int

    def blocks(self, plan: QuantizePlan) -> int:
        """Thread blocks of a head."""
        return -(-self.length // plan.rows)

    def blocks_of_scale(self, plan: QuantizePlan) -> int:
        """Thread blocks that share a scale."""
        return self.block // plan.rows if self.block else max(1, self.blocks(plan))

    def scales(self, plan: QuantizePlan) -> int:
        """Scales of a head."""
        return -(-self.blocks(plan) // self.blocks_of_scale(plan))

    def grid(self, plan: QuantizePlan) -> int:
        """Thread blocks in all."""
        return self.batch * self.heads * self.blocks(plan)


@functools.cache
def functions(plan: QuantizePlan, device: int) -> tuple[driver.Function, ...]:
    """The entries of a plan on a GPU, in the order in which they run."""

    def make() -> tuple[nvrtc.Compiled, dict[str, object]]:
        compiled = nvrtc.compile(emit(plan), plan.arch, name="quantize")
        return compiled, {"quantize": cache.as_data(plan), "nvrtc": nvrtc.version()}

    cubin = cache.default().fetch(cache.key(plan), make).cubin
    return tuple(driver.load(cubin, entry, smem_bytes=0, device=device) for entry in plan.scale.entries)


def launch(plan: QuantizePlan, sizes: Sizes, packed: bytes, *, device: int, stream: int) -> None:
    """Start its kernels on a stream."""
    buffer = ctypes.create_string_buffer(packed, len(packed))
    size = {"blocks": sizes.grid(plan), "threads": plan.threads, "early": plan.launches.early}
    for function in functions(plan, device):
        driver.Launcher(function, arguments=[ctypes.addressof(buffer)], **size)(stream)
