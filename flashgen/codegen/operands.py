"""What the templates of pipeline ampere's forward write of operands: elements of 16 bits, or of 8 that are widened."""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.codegen.packs import PackCode
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
    packs: PackCode

    @property
    def _widened(self) -> bool:
        return isinstance(self.plan.operands, Widened)

    @property
    def _found_again(self) -> bool:
        """Whether registers hold nothing that the loop uses once."""
        operands = self.plan.operands
        return isinstance(operands, Widened) and operands.found_again

    def store_part(self, seq: SequenceCode) -> str:
        """Where O of a part of the keys leaves: behind the loop, for which registers are dear."""
        if not seq.own:
            return f"store_part(o, softmax, {seq.rows_again}, p);  // found again: registers are dear in the loop"
        if not self._found_again or seq.joined:
            return f"store_part(o, softmax, {seq.rows_again}, p);"
        lines = (
            "const Start again = start_of_block(all);  // registers are dear in the loop",
            "Params end = all;",
            "end.q_offset = rows.q_first - again.first;",
            "store_part(o, softmax, {again.b, again.h, rows.q_first, rows.q_last, again.part}, end);",
        )
        return "\n  ".join(lines)

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
        return self.packs.load("THREADS", f"HEAD_DIM{half}", source, half)

    # -- what is widened

    def widen(self, name: str, word: str) -> str:
        """Four elements of 8 bits as two words of two 16-bit ones."""
        operands = self.plan.operands
        assert isinstance(operands, Widened)
        kind = "e4m3" if getattr(operands.of, name) == E4M3 else "e5m2"
        how = "_by_bits" if operands.by_bits and kind == "e4m3" else ""
        return f"f16_of_{kind}{how}({word})"

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
    def mma(self) -> str:
        return f"mma_m16n8k16_{PTX_TYPE[WIDE]}"

    @property
    def cvt_p(self) -> str:
        return f"cvt_{PTX_TYPE[WIDE]}x2"

    # -- q

    @property
    def q_before_loop(self) -> bool:
        """Whether the tile of q is waited for before the first one of keys."""
        return self.plan.q_in_registers or self.scales_rows or self._arranges_q

    @property
    def of_q(self) -> str:
        """What becomes of it then, by names."""
        scales = "  float q_scale[M][2];  // what elements of rows of q count by\n"
        return scales * (self.scales_rows and self.narrow("q")) + "  Q q_fragments;\n" * self.plan.q_in_registers

    @property
    def q_scales(self) -> str:
        """Where its rows' scales lie, if it becomes float16."""
        return "\n  float q_scale[TILE_Q];" * (self.scales_rows and not self.narrow("q"))

    @property
    def q_arrived(self) -> str:
        """What is made of it."""
        lines = ["Q q_fragments;"] * self._arranges_q
        lines += ["load_q(q_fragments, shared);"] * (self.plan.q_in_registers or self._arranges_q)
        if self.scales_rows:
            lines.append("find_q_descales(q_scale, rows, p);" if self.narrow("q") else "q_to_f16(q_fragments, shared);")
        lines += ["arrange_q(shared.q, q_fragments);"] * self._arranges_q
        return "".join(f"\n    {line}" for line in lines)

    @property
    def _arranges_q(self) -> bool:
        """Whether what a lane multiplies in a step is brought side by side in shared memory, before the loop."""
        return self._widened and not self.narrow("q") and not self.plan.q_in_registers

    @property
    def first_of_steps(self) -> str:
        """What is known of q before the first step of S."""
        if self.plan.q_in_registers:
            return ""
        return f"\n  const u32 first = {'first_of_q(q)' if self.narrow('q') else 'shared_address(step_of_q(q, 0, 0))'};"

    @property
    def step_of_q(self) -> str:
        """Loads what a step multiplies, where registers do not hold it."""
        if self.plan.q_in_registers:
            return ""
        kind, load = ("Chunk a[M];", "a[m] = ld_shared_v4(first + m * QTile::BLOCK + d * 32 * sizeof(Chunk));")
        if self.narrow("q"):
            kind, load = "u32 a[M][4];", "load_q_step(a[m], first, m, d);"
        return f"    {kind}\n#pragma unroll\n    for (int m = 0; m < M; m++) {load}\n"

    @property
    def a(self) -> str:
        """The operand of a step."""
        if self.plan.q_in_registers:
            return "q[d][m]"
        return "a[m]" if self.narrow("q") else "a[m].word"

    # -- scales

    @property
    def scales_rows(self) -> bool:
        """Whether each row of q has a scale of its own: that of its head, or what brought it to float16."""
        operands = self.plan.operands
        if not isinstance(operands, Widened):
            return False
        return operands.narrows_q or (self.narrow("q") and self.plan.packed)

    @property
    def scale_rows_of_s(self) -> str:
        """What brings them to S."""
        line = "#pragma unroll\n    for (int m = 0; m < M; m++) scale_rows(s[m], q_scale[m]);"
        return f"\n{line if self.narrow('q') else '    undo_scales(s, shared);'}" * self.scales_rows

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
        in_exponent = "1.f;  // scores are powers of two" if self.scored else f"fmaxf(p.scale * LOG2E, {_FLOOR}"
        if not self._widened:
            return f"const float scale = {in_exponent}"
        where = "u32 sequence = rows.b, of_keys = kv_head;  // where their descales lie is found again for each tile"
        head = "p.{x}_descale + rows.b * p.{x}_descale_batch + kv_head * p.{x}_descale_head;"
        lines = [f"const float* const {x}_descale = {head.format(x=x)}" for x in ("k", "v")]
        lines = [where] if self._found_again else lines
        q = " * q_descale(rows.h, rows, p)" * (self.narrow("q") and not self.plan.packed)
        if self.scored:
            lines += ["const float scale = 1.f;  // scores are powers of two", f"const float block_scale = p.scale{q};"]
        else:
            lines.append(f"const float block_scale = p.scale{q} * LOG2E;")
        return "\n  ".join(lines)

    @property
    def descales_of_tile(self) -> str:
        """Those of a tile of keys, read before they are used."""
        if not self._widened:
            return ""
        if self._found_again:
            return "\n    renew_one(sequence);\n    renew_one(of_keys);" + self._descale_of_tile("k")
        return self._descale_of_tile("k") + self._descale_of_tile("v")

    def _descale_of_tile(self, x: str) -> str:
        """That of k or v."""
        head = f"sequence * p.{x}_descale_batch + of_keys * p.{x}_descale_head + "
        found = f"p.{x}_descale[{head}" if self._found_again else f"{x}_descale["
        return f"\n    const float {x}_of_tile = {found}(step.tile * TILE_KV >> p.{x}_block_log2) * p.{x}_descale_row];"

    @property
    def scale_of_tile(self) -> str:
        """What stands before S is looked at."""
        if not self._widened:
            return ""
        of_v = self._descale_of_tile("v") if self._found_again else ""
        if self.scored:
            return f"{of_v}\n    const float tile_scale = block_scale * k_of_tile;"
        return f"{of_v}\n    const float scale = fmaxf(block_scale * k_of_tile, {_FLOOR}"

    @property
    def v_argument(self) -> str:
        """What P V counts by."""
        return ", v_of_tile" * self._widened
