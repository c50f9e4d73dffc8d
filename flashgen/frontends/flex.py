"""from_flex(): the functions that people give to PyTorch's flex_attention, as a Variant.

A function is traced once.  Another one of the same code, with other tensors of the same dtypes and dimensions, takes
what the first trace found, with its own tensors.
"""

from __future__ import annotations

import functools
import sys
import types
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from flashgen.errors import SpecError
from flashgen.frontends.arrays import Array, cast
from flashgen.frontends.captures import Captures, called, is_wide, read_outside, replaced, settled
from flashgen.frontends.trace import Tracer, title, traced
from flashgen.lang import declare, source
from flashgen.lang.expr import DType
from flashgen.lang.proxies import Expr
from flashgen.lang.variant import Variant, variant
from flashgen.locks import Lock

#: Skeletons of functions that are remembered, and traces of one: the oldest are forgotten.
MAX_FUNCTIONS = 512
MAX_TRACES = 64

#: Traces of one function for other numbers, after which a warning says how to have one.
MANY_NUMBERS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trace:
    """What one trace found: the variant, and what its captured tensors and parameters are.

    tensors  the places of captured tensors in `Captures.tensors`, by their names in the variant
    params   the names of numbers that are parameters
    shapes   the shapes that it holds for, by place
    """

    variant: Variant
    tensors: tuple[tuple[str, int], ...]
    params: frozenset[str]
    shapes: tuple[tuple[int, torch.Size], ...]

    def serves(self, captures: Captures) -> bool:
        return all(captures.tensors[place][1].shape == shape for place, shape in self.shapes)

    def giving(self, captures: Captures) -> Variant:
        given: dict[str, Any] = {name: captures.tensors[place][1] for name, place in self.tensors}
        given |= {name: value for name, value in captures.params.values() if name in self.params}
        return self.variant.giving(given)


@dataclass(slots=True)
class _Known:
    """The traces of functions of one skeleton, by their numbers."""

    traces: OrderedDict[tuple[Any, ...], list[_Trace]] = field(default_factory=OrderedDict)
    numbers: int = 0
    warned: bool = False


_known: OrderedDict[tuple[Any, ...], _Known] = OrderedDict()
_lock = Lock()

#: Traces that were made in this process.
traces = 0


def from_flex(
    mask_mod: Callable[..., Any] | None = None,
    score_mod: Callable[..., Any] | None = None,
    *,
    names: Iterable[str] | None = None,
) -> Variant:
    """The variant of functions as PyTorch's flex_attention takes them: `mask_mod(b, h, q_idx, kv_idx)` and
    `score_mod(score, b, h, q_idx, kv_idx)`, unchanged.

    Tensors that they read (from closures, globals, defaults, lists, objects) become captured tensors of their dtype,
    by reference: `flashgen.attention(q, k, v, variant)` reads what they hold then, and gradients flow to those that
    want one.  Python numbers are constants; those whose names `names` has are parameters, which change without a new
    kernel.  A function of the same code with other tensors of the same dtypes and dimensions costs no new trace.
    Nothing is promised about what tensors hold.

    Raises SpecError at the function's line for what the language has not: control flow by traced values, functions of
    torch that docs/frontends.md does not list, and tensors that change.  torch.compile breaks its graph here: make the
    variant outside of what is compiled.
    """
    if torch.compiler.is_compiling():
        from flashgen.frontends.eager import apart

        return apart(functools.partial(from_flex, names=names), mask_mod, score_mod)
    for kind, function in (("mask_mod", mask_mod), ("score_mod", score_mod)):
        if function is not None and (not callable(function) or isinstance(function, (Variant, type))):
            got = f"the variant {function.name!r}" if isinstance(function, Variant) else repr(function)
            raise SpecError(f"{kind} is a function of positions, as flex_attention takes it, and got {got}")
    if mask_mod is None and score_mod is None:
        return variant()
    if isinstance(names, str):
        raise SpecError(f"names is a tuple of names, as in names=({names!r},)")
    wanted = tuple(names or ())
    captures = Captures((mask_mod, score_mod), wanted)
    if captures.settled and (found := _remembered(captures)) is not None:
        return found.giving(captures)
    return _made(mask_mod, score_mod, wanted, captures)


def _remembered(captures: Captures) -> _Trace | None:
    numbers = tuple(captures.numbers)
    with _lock:
        known = _known.get(captures.key)
        if known is None or numbers not in known.traces:
            return None
        _known.move_to_end(captures.key)
        known.traces.move_to_end(numbers)
        return next((trace for trace in known.traces[numbers] if trace.serves(captures)), None)


