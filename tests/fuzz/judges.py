"""The judges: each compares one thing that the compiler makes of a case with the evaluator's reading of its text."""

from __future__ import annotations

import math
import tempfile
from collections import abc
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
import variant_kernel
from padded import Batch, Sequence
from paged import in_pages
from tolerance import ENOUGH, judge

import flashgen
from flashgen.analysis import tiles
from flashgen.analysis.derivative import differentiable
from flashgen.analysis.facts import analyse
from flashgen.analysis.tiles import EMPTY, FULL
from flashgen.codegen import emit
from flashgen.errors import PlanError
from flashgen.interpreter.simulate import simulate, simulate_backward
from flashgen.lang.load import load_spec
from flashgen.lang.variant import Variant
from flashgen.planning import planner, traffic
from flashgen.planning.arch import ARCHS
from flashgen.planning.layout import DENSE, LAYOUTS, Layout, Padded, Varlen
from flashgen.planning.plan import KernelPlan, Tile
from flashgen.planning.problem import Problem
from flashgen.runtime import nvrtc
from flashgen.runtime import tiles as walk
from flashgen.runtime.tiles_backward import count_backward

from . import grammar
from .choices import Choices
from .engine import Judge, Undecided, Wrong
from .evaluator import Attended, Call, Wobble
from .grammar import Case, Profile, with_options

#: What float32 and the quick functions of a kernel may be off: of a score, and of float64 on a CPU.
KERNEL = (2.0**-22, 2.0**-18)
WALK = (2.0**-50, 2.0**-50)


@lru_cache(maxsize=1)
def _folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="fuzz"))


def load(case: Case) -> Variant:
    """The variant of a case's text, as the compiler reads it."""
    file = _folder() / "fuzzed_spec.py"
    file.write_text(case.text)
    return load_spec(file)


def bound(case: Case) -> tuple[Variant, tiles.Case]:
    """The variant with its constants bound, and the data of a call."""
    variant = load(case)
    constants = case.values("constant")
    variant = variant.bind(**{c.name: constants[c.name] for c in variant.constants})
    given = case.values("param")
    params = variant.values({p.name: given[p.name] for p in variant.params})
    arrays = case.values("tensor")
    tensors = {t.name: arrays[t.name] for t in variant.tensors}
    return variant, tiles.Case(sizes=case.sizes, params=params, tensors=tensors)


def problem_of(case: Case) -> Problem:
    return Problem(**case.sizes, head_dim=case.head_dim, v_head_dim=case.v_head_dim, dtype=case.dtype)


def inputs(case: Case) -> tuple[torch.Tensor, ...]:
    """q, k, v, do in the case's dtype and dlse in float32."""
    g, p, dtype = torch.Generator().manual_seed(case.data_seed), problem_of(case), getattr(torch, case.dtype)
    rows, keys = (p.batch, p.heads, p.q_len), (p.batch, p.kv_heads, p.kv_len)
    shapes = (*rows, p.head_dim), (*keys, p.head_dim), (*keys, p.v_head_dim), (*rows, p.v_head_dim)
    drawn = (torch.randn(shape, generator=g, dtype=torch.float64).to(dtype) for shape in shapes)
    return *drawn, torch.randn(rows, generator=g)


def decided_mask(case: Case) -> torch.Tensor:
    visible, decided = case.spec.mask()
    if not decided.all():
        raise Undecided("a float of the mask stands too close to what it is compared with")
    return visible


# ---------------------------------------------------------------------------------------------------------------------
# analysis


def check_analysis(case: Case) -> None:
    variant, data = bound(case)
    facts, tile = analyse(variant), Tile(q=case.tile[0], kv=case.tile[1])
    visible, decided = (x.numpy() for x in case.spec.mask())
    sizes = case.sizes
    for b in range(sizes["batch"]):
        for h in range(sizes["heads"]):
            seen = _by_tile(visible[b, h] & decided[b, h], case.tile)
            hidden = _by_tile(~visible[b, h] & decided[b, h], case.tile)
            at = f"batch {b}, head {h}"
            classes = tiles.grid(facts, data, tile, b, h)
            _sound(classes, seen, hidden, f"classes, {at}")
            rows = [tiles.schedule(facts, data, tile, i, b, h) for i in range(seen.shape[0])]
            _sound(_scheduled(rows, seen.shape), seen, hidden, f"schedule, {at}")
            if any(list(row) != sorted(row, reverse=True) for row in rows):
                raise Wrong(f"a schedule is not in descending order, {at}")
            columns = [tiles.schedule_queries(facts, data, tile, i, b, h) for i in range(seen.shape[1])]
            _sound(_scheduled(columns, seen.shape[::-1]).T, seen, hidden, f"schedule of queries, {at}")


