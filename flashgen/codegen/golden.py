"""Golden CUDA: what is emitted for the shipped specs, kept in `generated/` so that every change to it is seen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashgen import files
from flashgen.codegen import quantize
from flashgen.codegen.emit import emit
from flashgen.lang.load import gallery, load_spec, shipped
from flashgen.planning import planner
from flashgen.planning.float8 import E4M3
from flashgen.planning.layout import Padded, Paged, Varlen
from flashgen.planning.members import FoldedLeaves, Leaves, SplitKeys
from flashgen.planning.plan import KernelPlan
from flashgen.planning.quantize import QuantizePlan
from flashgen.planning.quantize import plan as quantize_plan
from flashgen.planning.request import KernelRequest

#: (pipeline, arch) whose kernels are kept.
KEPT = (("ampere", "sm_80"), ("hopper", "sm_90a"))

DTYPE, HEAD_DIM = "bfloat16", 128

#: Specs whose backward of pipeline hopper, where it differs in kind from that of HEAD_DIM, is kept at this one too.
WIDE, WIDE_SPECS = 256, ("causal", "full", "softcap")

#: The spec whose backward for short sequences is kept too.
SHORT = "causal"

#: The spec whose forwards of packed heads are kept too.
PACKED = "causal_bottom_right"

#: The mask of real models whose forward of pipeline hopper is kept: asked for in words, and its tiles are put in order.
IN_WORDS = "global_flags"

#: The spec whose forward in 8 bits is kept, and its head dims: with three warpgroups, two, and P V in pieces.
FLOAT8, FLOAT8_DIMS = "causal", (64, 128, 192)

#: Options whose kernels differ in kind, by the folder that keeps them: the spec, and what is asked.
OPTIONS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "dropout": ("causal", {"dropout": True}),
    "padded": ("causal", {"layout": Padded()}),
    "varlen": ("causal", {"layout": Varlen()}),
    "split": ("causal_bottom_right", {"keys": SplitKeys()}),
    "leaves": ("causal_bottom_right", {"keys": FoldedLeaves()}),
    "leaves_in_parts": ("causal_bottom_right", {"keys": Leaves()}),
    "paged": ("causal", {"layout": Paged(queries=Varlen())}),
    "deterministic": ("causal", {"backward": True, "deterministic": True}),
    "gradients": ("alibi", {"backward": True, "gradients": ("slopes",)}),
    "sink": ("gpt_oss", {"backward": True, "gradients": ("sink",)}),
}

#: The folder of kernels that make tensors of 8 bits, and what is asked of each: the one that has a pass over memory,
#: the one that has two and does all that there is, and the first of sequences behind each other.
QUANTIZE = "quantize"
QUANTIZED: Mapping[str, dict[str, Any]] = {
    "own_scale": {"block": 128, "rotated": True, "centred": False},
    "shared_scale": {"block": None, "rotated": True, "centred": True},
    "varlen": {"block": 128, "rotated": True, "centred": False, "layout": Varlen()},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Golden:
    """One kept file: where it lies under `generated/`, what it should hold, and the plan it was made from."""

    path: Path
    text: str
    plan: KernelPlan | QuantizePlan

    @property
    def attends(self) -> bool:
        """Whether it is attention's, of a spec."""
        return isinstance(self.plan, KernelPlan)


