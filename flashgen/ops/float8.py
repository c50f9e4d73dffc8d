"""Calls on keys and values of 8 bits, and queries of 8 or 16: their descales, and what o is."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from flashgen.errors import LaunchError, shown
from flashgen.ops.layouts import check_memory, stacked
from flashgen.ops.values import no_tensor
from flashgen.planning.float8 import ACCURACIES, DEFAULT, DESCALES, E4M3, E5M2, LEAST_BLOCK, OUT_DTYPES, block_of
from flashgen.planning.layout import Layout
from flashgen.planning.problem import Problem
from flashgen.runtime.launch import Descale, descale_of
from flashgen.runtime.tiles import Sequence

#: torch's dtypes by name.
DTYPES = {torch.float8_e4m3fn: E4M3, torch.float8_e5m2: E5M2}
_OUT = {torch.bfloat16: OUT_DTYPES[0], torch.float16: OUT_DTYPES[1]}

#: The arguments of attention() for it, and what a call has among its named values, which no variant can declare.
ARGUMENTS = (*DESCALES.values(), "accuracy", "out_dtype")
NAMES = {name: f"float8.{name}" for name in ARGUMENTS}
_DESCALES = {tensor: NAMES[name] for tensor, name in DESCALES.items()}
_KNOWN = frozenset(NAMES.values())

#: What calls are told that want what 8 bits do not have.
_IN_16_BITS = "q, k and v of 16 bits: (q.float() * q_descale).to(torch.bfloat16) and so on"
WITH_GRADIENTS = (
    "a gradient is wanted, and attention in 8 bits has no gradient: P and dS of e4m3 have too few bits for sums of"
    f" gradients\n  nearest: torch.no_grad(), or {_IN_16_BITS}"
)
IN_GRAPHS = (
    "graphs (torch.export, make_fx) and transforms of torch.func do not hold attention in 8 bits\n"
    f"  nearest: the call outside of them, as under torch.compiler.disable, or {_IN_16_BITS}"
)
SHARDED = (
    "DTensors are not served in 8 bits\n"
    "  nearest: q.to_local(), k.to_local() and v.to_local() where neither b nor h is read, or DTensors of 16 bits"
)
INTO = "out= is not there in 8 bits\n  nearest: out.copy_(flashgen.attention(...))"
WITH_DROPOUT = "dropout is not there in 8 bits\n  nearest: dropout=0.0, or tensors of 16 bits"


def refuse_at(entrance: str, **tensors: object) -> None:
    """Raise LaunchError for a tensor of 8 bits at an entrance that has no argument for descales."""
    for name, x in tensors.items():
        if isinstance(x, torch.Tensor) and x.dtype in DTYPES:
            raise LaunchError(
                f"{entrance}: {name} is {_name(x.dtype)}, and this call takes no descales, which 8 bits need\n"
                "  nearest: flashgen.attention or attention_varlen with q_descale=, k_descale=, v_descale=, or 16 bits"
            )


class Eight(NamedTuple):
    """A call's own of 8 bits: descales by tensor of 8 bits, and the options of `KernelRequest.of`."""

    descales: dict[str, torch.Tensor]
    options: dict[str, str]


