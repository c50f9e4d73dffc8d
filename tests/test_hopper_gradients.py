"""Gradients of captured tensors in the backward of pipeline hopper: what fits there, and that it is right."""

import numpy as np
import ptx_backward
import pytest
from ptx_attention import replace

import flashgen as fg
from flashgen.lang.load import load_spec
from flashgen.planning import planner


def normal(*dims):
    def example(problem, rng):
        return rng.standard_normal([n if isinstance(n, int) else getattr(problem, n) for n in dims], "float32")

    return example


slopes = fg.tensor("slopes", dims=("heads",), dtype="float32", example=normal("heads"))
of_q = fg.tensor("of_q", dims=("heads", "q"), dtype="float32", example=normal("heads", "q_len"))
of_k = fg.tensor("of_k", dims=("heads", "kv"), dtype="float32", example=normal("heads", "kv_len"))
table = fg.tensor("table", dims=("heads", 65), dtype="float32", example=normal("heads", 65))


def distance(h, q, k):
    return table[h, fg.clamp(k - q, -32, 32) + 32]


@fg.variant(score=lambda s, b, h, q, k: s + slopes[h] * fg.float32(q - k) / 64 + distance(h, q, k))
def decaying(b, h, q, k):
    return k <= q


bucket = fg.tensor(
    "bucket",
    dims=(513,),
    dtype="int32",
    min=0,
    max=15,
    example=lambda p, r: np.minimum(np.log2(np.abs(np.arange(-256, 257)) + 1) * 2, 15).astype("int32"),
)
of_bucket = fg.tensor("of_bucket", dims=(16, "heads"), dtype="float32", example=normal(16, "heads"))
straight = fg.tensor("straight", dims=("heads", 513), dtype="float32", example=normal("heads", 513))
pairs = fg.tensor("pairs", dims=("q", "kv"), dtype="float32", example=normal("q_len", "kv_len"))


@fg.variant(score=lambda s, b, h, q, k: s + of_bucket[bucket[k - q + 256], h] * straight[h, q - k + 256])
def bucketed(b, h, q, k):
    return abs(q - k) < 200


offset = fg.tensor("offset", dims=("heads", None), dtype="float32", example=normal("heads", 31 * 63))
by_rows = fg.tensor("by_rows", dims=("q", None), dtype="float32", example=normal("q_len", 17))
of_blocks = fg.tensor("of_blocks", dims=(None, None), dtype="float32", example=normal(5, 5))
of_columns = fg.tensor("of_columns", dims=(None, "kv"), dtype="float32", example=normal(9, "kv_len"))


def in_image(width):
    def score(s, b, h, q, k):
        down, across = q // width - k // width + 15, q % width - k % width + width - 1
        return s + offset[h, down * (2 * width - 1) + across] * fg.where(q % 2 == 0, 1.0, 0.5)

    return fg.variant(score=score, name=f"image_{width}")


