"""Where consumers of Hopper's forward spend their clocks: `python tests/clocks.py full causal --seqlens 512 8192`.

Behind each part of a step, and of the end of a tile of queries, the emitted text reads the clock of the SM; one thread
of each warpgroup adds up what each part took.  This needs a GPU; `--compile` says what the changed text spills.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from unittest import mock

import numpy as np

from flashgen.bench import cells
from flashgen.bench.cells import Cell
from flashgen.codegen import emit
from flashgen.planning import planner
from flashgen.planning.plan import KernelPlan
from flashgen.runtime import nvrtc

#: Parts, how the function begins in which each ends (any, where that is empty), and the line behind which it has ended.
PARTS: Sequence[tuple[str, str, str]] = (
    ("K awaited", "", r" *await_full\(shared\.k_pipe, k_ring\);\n"),
    ("S issued", "", r" *issue_qk\(s\);\n"),
    ("P V issued", "", r" *issue_pv\(\);\n"),
    ("S awaited", "", r" *wgmma_wait_group<[01]>\(\);\n *pin\(s\);\n"),
    ("softmax", "", r" *exponentiate_rows\(.*\n"),
    ("P V awaited", "  DEVICE void await_pv(", r" *pin\(o\);\n"),
    ("P rounded", "", r" *round\(s\);\n"),
    ("O rescaled", "", r" *if \(moved\) rescale(_o)?\(\);\n"),
    ("tile awaited", "  DEVICE void run(", r" *(const Work coming = await_work|work_ring = await_visible)\(.*\n"),
    ("queries awaited", "", r" *await_full\(shared\.q_pipe\[warpgroup\], q_ring\);\n"),
    ("factors and lse", "  DEVICE void store(", r" *multiply_rows\(o, factor\);\n"),
    ("O stored", "  DEVICE void store(", r" *if \(.*\) store_lse\(.*\n"),
)

STEP, TILE = (next(i for i, part in enumerate(PARTS) if part[0] == name) for name in ("P rounded", "O stored"))

MEMBERS = f"""  u32 spent[{len(PARTS)}] = {{}}, times[{len(PARTS)}] = {{}}, at = tick();

  template <int PART> DEVICE void mark() {{
    const u32 now = tick();
    spent[PART] += now - at;
    if (PART == {STEP} || PART == {TILE}) times[PART]++;
    at = now;
  }}

"""

REPORT = f"""      if (work_at(work_ring).q_tile < 0) {{
        if (threadIdx.x % 128 == 0)
#pragma unroll
          for (int i = 0; i < {len(PARTS)}; i++) {{
            atomicAdd(&clocks[i], (unsigned long long)spent[i]);
            atomicAdd(&clocks[{len(PARTS)} + i], (unsigned long long)times[i]);
          }}
        return;
      }}
"""


def marked(text: str) -> str:
    """The text of a forward whose consumers count clocks.  Raises ValueError where it lacks a part."""
    head, begin, rest = text.partition("struct Consumer {\n")
    body, end, tail = rest.partition("\n};\n")
    functions = re.split(r"(?<=\n)(?=  (?:template .*)?DEVICE )", body)
    for i, (name, function, line) in enumerate(PARTS):
        found = 0
        for at, one in enumerate(functions):
            if one.startswith(function):
                functions[at], times = re.subn(line, lambda match, i=i: f"{match[0]}mark<{i}>();\n", one)
                found += times
        if not found:
            raise ValueError(f"{name} ends nowhere: no line is {line!r}")
    body = "".join(functions).replace("      if (work_at(work_ring).q_tile < 0) return;\n", REPORT)
    counter = f"""__device__ unsigned long long clocks[{2 * len(PARTS)}];
DEVICE u32 tick() {{ u32 t; asm volatile("mov.u32 %0, %%clock;" : "=r"(t)); return t; }}