def _by_tile(pairs: np.ndarray, tile: abc.Sequence[int]) -> np.ndarray:
    """Which tiles hold one of these pairs."""
    by_row = np.logical_or.reduceat(pairs, np.arange(0, pairs.shape[0], tile[0]), axis=0)
    return np.logical_or.reduceat(by_row, np.arange(0, pairs.shape[1], tile[1]), axis=1)


def _scheduled(rows: abc.Sequence, shape: tuple[int, ...]) -> np.ndarray:
    found = np.full(shape, EMPTY)
    for i, row in enumerate(rows):
        for j, kind in row:
            found[i, j] = kind
    return found


def _sound(classes: np.ndarray, seen: np.ndarray, hidden: np.ndarray, what: str) -> None:
    """EMPTY tiles hold no visible pair, FULL ones no hidden pair."""
    for name, kind, pairs in (("EMPTY", EMPTY, seen), ("FULL", FULL, hidden)):
        if (wrong := (classes == kind) & pairs).any():
            q, k = np.argwhere(wrong)[0]
            word = "visible" if kind == EMPTY else "hidden"
            raise Wrong(f"{what}: tile {q}, {k} is {name} and holds a {word} pair")


# ---------------------------------------------------------------------------------------------------------------------
# text


def check_text(case: Case) -> None:
    variant, data = bound(case)
    tile = Tile(q=case.tile[0], kv=case.tile[1])
    visible, decided = case.spec.mask()
    s = _some_scores(case)
    classes, kept, scores = variant_kernel.run(analyse(variant), data, tile, s.numpy())
    visible = visible & (torch.from_numpy(kept) | ~_hidden_by_score(case, s))
    if (wrong := (torch.from_numpy(kept) != visible) & decided).any():
        raise Wrong(f"keep{tuple(wrong.nonzero()[0].tolist())} is {not bool(visible[wrong][0])}")
    for b, h in np.ndindex(classes.shape[:2]):
        seen = _by_tile((visible & decided)[b, h].numpy(), case.tile)
        hidden = _by_tile((~visible & decided)[b, h].numpy(), case.tile)
        _sound(classes[b, h], seen, hidden, f"the kernel's schedule, batch {b}, head {h}")
    if variant.score_node is not None:
        _check_scores(case, s.double()[visible], torch.from_numpy(scores).double()[visible], visible)


def _hidden_by_score(case: Case, s: torch.Tensor) -> torch.Tensor:
    """Pairs whose score is -inf: whether a mask hides them too makes no difference."""
    spec = case.spec
    at = [x.expand(spec.shape).flatten() for x in spec.positions().values()]
    return (spec.scores(s.double().flatten(), at, spec.world(precision=torch.float64)) == -torch.inf).view(spec.shape)


def _some_scores(case: Case) -> torch.Tensor:
    """Scores as they come, and a few that are large, small or 0."""
    g = torch.Generator().manual_seed(case.data_seed)
    s = torch.randn(case.spec.shape, generator=g) * 2
    special = torch.tensor([0.0, -0.0, 1.0, -1.0, 40.0, -90.0, 1e-6, 5000.0])
    chosen = special[torch.randint(0, len(special), s.shape, generator=g)]
    return torch.where(torch.rand(s.shape, generator=g) < 0.15, chosen, s)


def _check_scores(case: Case, s: torch.Tensor, got: torch.Tensor, visible: torch.Tensor) -> None:
    """A kernel's scores within what its arithmetic may be off; where that says nothing, none is asked for."""
    spec = case.spec
    at = [x.expand(spec.shape)[visible] for x in spec.positions().values()]
    right = spec.scores(s, at, spec.world(precision=torch.float64))
    g, spread, sure = torch.Generator().manual_seed(1), torch.zeros_like(right), torch.tensor(True)
    for alike in (None, None, None, None, True, False):
        moved = spec.scores(s, at, spec.world(precision=torch.float64, wobble=Wobble(g, *KERNEL, alike)))
        same = (moved == right) | (moved.isnan() & right.isnan())
        near = moved.isfinite() & right.isfinite()
        sure = sure & (same | near)
        spread = torch.where(near, torch.maximum(spread, (moved - right).abs()), spread)
    limit = 4 * spread + 2.0**-21 * right.abs() + 1e-30
    held = (got == right) | (got.isnan() & right.isnan()) | ((got - right).abs() <= limit)
    held |= (right.abs() > 3.4e38) & (got.abs() > 3.4e38)
    if (wrong := ~held & sure).any():
        i = wrong.nonzero()[0]
        where = tuple(int(x[i]) for x in at)
        raise Wrong(f"score{where} of s = {float(s[i]):.9g} is {float(got[i]):.9g}, not {float(right[i]):.9g}")


