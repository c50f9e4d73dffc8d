"""What the templates of pipeline ampere's forward write of operands: elements of 16 bits, or of 8 that are widened."""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.codegen.params import element_of
from flashgen.codegen.sequences import SequenceCode
from flashgen.planning.float8 import E4M3
from flashgen.planning.operands import WIDE, Widened
from flashgen.planning.plan import KernelPlan

#: What the names of mma and cvt wrappers call the element type.
PTX_TYPE = {"float16": "f16", "bfloat16": "bf16"}

_FLOOR = "SMALLEST);  // scale 0 times a masked -inf stays -inf"


@dataclass(frozen=True, slots=True)
class OperandCode:
    """Fragments of CUDA by a plan's operands.

    Where these are widened the scale follows the tile of keys, whose descale is a part of it: where there is a score
    function (`scored`) it stands before that, else in the exponent.
    """

    plan: KernelPlan
    scored: bool

    @property
    def _widened(self) -> bool:
        return isinstance(self.plan.operands, Widened)

    def element(self, name: str) -> str:
        """The type of an element of q, k or v in memory."""
        return element_of(name, self.plan.out_dtype, self.plan.operands.narrow)

    @property
    def typedefs(self) -> str:
        return "\ntypedef unsigned char fp8;  // two of them are copied as one element of 16 bits\n" * self._widened

    def columns(self, name: str) -> str:
        """The 16-bit columns of a tile in shared memory."""
        columns = "V_COLUMNS" if name == "v" else "QK_COLUMNS"
        return f"{columns} / 2" if self.narrow(name) else columns

    def narrow(self, name: str) -> bool:
        """Whether elements of q, k or v have 8 bits."""
        return name in self.plan.operands.narrow

    @property
    def load_q(self) -> str:
        """Starts to copy the tile of q."""
        half, source = (" / 2", "(const u16*)q") if self.narrow("q") else ("", "q")
        rows = "rows.q_last - rows.q_first + 1"
        return f"load_tile<THREADS, HEAD_DIM{half}>(shared.q, {source}, p.q_row{half}, {rows});"

    # -- what is widened

    def widen(self, name: str, word: str) -> str:
        """Four elements of 8 bits as two words of two 16-bit ones."""
        operands = self.plan.operands
        assert isinstance(operands, Widened)
        kind = "e4m3" if getattr(operands.of, name) == E4M3 else "e5m2"
        to = PTX_TYPE[WIDE if name == "v" else operands.qk]
        how = "_by_bits" if operands.by_bits and kind == "e4m3" else ""
        inner = f"f16_of_{kind}{how}({word})"
        return inner if to == PTX_TYPE[WIDE] else f"{to}_of_f16({inner})"

    @property
    def first_of_q(self) -> str:
        """The address of a lane's first four columns of a row of q."""
        if self.narrow("q"):
            return "shared_address(q.at(row, 0)) + lane % 4 * 4"
        return "shared_address(q.at(row, lane % 4 / 2)) + lane % 2 * 8"

    @property
    def four_of_q(self) -> str:
        """Four columns of row 16 m + 8 r, side by side, 16 d columns from the first."""
        row = "+ (2 * m + r) * (QTile::BLOCK / 2)"
        if self.narrow("q"):
            return self.widen("q", f"ld_shared(QTile::right(first, d) {row})")
        return f"ld_shared_v2(QTile::right(first, 2 * d) {row})"

    @property
    def mma_qk(self) -> str:
        operands = self.plan.operands
        assert isinstance(operands, Widened)
        return f"mma_m16n8k16_{PTX_TYPE[operands.qk]}"

    @property
    def mma_pv(self) -> str:
        return f"mma_m16n8k16_{PTX_TYPE[WIDE]}"

    @property
    def cvt_p(self) -> str:
        return f"cvt_{PTX_TYPE[WIDE]}x2"

    # -- scales

    @property
    def scale_parameter(self) -> str:
        """Of the function that applies the score function."""
        return "float tile_scale, " * self._widened

    @property
    def scale_argument(self) -> str:
        return "tile_scale, " * self._widened

    @property
    def scale_of_element(self) -> str:
        """Of S before the score function."""
        return "tile_scale" if self._widened else "p.scale"

    def first_row(self, seq: SequenceCode) -> str:
        """The row of q in memory that is the block's first."""
        return "rows.q_first - p.q_offset" if seq.own else "rows.q_first"

    @property
    def scale_of_block(self) -> str:
        """What is known of the scale before the first tile."""
        in_exponent = "LOG2E;" if self.scored else f"fmaxf(p.scale * LOG2E, {_FLOOR}"
        if not self._widened:
            return f"const float scale = {in_exponent}"
        head = "p.{x}_descale + rows.b * p.{x}_descale_batch + kv_head * p.{x}_descale_head;"
        lines = [f"const float* const {x}_descale = {head.format(x=x)}" for x in ("k", "v")]
        q = " * q_descale(rows, p)" * self.narrow("q")
        if self.scored:
            lines += ["const float scale = LOG2E;", f"const float block_scale = p.scale{q};"]
        else:
            lines.append(f"const float block_scale = p.scale{q} * LOG2E;")
        return "\n  ".join(lines)

    @property
    def descales_of_tile(self) -> str:
        """Those of a tile of keys, read before they are used."""
        if not self._widened:
            return ""
        block = "(step.tile * TILE_KV >> p.{x}_block_log2)"
        line = "\n    const float {x}_of_tile = {x}_descale[" + block + " * p.{x}_descale_row];"
        return "".join(line.format(x=x) for x in ("k", "v"))

    @property
    def scale_of_tile(self) -> str:
        """What stands before S is looked at."""
        if not self._widened:
            return ""
        if self.scored:
            return "\n    const float tile_scale = block_scale * k_of_tile;"
        return f"\n    const float scale = fmaxf(block_scale * k_of_tile, {_FLOOR}"

    @property
    def v_argument(self) -> str:
        """What P V counts by."""
        return ", v_of_tile" * self._widened
