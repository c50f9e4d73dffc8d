"""`flashgen run`: a variant on random input, checked against float64."""

from __future__ import annotations

import dataclasses
import math
import shlex
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from flashgen.cli import build, options
from flashgen.cli.console import err, out, progress, seconds, share, size, tabulate, write_json
from flashgen.cli.options import Pass, Request, Spec
from flashgen.cli.resolve import Resolved, resolve
from flashgen.errors import FlashgenError, LaunchError, PlanError
from flashgen.planning.float8 import no_backward_in_8_bits
from flashgen.runtime.captured import on_device

if TYPE_CHECKING:
    from flashgen.lang.variant import Variant
    from flashgen.planning.problem import Problem
    from flashgen.runtime.philox import Dropout
    from flashgen.runtime.reference import Verdict

#: What a sweep takes every spec through; a CPU takes the lengths that its walk does at once.
_LENGTHS = {"cpu": (1, 127), "cuda": (1, 127, 1000, 4096)}
_HEAD_DIMS = (64, 128, 256)
_DTYPES = ("float16", "bfloat16")
_HEADS, _KV_HEADS = 8, (8, 1)

#: Elements that a check wants, as a share of `POOL`: the walk rounds as its baseline does, and takes its time.
_SHARE = {"cpu": 1 / 16, "cuda": 1}

#: Elements that a check of a captured tensor's gradient wants, and the most draws it takes for them.
_CAPTURED_ELEMENTS, _CAPTURED_DRAWS = 32, 4