# ---------------------------------------------------------------------------------------------------------------------
# kernels


def kernel_options(choices: Choices, case: Case) -> Case:
    """Which kernels run it: a pipeline, an entry of its menu, and how gradients are asked for."""
    return with_options(
        case,
        pipeline=choices.pick(("ampere", "hopper")),
        entry=choices.integer(0, 4),
        backward=not choices.one_in(3),
        deterministic=choices.one_in(3),
        by_tensors=not choices.one_in(4),
        dlse=choices.one_in(2),
    )


def forward_plan(case: Case, variant: Variant, layout: Layout = DENSE) -> KernelPlan:
    """The plan that the options pick from the menu."""
    arch = {"ampere": "sm_80", "hopper": "sm_90a"}[case.options["pipeline"]]
    forms = planner.menu(variant, arch, case.dtype, case.head_dim, case.v_head_dim, layout=layout).forms
    group = case.sizes["heads"] // case.sizes["kv_heads"]
    forms = [plan for plan in forms if not plan.packed or group > 1] or list(forms)
    return forms[case.options["entry"] % len(forms)]


def backward_plan(case: Case, variant: Variant) -> KernelPlan:
    arch = {"ampere": "sm_80", "hopper": "sm_90a"}[case.options["pipeline"]]
    plans = planner.backward_menu(
        *(variant, arch, case.dtype, case.head_dim, case.v_head_dim),
        deterministic=case.options["deterministic"],
        gradients=differentiable(variant.score_node) if case.options["by_tensors"] else (),
    ).plans
    return plans[case.options["entry"] % len(plans)]


def check_kernels(case: Case) -> None:
    variant, data = bound(case)
    scale = case.scale
    if scale < 0:  # as a call does
        variant, scale = variant.with_flipped_score(), -scale
    plan = forward_plan(case, variant)
    expected = Expected(case, differentiable(variant.score_node))
    *qkv, d_o, dlse = inputs(case)
    arrays = [x.float().numpy() for x in qkv]
    found = simulate(plan, data, *arrays, scale=scale)
    expected.check("o", found.o)
    expected.check_lse(found.lse)
    if not case.options["backward"]:
        return
    plan = backward_plan(case, variant)
    o = expected.same.o.to(getattr(torch, case.dtype)).float().numpy()
    dlse = dlse.numpy() if case.options["dlse"] else None
    lse = expected.right.lse.float().numpy()
    found = simulate_backward(plan, data, *arrays, o, lse, d_o.float().numpy(), scale=scale, dlse=dlse)
    for name in "qkv":
        expected.check(name, getattr(found, f"d{name}"))
    for name, gradient in found.captured.items():
        expected.check(name, gradient)


