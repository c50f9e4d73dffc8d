"""Keys that are split among blocks: against float64, the same bits again, no wait, and graphs with other lengths."""

import pytest
import torch
from gpu_checks import DEVICE, call, case_of, example_tensors, on, random_inputs, settle
from tolerance import baseline, judge, judge_lse, reference

import flashgen as fg
from flashgen.lang.load import load_spec, shipped
from flashgen.planning.problem import Problem

pytestmark = pytest.mark.gpu

PIPELINES = ("ampere", "hopper")
VALUES = {"sliding_window": {"window": 700}, "sink_window": {"window": 300}, "local_softcap": {"window": 300}}


def check(spec, pipeline, splits, *, q_len=3, kv_len=3000, batch=2, heads=8, kv_heads=2, head_dim=64, dtype="bfloat16"):
    variant = on(load_spec(spec), pipeline)
    dims = {"head_dim": head_dim, "v_head_dim": head_dim, "dtype": dtype}
    problem = Problem(batch=batch, heads=heads, kv_heads=kv_heads, q_len=q_len, kv_len=kv_len, **dims)
    values = VALUES.get(spec, {})
    constants = {c.name: values[c.name] for c in variant.constants if c.name in values}
    bound, params = variant.bind(**constants), {n: x for n, x in values.items() if n not in constants}
    pools = [[] for _ in range(5)]
    for seed in range(20):
        qkv, tensors = random_inputs(problem, seed), example_tensors(bound, problem, seed)
        case = case_of(bound, problem, params, tensors)
        found = call(*qkv, variant, kv_splits=splits, **constants, **params, **tensors)
        ref, ref_lse = reference(bound, case, *qkv, scale=head_dim**-0.5)
        base, _ = baseline(bound, case, *qkv, scale=head_dim**-0.5)
        for pool, x in zip(pools, (found[0], base, ref, found[1], ref_lse), strict=True):
            pool.append(x.flatten())
    o, base, ref, lse, ref_lse = map(torch.cat, pools)
    settle(judge(o, base, ref, dtype), judge_lse(lse, ref_lse), f"{spec} {problem} in {splits}")


@pytest.mark.parametrize("splits", [None, 1, 2, 7, 100])
@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize("spec", ["full", "causal_bottom_right"])
def test_numbers_of_blocks(spec, pipeline, splits):
    check(spec, pipeline, splits)


@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize("spec", sorted(shipped()))
def test_every_spec(spec, pipeline):
    check(spec, pipeline, 3, q_len=70, kv_len=1000)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_head_dims(pipeline, dtype, head_dim):
    check("causal_bottom_right", pipeline, 5, head_dim=head_dim, dtype=dtype)


@pytest.mark.parametrize(("kv_len", "kv_heads"), [(1024, 8), (4096, 4), (32768, 4), (131072, 8)])
def test_decoding_one_sequence(kv_len, kv_heads):
    check("full", "hopper", None, q_len=1, kv_len=kv_len, batch=1, heads=32, kv_heads=kv_heads, head_dim=128)


def test_reruns_and_batches_give_the_same_bits():
    q, k, v = (
        torch.randn(4, h, n, 128, device=DEVICE, dtype=torch.bfloat16) for h, n in ((32, 1), (8, 9000), (8, 9000))
    )
    full = load_spec("full")
    first = fg.attention(q, k, v, full, kv_splits=9)
    for _ in range(300):
        assert torch.equal(fg.attention(q, k, v, full, kv_splits=9), first)
    for b in range(4):
        alone = fg.attention(*(x[b : b + 1] for x in (q, k, v)), full, kv_splits=9)
        assert torch.equal(alone, first[b : b + 1])


