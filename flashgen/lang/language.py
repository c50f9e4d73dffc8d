"""The whole language in one table, for docs/language.md: made from the op table, so that it cannot fall behind."""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.lang.expr import DIMS, TENSOR_DTYPES
from flashgen.lang.loops import LOOPS
from flashgen.lang.ops import OPS


@dataclass(frozen=True, slots=True)
class Row:
    """One thing a spec can say; `write` holds its spellings, separated by "; "."""

    group: str
    write: str
    meaning: str


def language_table() -> list[Row]:
    """Every construct of the language, in reading order."""
    operations = [Row(op.group, op.spelling, op.doc) for op in OPS.values()]
    clamp = Row("choice", "fg.clamp(x, low, high)", "x kept inside low .. high; a bound may be None")
    last_choice = max(i for i, row in enumerate(operations) if row.group == "choice")
    loops = [Row("loop", loop.spelling, loop.doc) for loop in LOOPS.values()]
    return [*_VARIANTS, *_VALUES, *operations[: last_choice + 1], clamp, *operations[last_choice + 1 :], *loops]


def markdown() -> str:
    """`language_table` as a Markdown table."""
    lines = ["| | write | meaning |", "|---|---|---|"]
    group = ""
    for row in language_table():
        spellings = ", ".join(f"`{part}`" for part in row.write.split("; "))
        cells = [row.group if row.group != group else "", spellings, row.meaning]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        group = row.group
    return "\n".join(lines) + "\n"


_VARIANTS = (
    Row("variant", "@fg.variant", "makes a variant of a mask function `(b, h, q, k)`: true where q sees k"),
    Row("variant", "fg.variant(mask=None, score=None)", "the same as a call; without a mask every key is visible"),
    Row(
        "variant", "@v.score", "v with a score function `(s, b, h, q, k)`; `@fg.variant().score` for one without a mask"
    ),
    Row("variant", "v.then(f)", "v with another score function applied after its own; f may be a variant"),
    Row("variant", "v & w; v | w; ~v", "combine masks; `&` keeps the score function of v or of w"),
    Row(
        "variant",
        "fg.variant(sink=logits); v.with_sink(logits)",
        "v with a learned sink beside each row's keys; `fg.sink` makes it",
    ),
    Row(
        "variant",
        "head_dims=; dtypes=; only=",
        "what is emitted ahead; `only=True` refuses other dtypes of 16 bits and other head dims of q",
    ),
    Row("variant", "tile=; stages=; pipeline=; arch=", "pins: the planner checks them and never changes them"),
)

_VALUES = (
    Row("position", "b; h; q; k", "batch, query head, query and key position, int32 from 0"),
    Row("position", "s", "the score so far, scale * (q . k), float32"),
    Row("size", "fg.batch; fg.heads; fg.kv_heads; fg.q_len; fg.kv_len", "the problem's sizes, int32"),
    Row(
        "declared",
        "fg.param(name, default=None, min=, max=, dtype=)",
        "a number passed by name at the call; a new value compiles nothing",
    ),
    Row(
        "declared", "fg.constant(name, default, min=, max=)", "a number folded at compile time; overridden at the call"
    ),
    Row(
        "declared",
        "fg.tensor(name, dims, dtype, min=, max=, sorted=, example=)",
        f"a captured tensor; dims are {', '.join(DIMS)}, numbers or None; dtypes {', '.join(TENSOR_DTYPES)}",
    ),
    Row(
        "declared",
        "fg.sink(name, dims=, dtype=, example=)",
        "a logit that joins each row's softmax; dims are heads, or batch and heads; no function reads it",
    ),
    Row("declared", "t[b, k]; t[b][k]", "an element of a captured tensor; an index may itself be read from one"),
    Row("declared", "t.size(i)", "the length of dimension i"),
    Row("literal", "1; 0.5; True; math.inf", "Python numbers take the type of what they meet: int32, float32 or bool"),
)