class Expected:
    """What a call gives: in float64, as any method gives it that keeps p and dS in 16 bits, and how far rounding of
    scores moves it."""

    def __init__(self, case: Case, captured: abc.Sequence[str], *, narrow: bool = True, backward: bool | None = None):
        q, k, v, d_o, dlse = inputs(case)
        self.case = case
        backward = case.options["backward"] if backward is None else backward
        self.call = Call(
            *(case.spec, q, k, v, case.scale, decided_mask(case)),
            d_o=d_o if backward else None,
            dlse=dlse if backward and case.options["dlse"] else None,
            captured=tuple(captured) if backward else (),
            narrow=narrow,
        )
        self.right = self.call.attend()
        if not self.right.finite():
            raise Undecided("the result is not finite")
        in_16_bits = case.dtype in ("float16", "bfloat16")
        self.same = self.call.rounded(getattr(torch, case.dtype)) if in_16_bits else self.right
        self.noise = KERNEL if narrow else WALK
        g = torch.Generator().manual_seed(2)
        self.moved = [self.call.attend(Wobble(g, *self.noise, alike)) for alike in (True, False)]

    def of(self, name: str, attended: Attended) -> torch.Tensor:
        return attended.o if name == "o" else attended.gradients[name]

    def spread(self, name: str) -> float:
        """How far rounding of scores moves a result, at most."""
        right = self.of(name, self.right)
        moved = [(self.of(name, x) - right).abs() for x in self.moved]
        largest = max((float(x.max()) if x.numel() else 0.0 for x in moved), default=0.0)
        ulp = torch.finfo(getattr(torch, self.case.dtype)).eps
        allowed = max(2.0**-10 * (1e-3 + float(right.abs().max())), ulp / 4 * self.same.noise.get(name, 0.0))
        if not largest <= allowed:
            raise Undecided(f"rounding of scores decides what {name} is")
        return largest

    def check(self, name: str, found) -> None:
        """The project's rule where there are elements enough; else the largest error alone, beside a floor that the
        rounding of 16-bit values has whatever is drawn."""
        right, same = self.of(name, self.right), self.of(name, self.same)
        found = torch.as_tensor(found)
        dtype = getattr(torch, self.case.dtype)
        spread, ulp = self.spread(name), max(torch.finfo(dtype).eps, torch.finfo(found.dtype).eps)
        least = torch.finfo(found.dtype).tiny * torch.finfo(found.dtype).eps
        found = found.double().cpu()
        noise = self.same.noise.get(name, 0.0)
        error = float((found - right).abs().max()) if right.numel() else 0.0
        limit = 3 * float((same - right).abs().max()) + ulp * (float(right.abs().max()) + 2 * noise) + 8 * spread
        limit += least + (2.0**-20 * self.same.mass if name not in ("o", *"qkv") else 0.0)
        if dtype in (torch.float32, torch.float64):
            limit += 2.0**-18 if dtype is torch.float32 else 1e-9
        if not error <= limit:
            at = (found - right).abs().nan_to_num(math.inf).argmax()
            where = tuple(int(i) for i in np.unravel_index(int(at), right.shape))
            value = f"{float(found.flatten()[at]):.6g}, not {float(right.flatten()[at]):.6g}"
            raise Wrong(f"{name}{where} is {value} (more than {limit:.3g} off)")
        if right.numel() >= ENOUGH and self.case.dtype in ("float16", "bfloat16"):
            verdict = judge(found, same, right, self.case.dtype)
            allowed = verdict.rms_limit + spread + ulp * noise
            if not verdict.rms_error <= allowed:
                raise Wrong(f"{name}: RMS error {verdict.rms_error:.3g} exceeds {allowed:.3g}")

    def check_lse(self, found) -> None:
        right, found = self.right.lse, torch.as_tensor(found).double().cpu()
        if not torch.equal(found == -math.inf, right == -math.inf):
            at = ((found == -math.inf) != (right == -math.inf)).nonzero()[0].tolist()
            raise Wrong(f"lse{tuple(at)} is {float(found[tuple(at)])}, not {float(right[tuple(at)])}")
        seen = right != -math.inf
        spread = max((float((x.lse - right)[seen].abs().max()) for x in self.moved), default=0.0) if seen.any() else 0
        error = ((found - right).abs() / right.abs().clamp(min=1.0))[seen]
        if seen.any() and not float(error.max()) <= 1e-4 + 8 * spread:
            raise Wrong(f"lse is off by {float(error.max()):.3g} of max(1, |lse|)")


# ---------------------------------------------------------------------------------------------------------------------
# layouts


def layout_options(choices: Choices, case: Case) -> Case:
    """How sequences lie, and how long each is: some have no query."""
    batch, q_len, kv_len = (case.sizes[name] for name in ("batch", "q_len", "kv_len"))
    return with_options(
        case,
        pipeline=choices.pick(("ampere", "hopper")),
        entry=choices.integer(0, 4),
        joined=choices.one_in(2),
        page_size=choices.pick((None, None, 16, 8, 48)),
        q_lengths=tuple(choices.integer(int(b == 0), q_len) for b in range(batch)),
        kv_lengths=tuple(choices.integer(1, kv_len) for _ in range(batch)),
    )


