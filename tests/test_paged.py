"""Keys in the pages of a cache: each sequence has the bits that it has alone, whatever other rows and entries hold."""

import numpy as np
import pytest
from padded import batch
from paged import in_pages
from ptx_attention import replace

from flashgen.errors import PlanError
from flashgen.interpreter.errors import Trap
from flashgen.lang.load import load_spec, shipped
from flashgen.planning.layout import DENSE, Padded, Paged, Varlen
from flashgen.planning.planner import backward_menu, menu
from flashgen.runtime.philox import Dropout

PIPELINES = ("ampere", "hopper")

#: One has no query, one ends with a page of 16, one inside a tile and a page.
LENGTHS = {"q_lengths": (100, 33, 0), "kv_lengths": (130, 48, 20)}


def check(w, page_size, edit=lambda text: text, **options):
    """A batch in pages gives what its sequences give alone."""
    result = in_pages(w, page_size, **options).run(edit)
    assert w.wrong(result) == []
    assert result.report.conflicts == []
    return result


@pytest.mark.sampled("hopper-padded")
@pytest.mark.slow
@pytest.mark.parametrize("layout", [Padded(), Varlen()], ids=lambda layout: layout.name)
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_pages_in_another_order(pipeline, layout):
    check(batch("causal", pipeline, layout=layout, **LENGTHS), 16)


@pytest.mark.sampled("hopper-48")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("pipeline", "page_size"),
    [*(("ampere", n) for n in (8, 48, 64, 256, 1, 7)), *(("hopper", n) for n in (8, 48, 64, 256))],
)
def test_sizes_of_pages(pipeline, page_size):
    """The copies of pipeline hopper have multiples of 8 rows, those of pipeline ampere one."""
    check(batch("full", pipeline, q_offset="end", q_len=3, kv_lengths=(130, 64, 5), heads=4), page_size)


#: Copies of a page bring whole rows of k, of v, or of both; heads of queries share keys.
WHOLE_ROWS = {"heads": 4, "kv_heads": 2, "kv_lengths": (21, 130), "q_lengths": (20, 40)}


@pytest.mark.sampled("head_dims0-16", "head_dims1-48")
@pytest.mark.slow
@pytest.mark.parametrize("page_size", [8, 16, 48, 256])
@pytest.mark.parametrize("head_dims", [(128, 128), (192, 64), (64, 128), (256, 192)])
def test_copies_of_whole_rows(head_dims, page_size):
    head_dim, v_head_dim = head_dims
    w = batch("full", "hopper", head_dim=head_dim, v_head_dim=v_head_dim, **WHOLE_ROWS)
    assert in_pages(w, 16).plan.whole_rows == tuple(n for n, d in zip("kv", head_dims, strict=True) if d > 64)
    check(w, page_size)


@pytest.mark.sampled("head_boxes")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("kv_head * p.k_head_boxes", "0"),
        ("grouped_matrix_descriptor(shared.v, 1024, V_COLUMNS * 16)", "matrix_descriptor(shared.v, 1024)"),
        ("shared.v[tail.stage][row / 8][d / 64]", "shared.v[tail.stage][row / 8][0]"),
        ("row = tail.rows + threadIdx.x % 32 / 8", "row = tail.rows + 8"),
    ],
    ids=["head_boxes", "group of v", "columns to clear", "rows to clear"],
)
def test_every_step_of_whole_rows_counts(old, new):
    w = batch("full", "hopper", head_dim=128, **WHOLE_ROWS)
    try:
        wrong = w.wrong(in_pages(w, 16).run(replace(old, new)))
    except Trap as trap:
        wrong = [type(trap).__name__]
    assert wrong


@pytest.mark.sampled("hopper-document")
@pytest.mark.slow
@pytest.mark.parametrize("spec", sorted(shipped()))
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_every_spec(pipeline, spec):
    check(batch(spec, pipeline, layout=Varlen(), **LENGTHS), 16)


