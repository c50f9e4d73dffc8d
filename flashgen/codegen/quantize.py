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

#: The members of `Params` but for the signs at its end: addresses, strides in elements, numbers.
FIELDS = (
    Field("x", "const u16*"),
    Field("codes", "unsigned char*"),
    Field("descales", "float*"),
    Field("peaks", "u32*"),
    Field("mean", "const float*"),
    *(Field(f"{name}_{of}", "i64") for name in ("x", "codes") for of in ("batch", "head", "row")),
    *(Field(name, "int") for name in ("heads", "length", "blocks_of_scale")),
)

_FORMAT = "<" + "".join(field.format for field in FIELDS) + f"{SIGN_WORDS}I"

#: Bytes of `Params`: its alignment is that of an address.
BYTES = -(-struct.calcsize(_FORMAT) // 8) * 8

_FROM = {"float16": "from_f16", "bfloat16": "from_bf16"}


def emit(plan: QuantizePlan) -> str:
    """The CUDA of a plan: one self-contained file."""
    text = (
        environment()
        .get_template("quantize/quantize.cu.j2")
        .render(
            {
                "plan": plan,
                "banner": "\n".join(f"// {line}" for line in _banner(plan)),
                "fields": [*FIELDS, Field(f"signs[{SIGN_WORDS}]", "u32")],
                "params_bytes": BYTES,
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


def pack(values: Mapping[str, int], signs: tuple[int, ...]) -> bytes:
    """`Params` of these values and words of signs."""
    return struct.pack(_FORMAT, *(values[field.name] for field in FIELDS), *signs).ljust(BYTES, b"\0")


def _banner(plan: QuantizePlan) -> list[str]:
    rotated = " + ".join(str(part.columns) for part in plan.rotation)
    steps = [*(["less a mean"] * plan.centred), *([f"rotated in {rotated} columns"] if rotated else []), "as e4m3"]
    return [
        f"quantize: {plan.dtype}, head_dim {plan.head_dim}, {', '.join(steps)}, on {plan.arch}",
        f"a thread block has {plan.rows} rows, {plan.lanes} lanes a row: {plan.threads} threads",
    ]