@fg.variant(score=lambda s, b, h, q, k: s + by_rows[q, k // 16] + of_blocks[q // 64, k // 64] + of_columns[q // 32, k])
def in_blocks(b, h, q, k):
    return k <= q


by_pair = fg.variant(score=lambda s, b, h, q, k: s + pairs[q, k], name="by_pair")
by_two = fg.variant(score=lambda s, b, h, q, k: s + pairs[q, fg.maximum(k, 1)], name="by_two")
by_both = fg.variant(score=lambda s, b, h, q, k: s + of_q[h, q] * of_k[h, k], name="by_both")
near = fg.variant(score=lambda s, b, h, q, k: s + distance(h, q, k), name="near")
CASES = {
    "decaying": (decaying, ("slopes", "table"), 64),
    "by_both": (by_both, ("of_q", "of_k"), 64),
    "near": (near, ("table",), 128),
    "bucketed": (bucketed, ("of_bucket", "straight"), 64),
    "image_32": (in_image(32), ("offset",), 64),
    "image_16": (in_image(16), ("offset",), 128),
    "in_blocks": (in_blocks, ("by_rows", "of_blocks", "of_columns"), 64),
    "by_pair": (by_pair, ("pairs",), 128),
    "by_two": (by_two, ("pairs",), 128),
    "masked": (load_spec("document") & near, ("table",), 128),
}


def plan(name, **options):
    variant, gradients, head_dim = CASES[name]
    return planner.backward_menu(variant.bind(), "sm_90a", "bfloat16", head_dim, gradients=gradients, **options)


@pytest.mark.parametrize("name", CASES)
def test_gradients_of_captured_tensors_are_served(name):
    menu = plan(name)
    assert menu.plans[0].pipeline == "hopper" and menu.fallbacks == ()


def test_sums_in_one_order_take_more_registers():
    (fallback,) = plan("by_two", deterministic=True).fallbacks
    assert fallback.reason.startswith("registers ")
    assert plan("near", deterministic=True).fallbacks == ()


@pytest.mark.sampled(name=("decaying",))
@pytest.mark.slow
@pytest.mark.parametrize("name", tuple(CASES))
def test_gradients_of_captured_tensors_are_right(name):
    """Beside float64, in the interpreter."""
    variant, gradients, head_dim = CASES[name]
    work = ptx_backward.Backward(
        variant, pipeline="hopper", head_dim=head_dim, q_len=130, kv_len=150, heads=1, gradients=gradients
    )
    assert work.plan.pipeline == "hopper"
    ptx_backward.check(work)


@pytest.mark.slow
@pytest.mark.sampled("ampere-image_16")
@pytest.mark.parametrize("name", ["image_32", "image_16", "in_blocks"])
@pytest.mark.parametrize("pipeline", ["hopper", "ampere"])
def test_what_blocks_select_alike_is_summed_in_them(pipeline, name):
    """Lengths that end inside of a block; two heads that share keys."""
    variant, gradients, head_dim = CASES[name]
    shape = {"head_dim": head_dim, "q_len": 100, "kv_len": 140, "heads": 2, "kv_heads": 1, "batch": 1}
    ptx_backward.check(ptx_backward.Backward(variant, pipeline=pipeline, gradients=gradients, **shape))


def bucketed_work(**options):
    variant, gradients, head_dim = CASES["bucketed"]
    shape = {"head_dim": head_dim, "q_len": 140, "kv_len": 200, "heads": 2, "kv_heads": 1, "batch": 1} | options
    return ptx_backward.Backward(variant, gradients=gradients, **shape)


@pytest.mark.sampled("hopper-options0")
@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"deterministic": True}, {"dropout": ptx_backward.DROPOUT}])
@pytest.mark.parametrize("pipeline", ["hopper", "ampere"])
def test_what_many_distances_select_is_kept_from_tile_to_tile(pipeline, options):
    """Tiles of one bucket, of a few and of many; two heads that share keys, of which a block has both."""
    work = bucketed_work(pipeline=pipeline, **options)
    assert work.plan.pipeline == pipeline
    ptx_backward.check(work)


