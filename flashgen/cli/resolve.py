"""What the shared options come to for one spec: a problem, its data, and the kernel that serves it."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashgen.cli import captured, options
from flashgen.cli.options import Pass, Request
from flashgen.errors import PlanError

if TYPE_CHECKING:
    from flashgen.analysis.facts import Facts
    from flashgen.analysis.tiles import Case
    from flashgen.lang.variant import Variant
    from flashgen.planning.plan import KernelPlan
    from flashgen.planning.planner import Menu
    from flashgen.planning.prediction import Prediction
    from flashgen.planning.problem import Problem
    from flashgen.planning.traffic_sequences import OwnLengths


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """A spec and a request as values: what is planned, on which data, and by which kernel.

    `variant` has its constants bound; `menu` holds every plan for it and `plan` the one that serves `problem`; `case`
    has the data that were asked for.  `splits` blocks divide the keys of a tile of queries, and `why_splits` says why
    that many.  Where keys lie in pages these have `page_size` rows.
    """

    variant: Variant
    problem: Problem
    case: Case
    facts: Facts
    menu: Menu
    plan: KernelPlan
    splits: int = 1
    why_splits: str = ""
    sequences: tuple[OwnLengths, ...] = ()
    page_size: int | None = None

    def __str__(self) -> str:
        p = self.problem
        most = "at most " if self.sequences else ""
        lengths = f"seqlen {most}{p.q_len}" + (f", kv_seqlen {most}{p.kv_len}" if p.kv_len != p.q_len else "")
        heads = f"heads {p.heads}" + (f", kv_heads {p.kv_heads}" if p.kv_heads != p.heads else "")
        values = "".join(f", {name} {value:g}" for name, value in self.case.params.items())
        k, v = (p.kv_dtype or p.dtype,) * 2 if self.plan.float8 is None else (self.plan.float8.k, self.plan.float8.v)
        dtypes = p.dtype + ("" if k == v == p.dtype else f", k and v {k}" if k == v else f", k {k}, v {v}")
        return f"{self.variant.name}: batch {p.batch}, {heads}, {lengths}, head_dim {p.head_dim}, {dtypes}{values}"

    def predict(self) -> Prediction:
        """The plan's cost on the problem, with the candidates that were rejected for it."""
        from flashgen.planning.traffic import predict

        # On a CPU a plan lends its tiles to head dims that no kernel takes.
        plan = dataclasses.replace(self.plan, head_dim=self.problem.head_dim, v_head_dim=self.problem.v_head_dim)
        measured = None if plan.packed else self.menu.measured  # no packed form was measured against others
        others = (other for other in self.menu.forms if other != self.plan)
        splits = {"splits": self.splits, "why_splits": self.why_splits, "sequences": self.sequences}
        splits["page_size"] = self.page_size
        known = {"rejected": self.menu.rejected, "measured": measured, "others": others}
        return predict(plan, self.problem, self.case, **known, **splits)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """What `flashgen plan` is told of the lengths of sequences, as texts: numbers with commas between them, and where
    the first query sits; and of the rows of a page."""

    q: str | None
    kv: str | None
    q_offset: str
    page_size: int | None = None

    @property
    def alike(self) -> bool:
        """Whether all are as long as the problem says, as a call without lengths tells."""
        return self.q is self.kv is None

    def of(self, request: Request, problem: Problem) -> tuple[OwnLengths, ...]:
        """Those of a batch, of the sizes that a request names, or of the problem's where no lengths are given; raises
        PlanError for what is no length, and for sizes that are not those of the lengths."""
        from flashgen.planning.layout import AT_END
        from flashgen.planning.traffic_sequences import own_lengths

        first = AT_END if self.q_offset == "end" else _whole("--q-offset", self.q_offset, " or end")
        q, kv = (_numbers(name, text) for name, text in (("--q-lengths", self.q), ("--kv-lengths", self.kv)))
        if q is None and kv is None:
            return own_lengths(problem.batch, problem.q_len, problem.kv_len, q, kv, first)
        return own_lengths(request.batch, request.seqlen, request.kv_seqlen, q, kv, first)


