"""The forward of pipeline ampere on keys and values of 8 bits: what its candidates cost, beside those of 16 bits.

Tiles of 8-bit elements lie in shared memory, and each warp widens what it multiplies on the way to its registers: half
the bytes to copy and to read, and a few instructions for each element.  Queries have 16 bits, or 8 bits too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from flashgen.planning.arch import Arch
from flashgen.planning.float8 import E4M3, LEAST_BLOCK, Float8
from flashgen.planning.operands import Operands, Widened, narrows_q, widened
from flashgen.planning.pipelines.ampere import forward
from flashgen.planning.pipelines.ampere.forward import Candidate, padded
from flashgen.planning.pipelines.shared import total
from flashgen.planning.plan import ITEM, KernelPlan, Part
from flashgen.planning.request import Fixed, KernelRequest

#: As of 16 bits.
NAME, COPIES, SHARES_SM = forward.NAME, forward.COPIES, forward.SHARES_SM
SMALL_QUERIES, FEW_QUERIES, FEW_BYTES = forward.SMALL_QUERIES, forward.FEW_QUERIES, forward.FEW_BYTES
INTEGERS, QUERIES, EXAMPLES = forward.INTEGERS, forward.QUERIES, forward.EXAMPLES
cannot_address, cannot_page = forward.cannot_address, forward.cannot_page
cannot_pack, packed, packing_gain = forward.cannot_pack, forward.packed, forward.packing_gain
predictor = forward.predictor

#: Head dims that the pipeline emits: rows of 16 bytes.
HEAD_DIM_STEP, MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 16, 256

#: Tiles: one ldmatrix loads 16 bytes of 32 keys, and powers of two divide blocks of rows with one descale.
TILE_QUERIES, KEYS = (16, 32, 64, 128), (32, 64, 128)
TILE_RULE = f"tile_q is 16, 32, 64 or 128, tile_kv 32, 64 or 128 (which divide {LEAST_BLOCK})"
KEY_STEP = KEYS[0]

#: Shared memory is a multiple of so many bytes, as tiles begin there.
LINE = 128

#: Registers of a thread for descales, words on their way from 8 bits to 16, and P, which waits in 16 bits for all
#: columns of V: by the keys of a tile, of a block of 16 rows; those of a second block; and one for each key beyond
#: FEW_KEYS where Q is in registers.  Found by compiling.
WIDENING, SECOND_BLOCK = {32: 2, 64: 40, 128: 72}, 30
FEW_KEYS = 16

#: Registers left where a loop finds again what it uses once: fewer than so many beside rows of more than NARROW columns
#: or a mask and a score that tells heads apart, which takes some.  Else 8 to 44 bytes were spilled at head_dim 256
#: (`document`, `dilated`, `padding`, `prefix_lm`, windows, sinks, `relative_bias`), and by `alibi`.
DEAR, OF_HEADS = 11, 3

#: Instructions by which a lane makes two float16 of two elements, with and without a conversion, of e5m2 in any case.
CONVERSION, BY_BITS, SHIFT = 1, 7, 1


def unsupported_reason(request: KernelRequest) -> str | None:
    """Why there is no such kernel of 8-bit keys and values, or None."""
    if request.float8 is not None and request.float8.accuracy == "fast":
        return "makes no P by bits: it has 16 bits"
    if request.dropout:
        return "drops no probabilities in 8 bits"
    if request.keys.invariant:
        return "cuts no rows into leaves in 8 bits"
    return None


def nearest_tile(tile: tuple[int, int]) -> tuple[int, int]:
    """The tile that TILE_RULE allows and that comes closest."""
    q, kv = tile
    return min(TILE_QUERIES, key=lambda rows: abs(rows - q)), min(KEYS, key=lambda keys: abs(keys - kv))


def candidates(fixed: Fixed) -> Iterator[Candidate]:
    """Every candidate that has what is fixed, and else what the planner may choose freely."""
    yield from (c for c in forward.candidates(fixed) if fixed.tile or c.tile.kv in KEYS)


def smem(c: Candidate, request: KernelRequest) -> tuple[Part, ...]:
    """Bytes of shared memory of a block."""
    assert request.float8 is not None
    d, dv = padded(request.head_dim), padded(request.v_head_dim)
    of_q, of_o = d * (1 if "q" in request.float8.scaled else ITEM), dv * ITEM

    def staged(name: str, columns: int) -> Part:
        why = f"{c.stages} stages x {c.tile.kv} rows x {columns} bytes"
        return Part(name=name, amount=c.stages * c.tile.kv * columns, why=why)

    return (
        Part(
            name="q",
            amount=c.tile.q * max(of_q, of_o),
            why=f"{c.tile.q} rows x {max(of_q, of_o)} bytes; o leaves through the same room",
        ),
        staged("k", d),
        staged("v", dv),
        *_q_scales(c, request.float8),
    )


def _q_scales(c: Candidate, of: Float8) -> tuple[Part, ...]:
    """Those of rows of q, where it becomes float16."""
    if not narrows_q(of):
        return ()
    return (Part(name="q scales", amount=-(-4 * c.tile.q // LINE) * LINE, why=f"float32 of {c.tile.q} rows"),)


def registers(c: Candidate, request: KernelRequest) -> tuple[Part, ...]:
    """32-bit registers of a thread at the widest point of the loop, as of 16 bits: P and partial sums of a few columns
    stand where S stood."""
    *others, ahead = forward.registers(c, request)
    m = c.rows_per_warp // forward.MMA_ROWS
    of_keys = next((amount for keys, amount in WIDENING.items() if keys >= c.tile.kv), WIDENING[KEYS[-1]])
    amount = m * (of_keys + c.q_in_registers * (c.tile.kv - FEW_KEYS)) + (m - 1) * SECOND_BLOCK
    return (*others, Part(name="widening", amount=amount, why="descales, and words that become 16 bits"), ahead)


def does_not_fit_reason(c: Candidate, request: KernelRequest) -> str | None:
    """Why the candidate cannot run on the architecture, or None."""
    return forward.beyond_limits(c, request, smem(c, request), registers(c, request))


def plan(c: Candidate, request: KernelRequest) -> KernelPlan:
    """The plan of a candidate that fits."""
    assert request.float8 is not None
    exact = request.float8.exactly
    operands = widened(exact, by_bits=_by_bits(exact, request.arch))
    made = forward.plan_of(c, request.with_float8(exact), *(smem(c, request), registers(c, request)), operands=operands)
    left = forward.budget(c, request.arch, made.blocks_per_sm) - total(made.registers)
    return replace(made, operands=replace(operands, found_again=True)) if _dear(left, request) else made


def _dear(left: int, request: KernelRequest) -> bool:
    """Whether so few registers are left that a loop keeps nothing that it uses once."""
    of_heads = request.profile.uses_head
    wide = request.widest > forward.NARROW or (of_heads and request.profile.hides)
    return wide and left - OF_HEADS * of_heads < DEAR


def _by_bits(of: Float8, arch: Arch) -> bool:
    """Whether elements of e4m3 are put together of their bits."""
    return not arch.converts_e4m3 and E4M3 in (of.q, of.k, of.v)


def clocks(plan: KernelPlan, arch: Arch) -> dict[str, float]:
    """As of 16 bits, with half the bytes, and what widening takes: every warp does it for its own rows."""
    by_unit = forward.clocks(plan, arch)
    d, dv = plan.padded_head_dim, plan.padded_v_head_dim
    rows = plan.tile.q // plan.warps
    q_again = 0 if plan.q_in_registers else ITEM * d / plan.tile.kv
    bytes_moved = (d + dv) / rows + q_again + (d + dv) / plan.tile.q
    assert isinstance(plan.operands, Widened)
    widening = d * _instructions(plan.operands, "k") + dv * _instructions(plan.operands, "v")
    return by_unit | {
        "arithmetic": by_unit["arithmetic"] + (widening / rows + dv / plan.tile.kv) / arch.fp32_lanes,
        "shared memory": bytes_moved / arch.smem_per_clock,
        "l2": by_unit["l2"] / ITEM,
    }


def _instructions(operands: Operands, name: str) -> float:
    """Those of a lane for one element of k or of v."""
    assert isinstance(operands, Widened)
    exact = getattr(operands.of, name) == E4M3
    pair = (BY_BITS if operands.by_bits else CONVERSION) if exact else SHIFT
    turned = 0 if name == "k" else 1  # bytes of a column are brought side by side
    return (pair + turned) / 2


def seconds_per_score(plan: KernelPlan, arch: Arch) -> tuple[float, ...]:
    """Seconds an SM needs for one score while 1, 2 ... blocks share it; the last one ranks the plan."""
    shares = range(1, plan.blocks_per_sm + 1)
    return tuple(forward.pace(clocks(plan, arch), plan, arch, blocks) for blocks in shares)