def test_an_element_is_added_to_less_often_than_tiles_read_it():
    """`of_bucket`: a warp's additions are those of few tiles near the diagonal, not of all distances of all tiles."""
    variant = fg.variant(score=lambda s, b, h, q, k: s + of_bucket[fg.clamp(bucket[k - q + 256], 14, 15), h])
    work = ptx_backward.Backward(
        variant, pipeline="hopper", head_dim=64, q_len=128, kv_len=128, heads=1, batch=1, gradients=("of_bucket",)
    )
    result = work.run()
    assert work.wrong(result) == []
    added = result.reports["attention_backward"].bytes("red", buffer="grad_of_bucket") // 4
    warps, steps = 8, -(-128 // work.plan.tile.q)
    assert 0 < added <= 6 * warps * steps


FLUSH = "if (begins) flush_of_bucket(kept, sum, b, p);"
MUTATIONS = {
    "rows of lanes by four": replace("by_four = lane ^ 18", "by_four = lane ^ 16"),
    "rows of lanes by two": replace("(lane + 1 - row / 2 % 2 * 2 & 3)", "(lane & 3)"),
    "rows of lanes by one": replace("(lane - row % 2 & 3)", "(lane & 3)"),
    "not moved by a multiple of 8": replace("before ? low : high", "high"),
    "an odd distance": replace("+ (2 * lane - row & 7)", "+ (2 * lane & 7)"),
    "not added when another begins": replace(FLUSH, "if (begins) sum = 0.f;"),
    "never another": replace(FLUSH, ""),
    "not added at the end": replace(
        "flush_of_bucket(shared.kept[0][thread_index() / 32 - 4],"
        " shared.kept_sum[0][thread_index() - 128], keys.b, p);",
        "",
    ),
    "always two": replace("two &= distance(i) < border || of[i] == last;", "two &= true;"),
    "a border too far": replace("others = MOST + 1 - distance(i);", "others = MOST - distance(i);"),
    "sides swapped": replace("kept.near ? before : behind", "kept.near ? behind : before"),
    "the other side's": replace("kept.near ? behind : before", "kept.near ? before : behind"),
    "not kept from there on": replace("    kept.of = kept.other;", ""),
    "taken twice": replace("      taken += sum[i];\n      sum[i] = 0.f;", "      taken += sum[i];"),
}


@pytest.mark.sampled("a border too far")
@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_mutations_of_sums_are_noticed(name):
    work = bucketed_work(pipeline="hopper")
    assert work.wrong(work.run(MUTATIONS[name]))


QUERY_MUTATIONS = {
    "halves swapped": replace("(row % 2 ? high : low)", "(row % 2 ? low : high)"),
    "another query": replace("row % 2 * 4 + row / 2 % 2 * 2 + row / 4", "row % 2 * 4 + row / 4 * 2 + row / 2 % 2"),
}


@pytest.mark.sampled("None", "halves swapped")
@pytest.mark.slow
@pytest.mark.parametrize("name", [None, *QUERY_MUTATIONS])
def test_sums_by_query(name):
    variant, gradients, head_dim = CASES["by_both"]
    work = ptx_backward.Backward(
        variant, pipeline="hopper", head_dim=head_dim, q_len=100, kv_len=70, heads=1, gradients=gradients
    )
    assert bool(work.wrong(work.run(*[QUERY_MUTATIONS[name]] if name else []))) == (name is not None)


where_k = fg.tensor("where_k", dims=("kv",), dtype="int32", example=lambda p, r: r.integers(0, 4, p.kv_len, "int32"))
where_q = fg.tensor("where_q", dims=("q",), dtype="int32", example=lambda p, r: r.integers(0, 4, p.q_len, "int32"))
half = fg.tensor("half", dims=("heads", 4), dtype="float32", example=normal("heads", 4))


def longer(p, rng):
    """A table of more than the problem's distances, of which the rest is no number."""
    table = rng.standard_normal((p.heads, p.q_len + p.kv_len + 99), "float32")
    table[:, p.q_len + p.kv_len - 1 :] = [np.nan, np.inf, -np.inf] * 33 + [np.nan]
    return table


tail = fg.tensor("tail", dims=("heads", None), dtype="float32", example=longer)
BEYOND = {
    "slope by key": (lambda s, b, h, q, k: s + slopes[h] * fg.float32(where_k[k]), ("slopes",)),
    "slope by query": (lambda s, b, h, q, k: s + slopes[h] * fg.float32(where_q[q]), ("slopes",)),
    "selected by both": (lambda s, b, h, q, k: s + half[h, fg.minimum(where_q[q], where_k[k])], ("half",)),
    "a longer table": (lambda s, b, h, q, k: s + tail[h, q - k + fg.kv_len - 1], ("tail",)),
    "a longer table alone": (lambda s, b, h, q, k: s + tail[h, q - k + fg.kv_len - 1], ()),
}


@pytest.mark.sampled("hopper-a longer table")
@pytest.mark.slow
@pytest.mark.parametrize("name", BEYOND)
@pytest.mark.parametrize("pipeline", ["hopper", "ampere"])
def test_lanes_beyond_the_problem_read_and_leave_nothing(pipeline, name):
    """Rows and keys that fill up a tile: no read out of a tensor, and no number of theirs in a gradient."""
    score, gradients = BEYOND[name]
    shape = {"head_dim": 64, "q_len": 70, "kv_len": 70, "heads": 1, "batch": 1}
    work = ptx_backward.Backward(fg.variant(score=score), pipeline=pipeline, gradients=gradients, **shape)
    assert work.wrong(work.run()) == []