def _made(
    mask_mod: Any, score_mod: Any, names: tuple[str, ...], captures: Captures, *, changed: bool = False
) -> Variant:
    """A trace, remembered where all that it may depend on was found; `changed` says that an earlier one changed that.

    What a first call makes once, as an attribute that is kept, is there for the next: that one is the trace then.
    """
    global traces
    traces += 1
    by = {key: _parameter(name, value) for key, (name, value) in captures.params.items()}
    missing = sorted(set(names) - {name for _, name in captures.params})
    if missing:
        numbers = sorted({name for name, _ in captures.numbers} | {name for _, name in captures.params})
        raise SpecError(
            f"names has {missing[0]!r}, and no closure, global or default of {_titles(mask_mod, score_mod)} holds a"
            f" number by that name; it reads {', '.join(numbers) or 'no number'}"
        )
    described = mask_mod if mask_mod is not None else score_mod
    reached: dict[int, Any] = {}
    of_mask, of_score = (replaced(called(f), by, reached) if by else f for f in (mask_mod, score_mod))
    unreached = _Unreached(captures, reached, names)
    tracer = Tracer(captures.tensors)
    while True:
        with unreached:
            bare = variant(
                None if mask_mod is None else _mask(tracer, of_mask),
                None if score_mod is None else _score(tracer, of_score),
                name=_name(mask_mod, score_mod),
                doc=(getattr(described, "__doc__", None) or "").strip(),
            )
        unreached.check(_titles(mask_mod, score_mod))
        if tracer.sizes_met:
            break
        tracer = Tracer(captures.tensors, tracer.fixed)  # once more, with the shapes declared
    _check_parameters(captures, by, tracer, bare, _titles(mask_mod, score_mod))
    after = Captures((mask_mod, score_mod), names)
    if not after.alike(captures):
        if changed:
            raise SpecError(_changing(mask_mod, score_mod, captures, after))
        return _made(mask_mod, score_mod, names, after, changed=True)
    places = {name: place for place, (name, _) in enumerate(captures.tensors)}
    read = [t.name for t in bare.tensors]
    found = _Trace(
        variant=bare,
        tensors=tuple((name, places[name]) for name in read if name in places),
        params=frozenset(p.name for p in bare.params),
        shapes=tuple((places[name], tracer.read[name].shape) for name in sorted(tracer.fixed) if name in places),
    )
    if captures.settled and not tracer.unseen and not tracer.asked:
        _remember(captures, found, _titles(mask_mod, score_mod))
    made = found.giving(captures)
    unseen = {name: tracer.read[name] for name in read if name not in places}
    return made.giving({**made.given, **unseen}) if unseen else made


class _Unreached:
    """The functions that read named numbers where no parameter can take their place: of an object that a function asks
    for, of another module, or held where nobody looks.  While a trace runs inside of it, those that are called are
    noticed: by what they are, or by the number that they still have."""

    def __init__(self, captures: Captures, reached: Iterable[int], names: Iterable[str]) -> None:
        self._names = {
            reader.__code__: name
            for (_, name), readers in captures.readers.items()
            for reader in readers
            if id(reader) not in reached
        }
        self._wanted = frozenset(names)
        self._kept = captures.kept
        self._met: tuple[str, types.CodeType] | None = None
        self._before: Any = None  # who profiles beside

    def __enter__(self) -> None:
        if self._wanted:
            self._before = sys.getprofile()
            sys.setprofile(self._notice)

    def __exit__(self, *_: object) -> None:
        if self._wanted:
            of_python = self._before is None or callable(self._before)
            sys.setprofile(self._before if of_python else None)
            if not of_python:  # cProfile's, which is no function
                self._before.enable()

    def _notice(self, frame: types.FrameType, event: str, _: object) -> None:
        if event == "call" and self._met is None:
            code = frame.f_code
            name = self._names.get(code) or self._number(frame)
            self._met = None if name is None else (name, code)

    def _number(self, frame: types.FrameType) -> str | None:
        """The named number that code of a user's still reads as one."""
        code = frame.f_code
        if self._wanted.isdisjoint(code.co_names) and self._wanted.isdisjoint(code.co_freevars):
            return None
        if settled(frame.f_globals.get("__name__") or ""):
            return None
        for name in self._wanted & read_outside(code):
            around = name in code.co_freevars
            value = frame.f_locals.get(name) if around else frame.f_globals.get(name)
            value = value.item() if isinstance(value, np.generic) else value
            if type(value) in (int, float) and not (around and _made_by_caller(frame, name)):
                return name
        return None

    def check(self, titles: str) -> None:
        """Raise SpecError where one of them was called, or may have been before."""
        for name, function in self._kept.items():
            raise SpecError(
                f"names has {name!r}, which {function.__qualname__!r} reads: functools.lru_cache keeps what it gives"
                f" for one number, and no parameter can take its place\n  nearest: {function.__qualname__} without"
                f" lru_cache, or names without {name!r}",
                where=source.definition(function.__code__),
            )
        if self._met is not None:
            name, code = self._met
            raise SpecError(
                f"names has {name!r}, which {code.co_qualname!r} reads: no parameter can take its place in what an"
                f" object or another module holds\n  nearest: read it in {titles}, and hand it on",
                where=source.definition(code),
            )