def _numbers(name: str, text: str | None) -> tuple[int, ...] | None:
    return None if text is None else tuple(_whole(name, one) for one in text.split(","))


def _whole(name: str, text: str, other: str = "") -> int:
    """A number that is not negative.  A refusal names what `other` words the option takes."""
    if re.fullmatch("[0-9]{1,9}", text := text.strip()) is None:
        cure = f"{name} 4096{other}"
        raise PlanError(f"{name}: {text!r} is no whole number from 0 on of at most 9 digits\n  nearest: {cure}")
    return int(text)


def resolve(
    spec: str | Variant,
    request: Request,
    which: Pass | None = None,
    *,
    device: str | None = None,
    seed: int = 0,
    data: bool = True,
    kv_splits: int | None = None,
    lengths: Lengths | None = None,
) -> Resolved:
    """Load a spec, settle what the request leaves open, make its data and plan one pass of it.

    `device` is where the problem runs ("cpu", "cuda"; None: not at all, planned for the GPU where there is one); `seed`
    is that of the captured tensors' examples.  Without `data` nothing is made that no kernel depends on: parameters and
    captured tensors that the request gives are checked, and others not asked for.  `kv_splits` blocks divide keys, as
    many as flashgen chooses where it is None.  `lengths` are those of sequences in a layout that has them.  Raises
    SpecError and PlanError.
    """
    from flashgen.analysis.facts import analyse
    from flashgen.analysis.tiles import Case
    from flashgen.lang.load import load_spec
    from flashgen.ops.stages import default_arch, default_dtype, default_head_dim, sm_count
    from flashgen.planning import arch as archs
    from flashgen.planning import division, paging, planner
    from flashgen.planning.problem import Problem
    from flashgen.planning.request import KernelRequest

    which = which or Pass()
    if data and which.layout != "dense" and lengths is None:
        raise PlanError(
            f"--layout {which.layout}: this command makes tensors of dense sequences alone\n"
            f"  nearest: flashgen plan, emit, compile, build or show --program with --layout {which.layout}"
        )
    if data and which.split_keys:
        raise PlanError(
            "--split-keys is of a kernel alone (emit, compile, build, show --program), and a problem has a number of"
            " blocks\n  nearest: leave out --split-keys"
        )
    if which.backward and kv_splits is not None:
        raise PlanError("--kv-splits is of the forward\n  nearest: --kv-splits without --backward")
    variant, params = _bound(load_spec(spec) if isinstance(spec, str) else spec, request.param or (), data)
    arch = default_arch(variant) if request.arch is None else archs.find(request.arch).name
    fixed = {"pipeline": request.pipeline, "tile": options.tile_shape(request.tile), "stages": request.stages}
    if device is not None:
        # A call of attention takes these from the variant.  What needs no pin gets none: it is the kernel of any call.
        variant = _pinned(variant, **fixed, arch=arch if device == "cpu" else request.arch)
    head_dim = default_head_dim(variant) if request.head_dim is None else request.head_dim
    q_len = options.SEQLEN[device or options.default_device()] if request.seqlen is None else request.seqlen
    problem = Problem(
        batch=1 if request.batch is None else request.batch,
        heads=request.heads,
        kv_heads=request.heads if request.kv_heads is None else request.kv_heads,
        q_len=q_len,
        kv_len=q_len if request.kv_seqlen is None else request.kv_seqlen,
        head_dim=head_dim,
        v_head_dim=head_dim if request.v_head_dim is None else request.v_head_dim,
        dtype=default_dtype(variant) if request.dtype is None else request.dtype,
    )
    of_keys = which.of_keys(request.kv_dtype)
    kv_dtype = of_keys["k_dtype"] if of_keys["k_dtype"] != problem.dtype else None
    problem = problem._replace(kv_dtype=kv_dtype)
    sequences = () if lengths is None else lengths.of(request, problem)
    if sequences:
        most = {"q_len": max(x.q_rows for x in sequences), "kv_len": max(x.kv_len for x in sequences)}
        problem = problem._replace(batch=len(sequences), **most)
    positions = problem._replace(q_len=max((x.q_len for x in sequences), default=problem.q_len))
    tensors = captured.arrays(variant, positions, request.tensor or (), seed=seed, examples=data)
    if device == "cpu":
        from flashgen.ops.menus import cpu_request

        asked, sms = cpu_request(variant, problem, dropout=which.dropout, **of_keys), archs.find(arch).sms
    else:
        dims = problem.head_dim, problem.v_head_dim
        asked = KernelRequest.of(variant, arch, problem.dtype, *dims, **fixed, **which.asked(request.kv_dtype))
        sms = sm_count(arch)
    told = None if lengths is None else lengths.page_size
    page_size = paging.rows_of_pages(asked.layout.name, asked.layout.paged, told)
    if which.backward or which.split_keys or (which.invariant and not data):  # a kernel alone is the one that is named
        menu = paging.menu_of_pages(asked, page_size)
        found = division.Divided(menu=menu, plan=planner.choose(menu, problem, sms))
    else:
        found = division.divide(
            lambda keys: paging.menu_of_pages(asked.visiting(keys), page_size),
            *(problem, sms),
            kv_splits=kv_splits,
            params=params,
            layout=asked.layout,
            invariant=which.invariant,
            alike=lengths is None or lengths.alike,
        )
    return Resolved(
        variant=variant,
        problem=problem,
        case=Case(sizes=problem.sizes(), params=params, tensors=tensors),
        facts=analyse(variant),
        menu=found.menu,
        plan=found.plan,
        splits=found.splits,
        why_splits=found.why,
        sequences=sequences,
        page_size=page_size,
    )