#: Calls that are timed on a GPU, after one that is not.
_TIMED = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A result beside float64: its verdict, what is wrong with its lse, and the seconds of one call."""

    verdict: Verdict
    lse_reasons: tuple[str, ...]
    seconds: float

    @property
    def reasons(self) -> tuple[str, ...]:
        return self.verdict.reasons + self.lse_reasons


@options.shared
def command(
    spec: Spec,
    request: Request,
    sweep: Annotated[
        bool,
        typer.Option(
            "--sweep",
            help="Take SPEC, a folder too, through dtypes, head dims 64, 128, 256, GQA 8:1 and "
            "lengths 1, 127, 1000, 4096 (on a CPU: 1 and 127).",
        ),
    ] = False,
    backward: Annotated[
        bool, typer.Option("--backward", help="Check the gradients of q, k, v and captured tensors too.")
    ] = False,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="With --backward: gradients whose reruns give the same bits.")
    ] = False,
    kv_splits: options.Splits = None,
    dropout: options.Chance = 0.0,
    seed: options.Seed = 0,
    device: Annotated[str | None, typer.Option(help="cuda or cpu. [dim]default: the GPU where there is one[/]")] = None,
    as_json: options.as_json(
        "passed, device, seed, dropout, seconds (of one call), dtype, shape, params, kernel (as of flashgen compile),"
        " predicted_bytes, counted_bytes (null on a GPU), checked (o, with --backward dq, dk, dv and those of"
        " captured tensors: errors, their limits, elements, reasons), lse_reasons; of a sweep passed and cases"
        " (command, passed, reasons)"
    ) = False,
) -> None:
    """Run on random input, on the GPU where there is one, and check against float64; exit 1 where the check fails."""
    if backward and sweep:
        raise PlanError("--sweep takes the forward through its cases\n  nearest: --backward without --sweep")
    if sweep and kv_splits is not None:
        raise PlanError("--sweep leaves --kv-splits to flashgen\n  nearest: --kv-splits without --sweep")
    if deterministic and not backward:
        raise PlanError("--deterministic is of the backward\n  nearest: --deterministic with --backward")
    if Path(spec).is_dir() and not sweep:
        raise PlanError(
            f"{spec} is a folder, and a run takes one spec\n  nearest: {shlex.join(['flashgen', 'run', spec])} --sweep"
        )
    device = options.device(device)
    if sweep:
        ok = _sweep(spec, request, seed, dropout, device, as_json)
    else:
        ok = _single(spec, request, seed, dropout, device, backward, deterministic, as_json, kv_splits)
    if not ok:
        raise typer.Exit(1)


def _single(
    spec: str,
    request: Request,
    seed: int,
    dropout: float,
    device: str,
    backward: bool,
    deterministic: bool,
    as_json: bool,
    kv_splits: int | None,
) -> bool:
    with err.status("planning"):
        resolved = resolve(spec, request, _dropping(dropout, seed), device=device, seed=seed, kv_splits=kv_splits)
        prediction = resolved.predict()
    if backward and resolved.plan.float8 is not None:
        raise no_backward_in_8_bits(resolved.plan.float8.out)
    start = time.perf_counter()
    with err.status(f"running on the {'GPU' if device == 'cuda' else 'CPU'}, then in float64"):
        checked = check(resolved, device, seed, dropout, timed=True, kv_splits=kv_splits)
        verdicts = check_gradients(resolved, device, seed, dropout, deterministic, kv_splits) if backward else {}
    taken = time.perf_counter() - start
    counted = _counted(resolved) if device == "cpu" else None
    reasons = (*checked.reasons, *(f"{name}: {reason}" for name, x in verdicts.items() for reason in x.reasons))
    if as_json:
        write_json(
            {
                "passed": not reasons,
                "device": options.device_name(device),
                "seed": seed,
                "dropout": dropout,
                "seconds": checked.seconds,
                **options.posed(resolved.problem),
                "params": dict(resolved.case.params),
                "kernel": options.described(resolved.plan),
                "predicted_bytes": prediction.hbm.total,
                "counted_bytes": counted,
                "checked": {name: dataclasses.asdict(v) for name, v in {"o": checked.verdict, **verdicts}.items()},
                "lse_reasons": checked.lse_reasons,
            }
        )
        return not reasons
    from flashgen.planning.tables import decimal

    v, predicted = checked.verdict, prediction.hbm.total
    table = Table(title=escape(str(resolved)), title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    plan = resolved.plan
    where = options.device_name(device)
    table.add_row("ran on", f"{where}, tiles of {plan.tile.q} x {plan.tile.kv} ({plan.pipeline}, {plan.arch})")
    if dropout:
        table.add_row("dropout", f"{dropout:g}, of the same pairs in float64")
    table.add_row("time", seconds(checked.seconds) + (" (tile walk in NumPy)" if device == "cpu" else ""))
    table.add_row("checked in", f"{seconds(taken)} (with attention in float64 and with an exact row max)")
    peer = f"exact row max in {resolved.problem.dtype}"
    table.add_row("largest error", f"{v.max_error:.3g} ({peer}: {v.baseline_max_error:.3g})")
    table.add_row("RMS error", f"{v.rms_error:.3g} ({peer}: {v.baseline_rms_error:.3g})")
    for name, found in verdicts.items():
        table.add_row(f"{name}, largest", f"{found.max_error:.3g} ({peer}: {found.baseline_max_error:.3g})")
    ratio = predicted / max(prediction.standard.total, 1)
    table.add_row("predicted IO", f"{decimal(predicted)}, {ratio:.3g}x standard attention's")
    if counted is not None:
        same = "as predicted" if counted == predicted else f"predicted {predicted:,} bytes, counted {counted:,}"
        table.add_row("counted IO", f"{decimal(counted)} ({same})")
    tabulate(table)
    for reason in reasons:
        err.print(Text.assemble(("check failed:", "bold red"), f" {reason}"))
    elements = v.elements + sum(found.elements for found in verdicts.values())
    if not reasons:
        out.print(f"[green]checked[/] against float64: {elements:,} elements, seed {seed}")
    return not reasons


def _dropping(dropout: float, seed: int) -> Pass:
    """The forward of a run."""
    return Pass(dropout=options.drops(dropout, seed) is not None)


def _counted(resolved: Resolved) -> int:
    """Bytes that the walk of this problem moves, by its own count."""
    from flashgen.runtime import tiles

    p = resolved.problem
    sizes = {"head_dim": p.head_dim, "v_head_dim": p.v_head_dim, "dtype": p.dtype, "kv_splits": resolved.splits}
    traffic = tiles.count(resolved.plan, resolved.facts, resolved.case, **sizes)
    return traffic.read_bytes + traffic.write_bytes


@contextmanager
def room(problem: Problem, device: str) -> Iterator[None]:
    """LaunchError in place of what PyTorch and NumPy raise where memory runs out."""
    import torch

    try:
        yield
    except (MemoryError, RuntimeError) as error:  # PyTorch's own on a GPU is a RuntimeError, and so is that on a CPU
        told = any(words in str(error) for words in ("can't allocate memory", "Storage size calculation overflowed"))
        if not told and not isinstance(error, (MemoryError, torch.OutOfMemoryError)):
            raise
        elements = sum(math.prod(shape) for shape in (*shapes(problem), shapes(problem)[0]))
        raise LaunchError(
            f"{options.device_name(device)} has no room for this problem: q, k, v and o take"
            f" {size(elements * problem.itemsize)}, and checking them in float64 several times as much"
            f" ({str(error).splitlines()[0]})\n  nearest: a smaller --seqlen, --heads or --batch"
        ) from None


def check(
    resolved: Resolved,
    device: str,
    seed: int,
    dropout: float = 0.0,
    *,
    timed: bool = False,
    kv_splits: int | None = None,
) -> Checked:
    """Run a variant on random normal input, each probability dropped with this chance, and judge it; shapes of few
    elements are drawn several times.

    Raises LaunchError where memory runs out.
    """
    with room(resolved.problem, device):
        return _check(resolved, device, seed, dropout, timed, kv_splits)


def _check(resolved: Resolved, device: str, seed: int, dropout: float, timed: bool, kv_splits: int | None) -> Checked:
    import torch

    from flashgen.ops.attention import attention
    from flashgen.planning.float8 import DESCALES
    from flashgen.runtime import reference_float8
    from flashgen.runtime.reference import baseline, judge, judge_lse, reference

    p, case, variant = resolved.problem, resolved.case, resolved.variant
    dtype, eight = getattr(torch, p.dtype), resolved.plan.float8
    named = {**case.params, **on_device(variant, case.tensors, device)}
    named |= _splitting(kv_splits)
    elements = p.batch * p.heads * p.q_len * p.v_head_dim
    scale = 1 / math.sqrt(p.head_dim)
    draws: list[tuple[torch.Tensor, ...]] = []
    taken = math.inf
    for draw in range(_draws(elements, device)):
        generator = torch.Generator(device).manual_seed(seed + draw)
        values = [torch.randn(shape, generator=generator, device=device) for shape in shapes(p)]
        dropped = options.drops(dropout, seed + draw)
        inputs = named | _asking(dropped)
        if eight is None:
            values = [x.to(dtype) for x in values]
            q, k, v = values
            base = baseline(variant, case, q, k, v, scale=scale, dropout=dropped)
        else:
            dtypes = (getattr(torch, kind) for kind in (eight.q, eight.k, eight.v))
            of = [reference_float8.quantised(x, kind) for x, kind in zip(values, dtypes, strict=True)]
            values, (q, k, v) = [x.values for x in of], (x.codes for x in of)
            inputs |= {DESCALES[name]: of["qkv".index(name)].descale for name in eight.scaled}
            base = reference_float8.beside(resolved.plan, variant, case, of, scale=scale)
        start = time.perf_counter()
        o, lse = attention(q, k, v, variant, return_lse=True, **inputs)
        if device == "cuda":
            torch.cuda.synchronize()
        taken = min(taken, time.perf_counter() - start)
        if timed and device == "cuda":
            taken = _gpu_seconds(lambda: attention(q, k, v, variant, **inputs))  # noqa: B023
        ref = reference(variant, case, *values, scale=scale, dropout=dropped)
        draws.append(tuple(x.flatten() for x in (o, base[0], ref[0], lse, ref[1], base[1])))
    out, base_out, ref_out, lse, ref_lse, base_lse = (torch.cat(found) for found in zip(*draws, strict=True))
    verdict = judge(out, base_out, ref_out, p.dtype if eight is None else eight.out)
    lse_reasons = judge_lse(lse, ref_lse, None if eight is None else base_lse)
    return Checked(verdict=verdict, lse_reasons=lse_reasons, seconds=taken)


def _splitting(kv_splits: int | None) -> dict[str, object]:
    """What a call is told, for so many blocks to divide its keys."""
    return {} if kv_splits is None else {"kv_splits": kv_splits}


def _asking(dropped: Dropout | None) -> dict[str, object]:
    """What a call is told, to drop these."""
    return {} if dropped is None else {"dropout": dropped.p, "seed": dropped.seed}


def check_gradients(
    resolved: Resolved, device: str, seed: int, dropout: float, deterministic: bool, kv_splits: int | None = None
) -> dict[str, Verdict]:
    """dq, dk and dv of random q, k, v and do, each judged as `check` judges o, and the gradients of captured tensors.

    Raises LaunchError where memory runs out.
    """
    with room(resolved.problem, device):
        return _check_gradients(resolved, device, seed, dropout, deterministic, kv_splits)


def _check_gradients(
    resolved: Resolved, device: str, seed: int, dropout: float, deterministic: bool, kv_splits: int | None
) -> dict[str, Verdict]:
    import torch

    from flashgen.analysis.derivative import differentiable_of
    from flashgen.ops.attention import attention
    from flashgen.runtime.gradients import baseline_gradients, judge_captured, judge_gradients, reference_gradients

    p, case, variant = resolved.problem, resolved.case, resolved.variant
    tensors = on_device(variant, case.tensors, device)
    captured = {name: tensors[name].requires_grad_() for name in differentiable_of(variant)}
    inputs = {**case.params, **tensors, **_splitting(kv_splits)}
    of_inputs = shapes(p)
    fewest = min(math.prod(shape) for shape in of_inputs)
    few = min((x.numel() for x in captured.values()), default=_CAPTURED_ELEMENTS)
    draws, of_captured = [], {name: [] for name in captured}
    for draw in range(max(_draws(fewest, device), min(-(-_CAPTURED_ELEMENTS // max(few, 1)), _CAPTURED_DRAWS))):
        generator = torch.Generator(device).manual_seed(seed + draw)
        *qkv, do = (
            torch.randn(shape, generator=generator, device=device).to(getattr(torch, p.dtype))
            for shape in (*of_inputs, (*of_inputs[0][:3], p.v_head_dim))
        )
        leaves = [x.requires_grad_() for x in qkv]
        dropped = options.drops(dropout, seed + draw)
        o = attention(*leaves, variant, deterministic=deterministic, **inputs, **_asking(dropped))
        ours = torch.autograd.grad(o, [*leaves, *captured.values()], do)
        asked = variant, case, *(x.detach() for x in qkv), do
        scale = 1 / math.sqrt(p.head_dim)
        base, ref = (make(*asked, scale=scale, dropout=dropped) for make in (baseline_gradients, reference_gradients))
        draws.append((ours[:3], base[:3], ref[:3]))
        for name, found in zip(captured, ours[3:], strict=True):
            of_captured[name].append((found, base.captured[name], ref.captured[name]))
    # Of ours, base and ref each gradient's draws behind one another.
    together = [
        [torch.cat([x.flatten() for x in parts]) for parts in zip(*by_draw, strict=True)]
        for by_draw in zip(*draws, strict=True)
    ]
    verdicts = judge_gradients(*together, p.dtype)
    for name, drawn in of_captured.items():
        verdicts[f"d{name}"] = judge_captured(*map(torch.stack, zip(*drawn, strict=True)))
    return verdicts


def _draws(elements: int, device: str) -> int:
    """How often to draw, of so many elements each time, until a verdict has enough."""
    from flashgen.runtime.reference import POOL

    return max(1, math.ceil(_SHARE[device] * POOL / elements)) if elements else 1


def shapes(p: Problem) -> tuple[tuple[int, ...], ...]:
    """Those of q, k and v."""
    keys = (p.batch, p.kv_heads, p.kv_len)
    return (p.batch, p.heads, p.q_len, p.head_dim), (*keys, p.head_dim), (*keys, p.v_head_dim)


def _gpu_seconds(call: Any) -> float:
    """Median time of a call on the GPU, by its own events."""
    import torch

    times = []
    for _ in range(_TIMED):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def _sweep(spec: str, request: Request, seed: int, dropout: float, device: str, as_json: bool) -> bool:
    from flashgen.lang.load import load_spec

    # What a sweep varies is not for the caller to fix.
    varied = ("batch", "heads", "kv_heads", "seqlen", "kv_seqlen", "head_dim", "v_head_dim", "dtype")
    default = Request()
    if fixed := [name for name in varied if getattr(request, name) != getattr(default, name)]:
        flags = ", ".join("--" + name.replace("_", "-") for name in fixed)
        raise PlanError(f"--sweep chooses {flags} itself\n  nearest: leave out --sweep or {flags}")
    start = time.perf_counter()
    variants = {path: load_spec(path) for path in options.spec_files([spec])}
    cases = [
        (path, asked, _resolved(variant, asked, dropout, seed, device))
        for path, variant in variants.items()
        for asked in _requests(variant, request, device)
    ]
    if device == "cpu":
        err.print(f"no GPU: the kernels' tiles are walked on the CPU, at lengths {_LENGTHS['cpu']}")
    else:
        build.compiled([resolved.plan for *_, resolved in cases if isinstance(resolved, Resolved)])
    rows: dict[str, list[Checked]] = {str(path): [] for path in variants}
    outcomes: list[tuple[str, tuple[str, ...]]] = []
    with progress() as bar, _one_thread():
        task = bar.add_task("checking", total=len(cases))
        for path, asked, resolved in cases:
            bar.update(task, description=variants[path].name)
            try:
                if isinstance(resolved, FlashgenError):
                    raise resolved
                checked = check(resolved, device, seed, dropout)
            except FlashgenError as error:
                reasons = (str(error),)
            else:
                rows[str(path)].append(checked)
                reasons = checked.reasons
            outcomes.append((_repro(path, asked, seed, dropout, device), reasons))
            bar.advance(task)
    failures = [(command, reasons) for command, reasons in outcomes if reasons]
    if as_json:
        told = [{"command": command, "passed": not reasons, "reasons": reasons} for command, reasons in outcomes]
        write_json({"passed": not failures, "cases": told})
        return not failures
    tabulate(_table(rows))
    for command, reasons in failures:
        err.print("\n  ".join([command, *reasons]), markup=False)
    passed = len(cases) - len(failures)
    out.print(
        f"{passed} of {len(cases)} cases pass on {options.device_name(device)}"
        f" in {seconds(time.perf_counter() - start)}, seed {seed}"
    )
    return not failures


@contextmanager
def _one_thread() -> Iterator[None]:
    """PyTorch's CPU work on one thread: the problems of a sweep are small, and threads that wait slow them down."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _requests(variant: Variant, request: Request, device: str) -> Iterator[Request]:
    """The cases of a sweep that a spec allows."""
    for dtype in _allowed(variant, _DTYPES, variant.dtypes):
        for head_dim in _allowed(variant, _HEAD_DIMS, variant.head_dims):
            for kv_heads in _KV_HEADS:
                for seqlen in _LENGTHS[device]:
                    yield dataclasses.replace(
                        request, dtype=dtype, head_dim=head_dim, heads=_HEADS, kv_heads=kv_heads, seqlen=seqlen
                    )