def _made_by_caller(frame: types.FrameType, name: str) -> bool:
    """Whether a variable of that name belongs to a function that is running, which made the frame's."""
    caller = frame.f_back
    while caller is not None:
        if name in caller.f_code.co_cellvars and frame.f_code in caller.f_code.co_consts:
            return True
        caller = caller.f_back
    return False


def _check_parameters(
    captures: Captures, by: Mapping[tuple[int, str], Array], tracer: Tracer, bare: Variant, titles: str
) -> None:
    """Raise SpecError where a named number is no parameter because the function asked what type it is of: no operation
    met it, and what the trace found may hold for numbers alone, and for this one."""
    params = {p.name for p in bare.params}
    met: dict[str, bool] = {}
    for key, (param, _) in captures.params.items():
        met[key[1]] = met.get(key[1], False) or param in params or id(by[key]) in tracer.met
    for name, was_met in met.items():
        if not was_met and captures.reads("type", "__class__"):
            raise SpecError(
                f"names has {name!r}, and the trace of {titles} made no parameter of it: no operation met it, and its"
                f" type was asked for\n  nearest: isinstance({name}, int), which holds of a parameter too, or names"
                f" without {name!r}"
            )


def _changing(mask_mod: Any, score_mod: Any, before: Captures, after: Captures) -> str:
    counted = sorted({name for (name, now), (_, was) in zip(after.numbers, before.numbers, strict=False) if now != was})
    what = f"the number {counted[0]!r}" if counted else "a container, a tensor or an object"
    return (
        f"{_titles(mask_mod, score_mod)} changes {what} that it reads, each time it is called: a function of positions"
        " is called once, and its kernel many times\n  nearest: compute it before, and capture the result"
    )


def _remember(captures: Captures, trace: _Trace, titles: str) -> None:
    numbers = tuple(captures.numbers)
    with _lock:
        known = _known.setdefault(captures.key, _Known())
        _known.move_to_end(captures.key)
        if len(_known) > MAX_FUNCTIONS:
            _known.popitem(last=False)
        known.numbers += numbers not in known.traces
        several = known.traces.setdefault(numbers, [])
        several.insert(0, trace)
        del several[MAX_TRACES:]
        if len(known.traces) > MAX_TRACES:
            known.traces.popitem(last=False)
        tell = known.numbers > MANY_NUMBERS and not known.warned
        known.warned |= tell
        earlier = list(known.traces)
    if tell:
        changing = sorted({now[0] for other in earlier for now, was in zip(numbers, other, strict=True) if now != was})
        hint = ", ".join(map(repr, changing))
        warnings.warn(
            f"{titles} was compiled for {known.numbers} sets of numbers; {hint} differs, and is a constant of each"
            f" kernel\n  nearest: flashgen.from_flex(..., names=({hint},)), where a new number compiles nothing",
            stacklevel=4,
        )


def _parameter(name: str, value: float) -> Array:
    """A number of a function as a parameter: like it, of the type of what it meets."""
    declared = declare.param(name, dtype=float if isinstance(value, float) else "int64" if is_wide(value) else int)
    dtype = torch.float32 if declared.node.dtype is DType.FLOAT32 else torch.int64
    return Array(lambda index: declared, (), dtype, weak=True)


def _mask(tracer: Tracer, function: Callable[..., Any]) -> Callable[..., Expr]:
    def mask(b: Expr, h: Expr, q: Expr, k: Expr) -> Expr:
        return traced(tracer, function, "mask_mod", {"b": b, "h": h, "q_idx": q, "kv_idx": k}).element

    return mask


def _score(tracer: Tracer, function: Callable[..., Any]) -> Callable[..., Expr]:
    def score(s: Expr, b: Expr, h: Expr, q: Expr, k: Expr) -> Expr:
        made = traced(tracer, function, "score_mod", {"score": s, "b": b, "h": h, "q_idx": q, "kv_idx": k})
        return cast(made.element, torch.float32)

    return score


def _titles(mask_mod: Any, score_mod: Any) -> str:
    return " and ".join(title(f) for f in (mask_mod, score_mod) if f is not None)


def _name(mask_mod: Any, score_mod: Any) -> str:
    """The name of the variant: those of the functions, where they have one."""
    words = [title(f).strip("'") for f in (mask_mod, score_mod) if f is not None]
    return "_".join(word for word in words if word.isidentifier()) or "flex"