@pytest.mark.sampled(
    "ampere-causal-{'kv_lengths': (63, 0, 211), 'q_lengths': (0, 70, 64), 'layout': Varlen()}",
    "ampere-causal-{'kv_lengths': (60, 211), 'head_dim': 72, 'v_head_dim': 40, 'dtype': 'float16'}",
    "ampere-causal-{'q_offset': (69, 5), 'q_lengths': (1, 3), 'kv_lengths': (70, 150), 'layout': Varlen(), 'heads': 4}",
    "hopper-causal-{'q_offset': 37}",
)
@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [
        {"q_offset": 37},
        {"kv_lengths": (1, 129), "q_lengths": (64, 100), "q_stages": 2, "head_dim": 128},
        {"kv_lengths": (63, 0, 211), "q_lengths": (0, 70, 64), "layout": Varlen()},
        {"kv_lengths": (60, 211), "head_dim": 72, "v_head_dim": 40, "dtype": "float16"},
        {"q_offset": (69, 5), "q_lengths": (1, 3), "kv_lengths": (70, 150), "layout": Varlen(), "heads": 4},
    ],
    ids=str,
)
@pytest.mark.parametrize("spec", ("full", "causal"))
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_shapes(pipeline, spec, shape):
    check(batch(spec, pipeline, **shape), 32, beyond=np.inf)


@pytest.mark.sampled(layout=(Varlen(),))
@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    (Padded(), Varlen()),
    ids=lambda layout: layout.name,
)
def test_packed_heads(layout):
    lengths = {"q_lengths": (1, 4, 2), "kv_lengths": (130, 48, 70)}
    check(batch("causal", "hopper", packed=True, heads=4, q_offset="end", layout=layout, **lengths), 16)


@pytest.mark.sampled("hopper-1")
@pytest.mark.slow
@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_dropout_and_any_order_of_warps(pipeline, seed):
    w = in_pages(batch("causal", pipeline, dropout=Dropout(p=0.3, seed=5, offset=0), **LENGTHS), 16)
    np.testing.assert_allclose(w.run(seed=seed).o, w.walked().o, atol=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [Padded(), Varlen()], ids=lambda layout: layout.name)
def test_the_walk_and_its_bytes(layout):
    """The CPU's walk reads what the kernel of pipeline ampere reads, and gives what it gives."""
    w = in_pages(batch("causal", "ampere", layout=layout, **LENGTHS), 16)
    result, found = w.run(), w.walked()
    np.testing.assert_allclose(result.o, found.o, atol=0.04)
    for name in ("q", "k", "v", "o", "lse"):
        assert result.report.bytes(buffer=name) == getattr(found.traffic, name), name


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_plans(arch):
    """Sums are taken in the order of dense kernels; no backward reads pages."""
    for spec in ("full", "causal", "softcap"):
        variant = load_spec(spec).bind()
        layouts = DENSE, Paged(), Paged(queries=Varlen())
        dense, *others = (menu(variant, arch, "bfloat16", 128, layout=layout).plans for layout in layouts)
        for plans in others:
            assert [plan.order_of_sums for plan in plans] == [plan.order_of_sums for plan in dense]
            assert plans[0].pipeline == dense[0].pipeline
    with pytest.raises(PlanError, match="pages of a cache have no gradients"):
        backward_menu(load_spec("causal").bind(), arch, "bfloat16", 64, layout=Paged())


MUTATIONS = [
    ("ampere", "if (key >= keys) return {-1, 0};", "if (key >= (keys + 15) / 16 * 16) return {-1, 0};"),
    ("ampere", "p.page_table += at.b * p.table_row;", ""),
    ("ampere", "key - entry * p.page_size}", "key}"),
    ("hopper", "if (key >= keys) return {-1, 0};", ""),
    ("hopper", "p.page_table + work.b * p.table_row", "p.page_table"),
    ("hopper", "if (keys >= TILE_KV) return", "if (true) return"),
    ("hopper", "threadIdx.x % 32 * p.page_rows;", "0;"),
    ("hopper", "if (threadIdx.x % 32 == 0) mbarrier_arrive_expect_tx(full, sizeof(KTile));", ""),
]


@pytest.mark.sampled(
    "ampere key - entry * p.page_size}",
    "hopper threadIdx.x % 32 * p.page_rows;",
    "hopper if (threadIdx.x % 32 == 0) mbarrier_arrive_expect_tx(full, sizeof(KTile));",
)
@pytest.mark.slow
@pytest.mark.parametrize(("pipeline", "old", "new"), MUTATIONS, ids=[f"{on} {old}" for on, old, _ in MUTATIONS])
def test_every_step_counts(pipeline, old, new):
    w = batch("full", pipeline, q_lengths=(100, 33, 1), kv_lengths=(20, 48, 130))
    try:
        wrong = w.wrong(in_pages(w, 16, unused=0).run(replace(old, new)))
    except Trap as trap:
        wrong = [type(trap).__name__]
    assert wrong