@pytest.mark.parametrize("splits", [None, 6])
def test_no_call_waits_and_a_graph_takes_other_lengths(splits):
    causal = load_spec("causal")
    q, k, v = (
        torch.randn(3, h, n, 128, device=DEVICE, dtype=torch.bfloat16) for h, n in ((16, 2), (4, 5000), (4, 5000))
    )
    keys = torch.tensor([5000, 1300, 2], dtype=torch.int32, device=DEVICE)

    def attend():
        return fg.attention(q, k, v, causal, q_offset="end", kv_lengths=keys, kv_splits=splits)

    attend()
    torch.cuda.set_sync_debug_mode("error")
    try:
        attend()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = attend()
    for lengths in ([5000, 1300, 2], [7, 4999, 130]):
        keys.copy_(torch.tensor(lengths, dtype=torch.int32))
        graph.replay()
        assert torch.equal(o, attend())
        for b, n in enumerate(lengths):
            whole = fg.attention(
                q[b : b + 1], k[b : b + 1, :, :n], v[b : b + 1, :, :n], causal, q_offset="end", kv_splits=1
            )
            torch.testing.assert_close(o[b : b + 1], whole, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_sequences_behind_each_other(pipeline):
    causal = on(load_spec("causal"), pipeline)
    rows, lengths = (1, 5, 0, 2), (4000, 700, 30, 2)
    q, k, v = (
        torch.randn(n, h, 128, device=DEVICE, dtype=torch.bfloat16)
        for n, h in ((sum(rows), 16), (sum(lengths), 4), (sum(lengths), 4))
    )
    starts = [torch.tensor([sum(of[:b]) for b in range(5)], dtype=torch.int32, device=DEVICE) for of in (rows, lengths)]
    bounds = {"max_seqlen_q": 5, "max_seqlen_k": 4000, "q_offset": "end", "return_lse": True}
    found = [fg.attention_varlen(q, k, v, causal, *starts, **bounds, kv_splits=n) for n in (1, 3, None)]
    for o, lse in found[1:]:
        torch.testing.assert_close(o, found[0][0], rtol=0.02, atol=0.02)
        torch.testing.assert_close(lse, found[0][1], rtol=1e-5, atol=1e-5)


def test_what_lies_beyond_a_length_changes_nothing():
    causal = load_spec("causal")
    q, k, v = (torch.randn(2, h, n, 64, device=DEVICE, dtype=torch.bfloat16) for h, n in ((8, 1), (2, 4000), (2, 4000)))
    lengths = torch.tensor([1500, 2222], dtype=torch.int32, device=DEVICE)
    clean = fg.attention(q, k, v, causal, q_offset="end", kv_lengths=lengths, kv_splits=8)
    for b, n in enumerate(lengths.tolist()):
        k[b, :, n:], v[b, :, n:] = torch.nan, torch.inf
    assert torch.equal(fg.attention(q, k, v, causal, q_offset="end", kv_lengths=lengths, kv_splits=8), clean)


def test_a_compiled_model_and_opcheck():
    full = load_spec("full")
    q, k, v = (torch.randn(1, h, n, 64, device=DEVICE, dtype=torch.bfloat16) for h, n in ((8, 1), (2, 4000), (2, 4000)))

    def attend(q, k, v):
        return fg.attention(q, k, v, full, kv_splits=8)

    assert torch.equal(torch.compile(attend, fullgraph=True)(q, k, v), attend(q, k, v))
    arguments = (q, k, v, full.token, [], None, ["call.kv_splits"], [8], [], None, None, False)
    torch.library.opcheck(torch.ops.flashgen.attention.default, arguments)


@pytest.mark.parametrize("kv_len", [0, 90, 3 * 128 - 7])
def test_parts_without_a_key_of_a_mask_that_hides_nothing(kv_len):
    """Every tile of keys is visited, and some parts have none: nobody waits for it."""
    hides_nothing = fg.variant(lambda b, h, q, k: abs(q - k) >= 0, name="hides_nothing")
    q, k, v = (torch.randn(2, 4, n, 64, device=DEVICE, dtype=torch.bfloat16) for n in (5, kv_len, kv_len))
    for splits in (1, 2, 5):
        o = fg.attention(q, k, v, hides_nothing, kv_splits=splits)
        torch.testing.assert_close(o, fg.attention(q, k, v, load_spec("full"), kv_splits=splits), atol=0, rtol=0)
