"""The CUDA of a kernel that quantises tensors, and its parameters."""

from __future__ import annotations

import functools
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flashgen.codegen import device
from flashgen.codegen.emit import entered, environment
from flashgen.codegen.params import Field
from flashgen.codegen.reachable import reachable
from flashgen.planning.quantize import TENSORS, QuantizePlan

#: Words of signs, a bit a column of the widest head.
SIGN_WORDS = 8

_FROM = {"float16": "from_f16", "bfloat16": "from_bf16"}

#: An element of cos and of sin: its type, and what it is as a float, of words that hold several.
_ANGLES = {
    "float32": ("float", "__int_as_float(angles.word[j])"),
    **{dtype: ("u16", f"{name}(u16(angles.word[j / 2] >> 16 * (j % 2)))") for dtype, name in _FROM.items()},
}


#: What a banner says of how sequences lie.
_OF_LAYOUT = {"padded": "sequences of their own lengths", "varlen": "sequences behind each other"}


#: What differs where sequences lie behind each other, as do the numbers of their tiles.
_JOINED = {
    "blocks": "t.slots",
    "peaks": "(i64)at.head * t.slots + at.first / TILE + at.batch + at.row / TILE - work.own",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sequences:
    """What templates write of a tile where sequences have rows of their own, and where they are all of one length.

    numbered  the function that finds a tile by its number
    blocks    how many tiles a head has, of tensor t
    length    behind which row of a sequence there is none
    last      its last row, or 0
    tiles     how many tiles hold its rows
    peaks     which of all peaks is the first of those that share a scale
    row       a row in the tensor
    after     the tile after the next one
    work      the function that finds the work of a ticket
    of_tile   what is said of a tile beside
    template  what finds a tile's sequence
    """

    numbered: str = "tile_of"
    blocks: str = "(t.length + TILE - 1) / TILE"
    length: str = "t.length"
    last: str = "t.length - 1"
    tiles: str = "(t.length + TILE - 1) / TILE"
    peaks: str = "(i64)work.scale * t.tiles_of_scale"
    row: str = "row"
    after: str = "tile_of(blockIdx.x + (i + 2) * gridDim.x, p)"
    work: str = "work_of"
    of_tile: str = ""
    template: str = ""

    @classmethod
    def of(cls, plan: QuantizePlan) -> _Sequences:
        if not plan.layout.own:
            return cls()
        return cls(
            numbered="numbered",
            **(_JOINED if plan.layout.joined else {}),
            length="at.length",
            last="max(at.length, 1) - 1",
            tiles="tiles_of(at)",
            row="(at.first + row)" if plan.layout.joined else "row",
            after="next_tile(next, p)",
            work="work_from",
            of_tile="  Of a sequence of `length` rows" + " from `first` on" * plan.layout.joined + ".",
            template=f"quantize/{plan.layout.name}.cu.j2",
        )


@functools.cache
def tensor_fields(plan: QuantizePlan) -> tuple[Field, ...]:
    """The members of `Tensor`: addresses, strides in elements, numbers."""
    angles = ("cos", "sin") if plan.rope else ()
    of_angles = f"const {_ANGLES[plan.rope.dtype][0]}*" if plan.rope else ""
    shared, joined = plan.scale.tickets, plan.layout.joined
    return (
        Field("x", "const u16*"),
        Field("codes", "unsigned char*"),
        Field("descales", "float*"),
        *(Field("peaks", "u32*") for _ in range(shared)),
        *(Field("mean", "const float*") for _ in range(plan.centred)),
        *(Field(name, of_angles) for name in angles),
        *(Field("starts" if joined else "lengths", "const int*") for _ in range(plan.layout.own)),
        *(Field(f"{name}_{of}", "i64") for name in ("x", "codes") for of in ("batch", "head", "row")),
        *(Field(f"{name}_{of}", "i64") for name in angles for of in ("batch", "row")),
        *(Field(name, "u64") for name in ("by_batch", "by_heads", *(("by_group", "by_scale") if shared else ()))),
        *(Field(name, "int") for name in ("heads", "length", "tiles")),
        *(Field(name, "int") for name in ("sequences", "slots", "rows") if joined),
        *(Field("rotated", "int") for _ in range(bool(plan.rotation))),
        *(Field(name, "int") for name in ("tiles_of_scale", "scales", "group") if shared),
    )


@functools.cache
def fields(plan: QuantizePlan) -> tuple[Field, ...]:
    """The members of `Params` behind its tensors but for the signs at its end."""
    return (Field("ticket", "u32*"), Field("tiles", "int"), Field("lead", "int")) if plan.scale.tickets else ()


@functools.cache
def _sizes(plan: QuantizePlan) -> tuple[str, str]:
    """The formats of a tensor and of what is behind tensors, each as long as C++ has it: aligned as an address is."""
    tensor = "<" + "".join(field.format for field in tensor_fields(plan))
    behind = "<" + "".join(field.format for field in fields(plan)) + (f"{SIGN_WORDS}I" if plan.rotation else "")
    return _aligned(tensor), _aligned(behind)


def _aligned(form: str) -> str:
    return form + f"{-struct.calcsize(form) % 8}x"


def params_bytes(plan: QuantizePlan) -> int:
    """Bytes of `Params`."""
    tensor, behind = _sizes(plan)
    return TENSORS * struct.calcsize(tensor) + struct.calcsize(behind)


def emit(plan: QuantizePlan) -> str:
    """The CUDA of a plan: one self-contained file."""
    angle_type, from_angle = _ANGLES[plan.rope.dtype] if plan.rope else ("", "")
    text = (
        environment()
        .get_template("quantize/quantize.cu.j2")
        .render(
            {
                "plan": plan,
                "banner": "\n".join(f"// {line}" for line in _banner(plan)),
                "tensors": TENSORS,
                "tensor_fields": tensor_fields(plan),
                "fields": [*fields(plan), *([Field(f"signs[{SIGN_WORDS}]", "u32")] if plan.rotation else [])],
                "params_bytes": params_bytes(plan),
                "angle_type": angle_type,
                "from_angle": from_angle,
                "enter": entered(plan.launches),
                "from": _FROM[plan.dtype],
                "seq": _Sequences.of(plan),
            }
        )
    )
    kernel = reachable(text)
    for place, files in (("// PTX wrappers", device.WRAPPERS), ("// library", device.LIBRARY)):
        text = device.used_by(kernel, files)
        kernel = kernel.replace(place, text, 1) if text else kernel.replace(f"{place}\n\n", "", 1)
    return kernel


def pack(
    plan: QuantizePlan,
    tensors: Sequence[Mapping[str, int]],
    values: Mapping[str, int],
    signs: tuple[int, ...],
) -> bytes:
    """`Params` of these tensors, at most TENSORS, these values and words of signs."""
    form, behind = _sizes(plan)
    packed = b"".join(struct.pack(form, *(of[field.name] for field in tensor_fields(plan))) for of in tensors)
    packed = packed.ljust(TENSORS * struct.calcsize(form), b"\0")
    return packed + struct.pack(
        behind, *(values[field.name] for field in fields(plan)), *(signs if plan.rotation else ())
    )


def _banner(plan: QuantizePlan) -> list[str]:
    rotated = " + ".join(str(part.columns) for part in plan.rotation)
    turned = [f"turned by angles ({plan.rope})"] if plan.rope else []
    steps = [
        *turned,
        *(["less a mean"] * plan.centred),
        *([f"rotated in {rotated} columns"] if rotated else []),
        "as e4m3",
        *([_OF_LAYOUT[plan.layout.name]] if plan.layout.own else []),
    ]
    return [
        f"quantize: {plan.dtype}, head_dim {plan.head_dim}, {', '.join(steps)}, on {plan.arch}",
        f"tiles of {plan.rows} rows, {plan.lanes} lanes a row: {plan.threads} threads, {plan.smem_bytes} bytes shared",
    ]