def goldens() -> Iterator[Golden]:
    """Every kept file: the main plans of each shipped spec, forward and backward, in bfloat16, at head_dim 128 or the
    largest it allows, where the pipeline serves them; WIDE backwards and a SHORT one, forwards of PACKED heads, one of
    them for few queries over keys of 8 bits, forwards of 8 bits, a mask in words, and OPTIONS; and kernels that make
    tensors of 8 bits."""
    for pipeline, arch in KEPT:
        for name, path in sorted(shipped().items()):
            variant = load_spec(path).bind()
            head_dim = HEAD_DIM if HEAD_DIM in variant.head_dims else max(variant.head_dims)
            plans = [planner.menu(variant, arch, DTYPE, head_dim, head_dim, pipeline=pipeline).plans[0]]
            plans.append(planner.backward_menu(variant, arch, DTYPE, head_dim).plans[0])
            for plan in plans:
                if plan.pipeline != pipeline:  # another one serves it
                    continue
                yield Golden(path=Path(arch, plan.pass_name, f"{name}.cu"), text=emit(plan), plan=plan)
    for name in WIDE_SPECS:
        plan = planner.backward_menu(load_spec(shipped()[name]).bind(), "sm_90a", DTYPE, WIDE).plans[0]
        path = Path(plan.arch, plan.pass_name, f"head_dim_{WIDE}", f"{name}.cu")
        yield Golden(path=path, text=emit(plan), plan=plan)
    short = planner.backward_menu(load_spec(shipped()[SHORT]).bind(), "sm_90a", DTYPE, HEAD_DIM).small
    assert short is not None  # pipeline hopper has such a form
    yield Golden(path=Path(short.arch, short.pass_name, "short", f"{SHORT}.cu"), text=emit(short), plan=short)
    for _, arch in KEPT:
        plan = planner.menu(load_spec(shipped()[PACKED]).bind(), arch, DTYPE, HEAD_DIM, packed=True).plans[0]
        yield Golden(path=Path(arch, plan.pass_name, "packed", f"{PACKED}.cu"), text=emit(plan), plan=plan)
    variant = load_spec(shipped()[PACKED]).bind()
    decodes = planner.menu(variant, "sm_90a", DTYPE, HEAD_DIM, k_dtype=E4M3, v_dtype=E4M3, keys=SplitKeys())
    plan = decodes.few[0]
    yield Golden(path=Path(plan.arch, plan.pass_name, "widened", f"{PACKED}.cu"), text=emit(plan), plan=plan)
    plan = planner.menu(load_spec(gallery()[IN_WORDS]).bind(), "sm_90a", DTYPE, HEAD_DIM).plans[0]
    yield Golden(path=Path(plan.arch, plan.pass_name, "masks", f"{IN_WORDS}.cu"), text=emit(plan), plan=plan)
    variant = load_spec(shipped()[FLOAT8]).bind()
    for head_dim in FLOAT8_DIMS:
        plan = planner.menu(variant, "sm_90a", E4M3, head_dim).plans[0]
        path = Path(plan.arch, plan.pass_name, "float8", f"head_dim_{head_dim}", f"{FLOAT8}.cu")
        yield Golden(path=path, text=emit(plan), plan=plan)
    for folder, (name, asked) in OPTIONS.items():
        variant = load_spec(shipped()[name]).bind()
        for pipeline, arch in KEPT:
            request = KernelRequest.of(variant, arch, DTYPE, HEAD_DIM, pipeline=pipeline, **asked)
            plan = planner.menu_of(request).plans[0]
            yield Golden(path=Path(arch, plan.pass_name, folder, f"{name}.cu"), text=emit(plan), plan=plan)
    for name, asked in QUANTIZED.items():
        for _, arch in KEPT:
            quantizes = quantize_plan(arch, DTYPE, HEAD_DIM, **asked)
            yield Golden(path=Path(arch, QUANTIZE, f"{name}.cu"), text=quantize.emit(quantizes), plan=quantizes)


def stale(folder: Path) -> dict[Path, str | None]:
    """Files under `folder` that are not what is emitted now, with what they should hold; None: no file at all."""
    wanted = {folder / golden.path: golden.text for golden in goldens()}
    kept = {path for _, arch in KEPT for path in (folder / arch).rglob("*.cu")}
    differing = {path: text for path, text in wanted.items() if path not in kept or path.read_bytes() != text.encode()}
    return differing | dict.fromkeys(sorted(kept - set(wanted)))


def refresh(folder: Path) -> list[Path]:
    """Make the kept files what is emitted now; the paths that changed."""
    changed = stale(folder)
    for path, text in changed.items():
        if text is None:
            path.unlink()
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            files.write(path, text)
    return list(changed)
