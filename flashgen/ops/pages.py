"""Page tables of calls whose keys and values lie in the pages of a cache, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from flashgen.errors import LaunchError, shown
from flashgen.lang.ranges import MAX_LENGTH
from flashgen.ops.layouts import check_layout, stacked
from flashgen.ops.values import no_tensor
from flashgen.runtime.launch import Cache

#: How a call may say that caches lie: pages, rows and heads, or heads before rows.
PAGE_LAYOUTS = ("phd", "hpd")


def heads_first(
    k: torch.Tensor, v: torch.Tensor, page_layout: object, table: object
) -> tuple[torch.Tensor, torch.Tensor]:
    """Caches as [pages, kv_heads, page_size, columns], views of those that a call gives; LaunchError for others."""
    if page_layout is not None and not (isinstance(page_layout, str) and page_layout in PAGE_LAYOUTS):
        raise LaunchError(
            f'page_layout is {shown(page_layout)}: "phd" for caches [pages, page_size, kv_heads, head_dim], '
            '"hpd" for [pages, kv_heads, page_size, head_dim]\n  nearest: page_layout="phd"'
        )
    if table is None:
        if page_layout is not None:
            raise LaunchError(
                "page_layout says how the pages of a cache lie, and there is no page_table\n"
                "  nearest: page_table=, or no page_layout"
            )
        return k, v
    for name, x in (("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            raise LaunchError(no_tensor(name, x))
        if x.is_nested or x.layout != torch.strided:
            check_layout(name, name, x, nested=stacked(name))
        if x.dim() != 4:
            raise LaunchError(
                f"{name} has {x.dim()} dimensions {list(x.shape)}: with a page_table it is a cache"
                " [pages, page_size, kv_heads, head_dim]\n"
                f"  nearest: {name}.view(-1, page_size, kv_heads, head_dim)"
            )
    return (k, v) if page_layout == "hpd" else (k.transpose(1, 2), v.transpose(1, 2))


def checked_table(table: object, batch: int, device: torch.device) -> torch.Tensor:
    """A page table of so many sequences, or LaunchError for one that no kernel can read."""
    wanted = f"an int32 tensor [batch, pages of a sequence], on q's device ({device})"
    if not isinstance(table, torch.Tensor):
        cure = f"torch.tensor(page_table, dtype=torch.int32, device={str(device)!r})"
        raise LaunchError(f"page_table is a {type(table).__name__}: it is {wanted}\n  nearest: {cure}")
    if table.is_nested or table.layout != torch.strided:
        check_layout("page_table", "page_table", table, nested=stacked("page_table"))
    shape = list(table.shape)
    wrong = cure = ""
    if table.dtype != torch.int32:
        wrong, cure = str(table.dtype).removeprefix("torch."), "page_table.to(torch.int32)"
    elif table.device != device:
        wrong, cure = f"on {table.device}", f"page_table.to({str(device)!r}), a copy"
    elif table.dim() != 2:
        wrong, cure = str(shape), f"[{batch}, pages of a sequence]"
    elif shape[0] != batch:
        wrong, cure = f"{shape}", f"a row for each of {batch} sequences"
    elif shape[1] > 1 and table.stride(1) != 1:
        wrong, cure = (
            f"one with strides {list(table.stride())}",
            "page_table.contiguous(): a row's entries side by side",
        )
    if wrong:
        raise LaunchError(f"page_table is {wrong}: it is {wanted}\n  nearest: {cure}")
    return table


def cache_of(table: torch.Tensor, pages: int, page_size: int) -> tuple[Cache, int]:
    """The cache that a table is of, and how many keys a row of the table has room for; LaunchError where there is no
    such cache, or positions would reach too far."""
    width = table.shape[1]
    if page_size == 0 or (pages == 0 and width):
        raise LaunchError(
            f"the cache has {pages} pages of {page_size} rows: a page_table of {width} entries a row names some\n"
            "  nearest: pages of 16 rows or more, and at least one"
        )
    if width * page_size >= MAX_LENGTH:
        raise LaunchError(
            f"page_table has {width} entries a sequence, of pages of {page_size} rows: positions stay below 2^24\n"
            f"  nearest: page_table[:, :{(MAX_LENGTH - 1) // page_size}]"
        )
    row = table.stride(0) if table.shape[0] > 1 else width
    return Cache(pages=pages, page_size=page_size, table_row=row), width * page_size


def pages_of(table: np.ndarray | None, keys: np.ndarray, cache: Cache) -> Sequence[tuple[int, ...]]:
    """The pages of each sequence with so many keys; LaunchError for one that the cache does not have.  Other entries
    are not looked at."""
    assert table is not None  # calls with pages have one
    found = []
    for b, kv_len in enumerate(keys.tolist()):
        own = table[b, : -(-kv_len // cache.page_size)]
        for i in np.flatnonzero((own < 0) | (own >= cache.pages))[:1]:
            raise LaunchError(
                f"page_table[{b}, {i}] is {own[i]}: the cache has pages 0 to {cache.pages - 1}, and {kv_len} keys of"
                f" sequence {b} take {len(own)} of them\n  nearest: kv_lengths[{b}] = {i * cache.page_size}"
            )
        found.append(tuple(own.tolist()))
    return found
