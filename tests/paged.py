"""Sequences whose keys lie in the pages of a cache, made of those of padded.py: what they give is known from there."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from padded import Batch, hopper_plan

from flashgen.planning.layout import Paged
from flashgen.runtime import tiles as runtime

#: What entries of a page table hold that no key is found by.
NOTHING = (-1, 1 << 30, -(1 << 31), (1 << 31) - 1)


@dataclass(frozen=True)
class PagedBatch(Batch):
    """A kernel of pages, and the walk over them; `tables` are the pages of each sequence."""

    tables: tuple[tuple[int, ...], ...] = ()

    def walked(self, kv_splits: int = 1) -> runtime.Walked:
        joined = self.plan.layout.joined
        own = tuple(
            x.walked(0 if joined else b)._replace(k_start=0, pages=table)
            for b, (x, table) in enumerate(zip(self.sequences, self.tables, strict=True))
        )
        options = {"scale": self.scale, "dtype": self.problem.dtype, "dropout": self.dropout, "sequences": own}
        options["kv_splits"] = kv_splits
        return runtime.walk(self.plan, self.facts, self.case, *self.qkv, **options)


def in_pages(
    w: Batch, page_size: int, *, spare: int = 2, unused: int = 2, beyond: float = np.nan, seed: int = 0
) -> PagedBatch:
    """The same queries and keys, these in pages of a cache in another order than positions.

    Rows and pages of no key hold `beyond`; `spare` are such pages.  `unused` entries at the end of each row of the
    table, and those that its sequence has no key for, hold what no page is.
    """
    rng = np.random.default_rng(seed)
    q, *kv = w.qkv
    joined = w.plan.layout.joined
    counts = [-(-own.kv_len // page_size) for own in w.sequences]
    order = rng.permutation(sum(counts) + spare).tolist()
    tables = tuple(tuple(order[sum(counts[:b]) :][:n]) for b, n in enumerate(counts))
    table = rng.choice(NOTHING, (len(counts), max(counts) + unused)).astype(np.int32)
    caches = [np.full((len(order), x.shape[1], page_size, x.shape[3]), beyond, np.float32) for x in kv]
    for b, (own, pages) in enumerate(zip(w.sequences, tables, strict=True)):
        table[b, : len(pages)] = pages
        for cache, x in zip(caches, kv, strict=True):
            rows = x[0 if joined else b][:, own.keys]
            for i, page in enumerate(pages):
                part = rows[:, i * page_size : (i + 1) * page_size]
                cache[page, :, : part.shape[1]] = part
    layout = Paged(queries=w.plan.layout)
    problem = w.problem._replace(kv_len=table.shape[1] * page_size)
    plan = replace(w.plan, layout=layout)
    if plan.specialized is not None:
        plan = hopper_plan(plan, w.variant, problem, layout)
    lengths = np.array([own.kv_len for own in w.sequences], np.int32)
    told = {name: x for name, x in w.tensors.items() if name != "cu_seqlens_k"}
    return PagedBatch(
        plan=plan,
        variant=w.variant,
        facts=w.facts,
        problem=problem,
        case=replace(w.case, sizes={**w.case.sizes, "kv_len": problem.kv_len}),
        qkv=(q, *caches),
        scale=w.scale,
        sequences=w.sequences,
        q_offset=w.q_offset,
        tensors={**told, "kv_lengths": lengths, "page_table": table},
        dropout=w.dropout,
        tables=tables,
    )
