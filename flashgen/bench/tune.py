"""What `flashgen tune` measures: every candidate that fits, on a few shapes, checked, and written as a record."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashgen import files, jsonfile
from flashgen.analysis.tiles import Case
from flashgen.bench.inputs import draw
from flashgen.bench.protocol import interleave
from flashgen.bench.record import environment
from flashgen.errors import CompileError, LaunchError
from flashgen.planning import records
from flashgen.planning.arch import Arch
from flashgen.planning.integers import shown
from flashgen.planning.plan import KernelPlan, Tile
from flashgen.planning.planner import PIPELINES
from flashgen.planning.problem import Problem
from flashgen.planning.request import Fixed, KernelRequest
from flashgen.runtime import driver
from flashgen.runtime import kernel as kernels
from flashgen.runtime.captured import examples, on_device
from flashgen.runtime.launch import COUNTERS, Captured, make_launch
from flashgen.runtime.reference import baseline, judge, judge_lse, reference

if TYPE_CHECKING:
    import torch

    from flashgen.lang.variant import Variant

#: (batch x heads x head_dim, length): long and short, filling the GPU and not.
SHAPES = ((65_536, 512), (16_384, 2048), (4096, 8192), (2048, 16_384), (1024, 512), (1024, 2048), (1024, 8192))

#: Keys in a tile, beside those that the planner tries by itself.
TILE_KV = range(32, 193, 16)

#: Candidates that are compiled, best predicted first; those that are timed in full after one quick round; those kept.
COMPILED, TIMED, KEPT = 64, 12, 10

#: Warps that share an SM: fewer hide too little, more have too few registers.
WARPS = (8, 16)

#: Registers of a thread beside accumulators and Q below which compiling is not worth the time: it spills.
SPARE_REGISTERS = 24

#: Queries and keys of the problem that every candidate is checked on: no multiple of any tile.
CHECKED = (301, 333)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A candidate as a plan, and its fields."""

    form: Mapping[str, object]
    plan: KernelPlan

    def __str__(self) -> str:
        p = self.plan
        q = ", q in registers" if p.q_in_registers else ""
        return f"{p.tile}, {shown(p)}, {p.warps} warps, {p.blocks_per_sm} blocks{q}"


def contenders(variant: Variant, arch: str, pipeline: str, dtype: str, head_dim: int, v_head_dim: int) -> list:
    """Candidates whose shared memory fits, with each number of blocks an SM has room for.

    Registers are not judged: the compiler tells which candidates spill, and those are dropped.  Best predicted first.
    """
    module = PIPELINES[pipeline]
    request = KernelRequest.of(variant, arch, dtype, head_dim, v_head_dim, pipeline=pipeline)
    found = request.arch
    free = list(module.candidates(Fixed()))
    tiles = dict.fromkeys(
        [c.tile for c in free] + [Tile(q=q, kv=kv) for q in {c.tile.q for c in free} for kv in TILE_KV]
    )
    made: dict[KernelPlan, Contender] = {}
    for tile in tiles:
        for stages in sorted({c.stages for c in free}):
            for c in module.candidates(Fixed(tile=tile, stages=stages)):
                if sum(part.amount for part in module.smem(c, request)) > found.smem_per_block:
                    continue
                plan = module.plan(c, request)
                for blocks in _blocks(plan, found):
                    one = dataclasses.replace(plan, blocks_per_sm=blocks)
                    made.setdefault(one, Contender(form=_plain(dataclasses.asdict(c)), plan=one))
    ranked = sorted(made.values(), key=lambda c: (module.seconds_per_score(c.plan, found)[-1], str(c)))
    places: dict[int, int] = {}

    def place(c: Contender) -> int:
        """Among those with as many queries in a tile: small problems want small tiles, whatever the prediction."""
        places[c.plan.tile.q] = places.get(c.plan.tile.q, 0) + 1
        return places[c.plan.tile.q]

    return sorted(ranked, key=place)


