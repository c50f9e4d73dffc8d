"""How elements of a tile are masked: by bits of a table, by tile where the mask is the same all over one, and by
remainders that are taken of each side."""

import operator

import numpy as np
import padded
import ported
import ptx_attention
import ptx_backward
import pytest
import test_ptx_attention

import flashgen as fg
from flashgen.analysis.facts import analyse
from flashgen.analysis.tiles import Case
from flashgen.codegen import emit
from flashgen.codegen.per_pair import cheaper
from flashgen.lang.expr import walk
from flashgen.lang.load import load_spec
from flashgen.planning import planner
from flashgen.planning.layout import Padded
from flashgen.planning.members import (
    MaskAsBits,
    MaskByElement,
    MaskByTile,
    MaskByWarpgroup,
    MaskFromBits,
    MaskWithinBounds,
)
from flashgen.planning.plan import RowBits, Tile
from flashgen.planning.profile import profile
from flashgen.planning.summaries import tensors_beside
from flashgen.planning.traffic import predict
from flashgen.planning.traffic_sequences import OwnLengths
from flashgen.runtime import nvrtc


def some_of(*shape):
    return lambda p, rng: rng.random([getattr(p, n) if isinstance(n, str) else n for n in shape]) < 0.3


mask = fg.tensor(
    "mask", dims=("batch", "heads", "q", "kv"), dtype="bool", example=some_of("batch", "heads", "q_len", "kv_len")
)
flag = fg.tensor("flag", dims=("kv",), dtype="bool", example=some_of("kv_len"))
doc = fg.tensor("doc", ("batch", None), "int32", example=lambda p, rng: rng.integers(0, 5, (p.batch, p.kv_len)))

