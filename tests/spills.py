"""What ptxas spills in kernels of masks: `python tests/spills.py [NAMES] [--archs sm_90a] [--all]`, without a GPU.

Each mask of `specs` and `tests/masks` is planned and compiled by NVRTC: forward and backward, and the backward with the
gradients of every captured tensor that has one, at head dims 64 and 128.  A line says what is spilled, and at the end
how many kernels each pipeline serves.  `--all` takes every plan of a menu, else the first; `--plans` compiles nothing.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from flashgen.analysis.derivative import differentiable_of
from flashgen.codegen import emit
from flashgen.errors import PlanError
from flashgen.lang.load import gallery, load_spec, shipped
from flashgen.lang.variant import Variant
from flashgen.planning import planner
from flashgen.planning.plan import KernelPlan
from flashgen.runtime import nvrtc

FILES = shipped() | gallery() | {file.stem: file for file in sorted((Path(__file__).parent / "masks").glob("*.py"))}


class Asked(NamedTuple):
    """Kernels of a mask: `kind` is a pass, or a backward with the gradients of what the score reads."""

    name: str
    kind: str
    arch: str
    head_dim: int
    dtype: str

    def __str__(self) -> str:
        return f"{self.name} {self.kind} {self.arch} d{self.head_dim} {self.dtype}"


def variants() -> dict[str, Variant]:
    """Every mask of the repository by its name, with its constants bound."""
    return {name: load_spec(str(file)).bind() for name, file in FILES.items()}


def plans(variant: Variant, asked: Asked) -> tuple[KernelPlan, ...]:
    """The menu of what is asked, of a backward with its form for short sequences; raises PlanError."""
    where = variant, asked.arch, asked.dtype, asked.head_dim
    if asked.kind == "forward":
        return planner.menu(*where).plans
    gradients = differentiable_of(variant) if asked.kind == "gradients" else ()
    return planner.backward_menu(*where, gradients=gradients).forms


def grid(
    known: dict[str, Variant], archs: list[str], head_dims: list[int], dtypes: list[str], kinds: list[str]
) -> Iterator[Asked]:
    for name, variant in known.items():
        for kind in kinds:
            if kind != "gradients" or differentiable_of(variant):
                yield from (Asked(name, kind, a, d, t) for a in archs for d in head_dims for t in dtypes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="masks; all, without one")
    for option, default in (
        ("archs", "sm_90a,sm_80"),
        ("head-dims", "64,128"),
        ("dtypes", "bfloat16"),
        ("kinds", "forward,backward,gradients"),
    ):
        parser.add_argument(f"--{option}", default=default)
    parser.add_argument("--all", action="store_true", help="every plan of a menu")
    parser.add_argument("--plans", action="store_true", help="which pipelines serve; nothing is compiled")
    options = parser.parse_args()
    known = variants()
    if options.names:
        known = {name: known[name] for name in options.names}
    served: Counter[tuple[str, str, int, str]] = Counter()
    spilled = compiled = 0
    head_dims = [int(d) for d in options.head_dims.split(",")]
    lists = options.archs.split(","), head_dims, options.dtypes.split(","), options.kinds.split(",")
    for asked in grid(known, *lists):
        try:
            menu = plans(known[asked.name], asked)
        except PlanError as error:
            served[asked.kind, asked.arch, asked.head_dim, "none"] += 1
            print(f"{asked}: {str(error).splitlines()[0]}", flush=True)
            continue
        served[asked.kind, asked.arch, asked.head_dim, menu[0].pipeline] += 1
        for plan in () if options.plans else menu if options.all else menu[:1]:
            resources = nvrtc.compile(emit(plan), plan.arch).resources
            compiled += 1
            spilled += bool(resources.spills)
            if resources.spills:
                tile = f"{plan.pipeline} {plan.tile}, {plan.stages} stages"
                print(f"{asked}: {tile}: {resources.spills} bytes of spills", flush=True)
    print(f"{spilled} of {compiled} kernels spill")
    for (kind, arch, head_dim, pipeline), count in sorted(served.items()):
        print(f"{kind} {arch} d{head_dim}: {pipeline} {count}")


if __name__ == "__main__":
    main()
