"""Small kernels for the tests of the PTX interpreter: one instruction on arrays, or CUDA text compiled by NVRTC."""

from __future__ import annotations

import struct
from functools import lru_cache

import numpy as np

from flashgen.interpreter import Memory, Module, Report, load
from flashgen.runtime import nvrtc

_BITS = {1: "b8", 2: "b16", 4: "b32", 8: "b64"}
_KINDS = {"b16": "rs", "b32": "r", "b64": "rd"}


def instruction(text: str, out: np.dtype | type, *inputs: np.ndarray) -> np.ndarray:
    """Run `text` on each element: %o is the destination, %a %b %c the inputs, %p %q predicates, %t %u 32-bit spares.

    Registers have the width of their array's elements (at least 16 bits).
    """
    count = inputs[0].size
    out = np.dtype(out)
    declared = []
    body = []
    names = "abcd"[: len(inputs)]
    for n, (name, array) in enumerate(zip(names, inputs, strict=True)):
        size = array.dtype.itemsize
        declared.append(f".reg .b{max(16, 8 * size)} %{name};")
        body += [
            f"ld.param.u64 %base, [p{n}];",
            f"mad.wide.u32 %at, %i, {size}, %base;",
            f"ld.global.{'u8' if size == 1 else _BITS[size]} %{name}, [%at];",
        ]
    size = out.itemsize
    body += [
        text,
        f"ld.param.u64 %base, [p{len(inputs)}];",
        f"mad.wide.u32 %at, %i, {size}, %base;",
        f"st.global.{_BITS[size]} [%at], %o;",
    ]
    params = ", ".join(f".param .u64 p{n}" for n in range(len(inputs) + 1))
    source = f"""
.version 8.0
.target sm_80
.address_size 64
.visible .entry k({params})
{{
  .reg .pred %p, %q, %end;
  .reg .b32 %i, %t, %u;
  .reg .b64 %at, %base;
  .reg .b{max(16, 8 * size)} %o;
  {" ".join(declared)}
  mov.u32 %t, %ctaid.x;
  mov.u32 %u, %ntid.x;
  mov.u32 %i, %tid.x;
  mad.lo.u32 %i, %t, %u, %i;
  setp.ge.u32 %end, %i, {count};
  @%end ret;
  {chr(10).join(body)}
  ret;
}}"""
    result = np.zeros(count, out)
    memory = Memory()
    pointers = [memory.add(name, np.ascontiguousarray(array)) for name, array in zip(names, inputs, strict=True)]
    pointers.append(memory.add("out", result, writable=True))
    threads = min(256, -(-count // 32) * 32)
    load(source).launch("k", -(-count // threads), threads, 0, [struct.pack("Q", p) for p in pointers], memory)
    return result


@lru_cache(maxsize=64)
def compiled(source: str, arch: str = "sm_80") -> Module:
    """The module of CUDA text."""
    return load(nvrtc.ptx(source, arch), target=arch)


def launch(
    source: str,
    arrays: dict[str, np.ndarray],
    *values: int | float | bytes,
    grid: int = 1,
    block: int = 32,
    smem: int = 0,
    arch: str = "sm_80",
    writable: str = "out",
    edit=lambda text: text,
    **options,
) -> Report:
    """Compile CUDA text and launch its kernel `k` on arrays (pointers first, in order), then ints, floats and bytes.

    `edit` changes the PTX before it runs; `writable` names arrays, separated by spaces, that the kernel may write.
    """
    module = compiled(source, arch) if edit(".") == "." else load(edit(nvrtc.ptx(source, arch)), target=arch)
    memory = Memory()
    params = [
        struct.pack("Q", memory.add(name, array, writable=name in writable.split())) for name, array in arrays.items()
    ]
    for value in values:
        params.append(value if isinstance(value, bytes) else struct.pack("i" if isinstance(value, int) else "f", value))
    return module.launch("k", grid, block, smem, params, memory, **options)
