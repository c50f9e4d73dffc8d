"""The CUDA of a kernel that quantises, and its parameters."""

from __future__ import annotations

import struct
from collections.abc import Mapping

from flashgen.codegen import device
from flashgen.codegen.emit import entered, environment
from flashgen.codegen.params import Field
from flashgen.codegen.reachable import reachable
from flashgen.planning.quantize import QuantizePlan

#: Words of signs, a bit a column of the widest head.
SIGN_WORDS = 8

_FROM = {"float16": "from_f16", "bfloat16": "from_bf16"}

#: An element of cos and of sin: its type, and what it is as a float, of words that hold several.
_ANGLES = {
    "float32": ("float", "__int_as_float(angles.word[j])"),
    **{dtype: ("u16", f"{name}(u16(angles.word[j / 2] >> 16 * (j % 2)))") for dtype, name in _FROM.items()},
}

#: Which rows of which head a thread block has.  Where rows turn by angles heads are neighbours: then L2 has the angles.
_PLACE = "const int block = blockIdx.x % blocks, of = blockIdx.x / blocks;"
_PLACE_OF_ANGLES = (
    "const int block = blockIdx.x / p.heads % blocks;  // heads are neighbours, which share angles\n"
    "  const int of = blockIdx.x / p.heads / blocks * p.heads + blockIdx.x % p.heads;"
)


def fields(plan: QuantizePlan) -> tuple[Field, ...]:
    """The members of `Params` but for the signs at its end: addresses, strides in elements, numbers."""
    angles = ("cos", "sin") if plan.rope else ()
    of_angles = f"const {_ANGLES[plan.rope.dtype][0]}*" if plan.rope else ""
    return (
        Field("x", "const u16*"),
        Field("codes", "unsigned char*"),
        Field("descales", "float*"),
        Field("peaks", "u32*"),
        Field("mean", "const float*"),
        *(Field(name, of_angles) for name in angles),
        *(Field(f"{name}_{of}", "i64") for name in ("x", "codes") for of in ("batch", "head", "row")),
        *(Field(f"{name}_{of}", "i64") for name in angles for of in ("batch", "row")),
        *(Field(name, "int") for name in ("heads", "length", "blocks_of_scale")),
    )


def _format(plan: QuantizePlan) -> str:
    return "<" + "".join(field.format for field in fields(plan)) + f"{SIGN_WORDS}I"


def params_bytes(plan: QuantizePlan) -> int:
    """Bytes of `Params`: its alignment is that of an address."""
    return -(-struct.calcsize(_format(plan)) // 8) * 8


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
                "fields": [*fields(plan), Field(f"signs[{SIGN_WORDS}]", "u32")],
                "params_bytes": params_bytes(plan),
                "place": _PLACE_OF_ANGLES if plan.rope else _PLACE,
                "angle_type": angle_type,
                "from_angle": from_angle,
                "enter": entered(plan.launches),
                "from": _FROM[plan.dtype],
            }
        )
    )
    kernel = reachable(text)
    for place, files in (("// PTX wrappers", device.WRAPPERS), ("// library", device.LIBRARY)):
        text = device.used_by(kernel, files)
        kernel = kernel.replace(place, text, 1) if text else kernel.replace(f"{place}\n\n", "", 1)
    return kernel


def pack(plan: QuantizePlan, values: Mapping[str, int], signs: tuple[int, ...]) -> bytes:
    """`Params` of these values and words of signs."""
    packed = struct.pack(_format(plan), *(values[field.name] for field in fields(plan)), *signs)
    return packed.ljust(params_bytes(plan), b"\0")


def _banner(plan: QuantizePlan) -> list[str]:
    rotated = " + ".join(str(part.columns) for part in plan.rotation)
    turned = [f"turned by angles ({plan.rope})"] if plan.rope else []
    steps = [
        *turned,
        *(["less a mean"] * plan.centred),
        *([f"rotated in {rotated} columns"] if rotated else []),
        "as e4m3",
    ]
    return [
        f"quantize: {plan.dtype}, head_dim {plan.head_dim}, {', '.join(steps)}, on {plan.arch}",
        f"a thread block has {plan.rows} rows, {plan.lanes} lanes a row: {plan.threads} threads",
    ]
