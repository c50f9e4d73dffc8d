"""Tracing: a spec's mask and score functions, called once with proxies, become expressions."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from flashgen.errors import SourceLine, SpecError
from flashgen.lang import build, source
from flashgen.lang.expr import DType, Node, const, loop_indices, node
from flashgen.lang.proxies import Expr, examples_read, kind_of, node_of, refused

SCORE = node("score", DType.FLOAT32)

_MASK_CURE = ": return a condition, as in `return k <= q`"
_INDICES = {name: node("index", DType.INT32, (), name) for name in "bhqk"}


class Traced(NamedTuple):
    """An expression, and the examples of the captured tensors it reads.

    Equal expressions are one node, however their tensors' examples differ, so the examples travel beside the nodes.
    """

    node: Node | None
    examples: dict[str, Callable]


def trace_mask(function: Callable) -> Traced:
    """The mask that `function(b, h, q, k)` computes; None where it always holds."""
    result, examples = _call(function, "mask", "b h q k")
    if isinstance(result, (bool, np.bool_)):
        return Traced(None if result else const(False), examples)
    if not isinstance(result, Expr):
        raise SpecError(f"the mask {_title(function)} returned {kind_of(result)}{_MASK_CURE}", where=_defined(function))
    if result.node.dtype is not DType.BOOL:
        raise SpecError(
            f"the mask {_title(function)} returned {result.node.dtype.value}: compare it, as in x != 0",
            where=_defined(function),
        )
    return Traced(None if result.node is const(True) else result.node, examples)


def trace_score(function: Callable, incoming: Node | None = None) -> Traced:
    """The score that `function(s, b, h, q, k)` computes from `incoming` (None: s itself)."""
    result, examples = _call(function, "score", "s b h q k", incoming)
    if not isinstance(result, (Expr, int, float, np.integer, np.floating)) or isinstance(result, bool):
        raise SpecError(
            f"the score function {_title(function)} returned {kind_of(result)}; return the new score, as in s + 1.0",
            where=_defined(function),
        )
    value = node_of(result)
    if value.dtype is DType.BOOL:
        raise SpecError(
            f"the score function {_title(function)} returned a condition; a condition that hides belongs in the mask,"
            " or write fg.where(condition, s, -math.inf)",
            where=_defined(function),
        )
    return Traced(build.cast(value, DType.FLOAT32), examples)


def _call(
    function: Callable, kind: str, arguments: str, incoming: Node | None = None
) -> tuple[object, dict[str, Callable]]:
    if not callable(function):
        raise refused(f"a {kind} is a function ({', '.join(arguments.split())}), not {kind_of(function)}")
    names = arguments.split()
    try:
        own = list(inspect.signature(function).bind(*names).arguments)
    except TypeError:
        raise SpecError(
            f"the {kind} function {_title(function)} takes {inspect.signature(function)};"
            f" it is called with ({', '.join(names)})",
            where=_defined(function),
        ) from None
    if own != names and sorted(own) == sorted(names):
        raise SpecError(
            f"the {kind} function {_title(function)} takes ({', '.join(own)}), and arguments come in one order: write"
            f" ({', '.join(names)})",
            where=_defined(function),
        )
    proxies = [Expr((incoming or SCORE) if name == "s" else _INDICES[name]) for name in names]
    token = examples_read.set({})
    try:
        result = function(*proxies)
        if isinstance(result, Expr) and loop_indices(result.node):
            raise SpecError(
                f"the {kind} function {_title(function)} uses the index of a loop outside of that loop;"
                " use it in the function that fg.any or fg.sum is given",
                where=_defined(function),
            )
        return result, examples_read.get()
    except SpecError:
        raise
    except Exception as error:
        raise source.as_spec_error(error) from error
    finally:
        examples_read.reset(token)


def _title(function: Callable) -> str:
    return repr(getattr(function, "__name__", type(function).__name__))


def _defined(function: Callable) -> SourceLine | None:
    code = getattr(function, "__code__", None)
    return source.definition(code) if code else source.caller()