def _blocks(plan: KernelPlan, arch: Arch) -> Iterator[int]:
    """Numbers of blocks per SM to compile for: one where the blocks of a pipeline share none."""
    if not PIPELINES[plan.pipeline].SHARES_SM:
        yield plan.blocks_per_sm
        return
    room = max(1, min(arch.smem_per_sm // (plan.smem_bytes + arch.smem_reserved), WARPS[1] // plan.warps))
    held = sum(part.amount for part in plan.registers if part.name in ("o", "s", "q"))
    for blocks in range(1, room + 1):
        enough = arch.registers_per_sm >= blocks * plan.threads * (held + SPARE_REGISTERS)
        if enough and (blocks == room or blocks * plan.warps >= WARPS[0]):
            yield blocks


def problems(head_dim: int, v_head_dim: int, dtype: str) -> list[Problem]:
    """The shapes, with as many heads as keep the work of a shape alike for every head dim."""
    made = []
    for width, length in SHAPES:
        heads = max(1, width // head_dim)
        batch = max(1, heads // 32)
        heads //= batch
        made.append(
            Problem(
                batch=batch,
                heads=heads,
                kv_heads=heads,
                q_len=length,
                kv_len=length,
                head_dim=head_dim,
                v_head_dim=v_head_dim,
                dtype=dtype,
            )
        )
    return made


def tune(
    variant: Variant,
    arch: str,
    pipeline: str,
    dtype: str,
    head_dim: int,
    v_head_dim: int,
    *,
    rounds: int,
    advance: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> dict[str, object]:
    """The entry of a record for the class of `variant` (constants bound), measured on the current GPU.

    `advance(what, done, total)` reports progress.  Raises LaunchError where no candidate compiles without spills or
    where a result is wrong.
    """
    found = contenders(variant, arch, pipeline, dtype, head_dim, v_head_dim)[:COMPILED]

    def build(one: Contender) -> kernels.Kernel | None:
        try:
            loaded = kernels.load(one.plan)
        except CompileError:
            return None
        return loaded if loaded.resources.spills == 0 else None

    built: dict[str, tuple[Contender, kernels.Kernel]] = {}
    with ThreadPoolExecutor() as pool:
        for i, (one, loaded) in enumerate(zip(found, pool.map(build, found), strict=True)):
            advance("compiling", i + 1, len(found))
            if loaded is not None:
                built[str(one)] = one, loaded
    if not built:
        raise LaunchError(f"no candidate of {variant.name!r} (head_dim {head_dim}) compiles for {arch} without spills")
    _check(variant, head_dim, v_head_dim, dtype, built)

    shapes = problems(head_dim, v_head_dim, dtype)
    quick: dict[str, list[float]] = {name: [] for name in built}
    steps = 2 * len(shapes)
    for i, problem in enumerate(shapes):
        advance("a first look", i, steps)
        calls = _calls(variant, problem, built)
        timings = interleave(calls, slot_ms=0.5)
        for name in built:
            quick[name].append(timings.median_ms(name))
    fastest = [min(times[j] for times in quick.values()) for j in range(len(shapes))]
    # The best of each shape, then the best in the mean.
    order = sorted(built, key=lambda name: sum(math.log(t / f) for t, f in zip(quick[name], fastest, strict=True)))
    first = [min(built, key=lambda name: quick[name][j]) for j in range(len(shapes))]
    kept = list(dict.fromkeys([*first, *order]))[:TIMED]
    results: dict[str, list[tuple[float, ...]]] = {name: [] for name in kept}
    for i, problem in enumerate(shapes):
        advance("timing", len(shapes) + i, steps)
        timings = interleave(_calls(variant, problem, {name: built[name] for name in kept}), rounds=rounds, slot_ms=4.0)
        for name in kept:
            results[name].append(timings.rounds[name])
    advance("timing", steps, steps)
    return _entry(variant, (head_dim, v_head_dim), dtype, shapes, {name: built[name] for name in kept}, results)


def _entry(
    variant: Variant,
    dims: tuple[int, int],
    dtype: str,
    shapes: list[Problem],
    kept: Mapping[str, tuple],
    results: Mapping[str, list[tuple[float, ...]]],
) -> dict[str, object]:
    """The measured candidates as JSON, the fastest in the mean first."""
    median = {name: [sorted(rounds)[len(rounds) // 2] for rounds in times] for name, times in results.items()}
    best = [min(times[j] for times in median.values()) for j in range(len(shapes))]

    def loss(name: str) -> float:
        return sum(ms / b for ms, b in zip(median[name], best, strict=True))

    first = [min(median, key=lambda name: median[name][j]) for j in range(len(shapes))]
    order = list(dict.fromkeys([*first, *sorted(median, key=loss)]))[:KEPT]
    return {
        "class": records.key(variant, *dims)._asdict(),
        "spec": variant.name,
        "dtype": dtype,
        "shapes": [records.Shape(p.batch, p.heads, p.q_len, p.kv_len)._asdict() for p in shapes],
        "candidates": [
            {
                "form": kept[name][0].form,
                "blocks_per_sm": kept[name][0].plan.blocks_per_sm,
                "registers": kept[name][1].resources.registers,
                "ms": [round(ms, 5) for ms in median[name]],
                "rounds": [[round(ms, 5) for ms in rounds] for rounds in results[name]],
            }
            for name in sorted(order, key=loss)
        ],
        "measured": environment(),
    }


def place(folder: Path, arch: str, pipeline: str) -> Path:
    """The path of the record of (arch, pipeline); PlanError where the file that is there is no record, as a damaged one
    is not overwritten."""
    path = folder / records.file_name(arch, pipeline, "forward")
    records.load.cache_clear()
    records.load(path)
    return path


def write(folder: Path, arch: str, pipeline: str, entry: Mapping[str, object]) -> Path:
    """Put an entry into the record of (arch, pipeline), in place of that of its class; the path of the file.

    Raises PlanError where the file that is there is no record.
    """
    path = place(folder, arch, pipeline)
    old = jsonfile.read(path)["entries"] if path.exists() else []
    together = [other for other in old if other["class"] != entry["class"]] + [entry]
    together.sort(key=lambda other: json.dumps(other["class"]))
    lines = []
    for one in together:
        candidates = ",\n        ".join(json.dumps(c) for c in one["candidates"])
        head = ",\n      ".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in one.items() if k != "candidates")
        lines.append(f'{{\n      {head},\n      "candidates": [\n        {candidates}\n      ]\n    }}')
    text = f'{{\n  "format": {records.FORMAT},\n  "entries": [\n    ' + ",\n    ".join(lines) + "\n  ]\n}\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write(path, text)
    records.load.cache_clear()
    return path


def _plain(value: object) -> object:
    """A candidate's fields as JSON holds them."""
    return json.loads(json.dumps(value))


def _inputs(variant: Variant, problem: Problem, seed: int = 0) -> tuple:
    """Random q, k, v as a model has them (heads and columns side by side in memory), and the case."""
    arrays = examples(variant, problem, seed)
    case = Case(sizes=problem.sizes(), params=variant.values({}), tensors=arrays)
    return *draw(problem, seed)[:3], case


def _calls(variant: Variant, problem: Problem, built: Mapping[str, tuple]) -> dict[str, Callable[[], torch.Tensor]]:
    """Each contender as a launch on the same tensors; a call gives its o."""
    q, k, v, case = _inputs(variant, problem)
    return {name: _call(kernel, problem, q, k, v, case)[0] for name, (_, kernel) in built.items()}


def _call(kernel: Any, problem: Problem, q: Any, k: Any, v: Any, case: Any) -> tuple:
    """One kernel on one set of tensors: the launch, o and lse."""
    import torch

    plan, device = kernel.plan, q.device
    o = torch.full_like(q[..., :1].expand(*q.shape[:3], problem.v_head_dim), float("nan")).contiguous()
    lse = torch.full(q.shape[:3], float("nan"), device=device)
    captured = on_device(plan.variant, case.tensors, device)
    launch = make_launch(
        plan,
        problem,
        strides={name: t.stride()[:3] for name, t in (("q", q), ("k", k), ("v", v), ("o", o))},
        captured={name: Captured(sizes=tuple(t.shape), strides=t.stride()) for name, t in captured.items()},
        scale=problem.head_dim**-0.5,
        params=case.params,
        sms=driver.gpu(device.index or 0).sms,
    )
    record = kernel.record(launch, device.index or 0)
    tensors = {"q": q, "k": k, "v": v, "o": o, "lse": lse, **{f"tensor_{n}": t for n, t in captured.items()}}
    tensors[COUNTERS.name] = torch.zeros(COUNTERS.amount // 4, dtype=torch.int32, device=device)
    for part in launch.workspaces:
        tensors[part.name] = torch.empty(part.amount, dtype=torch.uint8, device=device)
    numbers = tuple(launch.values[name] for name in launch.scalars)

    def call() -> torch.Tensor:
        addresses = tuple(tensors[name].data_ptr() for name in launch.pointers)
        record(addresses, numbers, torch.cuda.current_stream().cuda_stream)
        return o

    return call, o, lse


def _check(variant: Variant, head_dim: int, v_head_dim: int, dtype: str, built: Mapping[str, tuple]) -> None:
    """Every contender against float64 on a small problem; raises LaunchError for a wrong one."""
    q_len, kv_len = CHECKED
    problem = Problem(
        batch=2, heads=4, kv_heads=2, q_len=q_len, kv_len=kv_len, head_dim=head_dim, v_head_dim=v_head_dim, dtype=dtype
    )
    q, k, v, case = _inputs(variant, problem)
    scale = problem.head_dim**-0.5
    ref, ref_lse = reference(variant, case, q, k, v, scale=scale)
    base, _ = baseline(variant, case, q, k, v, scale=scale)
    for name, (_, kernel) in built.items():
        call, o, lse = _call(kernel, problem, q, k, v, case)
        call()
        if reasons := [*judge(o, base, ref, dtype).reasons, *judge_lse(lse, ref_lse)]:
            raise LaunchError(f"{variant.name!r}, {name}: {reasons[0]}")
