"""The CUDA of a kernel that quantises tensors, and its parameters."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

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


def tensor_fields(plan: QuantizePlan) -> tuple[Field, ...]:
    """The members of `Tensor`: addresses, strides in elements, numbers."""
    angles = ("cos", "sin") if plan.rope else ()
    of_angles = f"const {_ANGLES[plan.rope.dtype][0]}*" if plan.rope else ""
    shared = plan.scale.tickets
    return (
        Field("x", "const u16*"),
        Field("codes", "unsigned char*"),
        Field("descales", "float*"),
        *(Field(name, "u32*") for name in ("peaks", "seen") if shared),
        *(Field("mean", "const float*") for _ in range(plan.centred)),
        *(Field(name, of_angles) for name in angles),
        *(Field(f"{name}_{of}", "i64") for name in ("x", "codes") for of in ("batch", "head", "row")),
        *(Field(f"{name}_{of}", "i64") for name in angles for of in ("batch", "row")),
        *(Field(name, "int") for name in ("heads", "length", "tiles")),
        *(Field("rotated", "int") for _ in range(bool(plan.rotation))),
        *(Field(name, "int") for name in ("tiles_of_scale", "group") if shared),
    )


def fields(plan: QuantizePlan) -> tuple[Field, ...]:
    """The members of `Params` behind its tensors but for the signs at its end."""
    return (Field("ticket", "u32*"), Field("tiles", "int"), Field("lead", "int")) if plan.scale.tickets else ()


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
    ]
    return [
        f"quantize: {plan.dtype}, head_dim {plan.head_dim}, {', '.join(steps)}, on {plan.arch}",
        f"tiles of {plan.rows} rows, {plan.lanes} lanes a row: {plan.threads} threads, {plan.smem_bytes} bytes shared",
    ]