def folded(variant: Variant, texts: Sequence[str]) -> Variant:
    """The variant with its constants folded; a kernel alone takes no value of a parameter, and PlanError says so."""
    given = _given(texts)
    if passed := [symbol.name for symbol in variant.params if symbol.name in given]:
        raise PlanError(
            f"--param {passed[0]}: {passed[0]!r} is a parameter of {variant.name!r}: it is passed at the call, and one"
            f" kernel serves every value\n  nearest: leave out --param {passed[0]}"
        )
    return variant.bind(**given)


def _bound(variant: Variant, texts: Sequence[str], complete: bool) -> tuple[Variant, Mapping[str, int | float]]:
    """The variant with its constants folded, and its parameters' values: `NAME=VALUE` texts, else the defaults; where
    that need not be complete, those without a default may be missing."""
    given = _given(texts)
    constants = {symbol.name for symbol in variant.constants}
    values = {name: value for name, value in given.items() if name not in constants}
    values = variant.values(values, complete=complete)
    return variant.bind(**{name: value for name, value in given.items() if name in constants}), values


def _given(texts: Sequence[str]) -> dict[str, int | float]:
    """The numbers of `NAME=VALUE` texts."""
    given: dict[str, int | float] = {}
    for name, value in (options.pair(text, "--param", "NAME=VALUE") for text in texts):
        if name in given:
            raise PlanError(f"--param {name} is given twice\n  nearest: --param {name}={value} alone")
        given[name] = _number(name, value)
    return given


def _number(name: str, text: str) -> int | float:
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    raise PlanError(f"--param {name}={text}: {text!r} is not a number")


def _pinned(variant: Variant, **chosen: object) -> Variant:
    """The variant with what is chosen in place of its own pins."""
    pins = dataclasses.replace(variant.pins, **{name: value for name, value in chosen.items() if value is not None})
    return variant if pins == variant.pins else dataclasses.replace(variant, pins=pins)
