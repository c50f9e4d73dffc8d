"""Serving: decoding with a cache, pages, several queries, mixed lengths, trees and sequences behind each other.

Caches hold N(0, 1) in bfloat16, head_dim is 128.  Every contender's result is compared with float64 on sampled rows.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flashgen.bench import host, joined, peers, sampled
from flashgen.bench.sampled import Sample
from flashgen.bench.suite import Builder, Contest, Ground, Row, Suite
from flashgen.bench.timers import Call, Cold, Eager, Host, Timer
from flashgen.lang.load import load_spec
from flashgen.ops.attention import attention

if TYPE_CHECKING:
    import torch

    from flashgen.lang.variant import Variant

#: Functions that a peer's file may have: `decode(q, k, v)` of [batch, heads, length, head_dim], causal from the end;
#: `paged(q, k_cache, v_cache, page_table, kv_lengths)` of caches [pages, page_size, kv_heads, head_dim].
ENTRIES = ("decode", "paged")

#: Sequences and key heads whose rows are compared with float64, and rows of each.
SAMPLED, ROWS = 4, 64

#: What unused entries of a page table hold: no page has this number.
NO_PAGE = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """The sizes of queries at the end of cached sequences: `lengths` are those of each sequence's keys."""

    lengths: tuple[int, ...]
    heads: int
    kv_heads: int
    q_len: int = 1
    head_dim: int = 128

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    @property
    def kv_bytes(self) -> int:
        """Of all keys and values in 16 bits: what decoding cannot help reading."""
        return 4 * sum(self.lengths) * self.kv_heads * self.head_dim

    def __str__(self) -> str:
        longest = max(self.lengths)
        length = f"{longest // 1024}k" if longest % 1024 == 0 else str(longest)
        return f"b{self.batch} {self.heads}:{self.kv_heads} {length}"


def cache(batch: int, heads: int, kv_heads: int, keys: int, **sizes: int) -> Cache:
    """Of sequences of one length."""
    return Cache(lengths=(keys,) * batch, heads=heads, kv_heads=kv_heads, **sizes)


#: The cases whose speed serving engines are compared by: batch, heads, key heads, keys.
DECODE = tuple(
    cache(batch, heads, kv_heads, 1024 * keys)
    for batch, heads, kv_heads, lengths in (
        (1, 32, 8, (1, 8, 32, 128)),
        (1, 32, 4, (1, 4, 32, 256)),
        (8, 32, 8, (4, 32)),
        (32, 32, 8, (8,)),
        (128, 32, 8, (2,)),
        (16, 32, 32, (4,)),
    )
    for keys in lengths
)

#: Key heads of those that are compared with peers' caches in pages too.
FEW_HEADS = 4

