"""flashgen::attention and its backward, the torch.library ops that torch.compile and other tracers see; eager calls go
around them.

A compiled graph holds no Variant: it holds its token, by which the process finds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import torch

from flashgen.errors import LaunchError
from flashgen.lang.variant import Variant, of_token
from flashgen.ops import dropout as drawing
from flashgen.ops.backward import SECOND, Given, results, run_backward, with_gradient
from flashgen.ops.call import Call
from flashgen.ops.forward import outputs, run
from flashgen.ops.out import WITH_GRADIENTS
from flashgen.ops.sinks import with_given_sink
from flashgen.ops.tracing import sharded, traced, transformed
from flashgen.ops.values import SYMBOLS, WORD, no_flag, no_number, no_seed, no_tensor, no_variant, too_long

#: What a call has beside q, k and v.  Tensors and numbers travel as parallel lists of names and values, where None
#: stands for no value: a package of AOTInductor hands no empty list of tensors over, and torch.export saves none of
#: numbers.  Scale and dropout, where they are given, are numbers too.  `state` is the seed and the offset of what is
#: dropped.
_GIVEN = "str variant, str[] tensor_names, Tensor[]? tensors, str[] names, Scalar[]? numbers"
_LAST = "Tensor? state, bool deterministic"

#: `symbols` are the numbers that a graph does not know when it is made: float64 scalars on the CPU.
_REST = f"{_GIVEN}, str[] symbol_names, Tensor[]? symbols, {_LAST}"

#: A call as it is traced.  It becomes flashgen::attention when a graph is made of it, where a float that may change is
#: a symbol: torch makes graphs anew for each value of a float that an op is given as a number.
_CALL = f"call(Tensor q, Tensor k, Tensor v, {_GIVEN}, {_LAST}) -> (Tensor o, Tensor lse)"

#: A call that is wrong in what no graph can hold: raises LaunchError when the graph runs, as other wrong calls do.
_REFUSE = "refuse(Tensor q, Tensor v, str message) -> (Tensor o, Tensor lse)"

#: The same of a call that writes to `out`: a compiler leaves out an op whose results nobody uses, unless it writes.
_REFUSE_INTO = "refuse_into(Tensor(a!) out, Tensor q, Tensor v, str message) -> Tensor lse"

#: Seed and offset of one call's dropout as int64 on the CPU, moving torch's generator on where no seed is given; a
#: `high` seed is 2^64 more.  `site` is the place of the call: two calls never share theirs, whatever a compiler finds
#: equal.
_DRAW = "draw(Tensor like, SymInt? seed, bool high, int site) -> Tensor"

_FORWARD = f"attention(Tensor q, Tensor k, Tensor v, {_REST}) -> (Tensor o, Tensor lse)"

#: The same into memory that the call is given, without gradients: for a traced call, and for a graph.
_CALL_INTO = f"call_into(Tensor(a!) out, Tensor q, Tensor k, Tensor v, {_GIVEN}, {_LAST}) -> Tensor lse"

_INTO = f"attention_into(Tensor(a!) out, Tensor q, Tensor k, Tensor v, {_REST}) -> Tensor lse"

_BACKWARD = (
    "attention_backward(Tensor? do, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse,"
    f" {_REST}, str[] wanted) -> (Tensor dq, Tensor dk, Tensor dv, Tensor[] captured)"
)

#: What torch.func under torch.compile is told.
TRANSFORMED = (
    "flashgen's attention is compiled for backward() and torch.autograd.grad, and not for transforms of torch.func or"
    " forward-mode AD\n  nearest: torch.func.grad, vjp and vmap without torch.compile, or backward() with it"
)

#: What DTensors are told where they are not plain calls.
SHARDED = (
    "attention of DTensors under a tracer, a mode of torch's dispatcher or a transform of torch.func is not served\n"
    "  nearest: the call outside of it, or q.to_local(), k.to_local() and v.to_local() where neither b nor h is read"
)

#: The variants of graphs that were traced, which may live as long as the process.
_traced: dict[str, Variant] = {}

_library = torch.library.Library("flashgen", "DEF")
_library.define(_DRAW, tags=(torch.Tag.nondeterministic_seeded,))
_library.define(_CALL)
_library.define(_REFUSE)
_library.define(_REFUSE_INTO)
_library.define(_FORWARD)
_library.define(_CALL_INTO)
_library.define(_INTO)
_library.define(_BACKWARD)


class _Arguments(NamedTuple):
    """A call as flashgen::attention takes it beside q, k and v: _REST, field by field."""

    variant: str
    tensor_names: Sequence[str]
    tensors: Sequence[torch.Tensor] | None
    names: Sequence[str]
    numbers: Sequence[float] | None
    symbol_names: Sequence[str]
    symbols: Sequence[torch.Tensor] | None
    state: torch.Tensor | None
    deterministic: bool


def through_op(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, dropout: float, seed: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, lse) by the op, as `attention` traces it, of a call whose dropout the graph draws; what is wrong with a call
    is said when it runs."""
    wrong = _checked(q, k, v, call, dropout, seed)
    if wrong is not None:
        return torch.ops.flashgen.refuse(q, v, wrong)
    return torch.ops.flashgen.call(q, k, v, *_traced_call(q, call, dropout, seed))


