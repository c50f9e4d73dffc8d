"""Caches in pages for tests of calls: keys and values of sequences, put into pages in any order."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Cached(NamedTuple):
    """Keys and values of sequences, each [kv_heads, keys, dim], and a cache that holds them: [pages, page_size,
    kv_heads, dim] for k and v, the table of its pages, and the numbers of keys."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor


def cached(lengths, page_size, *, kv_heads=1, dim=32, dtype=torch.float32, spare=3, seed=0, device="cpu") -> Cached:
    """Random keys in random pages; k is NaN and v inf elsewhere, and other entries are no pages."""
    random = torch.Generator().manual_seed(seed)
    keys, values = ([torch.randn(kv_heads, n, dim, generator=random).to(dtype) for n in lengths] for _ in range(2))
    counts = [-(-n // page_size) for n in lengths]
    order = torch.randperm(sum(counts) + spare, generator=random).tolist()
    # Two views of one interleaved tensor, and a table of which rows lie further apart than they are long.
    both = torch.full((len(order), 2, page_size, kv_heads, dim), torch.nan, dtype=dtype)
    both[:, 1] = torch.inf
    table = torch.full((len(lengths), max(counts) + 3), -7, dtype=torch.int32)[:, : max(counts) + 1]
    for b, count in enumerate(counts):
        for i in range(count):
            table[b, i] = page = order.pop()
            for kind, x in enumerate((keys[b], values[b])):
                rows = x[:, i * page_size : (i + 1) * page_size].transpose(0, 1)
                both[page, kind, : len(rows)] = rows
    both = both.to(device)
    sizes = torch.tensor(lengths, dtype=torch.int32, device=device)
    there = torch.empty_strided(table.shape, table.stride(), dtype=torch.int32, device=device).copy_(table)
    return Cached([x.to(device) for x in keys], [x.to(device) for x in values], both[:, 0], both[:, 1], there, sizes)