#: A prompt as one call, and of how many of its last queries the bits are compared where these come one by one.
AT_ONCE, DECODED = "at once", 16


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Filled:
    """Tensors of a cache in pages of one size: q [batch, heads, q_len, head_dim], pages [pages, page_size, kv_heads,
    head_dim], whose order is not that of positions, and a table [batch, most pages of a sequence]."""

    of: Cache
    q: torch.Tensor
    k_pages: torch.Tensor
    v_pages: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor

    @property
    def for_paged(self) -> tuple[torch.Tensor, ...]:
        """What a peer's `paged` is given."""
        return self.q, self.k_pages, self.v_pages, self.table, self.lengths

    def sequence(self, pages: torch.Tensor, b: int) -> torch.Tensor:
        """[kv_heads, keys, head_dim] of one sequence, in the order of positions."""
        count = -(-self.of.lengths[b] // pages.shape[1])
        return pages[self.table[b, :count].long()].flatten(0, 1)[: self.of.lengths[b]].transpose(0, 1)

    def dense(self) -> tuple[torch.Tensor, torch.Tensor]:
        """k and v [batch, kv_heads, keys, head_dim], of sequences of one length, with heads inside of positions."""
        import torch

        def whole(pages: torch.Tensor) -> torch.Tensor:
            return torch.stack([self.sequence(pages, b).transpose(0, 1) for b in range(self.of.batch)]).transpose(1, 2)

        return whole(self.k_pages), whole(self.v_pages)

    def wrong(self, sees: Sees = None) -> Callable[[torch.Tensor], list[str]]:
        """What judges o [batch, heads, q_len, head_dim] on sampled rows."""
        import torch

        of, group = self.of, self.of.heads // self.of.kv_heads
        places = spread(of.batch, of.kv_heads)
        samples, indices = [], []
        for b, kv_head in places:
            pairs = [(kv_head * group + g, i) for i in range(of.q_len) for g in range(group)]
            pairs = [pairs[i] for i in _evenly(len(pairs), ROWS)]
            at, rows = ([x[i] for x in pairs] for i in range(2))
            n = of.lengths[b]
            visible = None
            if sees is not None:
                position = torch.tensor(rows, device=self.q.device)[:, None] + n - of.q_len
                visible = sees(position, torch.arange(n, device=self.q.device))
            k, v = (self.sequence(pages, b)[kv_head] for pages in (self.k_pages, self.v_pages))
            samples.append(Sample(q=self.q[b, at, rows], k=k, v=v, visible=visible))
            indices.append((b, at, rows))

        def judge(o: torch.Tensor) -> list[str]:
            return sampled.wrong([o[index] for index in indices], samples, of.scale)

        return judge


#: Which positions of keys a position of a query sees; None: all.
Sees = Callable[[Any, Any], Any] | None


def fill(of: Cache, page_size: int, ground: Ground) -> Filled:
    """Random queries and a random cache, whose pages lie in a random order."""
    import torch

    generator = torch.Generator(ground.device).manual_seed(ground.seed)
    made = {"device": ground.device, "generator": generator}
    counts = [-(-n // page_size) for n in of.lengths]
    order = torch.randperm(sum(counts), **made).int()
    table = torch.full((of.batch, max(counts)), NO_PAGE, dtype=torch.int32, device=ground.device)
    for b, pages in enumerate(order.split(counts)):
        table[b, : len(pages)] = pages
    shape = (sum(counts), page_size, of.kv_heads, of.head_dim)
    k, v = (torch.randn(shape, dtype=torch.bfloat16, **made) for _ in range(2))
    q = torch.randn((of.batch, of.q_len, of.heads, of.head_dim), dtype=torch.bfloat16, **made).transpose(1, 2)
    lengths = torch.tensor(of.lengths, dtype=torch.int32, device=ground.device)
    return Filled(of=of, q=q, k_pages=k, v_pages=v, table=table, lengths=lengths)


def spread(batch: int, kv_heads: int) -> list[tuple[int, int]]:
    """Sequences and key heads to look at: the first and the last among them."""
    whole = [(b, h) for b in range(batch) for h in range(kv_heads)]
    return [whole[i] for i in _evenly(len(whole), SAMPLED)]


def _evenly(total: int, count: int) -> list[int]:
    count = min(total, count)
    return [i * (total - 1) // max(count - 1, 1) for i in range(count)]


def causal(q: Any, k: Any) -> Any:
    return k <= q


def at_end(filled: Filled, variant: Variant, **named: object) -> Call:
    """flashgen's call on the pages."""
    return functools.partial(
        attention,
        *(filled.q, filled.k_pages, filled.v_pages, variant),
        page_table=filled.table,
        kv_lengths=filled.lengths,
        q_offset="end",
        **named,
    )


def judged(by: Mapping[str, Callable[[Any], list[str]]], rest: Callable[[Any], list[str]]) -> Callable:
    """`Contest.wrong` of judges by contender."""

    def wrong(name: str, found: Any) -> list[str]:
        return [f"{name}: {reason}" for reason in by.get(name, rest)(found)]

    return wrong


def packages(ground: Ground, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, Builder]:
    """SDPA's backends on queries that see all keys."""
    return {name: functools.partial(_sdpa, name, q, k, v) for name in ground.names}


def _sdpa(name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> host.Contender:
    import torch

    attend = torch.nn.functional.scaled_dot_product_attention
    return host.Contender(
        call=functools.partial(attend, q, k, v, enable_gqa=q.shape[1] != k.shape[1]),
        around=functools.partial(peers.backend, name),
    )


# The parts


def decode(of: Cache, page_sizes: Sequence[int], ground: Ground) -> Contest:
    """One query a sequence over dense tensors: all of it sees the cache, so `full` says it; `causal` at the end is the
    same by the call of serving.  Peers that read pages are there with caches of these too."""
    filled = fill(of, 1, ground)
    k, v = filled.dense()
    judge = filled.wrong()
    filled = dataclasses.replace(filled, k_pages=k[0, :0], v_pages=v[0, :0])  # the pages are not held twice
    dense = functools.partial(attention, filled.q, k, v)
    in_pages, judges = {}, {}
    for size in page_sizes:
        own = fill(of, size, ground)
        for name, build in ground.of_files("paged", *own.for_paged).items():
            in_pages[f"{name} pages of {size}"], judges[f"{name} pages of {size}"] = build, own.wrong()
    return Contest(
        forms={
            "flashgen": functools.partial(dense, load_spec("full")),
            "causal at the end": functools.partial(dense, load_spec("causal"), q_offset="end"),
        },
        peers={**packages(ground, filled.q, k, v), **ground.of_files("decode", filled.q, k, v), **in_pages},
        wrong=judged(judges, judge),
        bytes=of.kv_bytes,
    )


def invariant_decode(of: Cache, ground: Ground) -> Contest:
    """The form whose bits do not depend on splits, beside the default."""
    filled = fill(of, 1, ground)
    k, v = filled.dense()
    dense = functools.partial(attention, filled.q, k, v, load_spec("causal"), q_offset="end")
    forms = {"flashgen": functools.partial(dense, invariant=True), "default": dense}
    return Contest(forms=forms, wrong=judged({}, filled.wrong()), bytes=of.kv_bytes)


def invariant_prefill(of: Cache, ground: Ground) -> Contest:
    """The same of a whole prompt."""
    filled = fill(of, 1, ground)
    k, v = filled.dense()
    dense = functools.partial(attention, filled.q, k, v, load_spec("causal"))
    forms = {"flashgen": functools.partial(dense, invariant=True), "default": dense}
    pairs = of.batch * of.heads * of.q_len * (of.q_len + 1) // 2
    return Contest(forms=forms, wrong=judged({}, filled.wrong(causal)), flops=4 * of.head_dim * pairs)


def pages(of: Cache, page_size: int, ground: Ground) -> Contest:
    """A cache in pages beside the same cache in one piece."""
    filled = fill(of, page_size, ground)
    k, v = filled.dense()
    variant = load_spec("causal")
    forms = {
        "flashgen": at_end(filled, variant),
        "dense": functools.partial(attention, filled.q, k, v, variant, q_offset="end"),
    }
    return Contest(
        forms=forms,
        peers=ground.of_files("paged", *filled.for_paged),
        wrong=judged({}, filled.wrong(causal)),
        bytes=of.kv_bytes,
    )


def queries(of: Cache, ground: Ground) -> Contest:
    """Several queries a sequence beside one, over the same cache."""
    filled = fill(of, 1, ground)
    k, v = filled.dense()
    variant, last = load_spec("causal"), filled.q[:, :, -1:]
    forms = {
        "flashgen": functools.partial(attention, filled.q, k, v, variant, q_offset="end"),
        "q_len 1": functools.partial(attention, last, k, v, variant, q_offset="end"),
    }
    alone = dataclasses.replace(filled, of=dataclasses.replace(of, q_len=1), q=last)
    return Contest(
        forms=forms,
        peers=ground.of_files("decode", filled.q, k, v),
        wrong=judged({"q_len 1": alone.wrong()}, filled.wrong(causal)),
        bytes=of.kv_bytes,
    )


def mixed(of: Cache, page_size: int, ground: Ground) -> Contest:
    """Sequences of several lengths beside as many of one, the same number of keys in all."""
    filled = fill(of, page_size, ground)
    equal = dataclasses.replace(of, lengths=(sum(of.lengths) // of.batch,) * of.batch)
    even = fill(equal, page_size, ground)
    variant = load_spec("causal")
    return Contest(
        forms={"flashgen": at_end(filled, variant), "equal lengths": at_end(even, variant)},
        peers=ground.of_files("paged", *filled.for_paged),
        wrong=judged({"equal lengths": even.wrong()}, filled.wrong()),
        bytes=of.kv_bytes,
        about={"lengths": list(of.lengths)},
    )


def window(of: Cache, seen: int, ground: Ground) -> Contest:
    """A window at the end of a long cache beside a cache that holds no more than the window."""
    filled = fill(of, 64, ground)
    short = dataclasses.replace(of, lengths=(seen,) * of.batch)
    small = fill(short, 64, ground)
    (k, v), (few_k, few_v) = filled.dense(), small.dense()
    sliding = load_spec("sliding_window")
    forms = {
        "flashgen": functools.partial(attention, filled.q, k, v, sliding, q_offset="end", window=seen),
        f"{seen} keys": functools.partial(attention, small.q, few_k, few_v, load_spec("causal"), q_offset="end"),
    }
    by = {f"{seen} keys": small.wrong()}
    judge = filled.wrong(lambda q, k: (k <= q) & (q - k < seen))
    return Contest(forms=forms, wrong=judged(by, judge), bytes=short.kv_bytes)


def tree(of: Cache, ground: Ground) -> Contest:
    """A tree of drafts at the end of a cache, which see it and their ancestors, beside as many causal queries."""
    import torch

    filled = fill(of, 64, ground)
    k, v = filled.dense()
    before, seen = max(of.lengths) - of.q_len, torch.eye(of.q_len, dtype=torch.bool)
    generator = torch.Generator().manual_seed(ground.seed)
    for i in range(1, of.q_len):
        seen[i] |= seen[int(torch.randint(i, (), generator=generator))]
    seen = seen.to(ground.device)

    def sees(q: Any, k: Any) -> Any:
        return (k < before) | seen[q - before, (k - before).clamp(min=0)]

    dense = functools.partial(attention, filled.q, k, v, q_offset="end")
    return Contest(
        forms={
            "flashgen": functools.partial(dense, variant=load_spec("tree"), drafts=seen),
            "causal": functools.partial(dense, variant=load_spec("causal")),
        },
        wrong=judged({"causal": filled.wrong(causal)}, filled.wrong(sees)),
        bytes=of.kv_bytes,
    )


def host_time(of: Cache, ground: Ground) -> Contest:
    """What a call of decoding takes of the host."""
    return decode(of, (), ground)


def lives(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    chunk: int,
    attend: Callable[..., torch.Tensor],
    paged: Call | None = None,
) -> dict[str, Call]:
    """The same rows of a prompt: all at once, alone in their batch, in chunks, the last of them one by one, and these
    from pages; `attend(q, k, v)` is causal from the end."""
    import torch

    n = q.shape[2]

    def in_turn(step: int, first: int) -> torch.Tensor:
        starts = range(first, n, step)
        return torch.cat([attend(q[:, :, i : i + step], *(x[:, :, : i + step] for x in (k, v))) for i in starts], 2)

    found: dict[str, Call] = {
        AT_ONCE: functools.partial(attend, q, k, v),
        "batch 1": functools.partial(attend, q[:1], k[:1], v[:1]),
        f"chunks of {chunk}": functools.partial(in_turn, chunk, 0),
        "decoded": functools.partial(in_turn, 1, n - DECODED),
    }
    return found if paged is None else {**found, "pages of 16": paged}


def bits(of: Cache, chunk: int, invariant: Mapping[str, object], ground: Ground) -> Contest:
    """How many elements of o have other bits in another life of their rows than in a prompt at once, in flashgen and,
    beside its default form, in peers."""
    filled = fill(of, 16, ground)
    last = dataclasses.replace(filled, q=filled.q[:, :, -DECODED:])
    variant, dense = load_spec("causal"), (filled.q, *filled.dense())
    run = functools.partial(attention, variant=variant, q_offset="end", **invariant)
    own = lives(*dense, chunk, run, at_end(last, variant, **invariant))
    for splits in (1, 4):
        split = lives(*dense, chunk, functools.partial(run, kv_splits=splits))["decoded"]
        own[f"decoded, {splits} split{'s' * (splits > 1)}"] = split
    del own[AT_ONCE]  # a prompt is called without a position
    forms = {"flashgen": functools.partial(attention, *dense, variant, **invariant), **own}
    prompt, builders = dict.fromkeys(forms, "flashgen"), {}
    for name, functions in {} if invariant else ground.files.items():
        if "decode" not in functions:
            continue
        paged = functools.partial(_made, functions["paged"], *last.for_paged) if "paged" in functions else None
        for life, call in lives(*dense, chunk, functools.partial(_made, functions["decode"]), paged).items():
            contender = name if life == AT_ONCE else f"{name} {life}"
            prompt[contender], builders[contender] = name, lambda call=call: call
    whole: dict[str, torch.Tensor] = {}
    judge, told, elements = filled.wrong(causal), {}, {}

    def wrong(name: str, found: torch.Tensor) -> list[str]:
        if name == prompt[name]:
            whole[name] = found
            return [f"{name}: {reason}" for reason in judge(found)]
        if prompt[name] not in whole:
            return [f"{name}: {prompt[name]} gave no prompt at once to compare with"]
        right = whole[prompt[name]][: found.shape[0], :, of.q_len - found.shape[2] :]
        told[name], elements[name] = int((found != right).sum()), found.numel()
        # With one split the default form promises equal bits too.
        promised = invariant and told[name]
        return [f"{name}: {told[name]} of {found.numel()} elements have other bits"] if promised else []

    return Contest(forms=forms, peers=builders, wrong=wrong, about={"other bits": told, "elements": elements})


def _made(build: Callable[..., Call], *given: torch.Tensor) -> torch.Tensor:
    """What a peer's call gives."""
    return build(*given)()


def _mixed_lengths(batch: int, low: int, high: int) -> tuple[int, ...]:
    """Drawn log-uniformly."""
    import numpy as np

    drawn = np.random.default_rng(0).uniform(np.log(low), np.log(high), batch)
    return tuple(int(n) for n in np.exp(drawn))


def _rows(backward: bool = False) -> Sequence[Row]:
    cold, k = Cold(), 1024

    def row(part: str, name: str, make: Callable, *given: object, timer: Timer = cold, **bars: float) -> Row:
        return Row(part=part, name=name, make=functools.partial(make, *given), timer=timer, bars=bars)

    page_sizes, rows = (16, 64), []
    for of in DECODE:
        beside = page_sizes if of.kv_heads == FEW_HEADS else ()
        bars = dict.fromkeys(("cudnn", "fa3", *(f"fa3 pages of {size}" for size in beside)), 1.0)
        rows.append(row("decode", str(of), decode, of, beside, **bars))
    for page_size in page_sizes:
        for of in (cache(1, 32, 4, 4 * k), cache(1, 32, 8, 32 * k), cache(8, 32, 8, 4 * k), cache(32, 32, 8, 8 * k)):
            rows.append(row("pages", f"{of} pages of {page_size}", pages, of, page_size, dense=0.97))
    for q_len, bar in ((4, 0.95), (16, 0.9)):
        for of in (cache(8, 32, 8, 8 * k, q_len=q_len), cache(8, 32, 4, 8 * k, q_len=q_len)):
            rows.append(row("queries", f"{of} q_len {q_len}", queries, of, **{"q_len 1": bar}))
    lengths = Cache(lengths=_mixed_lengths(64, 256, 64 * k), heads=32, kv_heads=8)
    rows.append(row("mixed", "b64 32:8 256 to 64k", mixed, lengths, 64, **{"equal lengths": 0.92}))
    of = cache(8, 32, 8, 128 * k)
    rows.append(row("window", f"{of} window {k}", window, of, k, **{f"{k} keys": 0.9}))
    of = cache(8, 32, 8, 8 * k, q_len=64)
    rows.append(row("tree", f"{of} 64 drafts", tree, of, causal=0.9))
    rows += joined.rows()
    for head_dim, bar in ((64, 0.9), (128, 0.9), (256, 0.8)):
        of = cache(2, 2048 // head_dim, 2048 // head_dim, 8 * k, q_len=8 * k, head_dim=head_dim)
        name = f"prefill {of} d{head_dim}"
        rows.append(row("invariant", name, invariant_prefill, of, timer=Eager(), default=bar))
    for of in (case for case in DECODE if case.batch in (1, 32)):
        bar = 0.9 if max(of.lengths) >= 8 * k else 1 / 1.5
        rows.append(row("invariant", f"decode {of}", invariant_decode, of, default=bar))
    for invariant in ({}, {"invariant": True}):
        of = cache(2, 32, 8, 2 * k, q_len=2 * k)
        name = f"{of}{' invariant' if invariant else ''}"
        rows.append(row("bits", name, bits, of, 512, invariant, timer=Eager(slot_ms=1.0)))
    rows.append(row("host", str(DECODE[0]), host_time, DECODE[0], timer=Host(), cudnn=1.0, fa2=1.0))
    return rows


SUITE = Suite(
    name="serving",
    doc="decoding over a cache, and what else serving asks for; of KV bytes alone in TB/s",
    rows=_rows,
    peers=("cudnn", "fa2"),
    entries=ENTRIES,
    minutes=5,
)
