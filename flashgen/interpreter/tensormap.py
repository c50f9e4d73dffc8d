"""Tensor maps: the arguments of cuTensorMapEncodeTiled, kept in 128 bytes of the interpreter's own."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flashgen.interpreter.errors import BadLaunch, Trap

#: CUtensorMapDataType -> bytes of an element.
ITEMSIZE = {0: 1, 1: 2, 2: 4, 3: 4, 4: 8, 5: 8, 6: 2, 7: 4, 8: 8, 9: 2, 10: 4, 11: 4, 12: 4}
UINT8, FLOAT16, FLOAT32, BFLOAT16 = 0, 6, 7, 9
#: CUtensorMapSwizzle -> bytes of a row of the pattern.
SWIZZLE_SPAN = {0: 16, 1: 32, 2: 64, 3: 128}
#: CUtensorMapSwizzle -> how many address bits from bit 7 are mixed into those from bit 4.
SWIZZLE_BITS = {0: 0, 1: 1, 2: 2, 3: 3}

_FORMAT = struct.Struct("<8sQBBBBB5Q4Q5H5H")
_MAGIC = b"FGTMAP01"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorMap:
    """A tiled tensor map.  Dimensions run from the innermost; `strides` are bytes, of all but the innermost."""

    dtype: int
    address: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int
    fill_nan: bool

    @classmethod
    def encode_tiled(
        cls,
        dtype: int,
        rank: int,
        address: int,
        dims: Sequence[int],
        strides: Sequence[int],
        box: Sequence[int],
        element_strides: Sequence[int],
        interleave: int = 0,
        swizzle: int = 0,
        l2_promotion: int = 0,
        oob_fill: int = 0,
    ) -> TensorMap:
        """The arguments of cuTensorMapEncodeTiled in their order (enumerators as integers).

        Raises BadLaunch for what the driver refuses, and for interleaved or strided boxes, which are not modelled.
        """
        size = ITEMSIZE.get(int(dtype))
        dims, strides, box = tuple(map(int, dims)), tuple(map(int, strides)), tuple(map(int, box))
        interleave, swizzle, oob_fill = int(interleave), int(swizzle), int(oob_fill)
        if size is None or not 1 <= rank <= 5 or (len(dims), len(strides), len(box)) != (rank, rank - 1, rank):
            raise BadLaunch(f"a tensor map of rank {rank} with {len(dims)} dimensions and {len(strides)} strides")
        if interleave or any(int(s) != 1 for s in element_strides):
            raise BadLaunch("interleaved tensor maps and element strides other than 1 are not modelled")
        problems = [
            (address % 16 != 0, f"address {address:#x} is not a multiple of 16"),
            (
                any(s % 16 or not 0 <= s < 1 << 40 for s in strides),
                f"strides {strides} must be multiples of 16 below 2^40",
            ),
            (any(not 1 <= d <= 1 << 32 for d in dims), f"dimensions {dims} must lie in 1..2^32"),
            (any(not 1 <= b <= 256 for b in box), f"box {box} must lie in 1..256"),
            (box[0] * size % 16 != 0, f"the box is {box[0] * size} bytes wide: not a multiple of 16"),
            (
                swizzle != 0 and box[0] * size > SWIZZLE_SPAN[swizzle],
                f"the box is {box[0] * size} bytes wide: its swizzle spans {SWIZZLE_SPAN[swizzle]}",
            ),
        ]
        for bad, text in problems:
            if bad:
                raise BadLaunch(f"tensor map refused: {text}")
        return cls(
            dtype=int(dtype),
            address=address,
            dims=dims,
            strides=strides,
            box=box,
            swizzle=swizzle,
            fill_nan=bool(oob_fill),
        )

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    @property
    def box_bytes(self) -> int:
        size = self.itemsize
        for extent in self.box:
            size *= extent
        return size

    def to_bytes(self) -> bytes:
        """128 bytes for a kernel parameter of type CUtensorMap."""
        pad = lambda values, count: (*values, *[0] * (count - len(values)))  # noqa: E731
        packed = _FORMAT.pack(
            _MAGIC,
            self.address,
            self.dtype,
            len(self.dims),
            self.swizzle,
            self.fill_nan,
            0,
            *pad(self.dims, 5),
            *pad(self.strides, 4),
            *pad(self.box, 5),
            *[1] * 5,
        )
        return packed.ljust(128, b"\0")

    @classmethod
    def from_bytes(cls, data: bytes) -> TensorMap:
        """Raises Trap where the bytes are no tensor map."""
        magic, address, dtype, rank, swizzle, nan, _, *rest = _FORMAT.unpack(data[: _FORMAT.size])
        if magic != _MAGIC:
            raise Trap("a bulk tensor copy names bytes that are no tensor map")
        return cls(
            dtype=dtype,
            address=address,
            dims=tuple(rest[:rank]),
            strides=tuple(rest[5 : 5 + rank - 1]),
            box=tuple(rest[9 : 9 + rank]),
            swizzle=swizzle,
            fill_nan=bool(nan),
        )


def swizzled(address: Any, bits: int) -> Any:
    """Mix `bits` address bits from bit 7 into those from bit 4 (the same pattern for TMA and wgmma)."""
    return address ^ ((address >> 7 & (1 << bits) - 1) << 4)