layout = fg.tensor(
    "layout", dims=(None, None), dtype="bool", example=lambda p, rng: (rng.random((5, 5)) < 0.4) | np.eye(5, dtype=bool)
)
by_head = fg.variant(lambda b, h, q, k: mask[b, h, q, k] & ((k <= q) | flag[k]), name="by_head")
blocks = {n: fg.variant(lambda b, h, q, k, n=n: layout[q // n, k // n], name=f"blocks_of_{n}") for n in (48, 64, 128)}


def first(variant, **asked):
    return planner.menu(variant.bind(), "sm_90a", "bfloat16", 128, **asked).plans[0]


def first_backward(variant, **asked):
    return planner.backward_menu(variant.bind(), "sm_90a", "bfloat16", 128, **asked).plans[0]


# ---------------------------------------------------------------------------------------------------------------------
# Tables of pairs


@pytest.mark.slow
def test_a_table_of_pairs_is_read_as_bits():
    """By rows of S, which are queries, and of S^T, which are keys."""
    forward, backward = first(ported.variant("dense")), first_backward(ported.variant("dense"))
    assert forward.specialized.mask == backward.backward.mask == MaskFromBits()
    assert (forward.tile, forward.summaries[0].bits) == (Tile(q=128, kv=128), RowBits(by="q", columns=128))
    assert backward.summaries[0].bits == RowBits(by="k", columns=backward.tile.q)
    assert "read_mask" not in emit(forward).partition("struct Consumer")[2]
    assert [nvrtc.compile(emit(plan), plan.arch).resources.spills for plan in (forward, backward)] == [0, 0]


@pytest.mark.sampled("lengths1")
@pytest.mark.parametrize("lengths", [(97, 130), pytest.param((161, 71), marks=pytest.mark.slow)])
def test_bits_of_each_batch_and_head(lengths):
    """Beside an element by key, a causal mask, and rows and tiles that end within a word."""
    q_len, kv_len = lengths
    work = ptx_attention.work(by_head, "hopper", q_len=q_len, kv_len=kv_len, batch=2, heads=2)
    assert work.plan.specialized.mask == MaskFromBits()
    test_ptx_attention.check(work)


@pytest.mark.slow
def test_bits_of_each_batch_and_head_backward():
    work = ptx_backward.Backward(by_head, pipeline="hopper", q_len=97, kv_len=150)
    assert work.plan.backward.mask == MaskFromBits()
    report = ptx_backward.check(work).reports["attention_backward"]
    read = {name for name in ("mask", "flag") if report.bytes(buffer=name)}
    assert read == {tensor.name for tensor in tensors_beside(work.plan)} == {"flag"}


def bytes_read(report, names):
    """What a kernel reads, of captured tensors of bytes and of what is made of them each byte once."""
    once = sum(len(report.touched[name]) * (4 if name.startswith("bits_") else 1) for name in names)
    return once + sum(report.bytes(buffer=name) for name in "qkv")


def square(n):
    """A table of all pairs of n blocks of 128 queries and keys, some of which are hidden."""
    table = fg.tensor("table", dims=(None, None), dtype="bool", example=lambda p, rng: rng.random((n, n)) < 0.7)
    return fg.variant(lambda b, h, q, k: table[q // 128, k // 128], name="square")


pairs = fg.variant(lambda b, h, q, k: mask[b, h, q, k], name="pairs")


@pytest.mark.sampled("variant0-MaskFromBits-128")
@pytest.mark.slow
@pytest.mark.parametrize(("variant", "form", "length"), [(pairs, MaskFromBits, 128), (square(2), MaskByTile, 256)])
def test_what_is_predicted_of_a_table_is_what_each_kernel_reads(variant, form, length):
    work = ptx_attention.work(variant, "hopper", q_len=length, kv_len=length, heads=1, tile=(128, 128))
    assert isinstance(work.plan.specialized.mask, form)
    found = predict(work.plan, work.problem, work.case)
    tables, made = [t.name for t in work.variant.tensors], [part.name for part in found.workspaces]
    result = work.run(track=(*tables, *made))
    predicted = dict(found.kernels) or {"attention_forward": found.hbm}
    assert bytes_read(result.report, [*tables, *made]) == predicted["attention_forward"].read_bytes
    if form is MaskFromBits:
        making, told = result.reports["attention_summaries"], predicted["attention_summaries"]
        assert bytes_read(making, tables) == told.read_bytes
        assert sum(making.bytes("st", buffer=name) for name in made) == told.write_bytes


@pytest.mark.slow
def test_of_sequences_with_lengths_a_table_is_read_by_pairs():
    """Nothing is summarised where a tile of one sequence is none of another."""
    work = padded.batch(pairs, "hopper", q_lengths=(64, 64), kv_lengths=(128, 128), heads=1, q_len=64, kv_len=128)
    own = [OwnLengths(q_rows=x.q_rows, kv_len=x.kv_len, q_offset=x.q_offset) for x in work.sequences]
    found = predict(work.plan, work.problem, work.case, sequences=own)
    assert bytes_read(work.run(track=("mask",)).report, ["mask"]) == found.hbm.read_bytes


def test_a_tile_of_no_whole_words_reads_the_table():
    plan = first(ported.variant("dense"), tile=(128, 80))
    assert plan.specialized.mask == MaskByElement() and plan.summaries[0].bits is None


def test_parts_of_a_tile_of_no_whole_words_read_the_table():
    """Blocks of 48 cut tiles into parts of 16 keys."""
    cut = fg.variant(lambda b, h, q, k: mask[b, h, q, k] & layout[q // 48, k // 48], name="cut")
    assert first(cut).specialized.mask == MaskByElement()
    assert first_backward(cut).summaries[0].bits is None


# ---------------------------------------------------------------------------------------------------------------------
# Bounds of positions apart from the rest of a mask

lattice = fg.variant(lambda b, h, q, k: (k <= q) & (q - k < 150) & ((q - k) % 3 == 0), name="lattice")


@pytest.mark.slow
def test_bounds_are_asked_apart_from_what_every_tile_has():
    """Not where all is bounds, where tiles lie in one block of the rest, where something is read, or where sequences
    have positions of their own."""
    assert first(lattice).specialized.mask == MaskWithinBounds()
    window = fg.variant(lambda b, h, q, k: (k <= q) & (q - k < 150), name="window")
    flags = fg.variant(lambda b, h, q, k: (k <= q) & flag[k], name="flags")
    either = fg.variant(lambda b, h, q, k: (k <= q) | ((q - k) % 3 == 0), name="either")
    chunks = fg.variant(lambda b, h, q, k: (k <= q) & (q // 512 == k // 512), name="chunks")
    assert not any(isinstance(first(v).specialized.mask, MaskWithinBounds) for v in (window, flags, either, chunks))
    assert first(lattice, layout=Padded()).specialized.mask == MaskByElement()


@pytest.mark.sampled("lengths1")
@pytest.mark.parametrize("lengths", [(200, 333), pytest.param((333, 129), marks=pytest.mark.slow)])
def test_tiles_on_bounds_and_within(lengths):
    q_len, kv_len = lengths
    work = ptx_attention.work(lattice, "hopper", q_len=q_len, kv_len=kv_len)
    assert work.plan.specialized.mask == MaskWithinBounds()
    test_ptx_attention.check(work)


@pytest.mark.slow
def test_a_bound_that_is_not_asked_is_missed():
    work = ptx_attention.work(lattice, "hopper", q_len=200, kv_len=333)
    never = ptx_attention.replace("classify_bounds(rows, tile, p) != FULL", "false")
    assert work.wrong(work.run(never))


# ---------------------------------------------------------------------------------------------------------------------
# Masks that are the same all over a tile


def test_blocks_that_tiles_divide_have_no_code_for_pairs():
    plans = first(blocks[128]), first_backward(blocks[128])
    assert plans[0].specialized.mask == plans[1].backward.mask == MaskByTile()
    assert plans[0].tile == Tile(q=128, kv=128) and not any(plan.summaries for plan in plans)
    assert all(plan.masked_by_tile for plan in plans)
    assert first(blocks[48]).specialized.mask == MaskByElement()
    assert first_backward(blocks[48]).backward.mask == MaskAsBits()


def test_blocks_that_rows_of_a_warpgroup_divide_are_asked_once_for_each():
    forward, backward = first(blocks[64]), first_backward(blocks[64])
    assert forward.specialized.mask == backward.backward.mask == MaskByWarpgroup()
    assert (forward.tile, backward.tile) == (Tile(q=128, kv=64), Tile(q=64, kv=128))


def test_uniform_is_what_each_tile_lies_in_one_block_of():
    causal_blocks = fg.variant(lambda b, h, q, k: layout[q // 128, k // 128] & (k <= q), name="causal_blocks")
    shifted = fg.variant(lambda b, h, q, k: layout[(q + 64) // 128, k // 128], name="shifted")
    square = Tile(q=128, kv=128)
    assert profile(blocks[128].bind()).uniform(square)
    assert profile(shifted.bind()).uniform(Tile(q=64, kv=128))
    assert not any(profile(v.bind()).uniform(square) for v in (causal_blocks, shifted, blocks[48], blocks[64]))
    own = first(blocks[128], layout=Padded())  # whose tiles start anywhere
    assert own.specialized.mask != MaskByTile()


@pytest.mark.sampled("lengths1-64", "lengths1-128")
@pytest.mark.parametrize("n", [64, 128])
@pytest.mark.parametrize("lengths", [(130, 300), pytest.param((257, 129), marks=pytest.mark.slow)])
def test_tiles_of_few_blocks_each(lengths, n):
    q_len, kv_len = lengths
    work = ptx_attention.work(blocks[n], "hopper", q_len=q_len, kv_len=kv_len)
    assert isinstance(work.plan.specialized.mask, MaskByTile if n == 128 else MaskByWarpgroup)
    test_ptx_attention.check(work)


@pytest.mark.slow
@pytest.mark.sampled("128")
@pytest.mark.parametrize("n", [64, 128])
def test_tiles_of_few_blocks_each_backward(n):
    options = {"head_dim": 128, "heads": 1} if n == 64 else {}  # tiles of 64 queries
    work = ptx_backward.Backward(blocks[n], pipeline="hopper", q_len=200, kv_len=201, **options)
    assert isinstance(work.plan.backward.mask, MaskByTile if n == 128 else MaskByWarpgroup)
    ptx_backward.check(work)


# ---------------------------------------------------------------------------------------------------------------------
# Remainders


@pytest.mark.parametrize("rest", range(-1, 4))
@pytest.mark.parametrize("sign", ["==", "!="])
def test_remainders_of_each_side_say_the_same(sign, rest):
    def said(b, h, q, k):
        left = (q - k) % 3
        return (left == rest) if sign == "==" else ((k - q) % 3 != rest)

    asked = fg.variant(said, name="asked").bind().mask
    found = cheaper(asked, frozenset())
    assert (found is not asked) == (0 <= rest < 3)
    case = Case(sizes={"batch": 1, "heads": 1, "kv_heads": 1, "q_len": 40, "kv_len": 40}, params={}, tensors={})
    at = {"b": 0, "h": 0, "q": np.arange(40)[:, None], "k": np.arange(40)}
    np.testing.assert_array_equal(case.evaluate(found, **at), case.evaluate(asked, **at))


#: Values of int32 at the ends of what it holds, and near positions.
position = fg.tensor("position", dims=("kv",), dtype="int32")
ENDS = np.array([-(2**31), 1 - 2**31, -(2**30), -3, 0, 5, 39, 2**30, 2**31 - 2, 2**31 - 1], np.int32)


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("op", ["lt", "le", "eq", "ne", "ge", "gt"])
def test_one_large_term_alone_says_the_same(op, sign):
    compared = getattr(operator, op)
    asked = fg.variant(lambda b, h, q, k: compared(q + sign * position[k], 7 - q), name="asked").bind()
    found = cheaper(asked.mask, analyse(asked).int64)
    assert found is not asked.mask and all(n.dtype.itemsize <= 4 for n in walk([found]))
    case = Case(
        sizes={"batch": 1, "heads": 1, "kv_heads": 1, "q_len": 40, "kv_len": 10}, params={}, tensors={"position": ENDS}
    )
    at = {"b": 0, "h": 0, "q": np.arange(40)[:, None], "k": np.arange(10)}
    np.testing.assert_array_equal(case.evaluate(found, **at), case.evaluate(asked.mask, **at))


def test_two_large_terms_stay():
    asked = fg.variant(lambda b, h, q, k: q - position[q] >= k - position[k], name="asked").bind()
    assert cheaper(asked.mask, analyse(asked).int64) is asked.mask


def test_dilated_takes_remainders_of_each_side():
    fourth = fg.variant(lambda b, h, q, k: (k <= q) & ((q - k) % 4 == 0), name="each_fourth")
    assert "(q & 3) == (k & 3)" in emit(first(fourth))
    assert "q % p.param_dilation == k % p.param_dilation" in emit(first(load_spec("dilated")))


@pytest.mark.slow
def test_behind_the_last_tile_nothing_is_judged():
    """Runs of keys end with no tile, of which there is no summary either."""
    of_three = fg.variant(
        lambda b, h, q, k: fg.where(q < 0, doc[b, k] == 3, abs(q // 6 - k // 6) >= 0), name="of_three"
    )
    work = ptx_attention.work(of_three, "ampere", heads=1, q_len=70, kv_len=70)
    assert work.plan.summaries and work.wrong(work.run()) == ()
