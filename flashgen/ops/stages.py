"""The stages one by one, for a person at a prompt: plan(), emit(), compile(); attention() runs them all by itself."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from os import PathLike
from typing import TYPE_CHECKING

from flashgen import codegen
from flashgen.errors import PlanError, shown
from flashgen.lang.variant import Variant
from flashgen.ops.options import apart, option, plan_of, variant_of
from flashgen.planning import division, paging, planner
from flashgen.planning.arch import find, newest, of_device
from flashgen.planning.layout import Layout
from flashgen.planning.members import ALL_KEYS, FoldedLeaves, Keys, SplitKeys
from flashgen.planning.plan import KernelPlan
from flashgen.planning.problem import Problem
from flashgen.planning.request import KernelRequest
from flashgen.planning.traffic_sequences import own_lengths
from flashgen.runtime import driver, kernel
from flashgen.runtime.kernel import Kernel

if TYPE_CHECKING:
    import torch


def plan(
    variant: Variant | str | PathLike[str],
    *,
    batch: int | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    seqlen: int | None = None,
    kv_seqlen: int | None = None,
    head_dim: int | None = None,
    v_head_dim: int | None = None,
    dtype: str | torch.dtype | None = None,
    arch: str | None = None,
    pipeline: str | None = None,
    tile: tuple[int, int] | None = None,
    stages: int | None = None,
    q_stages: int | None = None,
    dropout: bool = False,
    packed: bool = False,
    kv_splits: int | None = None,
    invariant: bool = False,
    backward: bool = False,
    deterministic: bool = False,
    gradients: Sequence[str] = (),
    layout: str = "dense",
    q_lengths: Sequence[int] | None = None,
    kv_lengths: Sequence[int] | None = None,
    page_size: int | None = None,
    k_dtype: str | torch.dtype | None = None,
    v_dtype: str | torch.dtype | None = None,
    out_dtype: str | torch.dtype | None = None,
    accuracy: str | None = None,
    **constants: int | float,
) -> KernelPlan:
    """The kernel that a variant (or spec file) gets: for a problem where `seqlen` is given, else for long sequences.

    Unless given: batch 1 and 8 heads for a problem, head_dim 128 if the variant declares it, else its largest; bfloat16
    if it declares it; the arch that it pins, else that of the first GPU, else sm_90a.  `tile` (queries, keys), `stages`
    (of keys, in shared memory), `q_stages` (of queries: 1 or 2, on Hopper) and `pipeline` fix what the planner would
    choose; `packed` asks for tiles that hold all heads which share keys, as problems with few queries get them.  With
    `kv_splits` above 1 the kernel whose keys so many blocks divide, with 1 one that visits all: of a problem flashgen
    chooses unless it is given, and a plan holds the choice, not the number; with `invariant` the kernel that
    folds leaves of keys, or of which each leaf is a part.  With `backward` the kernels of its
    gradients, those of the captured tensors in `gradients` too, and with `deterministic` in one order of sums.
    `layout` says how sequences lie ("dense", "padded", "varlen" ...), and `q_lengths` and `kv_lengths` how long each is
    where they have lengths of their own, which are then the problem; pages have `page_size` rows, 16 unless given.
    `k_dtype` and `v_dtype` are those of keys and values of 8 bits, beside queries (`dtype`) of 8 or 16; `out_dtype` and
    `accuracy` are of 8-bit queries ("float8_e4m3fn").  `fallbacks` of the result name the better pipelines of
    the arch that do not serve this, and why.  Raises PlanError with the limit that the request hits and the nearest
    thing that works, and SpecError for a file that is no spec.
    """
    sizes = {"batch": batch, "heads": heads, "kv_heads": kv_heads, "seqlen": seqlen, "kv_seqlen": kv_seqlen}
    sizes = {name: option(name, value) for name, value in sizes.items()}
    lies: Layout = option("layout", layout)
    if q_lengths is not None or kv_lengths is not None:
        sizes |= _of_lengths(lies, sizes, q_lengths, kv_lengths)
        seqlen = sizes["seqlen"]
    for name, value in sizes.items():
        if value is not None and seqlen is None:
            raise PlanError(f"{name} alone is no problem\n  nearest: give seqlen too")
    variant = variant_of(variant)
    where: str = default_arch(variant) if arch is None else option("arch", arch)
    width: int = default_head_dim(variant) if head_dim is None else option("head_dim", head_dim)
    kind: str = default_dtype(variant) if dtype is None else option("dtype", dtype)
    integers, constants = apart({"stages": stages, "q_stages": q_stages, **constants})
    splits = option("kv_splits", kv_splits)
    leaves: bool = option("invariant", invariant)
    bound = variant.bind(**constants)
    request = KernelRequest.of(
        *(bound, where, kind, width, option("v_head_dim", v_head_dim)),
        pipeline=option("pipeline", pipeline),
        tile=option("tile", tile),
        dropout=option("dropout", dropout),
        packed=option("packed", packed),
        backward=option("backward", backward),
        deterministic=option("deterministic", deterministic),
        gradients=option("gradients", gradients),
        keys=keys_of(splits, leaves),
        layout=lies,
        k_dtype=option("k_dtype", k_dtype),
        v_dtype=option("v_dtype", v_dtype),
        out_dtype=option("out_dtype", out_dtype),
        accuracy=option("accuracy", accuracy),
        **{name: option(name, value) for name, value in integers.items()},
    )
    rows = paging.rows_of_pages(lies.name, lies.paged, option("page_size", page_size))
    menu = paging.menu_of_pages(request, rows)
    if seqlen is None:
        return menu.plans[0]
    given = {name: value for name, value in sizes.items() if value is not None}
    heads = given.get("heads", 8)
    problem = Problem(
        batch=given.get("batch", 1),
        heads=heads,
        kv_heads=given.get("kv_heads", heads),
        q_len=given["seqlen"],
        kv_len=given.get("kv_seqlen", given["seqlen"]),
        head_dim=menu.plans[0].head_dim,
        v_head_dim=menu.plans[0].v_head_dim,
        dtype=kind,
        kv_dtype=None if request.float8 is None else request.float8.k,
    )
    sms = sm_count(where)
    if backward or splits is not None:
        return planner.choose(menu, problem, sms)
    params = bound.values({}, complete=False)
    found = division.divide(
        lambda keys: paging.menu_of_pages(request.visiting(keys), rows),
        problem,
        sms,
        params=params,
        layout=request.layout,
        invariant=leaves,
        alike=q_lengths is kv_lengths is None,
    )
    return found.plan


def keys_of(splits: int | None, invariant: bool) -> Keys:
    """The keys that a block of a kernel visits; PlanError for what is no number of blocks."""
    division.check_splits(splits)
    division.check_together(splits, invariant)
    if invariant:
        return FoldedLeaves()
    return SplitKeys() if splits is not None and splits > 1 else ALL_KEYS


def _of_lengths(
    layout: Layout, sizes: dict[str, int | None], q: Sequence[int] | None, kv: Sequence[int] | None
) -> dict[str, int | None]:
    """Sizes of the batch that sequences of these lengths make; PlanError for a layout that has none."""
    if not layout.own:
        given = "q_lengths" if q is not None else "kv_lengths"
        raise PlanError(f'{given} are of sequences with lengths of their own\n  nearest: layout="padded"')
    for name, lengths in (("q_lengths", q), ("kv_lengths", kv)):
        if lengths is not None and (not isinstance(lengths, tuple | list) or not all(map(_whole, lengths))):
            cure = f"{name}={name}.tolist()" if hasattr(lengths, "tolist") else f"{name}=[17, 8]"
            raise PlanError(f"{name} is {shown(lengths)}: it is a list of whole numbers\n  nearest: {cure}")
    own = own_lengths(sizes["batch"], sizes["seqlen"], sizes["kv_seqlen"], q, kv)
    longest = {"seqlen": max(one.q_rows for one in own), "kv_seqlen": max(one.kv_len for one in own)}
    return {"batch": len(own), **longest}


def _whole(number: object) -> bool:
    return isinstance(number, numbers.Integral) and not isinstance(number, bool)


def emit(plan: KernelPlan) -> str:
    """The CUDA of a plan: one self-contained file."""
    return codegen.emit(plan_of("emit", plan))


def compile(plan: KernelPlan) -> Kernel:
    """A plan's kernel, through the disk cache: `cubin`, `resources`, and what attention() launches.

    Raises CompileError with NVRTC's log.
    """
    return kernel.load(plan_of("compile", plan))


def default_arch(variant: Variant) -> str:
    """The arch that the variant pins, else that of the first GPU, else the newest that has a pipeline of its own."""
    if variant.pins.arch is not None:
        return variant.pins.arch
    if driver.gpus():
        return of_device(*driver.gpu(0).capability).name
    return newest().name


def default_head_dim(variant: Variant) -> int:
    """128 where the variant declares it, else the largest that it declares."""
    return 128 if 128 in variant.head_dims else max(variant.head_dims)


def default_dtype(variant: Variant) -> str:
    """bfloat16 where the variant declares it."""
    return "bfloat16" if "bfloat16" in variant.dtypes else variant.dtypes[0]


def sm_count(arch: str) -> int:
    """SMs of the first GPU where it has this arch, else of the arch's reference card."""
    wanted = find(arch)
    if driver.gpus() and of_device(*driver.gpu(0).capability) == wanted:
        return driver.gpu(0).sms
    return wanted.sms
