"""wgmma: products of a warpgroup, done when their group is waited for.

A warp's quarter of a product needs nothing of the other three warps, so each warp of the warpgroup is computed by
itself: rows 16 w .. 16 w + 15 of the 64, w being the warp's place in its warpgroup.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from flashgen.interpreter.block import Block
from flashgen.interpreter.build import Build, Closure
from flashgen.interpreter.descriptors import Descriptor
from flashgen.interpreter.errors import MissingFence, NotComplete, OutOfBounds, UnfinishedCopy
from flashgen.interpreter.groups import Queue
from flashgen.interpreter.hazards import check_fence
from flashgen.interpreter.ops.loads import note_granule
from flashgen.interpreter.ops.matrix import halves
from flashgen.interpreter.parser import Imm, Vec
from flashgen.interpreter.registers import LANES, Group, Mask, Slots
from flashgen.interpreter.shared import BASE
from flashgen.lang import float8

_SHAPE = re.compile(r"m64n(\d+)k(16|32)")

#: 8-bit floats, by what PTX calls them.
_EIGHT = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}

#: Their least normal numbers.
_LEAST = {"e4m3": 2.0**-6, "e5m2": 2.0**-14}


@dataclass(frozen=True, slots=True, eq=False)
class Form:
    """One wgmma instruction: registers (bank indices and in-flight numbers) and how its operands lie."""

    n: int
    a_kind: str
    b_kind: str
    d: np.ndarray
    a: np.ndarray | None
    d_numbers: tuple[int, ...]
    a_numbers: tuple[int, ...]
    a_sign: float
    b_sign: float
    a_mn_major: bool
    b_mn_major: bool
    line: int


@dataclass(slots=True, eq=False)
class Product:
    """One execution by some warps: descriptors and whether to accumulate, by warp."""

    form: Form
    a_words: dict[int, int]
    b_words: dict[int, int]
    accumulate: dict[int, bool]


def _queues(block: Block) -> list[Queue[Product]]:
    return block.keep("wgmma", lambda: [Queue() for _ in range(block.warps)])


def multiply(b: Build) -> Closure:
    b.drop("sync", "aligned")
    b_kind, a_kind, d_kind = b.type(), b.type(), b.type()
    match = _SHAPE.fullmatch(b.mods.pop(0)) if b.mods else None
    from_registers = isinstance(b.operands[1], Vec)
    eight = a_kind in _EIGHT
    b.done(6 if eight else 7 if from_registers else 8)
    n = int(match[1]) if match else 0
    kinds = b_kind in _EIGHT if eight else a_kind == b_kind and a_kind in ("f16", "bf16")
    if not match or n % 8 or not 8 <= n <= 256 or not kinds or d_kind != "f32" or match[2] != ("32" if eight else "16"):
        raise b.unknown("this shape or type")
    scale_a, scale_b, *transposed = (b.immediate(operand) for operand in b.operands[4:])
    if scale_a not in (1, -1) or scale_b not in (1, -1) or any(t not in (0, 1) for t in transposed):
        raise b.unknown("these immediates")
    d = b.words(b.operands[0], write=True)
    a = b.words(b.operands[1]) if from_registers else None
    if len(d) != n // 2 or (a is not None and len(a) != 4):
        raise b.unknown("a fragment of this many registers")
    predicate = b.operands[3]
    if isinstance(predicate, Imm):
        known: bool | None = bool(predicate.value)
        p = None
    else:
        known = b.translator.constants.get(predicate.name)
        p = b.read(predicate, "pred")
    if known:
        b.words(b.operands[0])  # it reads what it adds to
    number = b.translator.wgmma
    form = Form(
        n,
        a_kind,
        b_kind,
        d,
        a,
        tuple(number[reg.name] for reg in b.operands[0].items),
        tuple(number[reg.name] for reg in b.operands[1].items) if from_registers else (),
        float(scale_a),
        float(scale_b),
        not from_registers and not eight and bool(transposed[0]),
        not eight and bool(transposed[-1]),
        b.instruction.line,
    )
    a_slot = None if from_registers else b.read(b.operands[1], "b64")
    b_slot = b.read(b.operands[2], "b64")
    note_granule(b, "shared", 16)

    def run(V: Slots, m: Mask) -> None:
        group = V[0]
        group.whole_rows(m, "wgmma")
        block = group.block
        warps = group.warps_of(m)
        _check_registers(block, form, group.row_bits(m))
        product = Product(form, {}, {}, {})
        for warp in warps:
            row = warp - group.a
            if a_slot is not None:
                product.a_words[warp] = _one(V[a_slot], row)
            product.b_words[warp] = _one(V[b_slot], row)
            product.accumulate[warp] = known if p is None else bool(_one(V[p], row))
            _queues(block)[warp].open.append(product)
        _note_reads(block, product, warps)

    return run


def _one(value: np.ndarray, row: int) -> int:
    return int(value if np.ndim(value) == 0 else value[row, 0])


def _check_registers(block: Block, form: Form, bits: int) -> None:
    state = block.wgmma
    check_fence(state, form.d_numbers, bits)
    check_fence(state, form.a_numbers, bits)
    for n in form.a_numbers:
        if state.writing[n] & bits:
            raise NotComplete("a wgmma reads as A what another one not waited for still writes")
        state.reading[n] |= bits
    for n in form.d_numbers:
        if state.reading[n] & bits:
            raise NotComplete("a wgmma accumulates into registers that another one still reads as A")
        shape = state.shapes.get(n)
        if state.writing[n] & bits and shape != form.n:
            raise MissingFence("a wgmma of another shape still accumulates into these registers")
        state.writing[n] |= bits
        state.shapes[n] = form.n


# ---------------------------------------------------------------- operands in shared memory
def _operand(block: Block, word: int, rows: int, mn_major: bool) -> np.ndarray:
    """Chunk addresses of an operand, checked against the bounds of shared memory; kept for the next use."""
    cache = block.keep("wgmma operands", dict)
    key = word, rows, mn_major
    if key not in cache:
        descriptor = Descriptor.decode(word)
        chunks = descriptor.mn_major(rows) if mn_major else descriptor.k_major(rows)
        low, high = int(chunks.min()), int(chunks.max()) + 16
        if low < BASE or high > block.shared.end:
            raise OutOfBounds(
                f"a wgmma operand reaches bytes {low - BASE}..{high - BASE - 1} of shared memory: the block has"
                f" {block.shared.size} bytes"
            )
        per = 16 // block.shared.granule
        granules = (chunks.reshape(-1, 1) // block.shared.granule + np.arange(per)).reshape(-1)
        cache[key] = chunks >> 4, granules
    return cache[key]


def _matrix(block: Block, word: int, rows: int, mn_major: bool, kind: str) -> np.ndarray:
    """An operand as [rows, 16] float32; of 8 bits [rows, 32]."""
    chunks, _ = _operand(block, word, rows, mn_major)
    if kind in _EIGHT:
        return _bytes(block.shared.rows16[chunks], kind).reshape(rows, 32)
    values = halves(block.shared.rows16[chunks], kind)  # [..., 4, 2]
    if mn_major:
        return values.reshape(rows // 8, 16, 8).transpose(0, 2, 1).reshape(rows, 16)
    return values.reshape(rows, 16)


def _bytes(words: np.ndarray, kind: str) -> np.ndarray:
    """Packed 8-bit floats [...] (uint32) -> [..., 4] float32, the lowest byte first."""
    packed = np.ascontiguousarray(words).view(np.uint8).reshape(*words.shape, 4)
    return float8.values(packed, _EIGHT[kind])


def _note_reads(block: Block, product: Product, warps: list[int]) -> None:
    form = product.form
    operands = [(product.b_words, form.n, form.b_mn_major)]
    if form.a is None:
        operands.append((product.a_words, 64, form.a_mn_major))
    races = block.cluster.races
    queues = _queues(block)
    for words, rows, mn_major in operands:
        for word in dict.fromkeys(words.values()):
            _, granules = _operand(block, word, rows, mn_major)
            if races is not None:
                who = [warp for warp in warps if words[warp] == word]
                times = np.array([queues[warp].committed + 1 for warp in who])
                races.read_async(block.shared.shadow, granules, np.array(who) + block.first_row, races.wgmma, times)


# ---------------------------------------------------------------- groups
def fence(b: Build) -> Closure:
    """wgmma.fence: registers used until now may be given to wgmma."""
    b.drop("sync", "aligned")
    b.done(0)

    def run(V: Slots, m: Mask) -> None:
        group = V[0]
        group.whole_rows(m, "wgmma.fence")
        state, keep = group.block.wgmma, ~group.row_bits(m)
        state.touched = [bits & keep for bits in state.touched]

    return run


def commit(b: Build) -> Closure:
    b.drop("sync", "aligned")
    b.done(0)

    def run(V: Slots, m: Mask) -> None:
        V[0].whole_rows(m, "wgmma.commit_group")
        queues = _queues(V[0].block)
        for warp in V[0].warps_of(m):
            queues[warp].commit()

    return run


def wait(b: Build) -> Closure:
    """wgmma.wait_group n: all but the newest n groups are done."""
    b.drop("sync", "aligned")
    b.done(1)
    keep = b.immediate(b.operands[0])

    def run(V: Slots, m: Mask) -> None:
        group = V[0]
        group.whole_rows(m, "wgmma.wait_group")
        block = group.block
        races, queues = block.cluster.races, _queues(block)
        todo: dict[int, tuple[Product, list[int]]] = {}
        for warp in group.warps_of(m):
            queue = queues[warp]
            for products in queue.leave(keep):
                for product in products:
                    todo.setdefault(id(product), (product, []))[1].append(warp)
            if races is not None:
                row = warp + block.first_row
                races.finish(row, races.wgmma + row, queue.left)
        _compute(block, list(todo.values()))
        _release(block, group, m, list(todo.values()))

    return run


def _release(block: Block, group: Group, m: Mask, done: list[tuple[Product, list[int]]]) -> None:
    """Registers of finished products are free again, unless a pending one uses them too."""
    state, bits = block.wgmma, group.row_bits(m)
    for product, _ in done:
        for n in product.form.d_numbers:
            state.writing[n] &= ~bits
        for n in product.form.a_numbers:
            state.reading[n] &= ~bits
    for warp in group.warps_of(m):
        queue = _queues(block)[warp]
        for products in (*queue.groups, queue.open):
            for product in products:
                for n in product.form.d_numbers:
                    state.writing[n] |= 1 << warp
                for n in product.form.a_numbers:
                    state.reading[n] |= 1 << warp


def leaving(block: Block, row: int) -> None:
    if "wgmma" in block.state:
        queue = block.state["wgmma"][row]
        if queue.open or any(queue.groups):
            raise UnfinishedCopy(f"warp {row} leaves while its wgmmas are not waited for")


# ---------------------------------------------------------------- arithmetic
def _compute(block: Block, products: list[tuple[Product, list[int]]]) -> None:
    """Products in order; a run of k steps into one accumulator is one matrix product."""
    at = 0
    while at < len(products):
        first, warps = products[at]
        stop = at + 1
        while stop < len(products):
            product, others = products[stop]
            same = product.form.d_numbers == first.form.d_numbers and others == warps
            if not same or not all(product.accumulate[w] for w in warps):
                break
            stop += 1
        _chain(block, [product for product, _ in products[at:stop]], warps)
        at = stop


def _chain(block: Block, products: list[Product], warps: list[int]) -> None:
    """Add (or set) the sum of several products for some warps: exact products, summed in float64 and rounded once; of
    8 bits as the hardware sums them."""
    form, n = products[0].form, products[0].form.n
    bank = block.banks.bank[32]
    groups: dict[tuple[int, ...], list[int]] = {}
    for warp in warps:
        groups.setdefault(tuple(x for p in products for x in (p.b_words[warp], p.a_words.get(warp, 0))), []).append(
            warp
        )
    for members in groups.values():
        rows = np.array(members)
        left, right = [], []
        for product in products:
            f = product.form
            right.append(f.b_sign * _matrix(block, product.b_words[members[0]], n, f.b_mn_major, f.b_kind))
            if f.a is None:
                whole = _matrix(block, product.a_words[members[0]], 64, f.a_mn_major, f.a_kind)
                part = whole.reshape(4, 16, -1)[rows % 4]
            elif f.a_kind in _EIGHT:
                words = bank[f.a[:, None], rows]  # a[2 i + r]: row 8r + l/4, columns 16i + 4(l%4) + e
                part = _bytes(words, f.a_kind).reshape(2, 2, len(rows), 8, 4, 4).transpose(2, 1, 3, 0, 4, 5)
                part = part.reshape(len(rows), 16, 32)
            else:
                words = bank[f.a[:, None], rows]  # a[2 i + r]: row 8r + l/4, columns 8i + 2(l%4) + e
                part = halves(words, f.a_kind).reshape(2, 2, len(rows), 8, 4, 2).transpose(2, 1, 3, 0, 4, 5)
                part = part.reshape(len(rows), 16, 16)
            left.append(f.a_sign * part)
        a = np.concatenate(left, axis=2, dtype=np.float64).reshape(len(rows) * 16, -1)
        b = np.concatenate(right, axis=1, dtype=np.float64)
        where = form.d[:, None], rows
        keep = np.array([products[0].accumulate[w] for w in members])
        bits = block.cluster.launch.options.accumulator_bits
        if form.a_kind in _EIGHT and bits is not None:
            old = _rows_of(bank[where].view(np.float32).astype(np.float64), n) if keep.any() else 0.0
            start = np.where(np.repeat(keep, 16)[:, None], old, 0.0)
            added = _cut_sum(a, b, start, bits, (form.a_kind, form.b_kind))
            bank[where] = _spread(added, n).astype(np.float32).view(np.uint32)
            continue
        total = _spread(a @ b.T, n)
        if keep.any():
            old = bank[where].view(np.float32)
            total = total + (old if keep.all() else np.where(keep[:, None], old, np.float32(0)))
        bank[where] = np.ascontiguousarray(total, np.float32).view(np.uint32)


def _spread(total: np.ndarray, n: int) -> np.ndarray:
    """[rows of warps, n] -> [registers, warps, lanes]; d[4 j + 2 r + e]: row 8r + l/4, column 8j + 2(l%4) + e."""
    spread = total.reshape(-1, 2, 8, n // 8, 4, 2).transpose(3, 1, 5, 0, 2, 4)
    return np.ascontiguousarray(spread.reshape(n // 2, -1, LANES))


def _rows_of(spread: np.ndarray, n: int) -> np.ndarray:
    """The inverse of _spread."""
    return spread.reshape(n // 8, 2, 2, -1, 8, 4).transpose(3, 1, 4, 0, 5, 2).reshape(-1, n)


def _cut_sum(
    a: np.ndarray, b: np.ndarray, start: np.ndarray, bits: int, kinds: tuple[str, str] = ("e4m3", "e4m3")
) -> np.ndarray:
    """start + a @ b.T as Hopper adds up products of 8 bits: in a step of 32, each addend, the sum so far among them, is
    cut off toward zero at 2^-bits of the largest power of two among them; that of a product is the product of its
    factors', a subnormal counting as the least normal number.  The sum is cut off at 2^-bits of its own."""
    total = np.broadcast_to(start, (a.shape[0], b.shape[0]))
    power_a, power_b = (_power(x, _LEAST[kind]) for x, kind in zip((a, b), kinds, strict=True))
    for k in range(0, a.shape[1], 32):
        at = slice(k, k + 32)
        addends = a[:, None, at] * b[None, :, at]
        largest = np.maximum((power_a[:, None, at] * power_b[None, :, at]).max(axis=2), _power(total))
        finite = np.isfinite(largest) & (largest > 0)
        unit = np.where(finite, largest, 1.0) * 2.0**-bits
        added = (np.trunc(addends / unit[..., None]).sum(axis=2) + np.trunc(total / unit)) * unit
        own = np.where(finite & (added != 0), _power(added), 1.0) * 2.0**-bits
        total = np.where(finite | (largest == 0), np.trunc(added / own) * own, addends.sum(axis=2) + total)
    return total


def _power(x: np.ndarray, least: float = 0.0) -> np.ndarray:
    """The largest power of two that is no more than |x|, and no less than `least`; 0 and what is not finite stay."""
    size = np.abs(x)
    seen = np.isfinite(size) & (size > 0)
    power = np.exp2(np.frexp(np.where(seen, size, 1.0))[1] - 1.0)
    return np.where(seen, np.maximum(power, least), size)


TABLE: dict[str, Callable[[Build], Closure]] = {
    "wgmma.mma_async": multiply,
    "wgmma.fence": fence,
    "wgmma.commit_group": commit,
    "wgmma.wait_group": wait,
}