def check_layouts(case: Case) -> None:
    """Each sequence is what the evaluator makes of it alone, whatever lies beyond its rows."""
    variant, data = bound(case)
    variant = variant.with_flipped_score() if case.scale < 0 else variant
    joined, page_size = case.options["joined"], case.options["page_size"]
    lengths = tuple(zip(case.options["q_lengths"], case.options["kv_lengths"], strict=True))
    alone = [replace(case, sizes={**case.sizes, "q_len": max(1, rows), "kv_len": keys}) for rows, keys in lengths]
    qkv, sequences, told = (_joined if joined else _padded)(case, [inputs(one)[:3] for one in alone], lengths)
    plan = forward_plan(case, variant, Varlen() if joined else Padded())
    given = problem_of(case), data, qkv, abs(case.scale), sequences, 0, told, None
    w = Batch(plan, variant, analyse(variant), *given)
    found = (w if page_size is None else in_pages(w, page_size)).run()
    for b, (one, own) in enumerate(zip(alone, sequences, strict=True)):
        o, lse = (x[0 if joined else b] for x in (found.o, found.lse))
        if not joined and (o[:, own.q_rows :].any() or (lse[:, own.q_rows :] != -np.inf).any()):
            raise Wrong(f"o or lse of sequence {b} is not 0 or -inf beyond its queries")
        if own.q_rows:
            expected = Expected(one, (), backward=False)
            results = expected.same.o.float(), expected.right.lse.float()  # right where the sequence is another
            for result, x in zip(results, (o, lse), strict=True):
                result[b] = torch.from_numpy(x[:, own.queries])
            expected.check("o", results[0])
            expected.check_lse(results[1])


def _padded(case: Case, given: abc.Sequence, lengths: tuple[tuple[int, int], ...]) -> tuple:
    """Tensors, sequences and what a kernel is told of them, in rows of one batch; NaN beyond."""
    qkv = tuple(np.full(x.shape, np.nan, np.float32) for x in inputs(case)[:3])
    for b, (rows, keys) in enumerate(lengths):
        for whole, x, n in zip(qkv, given[b], (rows, keys, keys), strict=True):
            whole[b, :, :n] = x[b, :, :n].float()
    told = {name: np.array(case.options[name], np.int32) for name in ("q_lengths", "kv_lengths")}
    return qkv, tuple(Sequence(*of, 0) for of in lengths), told


def _joined(case: Case, given: abc.Sequence, lengths: tuple[tuple[int, int], ...]) -> tuple:
    """The same behind each other."""
    parts = [
        [x[b, :, :n].float().numpy() for x, n in zip(given[b], (rows, keys, keys), strict=True)]
        for b, (rows, keys) in enumerate(lengths)
    ]
    starts = [np.cumsum([0, *of], dtype=np.int32) for of in zip(*lengths, strict=True)]
    at = zip(*(of.tolist() for of in starts), strict=True)
    sequences = tuple(Sequence(*of, 0, *first) for of, first in zip(lengths, at, strict=False))
    told = {f"cu_seqlens_{name}": of for name, of in zip("qk", starts, strict=True)}
    return tuple(np.concatenate(x, axis=1)[None] for x in zip(*parts, strict=True)), sequences, told


# ---------------------------------------------------------------------------------------------------------------------
# gradients on a CPU


def gradient_options(choices: Choices, case: Case) -> Case:
    case = replace(case, dtype=choices.pick(("float64", "float64", "float64", "float32", "bfloat16")))
    return with_options(case, dlse=choices.one_in(2), backward=True)


def call_attention(case: Case, variant: Variant, device: str = "cpu", **options):
    """attention() with gradients asked for: o, lse, and the gradients by name."""
    q, k, v, d_o, dlse = (x.to(device) for x in inputs(case))
    dlse = dlse.to(q.dtype) if case.dtype == "float64" else dlse
    arrays, given = case.values("tensor"), case.values("param") | case.values("constant")
    named = {p.name: given[p.name] for p in (*variant.params, *variant.constants)}
    for t in variant.tensors:
        held = torch.from_numpy(np.ascontiguousarray(arrays[t.name])).to(device, getattr(torch, t.dtype))
        named[t.name] = held.requires_grad_(held.is_floating_point() and case.options["backward"])
    leaves = {"q": q, "k": k, "v": v}
    for x in leaves.values():
        x.requires_grad_(case.options["backward"])
    o, lse = flashgen.attention(q, k, v, variant, scale=case.scale, return_lse=True, **named, **options)
    if not case.options["backward"]:
        return o, lse, {}
    leaves |= {n: x for n, x in named.items() if isinstance(x, torch.Tensor) and x.requires_grad}
    results, seeds = ([o, lse], [d_o, dlse]) if case.options["dlse"] else ([o], [d_o])
    found = torch.autograd.grad(results, list(leaves.values()), seeds, allow_unused=True)
    return o.detach(), lse.detach(), dict(zip(leaves, found, strict=True))