def _allowed(variant: Variant, wanted: tuple, declared: tuple) -> tuple:
    return tuple(value for value in wanted if not variant.only or value in declared)


def _resolved(variant: Variant, asked: Request, dropout: float, seed: int, device: str) -> Resolved | FlashgenError:
    """A case of a sweep, or why there is none."""
    try:
        return resolve(variant, asked, _dropping(dropout, seed), device=device, seed=seed)
    except FlashgenError as error:
        return error


def _repro(path: object, asked: Request, seed: int, dropout: float, device: str) -> str:
    """The command that runs a case of a sweep alone."""
    words, varied = ["flashgen", "run", str(path)], ("dtype", "head_dim", "heads", "kv_heads", "seqlen")
    kept = [f.name for f in dataclasses.fields(asked) if f.name not in varied and getattr(asked, f.name) != f.default]
    for name in (*varied, *kept):
        value = getattr(asked, name)
        for one in value if isinstance(value, list) else [value]:
            words += [f"--{name.replace('_', '-')}", str(one)]
    words += ["--seed", str(seed), *(["--dropout", str(dropout)] if dropout else []), "--device", device]
    return shlex.join(words)


def _table(rows: dict[str, list[Checked]]) -> Table:
    """A line a spec: how the worst of its cases stands beside its limits."""
    table = Table("spec", "cases", "passed", "largest error", "RMS error", "bias", box=None, padding=(0, 2, 0, 0))
    table.caption, table.caption_justify = "errors of the worst case, as a share of what the rule allows", "left"
    for path, checked in rows.items():
        verdicts = [c.verdict for c in checked if c.verdict.elements]
        worst = [
            max(
                (share(getattr(v, value), getattr(v, limit)) for v in verdicts),
                key=lambda text: float(text[:-1]),
                default="-",
            )
            for value, limit in (("max_error", "max_limit"), ("rms_error", "rms_limit"), ("bias", "bias_limit"))
        ]
        table.add_row(Text(path), str(len(checked)), str(sum(not c.reasons for c in checked)), *worst)
    return table
