"""The options of plan() and supports(), as planning takes them: checked by type, coerced where nothing is lost."""

from __future__ import annotations

import difflib
import numbers
import os
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from flashgen.errors import PlanError, shown
from flashgen.lang.load import load_spec
from flashgen.lang.variant import Variant
from flashgen.planning.float8 import DEFAULT
from flashgen.planning.integers import INTEGERS, Integer
from flashgen.planning.layout import DENSE, LAYOUTS, Layout
from flashgen.planning.plan import KernelPlan


class _Kind(NamedTuple):
    """What an option may be: `taken` gives planning's form of a value, or None for one that is not of the kind;
    `unless` is what the option is where none is given, which None says too."""

    what: str
    taken: Callable[[object], object]
    nearest: Callable[[object], object]
    unless: object = None


#: Whole numbers lie from minus this to this.
_WHOLES = 1 << 63


def _whole(value: Any) -> int | None:
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    return int(value) if whole and -_WHOLES <= value < _WHOLES else None


def _near_whole(value: Any) -> int:
    try:
        return int(float(value))
    except (TypeError, ValueError, OverflowError):
        return 64


def _tile(value: object) -> tuple[int, int] | None:
    sides = tuple(map(_whole, value)) if isinstance(value, (tuple, list)) else ()
    if len(sides) != 2 or sides[0] is None or sides[1] is None:
        return None
    return sides[0], sides[1]


def _near_tile(value: object) -> tuple[int, int]:
    named = re.fullmatch(r"(\d+)[xX](\d+)", str(value))
    return (int(named[1]), int(named[2])) if named else (128, 64)


def _dtype(value: object) -> str | None:
    """A name, or a dtype of PyTorch, which need not be imported for that."""
    return str(value).removeprefix("torch.") if isinstance(value, str) or str(value).startswith("torch.") else None


def _layout(value: object) -> Layout | None:
    return LAYOUTS.get(value) if isinstance(value, str) else None


def _near_layout(value: object) -> str:
    """The layout that is named most like it; one of PyTorch's names of sequences behind each other means these."""
    name = str(value).lower()
    close = difflib.get_close_matches(name, LAYOUTS, n=1)
    return "varlen" if name in ("ragged", "jagged", "nested") else close[0] if close else "dense"


def _names(value: object) -> tuple[str, ...] | None:
    if not isinstance(value, (tuple, list)) or not all(isinstance(name, str) for name in value):
        return None
    return tuple(value)


def _of(kind: type) -> Callable[[object], object]:
    return lambda value: value if isinstance(value, kind) else None


_WHOLE = _Kind("a whole number of 64 bits", _whole, _near_whole)


def _integer(row: Integer) -> _Kind:
    """What one of a kernel's integers may be."""
    near = _near_whole if (example := row.example) is None else lambda value: example
    return _Kind(row.kind or _WHOLE.what, _whole, near)


_FLAG = _Kind("True or False", _of(bool), lambda value: True, unless=False)
_KINDS = {
    **dict.fromkeys(
        ("batch", "heads", "kv_heads", "seqlen", "kv_seqlen", "head_dim", "v_head_dim", "kv_splits", "page_size"),
        _WHOLE,
    ),
    **{name: _integer(row) for name, row in INTEGERS.items()},
    **dict.fromkeys(("dropout", "packed", "invariant", "backward", "deterministic"), _FLAG),
    **dict.fromkeys(("dtype", "out_dtype"), _Kind("a name or a torch.dtype", _dtype, lambda value: "bfloat16")),
    **dict.fromkeys(("k_dtype", "v_dtype"), _Kind("a name or a torch.dtype", _dtype, lambda value: "float8_e4m3fn")),
    "accuracy": _Kind("a name", _of(str), lambda value: DEFAULT),
    "arch": _Kind("a name", _of(str), lambda value: "sm_80"),
    "pipeline": _Kind("a name", _of(str), lambda value: "ampere"),
    "tile": _Kind("(queries, keys), whole numbers", _tile, _near_tile),
    "layout": _Kind(", ".join(LAYOUTS), _layout, _near_layout, unless=DENSE),
    "gradients": _Kind("a tuple of names", _names, lambda value: (str(value),), unless=()),
}


def apart(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A kernel's integers among these, and the others, which are constants."""
    return (
        {name: value for name, value in given.items() if name in INTEGERS},
        {name: value for name, value in given.items() if name not in INTEGERS},
    )


def option(name: str, value: object) -> Any:
    """A value of an option as planning takes it; None stands for none given.

    Raises PlanError for a value of another type.
    """
    kind = _KINDS[name]
    if value is None:
        return kind.unless
    taken = kind.taken(value)
    if taken is None:
        raise PlanError(f"{name} is {kind.what} and got {shown(value)}\n  nearest: {name}={kind.nearest(value)!r}")
    return taken


def variant_of(given: object) -> Variant:
    """A variant, or that of the spec which a path or a shipped spec's name means; PlanError for anything else."""
    if isinstance(given, (str, os.PathLike)):
        return load_spec(given).bare
    if not isinstance(given, Variant):
        raise PlanError(f"a variant or the path of a spec is asked for and got {given!r}")
    return given.bare


def plan_of(call: str, given: object) -> KernelPlan:
    """The plan that emit() and compile() take; PlanError for anything else."""
    if not isinstance(given, KernelPlan):
        raise PlanError(
            f"{call}() takes a plan and got a {type(given).__name__}\n"
            f"  nearest: flashgen.{call}(flashgen.plan(...)), where plan() takes a variant or the path of a spec"
        )
    return given