def check_gradients(case: Case) -> None:
    variant = load(case)
    bound(case)
    floats = [t.name for t in variant.tensors if "float" in t.dtype]
    expected = Expected(case, floats, narrow=case.dtype != "float64")
    o, lse, gradients = call_attention(case, variant)
    expected.check("o", o)
    expected.check_lse(lse)
    for name, gradient in gradients.items():
        right = expected.of(name, expected.right)
        if gradient is None:
            gradient = torch.zeros_like(right)
        expected.check(name, gradient)


# ---------------------------------------------------------------------------------------------------------------------
# counts


def count_options(choices: Choices, case: Case) -> Case:
    tile = choices.pick(((16, 16), (32, 16), (64, 32), (16, 64)))
    return with_options(replace(case, tile=tile), deterministic=choices.one_in(3), dlse=choices.one_in(2))


def check_counts(case: Case) -> None:
    from backward_checks import plan_of

    variant, data = bound(case)
    problem, facts = problem_of(case), analyse(variant)
    visible = decided_mask(case)
    d, dv = case.head_dim, case.v_head_dim
    shape = {"head_dim": d, "v_head_dim": dv, "dtype": case.dtype}
    plan = planner.menu(variant, "sm_80", case.dtype, d, dv).plans[0]
    plan = replace(plan, tile=Tile(q=case.tile[0], kv=case.tile[1]))
    p = traffic.predict(plan, problem, data)
    counted = walk.count(plan, facts, data, **shape)
    beside = visible & ~_hidden_by_score(case, _some_scores(case))
    if counted.visible == int(beside.sum()):  # a score that only chooses between itself and -inf is a mask too
        visible = beside
    per_pair = 2 * (d + dv)
    wanted = {
        "bytes read": (counted.read_bytes, p.hbm.read_bytes),
        "bytes written": (counted.write_bytes, p.hbm.write_bytes),
        "FLOPs": (per_pair * counted.elements, p.flops),
        "useful FLOPs": (per_pair * int(visible.sum()), p.flops_useful),
        "visible pairs": (counted.visible, int(visible.sum())),
        **{name: (getattr(counted, name), getattr(p.tiles, name)) for name in ("total", "empty", "partial", "full")},
        **_of_backward(case, variant, data, problem, int(visible.sum()), plan_of),
    }
    wrong = {name: pair for name, pair in wanted.items() if pair[0] != pair[1]}
    if wrong:
        raise Wrong("; ".join(f"{name}: {a} counted, {b} predicted" for name, (a, b) in wrong.items()))


def _of_backward(case: Case, variant, data, problem, visible: int, plan_of: Callable) -> dict[str, tuple]:
    plan = plan_of(variant, problem, case.tile, deterministic=case.options["deterministic"])
    d, dv, dlse = case.head_dim, case.v_head_dim, case.options["dlse"]
    p = traffic.predict(plan, problem, data, dlse=dlse)
    shape = {"head_dim": d, "v_head_dim": dv, "dtype": case.dtype}
    counted = count_backward(plan, analyse(variant), data, dlse=dlse, **shape)
    found = {
        "backward: bytes read": (counted.read_bytes, p.hbm.read_bytes),
        "backward: bytes written": (counted.write_bytes, p.hbm.write_bytes),
        "backward: useful FLOPs": (2 * (3 * d + 2 * dv) * visible, p.flops_useful),
    }
    if counted.kernels:
        of_tiles = ("empty", "partial", "full")
        found |= {f"backward: {n}": (getattr(counted, n), getattr(p.tiles, n)) for n in of_tiles}
    return found


# ---------------------------------------------------------------------------------------------------------------------
# compile