"""
    fields, first, others = body.partition("  // Read where it is used")
    return head + counter + begin + fields + MEMBERS + first + others + end + tail


def chosen(cell: Cell) -> KernelPlan:
    """The plan that serves a cell on an H200."""
    p = cell.problem
    found = planner.menu(cell.variant().bind(), "sm_90a", p.dtype, p.head_dim, p.v_head_dim, pipeline="hopper")
    return planner.choose(found, p, sms=132)


@contextlib.contextmanager
def counting() -> Iterator[list]:
    """Where kernels count clocks: the modules that are loaded there.  A kernel serves other cells from then on."""
    from cuda.bindings import driver as api

    modules, load, compiled = [], api.cuModuleLoadData, nvrtc.compile

    def loaded(cubin: bytes) -> tuple:
        result = load(cubin)
        modules.append(result[1])
        return result

    def compile_marked(text: str, *args, **options) -> nvrtc.Compiled:
        return compiled(marked(text) if "struct Consumer {" in text else text, *args, **options)

    with mock.patch.object(api, "cuModuleLoadData", loaded), mock.patch.object(nvrtc, "compile", compile_marked):
        yield modules


def totals(modules: Sequence) -> np.ndarray:
    """What all counters of these modules hold now: clocks of each part, then how often each ended."""
    import torch
    from cuda.bindings import driver as api

    torch.cuda.synchronize()
    total = np.zeros(2 * len(PARTS), np.uint64)
    for module in modules:
        status, address, size = api.cuModuleGetGlobal(module, b"clocks")
        if int(status) == 0:
            held = np.zeros_like(total)
            api.cuMemcpyDtoH(held.ctypes.data, address, size)
            total += held
    return total


def measured(cell: Cell, name: str, modules: Sequence) -> dict[str, int]:
    """Clocks of each part, and how many steps and tiles there were, of one call on the current GPU."""
    from flashgen.bench import inputs
    from flashgen.ops.attention import attention

    q, k, v, _ = inputs.draw(cell.problem, 0, name)
    attention(q, k, v, cell.variant())  # compiles, and warms up
    before = totals(modules)
    attention(q, k, v, cell.variant())
    spent, times = np.split((totals(modules) - before).astype(int), 2)
    found = {part: int(clocks) for (part, _, _), clocks in zip(PARTS, spent, strict=True)}
    return found | {"steps": int(times[STEP]), "tiles": int(times[TILE])}


def table(found: dict[str, int]) -> str:
    """Clocks of a tile of queries, by part.  Raises SystemExit where no tile was counted."""
    steps, tiles = found.pop("steps"), found.pop("tiles")
    if not tiles:
        raise SystemExit("no kernel of pipeline hopper ran here: it takes a GPU of compute capability 9.0")
    lines = [
        f"{sum(found.values()) / tiles:,.0f} clocks a tile of queries",
        f"  {'part':16} {'a tile':>9} {'a step':>8}   ({steps / tiles:.1f} steps a tile)",
    ]
    return "\n".join(lines + [f"  {part:16} {n / tiles:9,.0f} {n / steps:8,.0f}" for part, n in found.items()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("specs", nargs="+")
    parser.add_argument("--head-dims", nargs="+", type=int, default=[128])
    parser.add_argument("--seqlens", nargs="+", type=int, default=[8192])
    parser.add_argument("--inputs", nargs="+", default=["normal"], help="as flashgen bench data names them")
    parser.add_argument("--compile", action="store_true", help="only compile the texts")
    args = parser.parse_args()
    asked = itertools.product(args.specs, args.head_dims, args.seqlens)
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict(os.environ, FLASHGEN_CACHE_DIR=folder),
        counting() as modules,
    ):
        for cell in itertools.starmap(cells.cell, asked):
            plan = chosen(cell)
            if args.compile:
                spilled = nvrtc.compile(emit(plan), plan.arch).resources.spill_stores
                print(f"{cell}, tile {plan.tile}: {spilled} bytes spilled")
                continue
            for name in args.inputs:
                print(f"{cell} {name}, tile {plan.tile}: {table(measured(cell, name, modules))}")


if __name__ == "__main__":
    main()
