"""The kernel's parameters: one ordered list makes the C++ struct, its size and its packing."""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from flashgen.lang.variant import Variant
from flashgen.planning.backward import layout, storable
from flashgen.planning.float8 import DESCALES, Float8
from flashgen.planning.layout import DENSE, Layout
from flashgen.planning.members import ALL_KEYS, Keys
from flashgen.planning.plan import KernelPlan, Specialized, SpecializedBackward, TileSummary
from flashgen.planning.program import CTYPES

#: C++ name of the 16-bit element type, a bit pattern to the compiler.
ELEMENT = {"float16": "fp16", "bfloat16": "bf16"}

#: The same of 8 bits.
ELEMENT_8_BITS = "fp8"

#: C++ type of a captured tensor's element in memory; the 16-bit floats are read as bits.
STORED = {
    "bool": "unsigned char",
    "uint8": "unsigned char",
    "int8": "signed char",
    "int16": "short",
    "int32": "int",
    "int64": "i64",
    "float16": "u16",
    "bfloat16": "u16",
    "float32": "float",
}

_FORMATS = {"i64": "q", "u64": "Q", "int": "i", "u32": "I", "float": "f"}


@dataclass(frozen=True, slots=True)
class Field:
    """One member of `Params`: its name and C++ type (a pointer ends in "*")."""

    name: str
    ctype: str

    @property
    def format(self) -> str:
        """Its code in the struct module: pointers are addresses."""
        return "Q" if self.ctype.endswith("*") else _FORMATS[self.ctype]


#: What kernels that drop probabilities take: two words, which stand before numbers.
DROPOUT = (
    Field("dropout_seed", "u64"),
    Field("dropout_offset", "u64"),
    Field("dropout_threshold", "u32"),
    Field("dropout_scale", "float"),
    Field("dropout_first", "u32"),
    Field("dropout_heads", "u32"),
)


def maps(plan: KernelPlan) -> tuple[str, ...]:
    """The tensors of which a kernel takes tensor maps, as parameters of their own before the struct."""
    if isinstance(plan.backward, SpecializedBackward):
        return ("q", "k", "v", "d_o")
    if plan.specialized is None:
        return ()
    return ("q", "k", "v", "o") if plan.specialized.o.by_tma else ("q", "k", "v")


def fields(plan: KernelPlan) -> tuple[Field, ...]:
    """The members of a plan's `Params`, in order."""
    if plan.backward is not None:
        return _backward_fields(plan)
    shape = plan.specialized, plan.dropout, plan.layout, plan.summaries, plan.keys, plan.float8, plan.packed
    return fields_of(plan.variant, plan.out_dtype, *shape, plan.whole_rows, plan.ordered)


def head_boxes(whole_rows: Iterable[str]) -> tuple[str, ...]:
    """The numbers by which a tensor map in whole rows counts heads."""
    return tuple(f"{name}_head_boxes" for name in whole_rows)


def element_of(name: str, dtype: str, narrow: Collection[str]) -> str:
    """The C++ type of an element of q, k or v, of which some have 8 bits, the others `dtype`."""
    return ELEMENT_8_BITS if name in narrow else ELEMENT[dtype]


@lru_cache(maxsize=256)
def fields_of(
    variant: Variant,
    dtype: str,
    specialized: Specialized | None = None,
    dropout: bool = False,
    sequences: Layout = DENSE,
    summaries: tuple[TileSummary, ...] = (),
    keys: Keys = ALL_KEYS,
    float8: Float8 | None = None,
    packed: bool = False,
    whole_rows: tuple[str, ...] = (),
    ordered: bool = False,
) -> tuple[Field, ...]:
    """The members of a forward's `Params`: pointers, then 64-bit, then 32-bit numbers, so that none needs padding.

    Strides count elements.  A captured tensor has `tensor_NAME`, and for each dimension i `stride<i>_NAME` and
    `size<i>_NAME`; a parameter is `param_NAME`.  Pipeline hopper has tensor maps (`maps`) in front of the
    struct, and two counters of tiles where it hands them out; where heads are packed `packs` counts what stands in
    their place, and a pack is 1 << `pack_log2` heads.  Where sequences have lengths of their own `q_rows` are those of
    q in memory, and `q_offset` is the position of the first query where no `q_offsets` say it.  Where keys are split
    among `splits` blocks, `part_o` and `part_rows` are what these leave.  Of q, k and v those of 8 bits (`dtype` is
    that of o) have descales, whose `row` is a block of 1 << `block_log2` rows; `q_descale_heads` heads share one of q.
    Of k and v in whole rows `head_boxes` are those from a key head to the next.  Where tiles of queries are `ordered`
    in this call, their `order` is there.  `quotient_by` divides by numbers `by_*`.
    """
    element = ELEMENT[dtype]
    mapped = specialized is not None
    scaled = () if float8 is None else float8.scaled
    operands = () if mapped else ("q", "k", "v")
    pointers = [Field(name, f"const {element_of(name, dtype, scaled)}*") for name in operands]
    pointers += [Field("o", f"{element}*"), Field("lse", "float*")]
    descales = tuple(DESCALES[name] for name in scaled)
    pointers += [Field(name, "const float*") for name in descales]
    numbers = ["batch", "heads", "kv_heads", "q_len", "kv_len", "q_tiles"]
    if specialized is not None and specialized.scheduler.dynamic:
        pointers.append(Field("counters", "int*"))
        numbers.append("l2_heads")
    if packed:
        numbers += ["packs", "pack_log2"]
    pointers += [Field(name, "const int*") for name in sequences.pointers]
    if keys.split:
        pointers += [Field("part_o", "float*"), Field("part_rows", "float2*")]
        numbers.append("splits")
    if specialized is not None and specialized.fold.pointer:
        pointers.append(Field(specialized.fold.pointer, "float*"))
    pointers += _summaries(summaries)
    if ordered:
        pointers.append(Field("order", "int*"))
    numbers += [*sequences.numbers, *head_boxes(whole_rows)]
    numbers += [*(f"{name}_block_log2" for name in scaled), *(["q_descale_heads"] if "q" in scaled else [])]
    numbers += ["ordered"] if ordered else []
    divisors = [*sequences.divisors]
    if specialized is not None and keys.split:
        divisors += ["packs" if packed and name == "heads" else name for name in specialized.scheduler.divisors]
        divisors += ["group", *(["splits"] if keys.turns and variant.mask is not None else [])]
    words = [*(Field(name, "i64") for name in sequences.strides)]
    words += [Field(f"by_{name}", "u64") for name in dict.fromkeys(divisors)]
    return _members(variant, pointers, (*("o" if mapped else "qkvo"), *descales), numbers, dropout, words)