def check_together(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Raise LaunchError for dtypes, of which some have 8 bits, that do not go together."""
    narrow = {k.dtype, v.dtype} <= DTYPES.keys()
    if narrow and (q.dtype in DTYPES or q.dtype in _OUT):
        return
    kinds = ", ".join(f"{name} is {_name(x.dtype)}" for name, x in (("q", q), ("k", k), ("v", v)))
    several = f"k and v in {E4M3} or {E5M2} with descales, q in one of {', '.join((E4M3, *OUT_DTYPES))}"
    cure = "q.bfloat16()" if narrow else several
    raise LaunchError(
        f"{kinds}: keys and values have 8 bits together, beside queries of 8 bits or of 16\n  nearest: {cure}"
    )


def joined(
    named: dict[str, Any], q_descale: object, k_descale: object, v_descale: object, accuracy: object, out_dtype: object
) -> dict[str, Any]:
    """A call's named values with these of 8 bits, where it has any."""
    if q_descale is None and k_descale is None and v_descale is None and accuracy is None and out_dtype is None:
        return named  # as of most calls
    given = (q_descale, k_descale, v_descale, accuracy, out_dtype)
    return {**named, **{name: x for name, x in zip(NAMES.values(), given, strict=True) if x is not None}}


def of_call(named: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a call's named values that are of 8 bits."""
    return {name: named[name] for name in NAMES.values() if name in named} if _KNOWN & named.keys() else {}


def key(named: Mapping[str, Any]) -> Iterator[object]:
    """All that a record depends on."""
    for name in NAMES.values():
        x = named.get(name)
        yield (x.shape, x.stride(), x.dtype, x.device, x.is_neg()) if isinstance(x, torch.Tensor) else x


def options(named: Mapping[str, Any]) -> tuple[object, ...]:
    """What of a call's own chooses its kernels beside dtypes."""
    return tuple(named.get(NAMES[name]) for name in ("accuracy", "out_dtype"))


def addresses(named: Mapping[str, Any]) -> tuple[int, ...]:
    """Those of the descales, in the order of a kernel's pointers."""
    return tuple(named[name].data_ptr() for name in _DESCALES.values() if name in named)


def out_dtype(eight: Eight | None, q: torch.Tensor) -> torch.dtype:
    """The dtype of o."""
    return q.dtype if eight is None else next(d for d, name in _OUT.items() if name == eight.options["out_dtype"])


def checked(
    given: Mapping[str, Any],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    problem: Problem,
    layout: Layout,
    *,
    read: bool,
) -> Eight | None:
    """A call's own of 8 bits, or LaunchError for what is wrong with it; None: q, k and v have more bits.  With `read`
    the descales' values are looked at too, for which the host waits."""
    if k.dtype not in DTYPES:
        for name in given:
            said = name.removeprefix("float8.")
            raise LaunchError(f"{said} is of 8-bit tensors, and q is {_name(q.dtype)}\n  nearest: {said}=None")
        return None
    options = {
        "k_dtype": DTYPES[k.dtype],
        "v_dtype": DTYPES[v.dtype],
        "accuracy": _accuracy(given.get(NAMES["accuracy"])),
    }
    if q.dtype in DTYPES:
        options["out_dtype"] = _out(given.get(NAMES["out_dtype"]))
    else:
        options |= _of_wide_queries(given, q)
    descales: dict[str, Any] = {}
    for tensor, x in (("q", q), ("k", k), ("v", v)):
        if x.dtype not in DTYPES:
            continue
        heads = {"q": (problem.heads, problem.kv_heads)}.get(tensor, (problem.kv_heads,))
        rows = problem.q_len if tensor == "q" else problem.kv_len
        found = given.get(_DESCALES[tensor])
        _check_descale(DESCALES[tensor], found, tensor, problem.batch, heads, rows, q.device, read)
        descales[tensor] = found
        if layout.joined and (tensor == "q" or not layout.paged):
            _check_blocks_of_sequences(DESCALES[tensor], descales[tensor], problem.batch)
    return Eight(descales, options)


def _of_wide_queries(given: Mapping[str, Any], q: torch.Tensor) -> dict[str, str]:
    """The options of a call whose queries have 16 bits, or LaunchError for one that these do not have."""
    if given.get(_DESCALES["q"]) is not None:
        raise LaunchError(
            f"q_descale is of queries of 8 bits, and q is {_name(q.dtype)}, which holds its values\n"
            "  nearest: q_descale=None"
        )
    out, accuracy = given.get(NAMES["out_dtype"]), given.get(NAMES["accuracy"])
    if out is not None and _out(out) != _OUT[q.dtype]:
        raise LaunchError(
            f"out_dtype is {_out(out)}, and q {_name(q.dtype)}: o has the dtype of queries of 16 bits\n"
            "  nearest: out_dtype=None"
        )
    if accuracy == ACCURACIES[-1]:
        raise LaunchError(
            f"accuracy is {accuracy!r} beside q in {_name(q.dtype)}: P has 16 bits there, and no form is faster\n"
            f"  nearest: accuracy={ACCURACIES[0]!r}"
        )
    return {"out_dtype": _OUT[q.dtype]}


def launched(eight: Eight, problem: Problem) -> dict[str, Descale]:
    """How a call's descales lie, for its launch."""
    return {
        tensor: descale_of(x.shape, x.stride(), problem.q_len if tensor == "q" else problem.kv_len, problem.heads)
        for tensor, x in eight.descales.items()
    }


def dequantised(
    x: torch.Tensor, descale: torch.Tensor, dtype: torch.dtype = torch.float32, *, covered: int | None = None
) -> torch.Tensor:
    """The values of x [batch, heads, rows, columns]; in float64 they are exact.  Blocks cover so many rows, those of x
    unless given."""
    shape = (*descale.shape, *(1,) * (3 - descale.dim()))
    whole = descale.reshape(shape)
    heads, rows = x.shape[1], x.shape[2]
    if shape[1] not in (1, heads):  # of q: one for the heads that share keys
        whole = whole.repeat_interleave(heads // shape[1], dim=1)
    if shape[2] > 1:
        block = block_of(rows if covered is None else covered, shape[2])
        assert block is not None  # it was checked
        whole = whole.repeat_interleave(block, dim=2)[:, :, :rows]
    return x.to(dtype) * whole.to(dtype).unsqueeze(-1)


def of_sequences(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    eight: Eight,
    own: tuple[Sequence, ...],
    layout: Layout,
    problem: Problem,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, tuple[Sequence, ...]]:
    """The values of q, k and v where several sequences lie in one row of heads, and the sequences over these."""
    if layout.joined and "q" in eight.descales:  # queries of 16 bits are their values
        queries = [(of.q_start, of.q_len - of.q_offset) for of in own]
        q = _of_rows(q, eight.descales["q"], queries, problem.q_len)
    if layout.paged:
        return q, *of_pages(k, v, eight, own, problem.kv_len)
    if layout.joined:
        keys = [(of.k_start, of.kv_len) for of in own]
        k, v = (_of_rows(x, eight.descales[name], keys, problem.kv_len) for name, x in (("k", k), ("v", v)))
    return q, k, v, own


def _of_rows(x: torch.Tensor, descale: torch.Tensor, spans: list[tuple[int, int]], most: int) -> torch.Tensor:
    """The values of x [1, heads, rows, columns] whose sequences, of at most so many rows, begin and are as long as
    that; rows of none are 0."""
    wide = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    whole = descale.reshape(*descale.shape, *(1,) * (3 - descale.dim())).expand(len(spans), -1, -1)
    for b, (first, length) in enumerate(spans):
        rows = slice(first, first + length)
        wide[:, :, rows] = dequantised(x[:, :, rows], whole[b : b + 1], covered=most)
    return wide


def of_pages(
    k: torch.Tensor, v: torch.Tensor, eight: Eight, own: tuple[Sequence, ...], rows: int
) -> tuple[torch.Tensor, torch.Tensor, tuple[Sequence, ...]]:
    """The values of those pages of k and v that sequences of at most so many rows have, one sequence's behind those of
    another, and the sequences over these: pages that two share may count by other descales."""
    starts = list(itertools.accumulate((len(of.pages or ()) for of in own), initial=0))
    wide = []
    for name, x in (("k", k), ("v", v)):
        descale = eight.descales[name]
        whole = descale.reshape(*descale.shape, *(1,) * (3 - descale.dim())).expand(len(own), -1, -1)
        found = [x.new_empty((0, *x.shape[1:]), dtype=torch.float32)]
        for b, of in enumerate(own):
            codes = x.view(torch.uint8)[list(of.pages or ())]  # PyTorch 2.6 indexes no 8-bit floats on a CPU
            pages = codes.view(x.dtype).transpose(0, 1)  # [kv_heads, pages, page_size, columns]
            room = -(-rows // x.shape[2]) * x.shape[2]
            padded = torch.nn.functional.pad(pages.flatten(1, 2).float(), (0, 0, 0, room - pages[0, ..., 0].numel()))
            values = dequantised(padded[None, :, :rows], whole[b : b + 1])[0]
            values = torch.nn.functional.pad(values, (0, 0, 0, room - rows)).unflatten(1, (-1, x.shape[2]))
            found.append(values.transpose(0, 1)[: pages.shape[1]])
        wide.append(torch.cat(found))
    numbered = [of._replace(pages=tuple(range(i, j))) for of, i, j in zip(own, starts, starts[1:], strict=False)]
    return wide[0], wide[1], tuple(numbered)


def _check_descale(
    name: str,
    given: object,
    tensor: str,
    batch: int,
    heads: tuple[int, ...],
    rows: int,
    device: torch.device,
    read: bool,
) -> None:
    """Raise LaunchError for what is no descale of a tensor [batch, heads, rows, columns]."""
    wanted = f"[1], [batch, heads] = [{batch}, {heads[0]}] or [batch, heads, blocks]"
    if given is None:
        raise LaunchError(
            f"{name} is missing: an element of 8 bits times its descale is its value\n"
            f"  nearest: {name}=torch.ones(1, device=q.device) where {tensor} holds the values themselves"
        )
    if not isinstance(given, torch.Tensor):
        raise LaunchError(f"{no_tensor(name, given)}\n  nearest: torch.tensor([1.0], device=q.device)")
    check_memory(name, name, given, nested=stacked(name))
    if given.dtype != torch.float32:
        raise LaunchError(f"{name} is {_name(given.dtype)}: descales are float32\n  nearest: {name}.float()")
    if given.device != device:
        raise LaunchError(f"{name} is on {given.device} and q on {device}\n  nearest: {name}.to({str(device)!r})")
    shape = tuple(given.shape)
    whole = (*shape, *(1,) * (3 - len(shape)))
    fits = shape == (1,) or (len(shape) in (2, 3) and whole[0] in (1, batch) and whole[1] in (1, *heads))
    if not fits or len(whole) > 3:
        raise LaunchError(f"{name} is {list(shape)} and must broadcast from {wanted}\n  nearest: {name} of [1]")
    if whole[2] > 1 and block_of(rows, whole[2]) is None:
        blocks = max(1, -(-rows // LEAST_BLOCK))
        raise LaunchError(
            f"{name} has {whole[2]} blocks for {rows} rows: a block is a power of two of rows from {LEAST_BLOCK} on\n"
            f"  nearest: {blocks} block{'s' * (blocks != 1)} of {LEAST_BLOCK} rows"
        )
    if whole[2] == 0 < rows:
        raise LaunchError(f"{name} is {list(shape)}: it has no block\n  nearest: {name} of [1]")
    if read and bool((wrong := ~((given > 0) & given.isfinite())).any()):
        at = tuple(wrong.nonzero()[0].tolist())
        raise LaunchError(
            f"{name} holds {shown(float(given[at]))} at {list(at)}: descales are positive and finite\n"
            f"  nearest: 1 where all elements of a block are 0"
        )


def _check_blocks_of_sequences(name: str, given: torch.Tensor, sequences: int) -> None:
    """Raise LaunchError for blocks of all rows, where each sequence has blocks from its own first row on."""
    if given.dim() == 3 and given.shape[2] > 1 and given.shape[0] != sequences:
        raise LaunchError(
            f"{name} is {list(given.shape)}: blocks are of {sequences} sequences, each one's from its first row on\n"
            f"  nearest: [sequences, heads, blocks], or one for all rows of a head, [1, heads]"
        )


def _out(given: object) -> str:
    if given is None:
        return OUT_DTYPES[0]
    if isinstance(given, torch.dtype) and given in _OUT:
        return _OUT[given]
    if given in OUT_DTYPES:
        return str(given)
    raise LaunchError(
        f"out_dtype is {shown(given)}: o of 8-bit tensors is {' or '.join(OUT_DTYPES)}\n"
        "  nearest: out_dtype=torch.bfloat16"
    )


def _accuracy(given: object) -> str:
    if given is None or given in ACCURACIES:
        return DEFAULT if given is None else str(given)
    raise LaunchError(
        f"accuracy is {shown(given)}: it is one of {', '.join(ACCURACIES)}\n  nearest: accuracy={DEFAULT!r}"
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
