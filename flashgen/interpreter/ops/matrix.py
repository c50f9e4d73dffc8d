"""ldmatrix, stmatrix and mma.sync: fragments of small matrices spread over the lanes of a warp."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from flashgen.interpreter.build import Build, Closure
from flashgen.interpreter.ops.convert import bf16_value
from flashgen.interpreter.ops.loads import note_granule
from flashgen.interpreter.ops.remote import local_address
from flashgen.interpreter.registers import LANES, Mask, Slots

_MATRICES = {"x1": 1, "x2": 2, "x4": 4}


def _matrix_form(b: Build) -> tuple[int, bool]:
    """(number of 8x8 matrices, transposed)."""
    kind = b.type()
    b.drop("sync", "aligned", "shared", "shared::cta")
    shape = b.take("m8n8")
    count = _MATRICES.get(b.take(*_MATRICES), 0)
    transposed = bool(b.take("trans"))
    b.done(2)
    if kind != "b16" or not shape or not count:
        raise b.unknown("this shape")
    return count, transposed


def _rows_in_shared(b: Build, operand: Any, registers: int, count: int) -> Callable[[Slots, Mask, bool], tuple]:
    """Of `count` matrices whose rows the lanes name: (group, its warps that take part, shared memory's 16-byte row of
    each lane of theirs), for lanes that write or read."""
    if registers != count:
        raise b.unknown(f"{registers} registers for {count} matrices")
    address, offset = b.address(operand)
    instruction = b.instruction
    takes_part = np.arange(LANES) < 8 * count
    note_granule(b, "shared", 16)

    def rows_of(V: Slots, m: Mask, write: bool) -> tuple:
        group = V[0]
        rows = group.whole_rows(m, "stmatrix" if write else "ldmatrix")
        memory = group.block.shared
        where = np.broadcast_to(np.asarray(V[address]).astype(np.int64) + offset, (group.n, LANES))
        lanes: Mask = True
        if count < 4 or m is not True:
            lanes = np.broadcast_to(takes_part, (group.n, LANES)) & (True if m is True else m)
        where, pattern = memory.access(group, local_address(group.block, where, lanes), lanes, 16)
        if write:
            memory.note_write(group, where, pattern, lanes, instruction.line)
        else:
            memory.note_read(group, where, pattern, lanes)
        group.block.launch.report.note_shared(instruction, len(group.warps_of(m)), pattern.wavefronts, pattern.ideal)
        return group, rows, where[rows][:, : 8 * count] >> 4

    return rows_of


def load_matrix(b: Build) -> Closure:
    """Lane 8i + r names row r of matrix i (16 bytes); lane l receives elements 2(l%4), 2(l%4)+1 of row l/4."""
    count, transposed = _matrix_form(b)
    words = b.words(b.operands[0], write=True)
    rows_of = _rows_in_shared(b, b.operands[1], len(words), count)

    def run(V: Slots, m: Mask) -> None:
        group, rows, at = rows_of(V, m, False)
        data = group.block.shared.rows16[at]  # [warps, rows of all matrices, 4 words]
        n = data.shape[0]
        if transposed:
            halves = np.ascontiguousarray(data).view(np.uint16).reshape(n, count, 8, 8)
            data = np.ascontiguousarray(halves.transpose(0, 1, 3, 2)).view(np.uint32)
        out = data.reshape(n, count, LANES).transpose(1, 0, 2)
        bank = group.bank32[:, group.a : group.b]
        if m is True:
            bank[words] = out
        else:
            bank[words[:, None], np.arange(group.n)[rows]] = out

    return run


def store_matrix(b: Build) -> Closure:
    """As `load_matrix`, from registers to the rows."""
    count, transposed = _matrix_form(b)
    words = b.words(b.operands[1])
    rows_of = _rows_in_shared(b, b.operands[0], len(words), count)

    def run(V: Slots, m: Mask) -> None:
        group, rows, at = rows_of(V, m, True)
        data = group.bank32[words, group.a : group.b][:, rows].transpose(1, 0, 2)  # [warps, matrices, lanes]
        n = data.shape[0]
        data = np.ascontiguousarray(data).reshape(n, count, 8, 4)
        if transposed:
            halves = data.view(np.uint16).reshape(n, count, 8, 8)
            data = np.ascontiguousarray(halves.transpose(0, 1, 3, 2)).view(np.uint32)
        group.block.shared.rows16[at] = data.reshape(n, count * 8, 4)

    return run


def halves(words: np.ndarray, kind: str) -> np.ndarray:
    """Packed pairs [...] (uint32) -> [..., 2] float32, the lower half first."""
    pairs = np.ascontiguousarray(words).view(np.uint16).reshape(*words.shape, 2)
    return bf16_value(pairs) if kind == "bf16" else pairs.view(np.float16).astype(np.float32)


def mma(b: Build) -> Closure:
    """mma.sync m16n8k16 and m16n8k8 with float32 accumulators: D = A B + C.

    Products of halves are exact and their sum is taken in float64 and rounded once with C: at least as exact as a
    tensor core, whose order and truncation NVIDIA does not specify.
    """
    b.drop("sync", "aligned")
    shape = b.take("m16n8k16", "m16n8k8")
    layout = b.take("row"), b.take("col")
    kinds = [b.type() for _ in range(4)][::-1] if len(b.mods) == 4 else []
    b.done(4)
    if kinds not in (["f32", "f16", "f16", "f32"], ["f32", "bf16", "bf16", "f32"]) or not shape or not all(layout):
        raise b.unknown("this shape or type")
    blocks = 2 if shape == "m16n8k16" else 1  # k16 is two blocks of 8 columns
    kind = kinds[1]
    d = b.words(b.operands[0], write=True)
    a, bb, c = (b.words(operand) for operand in b.operands[1:])
    if (len(d), len(a), len(bb), len(c)) != (4, 2 * blocks, blocks, 4):
        raise b.unknown("a fragment of this many registers")

    def run(V: Slots, m: Mask) -> None:
        group = V[0]
        rows = group.whole_rows(m, "mma.sync")
        bank = group.bank32[:, group.a : group.b]
        # a[2 i + r]: row 8r + l/4, columns 8i + 2(l%4) + e
        af = halves(bank[a][:, rows], kind)
        n = af.shape[1]
        af = af.reshape(blocks, 2, n, 8, 4, 2).transpose(2, 1, 3, 0, 4, 5).reshape(n, 16, 8 * blocks)
        # b[i]: rows 8i + 2(l%4) + e, column l/4
        bf = (
            halves(bank[bb][:, rows], kind)
            .reshape(blocks, n, 8, 4, 2)
            .transpose(1, 0, 3, 4, 2)
            .reshape(n, 8 * blocks, 8)
        )
        # c[2 r + e]: row 8r + l/4, column 2(l%4) + e
        product = np.matmul(af, bf, dtype=np.float64)
        spread = product.reshape(n, 2, 8, 4, 2).transpose(1, 4, 0, 2, 3).reshape(4, n, LANES)
        total = (spread + bank[c][:, rows].view(np.float32)).astype(np.float32).view(np.uint32)
        if m is True:
            bank[d] = total
        else:
            bank[d[:, None], np.arange(group.n)[rows]] = total

    return run


TABLE: dict[str, Callable[[Build], Closure]] = {
    "ldmatrix": load_matrix,
    "stmatrix": store_matrix,
    "mma": mma,
}