@lru_cache(maxsize=256)
def _backward_fields(plan: KernelPlan) -> tuple[Field, ...]:
    """The members of a backward's `Params`: `d_o` is the output's gradient, and workspaces stand before the results.

    Where the gradient of a captured tensor is asked for, it is `grad_NAME`, and `exact_NAME` the exact sums it is
    rounded from; `stored_NAME` says that each pair has an element of its own.  Pipeline hopper has tensor maps in place
    of q, k and v.
    """
    element, how = ELEMENT[plan.dtype], layout(plan)
    workspaces = ("lse_log2", "delta", *(("dq_sum",) if how.adds_dq else ()))
    mapped = bool(maps(plan))
    loaded = ("o", "d_o") if mapped else ("q", "k", "v", "o", "d_o")
    pointers = [Field(name, f"const {element}*") for name in loaded]
    pointers += [Field(name, "const float*") for name in ("lse", "dlse")]
    pointers += [Field(name, "float*") for name in workspaces]
    pointers += [Field("dq_semaphore", "u32*")] if how.adds_dq and plan.deterministic else []
    pointers += [Field("progress", "u32*")] if how.dq_in_main_kernel else []
    pointers += [Field("taken", "u32*")] if how.persistent else []
    pointers += _summaries(plan.summaries)
    pointers += [Field(name, f"{element}*") for name in ("dq", "dk", "dv")]
    pointers += [Field(f"grad_{name}", "float*") for name in plan.gradients]
    pointers += [Field(f"exact_{name}", "i64*") for name in plan.score_gradients if plan.deterministic]
    numbers = ["batch", "heads", "kv_heads", "q_len", "kv_len", "q_tiles", "kv_tiles"]
    pointers += [Field(name, "const int*") for name in plan.layout.pointers]
    numbers += plan.layout.numbers
    if mapped and (plan.variant.mask is not None or plan.deterministic or plan.layout.joined):
        numbers.append("l2_heads")
    if how.dq_in_main_kernel:
        numbers.append("clear_distance")
    numbers += [f"stored_{name}" for name in storable(plan)]
    return _members(plan.variant, pointers, (*loaded, "dq", "dk", "dv"), numbers, plan.dropout)


def _summaries(summaries: tuple[TileSummary, ...]) -> list[Field]:
    found = [Field(one.pointer, f"{one.ctype}*") for one in summaries]
    return [*found, *(Field(one.bits_pointer, "u32*") for one in summaries if one.bits)]


def _members(
    variant: Variant,
    pointers: Iterable[Field],
    strided: Iterable[str],
    counts: Iterable[str],
    dropout: bool,
    more_words: Iterable[Field] = (),
) -> tuple[Field, ...]:
    """Those of one kernel, with what all of a variant take: scale, parameters, captured tensors, dropout."""
    tensors = variant.tensors
    pointers = [*pointers, *(Field(f"tensor_{t.name}", f"const {STORED[t.dtype]}*") for t in tensors)]
    words = [Field(f"{t}_{dimension}", "i64") for t in strided for dimension in ("batch", "head", "row")]
    words += more_words
    words += [Field(f"stride{i}_{t.name}", "i64") for t in tensors for i in range(len(t.dims))]
    numbers = [*(Field(name, "int") for name in counts), Field("scale", "float")]
    for p in variant.params:
        field = Field(f"param_{p.name}", CTYPES[p.dtype])
        (words if field.ctype == "i64" else numbers).append(field)
    numbers += [Field(f"size{i}_{t.name}", "int") for t in tensors for i in range(len(t.dims))]
    if dropout:
        words += DROPOUT[:2]
        numbers += DROPOUT[2:]
    return (*pointers, *words, *numbers)


def sizeof(plan: KernelPlan) -> int:
    """Bytes of a plan's `Params`."""
    return len(packed(fields(plan), dict.fromkeys((field.name for field in fields(plan)), 0)))


def pack(plan: KernelPlan, values: Mapping[str, int | float]) -> bytes:
    """A plan's `Params` with these values; raises KeyError for a field without one.

    A pointer is an address; the stride of a dimension of size 1 should be 0, so that any index reads its one element.
    """
    return packed(fields(plan), values)


def packed(members: tuple[Field, ...], values: Mapping[str, int | float]) -> bytes:
    """A struct of these members, padded at its end to a multiple of 8 bytes as the C++ one is."""
    formats = "<" + "".join(field.format for field in members)
    size = -(-struct.calcsize(formats) // 8) * 8
    return struct.pack(formats, *(values[field.name] for field in members)).ljust(size, b"\0")