def through_op_into(
    out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, dropout: float, seed: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same whose o is written to `out`: that and lse."""
    wrong = _checked(q, k, v, call, dropout, seed)
    if not isinstance(out, torch.Tensor):
        return torch.ops.flashgen.refuse(q, v, wrong or no_tensor("out", out))
    tensors = (x for x in (q, k, v, out, *call.named.values()) if isinstance(x, torch.Tensor))
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        wrong = wrong or WITH_GRADIENTS
    if wrong is not None:
        return out, torch.ops.flashgen.refuse_into(out, q, v, wrong)
    return out, torch.ops.flashgen.call_into(out, q, k, v, *_traced_call(q, call, dropout, seed))


def _checked(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, dropout: object, seed: object
) -> str | None:
    """What is wrong with a traced call, to be said when it runs; raises LaunchError where it never can."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, torch.Tensor):
            raise LaunchError(no_tensor(name, tensor))
    return _wrong(call, dropout, seed)


def _traced_call(q: torch.Tensor, call: Call, dropout: float, seed: int | None) -> tuple[Any, ...]:
    """_GIVEN and _LAST of a call whose dropout the graph draws."""
    p = state = None
    if dropout != 0 or isinstance(dropout, bool) or seed is not None:
        from flashgen.ops.sites import site

        p = dropout
        high = seed is not None and seed >= 1 << 63
        word = seed - (1 << 64) if seed is not None and high else seed
        state = torch.ops.flashgen.draw(q, word, high, site())
    return *_lists(call, p), state, call.deterministic


def _lists(
    call: Call, p: float | None
) -> tuple[str, list[str], list[torch.Tensor] | None, list[str], list[float] | None]:
    """_GIVEN of a call that drops by the chance p, if any."""
    call, tensors = call.apart()
    numbers = {**call.named}
    if call.scale is not None:
        numbers["scale"] = call.scale
    if p is not None:
        numbers["dropout"] = p
    values = list(numbers.values()) or None
    return call.variant.token, list(tensors), list(tensors.values()) or None, list(numbers), values


def _wrong(call: Call, dropout: object, seed: object) -> str | None:
    """What is wrong with a call that no graph can hold: all but the values of numbers and tensors."""
    variant, scale, named, _, deterministic = call
    if not isinstance(variant, Variant):
        return no_variant(variant)
    texts = [None if scale is None else no_number("scale", scale), no_number("dropout", dropout)]
    texts += [too_long("scale", scale), too_long("dropout", dropout), no_flag("deterministic", deterministic)]
    if isinstance(seed, bool) or not isinstance(seed, int) or not -(1 << 63) <= seed <= WORD:
        texts.append(no_seed(seed))
    for name, value in named.items():
        title = f"{name.rpartition('.')[2]!r} of {variant.name!r}"
        if not isinstance(value, (*SYMBOLS, int, float, torch.Tensor)):
            kind = type(value).__name__
            texts.append(f"{title} is a {kind}: parameters are numbers and captured tensors are torch.Tensors")
        texts.append(too_long(title, value))
    for text in texts:
        if text is not None:
            return text
    return None


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, lse) of a call whose dropout is drawn: by the op where it is traced, else at once."""
    if not traced(q, k, v):
        return run(q, k, v, call)
    if sharded(q, k, v):
        raise LaunchError(SHARDED)
    return torch.ops.flashgen.attention(q, k, v, *_arguments(call))


def differentiate(given: Given, call: Call, wanted: tuple[str, ...]) -> tuple[torch.Tensor, ...]:
    """Gradients as `run_backward` gives them, flat: by the op where it is traced, else at once."""
    if not traced(given.q, given.k, given.v):
        *found, captured = run_backward(given, call, wanted)
    else:
        *found, captured = torch.ops.flashgen.attention_backward(*given, *_arguments(call), list(wanted))
    return *found, *captured


def _arguments(call: Call) -> _Arguments:
    """A call whose numbers are known."""
    p = state = None
    if call.dropout is not None:
        p, words = call.dropout.p, [_signed(call.dropout.seed), _signed(call.dropout.offset)]
        state = torch.tensor(words, dtype=torch.int64, device="cpu")
    return _Arguments(*_lists(call, p), [], None, state, call.deterministic)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >= 1 << 63 else word


def _known(token: str) -> Variant:
    variant = _traced.get(token) or of_token(token)
    if variant is None:
        raise LaunchError(
            f"flashgen::attention got the token {token!r}, which no variant of this process has: trace again"
        )
    return variant


def _call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    if transformed():
        _transformed()
    return torch.ops.flashgen.attention(q, k, v, *_with_symbols(*given))


def _call_into(out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *given: Any) -> torch.Tensor:
    if transformed():
        _transformed()
    return torch.ops.flashgen.attention_into(out, q, k, v, *_with_symbols(*given))


def _with_symbols(*given: Any) -> tuple[Any, ...]:
    """_REST of _GIVEN and _LAST: numbers that a graph does not know are tensors."""
    variant, tensor_names, tensors, names, numbers, state, deterministic = given
    known: dict[str, float] = {}
    symbols: dict[str, torch.Tensor] = {}
    for name, number in zip(names, numbers or (), strict=True):
        if isinstance(number, torch.SymFloat):
            # A product, because torch turns the arithmetic of such a float and a tensor into that of two tensors.
            one: Any = torch.ones((), dtype=torch.float64, device="cpu")
            symbols[name] = one * number
        else:
            known[name] = number
    lists = (list(known), list(known.values()) or None, list(symbols), list(symbols.values()) or None)
    return variant, tensor_names, tensors, *lists, state, deterministic


def _transformed(*_: object) -> NoReturn:
    raise LaunchError(TRANSFORMED)


def _refuse(*arguments: Any) -> NoReturn:
    raise LaunchError(arguments[-1])


def _draw(like: torch.Tensor, seed: int | None, high: bool, site: int) -> torch.Tensor:
    seed = seed + (1 << 64) if high and seed is not None else seed
    if wrong := no_seed(seed):
        raise LaunchError(wrong)
    return torch.tensor([_signed(word) for word in drawing.state(like, seed)], dtype=torch.int64, device="cpu")


def _call_of(rest: _Arguments) -> Call:
    """The call of a graph that runs: its variant found, its symbols read, its dropout checked."""
    names, values = (*rest.tensor_names, *rest.names), (*(rest.tensors or ()), *(rest.numbers or ()))
    named: dict[str, Any] = dict(zip(names, values, strict=True))
    named |= {name: symbol.item() for name, symbol in zip(rest.symbol_names, rest.symbols or (), strict=True)}
    scale, p = named.pop("scale", None), named.pop("dropout", 0.0)
    drawing.check(p)
    dropout = drawing.dropout_of(float(p), *rest.state.tolist()) if p and rest.state is not None else None
    return Call(with_given_sink(_known(rest.variant), named), scale, named, dropout, rest.deterministic)


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return run(q, k, v, _call_of(_Arguments(*rest)))


def _attention_into(out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> torch.Tensor:
    return run(q, k, v, _call_of(_Arguments(*rest)), True, out)[1]


def _attention_backward(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    given, rest, wanted = _of_backward(*arguments)
    found = run_backward(given, _call_of(rest), wanted)
    return *found[:3], list(found.captured)


def _of_backward(*arguments: Any) -> tuple[Given, _Arguments, Sequence[str]]:
    """The arguments of flashgen::attention_backward."""
    tensors = len(Given._fields)
    return Given(*arguments[:tensors]), _Arguments(*arguments[tensors:-1]), arguments[-1]


def _shapes(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, variant: str, *_: object
) -> tuple[torch.Tensor, torch.Tensor]:
    if (known := of_token(variant)) is not None:
        _traced[variant] = known
    return _results(q, v)


def _into_shapes(out: torch.Tensor, *arguments: Any) -> torch.Tensor:
    return _shapes(*arguments)[1]


def _results(q: torch.Tensor, v: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
    if q.dim() != 4 or v.dim() != 4:  # refused when the graph runs
        return torch.empty_like(q), torch.empty_like(q)
    return outputs(q, v)


def _backward_shapes(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    given, rest, wanted = _of_backward(*arguments)
    named = dict(zip(rest.tensor_names, rest.tensors or (), strict=True))
    captured = [torch.empty_like(named[name], memory_format=torch.contiguous_format) for name in wanted]
    dq, dk, dv = results(given.q, given.k, given.v)
    return dq, dk, dv, captured


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v = inputs[:3]
    rest = _Arguments(*inputs[3:])
    state, tensors = [] if rest.state is None else [rest.state], rest.tensors or ()
    ctx.save_for_backward(q, k, v, *output, *state, *(rest.symbols or ()), *tensors)
    ctx.has_state, ctx.wants = bool(state), tuple(tensor.requires_grad for tensor in tensors)
    ctx.rest = rest._replace(state=None, symbols=rest.symbols and (), tensors=rest.tensors and ())
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, do: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[Any, ...]:
    q, k, v, o, lse, *tensors = ctx.saved_tensors
    state = tensors.pop(0) if ctx.has_state else None
    count = len(ctx.rest.symbol_names)
    rest = ctx.rest._replace(state=state, symbols=tensors[:count] or None, tensors=tensors[count:] or None)
    variant = with_given_sink(_known(rest.variant), dict(zip(rest.tensor_names, rest.tensors or (), strict=True)))
    wanted = with_gradient(variant, tuple(rest.tensor_names), ctx.wants)
    given = Given(do, dlse, q, k, v, o, lse)
    *gradients, captured = torch.ops.flashgen.attention_backward(*given, *rest, list(wanted))
    by_name = dict(zip(wanted, captured, strict=True))
    # torch takes an empty list for a list of tensors, and wants one back.
    none: dict[str, Any] = {
        name: [] if isinstance(field, (list, tuple)) and not field else None
        for name, field in ctx.rest._asdict().items()
    }
    if ctx.rest.tensors is not None:
        none["tensors"] = [by_name.get(name) for name in rest.tensor_names]
    if ctx.rest.symbols is not None:
        none["symbols"] = [None] * count
    return *gradients, *none.values()


def _no_second(ctx: object, *_: object) -> NoReturn:
    raise LaunchError(SECOND)


_library.impl("call", _call, "CompositeImplicitAutograd")
_library.impl("call", _transformed, "FuncTorchBatched")
_library.impl("call_into", _call_into, "CompositeImplicitAutograd")
_library.impl("call_into", _transformed, "FuncTorchBatched")
# Dynamo traces none of these where a frame that it gave up calls them; it would all that `Library.impl` registers.
for _name, _kernel in (
    ("draw", _draw),
    ("refuse", _refuse),
    ("refuse_into", _refuse),
    ("attention", _attention),
    ("attention_into", _attention_into),
    ("attention_backward", _attention_backward),
):
    torch.library.register_kernel(f"flashgen::{_name}", ("cpu", "cuda"), _kernel, lib=_library)
torch.library.register_fake("flashgen::draw", lambda *_: torch.empty(2, dtype=torch.int64, device="cpu"), lib=_library)
torch.library.register_fake("flashgen::refuse", _results, lib=_library)
torch.library.register_fake("flashgen::refuse_into", lambda out, q, v, _: _results(q, v)[1], lib=_library)
torch.library.register_fake("flashgen::attention", _shapes, lib=_library)
torch.library.register_fake("flashgen::attention_into", _into_shapes, lib=_library)
torch.library.register_fake("flashgen::attention_backward", _backward_shapes, lib=_library)
torch.library.register_autograd("flashgen::attention", _differentiate, setup_context=_keep, lib=_library)
torch.library.register_autograd("flashgen::attention_backward", _no_second, lib=_library)
