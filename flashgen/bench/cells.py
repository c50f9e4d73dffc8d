"""The cells of the benchmark tables: total tokens 16,384 and heads x head_dim 2,048, as the papers measure."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashgen.lang.load import load_spec
from flashgen.planning.problem import Problem

if TYPE_CHECKING:
    from flashgen.lang.variant import Variant

TOKENS = 16_384
WIDTH = 2_048
LENGTHS = (512, 1024, 2048, 4096, 8192, 16_384)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One row of a table: shipped specs (joined by `&`), their parameter values, and a problem."""

    specs: tuple[str, ...]
    problem: Problem
    params: tuple[tuple[str, int | float], ...] = ()

    def __str__(self) -> str:
        p = self.problem
        heads = f"h{p.heads}" if p.group == 1 else f"h{p.heads}:{p.kv_heads}"
        values = "".join(f" {name} {value:g}" for name, value in self.params)
        dtype = "" if p.dtype == "bfloat16" else f" {p.dtype}"
        length = f"s{p.q_len}" if p.q_len == p.kv_len else f"s{p.q_len}:{p.kv_len}"
        return f"d{p.head_dim} {'+'.join(self.specs)}{values} {length} b{p.batch} {heads}{dtype}"

    def variant(self) -> Variant:
        """The variant of this cell, not bound to a pipeline."""
        return functools.reduce(operator.and_, map(load_spec, self.specs))


def cell(
    specs: str,
    head_dim: int,
    length: int,
    *,
    batch: int | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    kv_len: int | None = None,
    dtype: str = "bfloat16",
    **params: int | float,
) -> Cell:
    """Attention of `length` queries and, unless given, as many keys; batch and heads keep tokens and width constant
    unless given."""
    heads = WIDTH // head_dim if heads is None else heads
    problem = Problem(
        batch=max(1, TOKENS // length) if batch is None else batch,
        heads=heads,
        kv_heads=heads if kv_heads is None else kv_heads,
        q_len=length,
        kv_len=length if kv_len is None else kv_len,
        head_dim=head_dim,
        v_head_dim=head_dim,
        dtype=dtype,
    )
    return Cell(specs=tuple(specs.split("+")), problem=problem, params=tuple(params.items()))


def table(head_dims: tuple[int, ...], *, lengths: tuple[int, ...] = LENGTHS, dtype: str = "bfloat16") -> list[Cell]:
    """head_dims x (full, causal) x lengths."""
    return [cell(spec, d, n, dtype=dtype) for d in head_dims for spec in ("full", "causal") for n in lengths]


#: What `flashgen bench` measures of the forward of each pipeline.
FORWARD: dict[str, list[Cell]] = {
    "ampere": [
        *table((64, 128, 256)),
        cell("sliding_window", 128, 8192, batch=2, heads=16, window=1024),
    ],
    "hopper": [
        *table((64, 128, 256)),
        cell("sliding_window", 128, 8192, batch=2, heads=16, window=1024),
        cell("alibi", 128, 8192, batch=2, heads=16),
        cell("causal+softcap", 128, 8192, batch=2, heads=16, cap=30.0),
        cell("causal", 128, 8192, batch=2, heads=32, kv_heads=8),
        cell("causal", 128, 512, batch=32, heads=32, kv_heads=8),
        *(cell("full", 128, n, batch=16, heads=32, kv_heads=8, kv_len=8192) for n in (1, 16)),
        *table((64, 128, 256), lengths=(8192,), dtype="float16"),
        *table((96, 192), lengths=(8192,)),
    ],
}

#: What `flashgen bench --backward` measures.
BACKWARD: dict[str, list[Cell]] = {
    "ampere": [*table((64, 128)), *table((256,), lengths=(4096,))],
    "hopper": [
        *table((64, 128), lengths=(2048, 8192, 16_384)),
        *table((256,), lengths=(4096,)),
        cell("sliding_window", 128, 8192, batch=2, heads=16, window=1024),
        cell("alibi", 128, 8192, batch=2, heads=16),
        cell("causal+softcap", 128, 8192, batch=2, heads=16, cap=30.0),
        cell("causal+document", 128, 8192, batch=2, heads=16),
    ],
}


def dropping(cells: Sequence[Cell]) -> list[Cell]:
    """Those that say what dropout costs: full and causal of two lengths, in bfloat16."""
    masks, lengths = (("full",), ("causal",)), (2048, 8192)
    wide = [c for c in cells if c.problem.head_dim in (64, 128, 256) and c.problem.group == 1]
    return [c for c in wide if c.specs in masks and c.problem.q_len in lengths and c.problem.dtype == "bfloat16"]