def compile_options(choices: Choices, case: Case) -> Case:
    """A request: most can be met, some cannot."""
    c = choices
    backward = c.one_in(2)
    options = {
        "arch": c.pick(list(ARCHS)),
        "head_dim": c.pick((64, 128, 16, 24, 40, 72, 80, 96, 136, 192, 256, 512, 20)),
        "v_head_dim": c.pick((None, None, None, 64, 128, 32, 256)),
        "dtype": c.pick(("bfloat16", "float16")),
        "dropout": c.one_in(4),
        "backward": backward,
        "layout": c.pick(("dense", "dense", "padded", "varlen", *(() if backward else LAYOUTS))),
    }
    if backward:
        options |= {"deterministic": c.one_in(3), "gradients": None if c.one_in(2) else ()}
    else:
        options |= {"packed": c.one_in(5), "q_stages": c.pick((None, None, None, 1, 2))}
    if c.one_in(3):
        options["tile"] = (c.pick((64, 128, 32, 192)), c.pick((64, 32, 128, 176)))
    if c.one_in(4):
        options["stages"] = c.pick((2, 3, 1))
    if c.one_in(4):
        options["pipeline"] = c.pick(("ampere", "hopper"))
    return with_options(case, **options)


def check_compile(case: Case) -> None:
    variant, _ = bound(case)
    options = dict(case.options)
    if options.get("gradients", ()) is None:
        options["gradients"] = differentiable(variant.score_node)
    reasons = flashgen.supports(variant, **options)
    try:
        plan = flashgen.plan(variant, **options)
    except PlanError as error:
        if not reasons:
            raise Wrong(f"supports() gives no reason, and plan() refuses: {error}") from None
        if any(not r.limit for r in reasons):
            raise Wrong(f"a refusal without a reason: {reasons}") from None
        raise
    if reasons:
        raise Wrong(f"supports() refuses what plan() plans: {reasons[0].limit}")
    nvrtc.compile(emit(plan), plan.arch)


# ---------------------------------------------------------------------------------------------------------------------
# gpu


def gpu_options(choices: Choices, case: Case) -> Case:
    """A call on this GPU, of any pipeline that it has or of one that is pinned."""
    return with_options(
        case,
        pin=choices.pick((None, None, "ampere", "hopper")),
        backward=choices.one_in(2),
        deterministic=choices.one_in(3),
        dlse=choices.one_in(2),
    )


def check_gpu(case: Case) -> None:
    variant = load(case)
    bound(case)
    here = "hopper" if torch.cuda.get_device_capability() == (9, 0) else "ampere"
    if (pin := case.options["pin"]) is not None:
        variant = replace(variant, pins=replace(variant.pins, pipeline=pin if here == "hopper" else here))
    floats = [t.name for t in variant.tensors if "float" in t.dtype]
    expected = Expected(case, floats)
    torch.use_deterministic_algorithms(True, warn_only=True)  # which fills memory that nothing wrote yet with NaN
    assert torch.empty(64, device="cuda").isnan().all(), "torch no longer fills uninitialised memory"
    o, lse, gradients = call_attention(case, variant, "cuda", deterministic=case.options["deterministic"])
    expected.check("o", o)
    expected.check_lse(lse)
    for name, gradient in gradients.items():
        right = expected.of(name, expected.right)
        expected.check(name, torch.zeros_like(right) if gradient is None else gradient)


# ---------------------------------------------------------------------------------------------------------------------


def _judge(name: str, check: Callable, profile: Profile, options: Callable | None = None) -> Judge:
    def draw(choices: Choices) -> Case:
        case = grammar.draw(choices, profile)
        return case if options is None else options(choices, case)

    return Judge(name, draw, check)


_KERNEL = Profile(longest=80, outside=True, tiles=((64, 64), (64, 32), (64, 128)), head_dims=(32, 64, 16, 24, 72))
_LAYOUTS = replace(_KERNEL, batches=(2, 3, 1))
_GPU = replace(_KERNEL, longest=300, tiles=((128, 128), (64, 64), (128, 64)), head_dims=(64, 128, 32, 80, 40, 256))

JUDGES = {
    judge.name: judge
    for judge in (
        _judge("analysis", check_analysis, Profile(outside=True, score=False)),
        _judge("text", check_text, Profile(outside=True, tame=False)),
        _judge("kernels", check_kernels, _KERNEL, kernel_options),
        _judge("layouts", check_layouts, _LAYOUTS, layout_options),
        _judge("compile", check_compile, Profile(outside=True, tame=False), compile_options),
        _judge("gradients", check_gradients, Profile(score=True, head_dims=(4, 8)), gradient_options),
        _judge("counts", check_counts, Profile(longest=70, head_dims=(16, 24)), count_options),
        _judge("gpu", check_gpu, _GPU, gpu_options),
    )
}
