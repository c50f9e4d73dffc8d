"""Keys that are cut into leaves: no bit differs between prompts, chunks, decode, batches and pages; against float64."""

import pytest
import torch
from gpu_checks import DEVICE, call, case_of, example_tensors, on, random_inputs, settle
from tolerance import baseline, judge, judge_lse, reference

import flashgen as fg
from flashgen.errors import LaunchError
from flashgen.lang.load import load_spec, shipped
from flashgen.planning import leaf_times
from flashgen.planning.problem import Problem

pytestmark = pytest.mark.gpu

PIPELINES = ("ampere", "hopper")
VALUES = {"sliding_window": {"window": 700}, "sink_window": {"window": 300}, "local_softcap": {"window": 300}}
BF16 = {"device": DEVICE, "dtype": torch.bfloat16}


@pytest.mark.parametrize(("pipeline", "folded"), [("ampere", False), ("hopper", False), ("hopper", True)])
@pytest.mark.parametrize("spec", sorted(shipped()))
def test_every_spec(spec, pipeline, folded, monkeypatch):
    """So few queries have their leaves in parts; blocks fold them where the predicted times say so."""
    if folded:
        monkeypatch.setattr(leaf_times, "seconds", lambda plan, *_: float(plan.keys.split))
    variant, queries = on(load_spec(spec), pipeline), 71 if folded else 70
    problem = Problem(batch=2, heads=8, kv_heads=2, q_len=queries, kv_len=1300, head_dim=64, v_head_dim=64)
    values = VALUES.get(spec, {})
    constants = {c.name: values[c.name] for c in variant.constants if c.name in values}
    bound, params = variant.bind(**constants), {n: x for n, x in values.items() if n not in constants}
    pools = [[] for _ in range(5)]
    for seed in range(20):
        qkv, tensors = random_inputs(problem, seed), example_tensors(bound, problem, seed)
        case = case_of(bound, problem, params, tensors)
        found = call(*qkv, variant, invariant=True, **constants, **params, **tensors)
        ref, ref_lse = reference(bound, case, *qkv, scale=0.125)
        base, _ = baseline(bound, case, *qkv, scale=0.125)
        for pool, x in zip(pools, (found[0], base, ref, found[1], ref_lse), strict=True):
            pool.append(x.flatten())
    o, base, ref, lse, ref_lse = map(torch.cat, pools)
    settle(judge(o, base, ref, "bfloat16"), judge_lse(lse, ref_lse), f"{spec} {problem} in leaves")


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_no_bit_differs(pipeline, dtype, head_dim):
    causal = on(load_spec("causal"), pipeline)
    n, size = 2900, 16
    q, k, v = (torch.randn(2, h, n, head_dim, device=DEVICE, dtype=dtype) for h in (16, 4, 4))
    o, lse = fg.attention(q, k, v, causal, return_lse=True, invariant=True)
    torch.testing.assert_close(o, fg.attention(q, k, v, causal), rtol=0.02, atol=0.02)
    for start in range(0, n, 512):
        end = min(start + 512, n)
        given = q[:, :, start:end], k[:, :, :end], v[:, :, :end], causal
        chunk, chunk_lse = fg.attention(*given, q_offset=start, return_lse=True, invariant=True)
        assert torch.equal(chunk, o[:, :, start:end]) and torch.equal(chunk_lse, lse[:, :, start:end])
    for b in range(2):
        one = (x[b : b + 1] for x in (q, k, v))
        assert torch.equal(fg.attention(*one, causal, invariant=True), o[b : b + 1])
    lengths = torch.tensor([n, 1700], dtype=torch.int32, device=DEVICE)
    last = torch.stack([q[b, :, m - 1 : m] for b, m in enumerate(lengths.tolist())])
    want = torch.stack([o[b, :, m - 1 : m] for b, m in enumerate(lengths.tolist())])
    bad_k, bad_v = k.clone(), v.clone()
    bad_k[1, :, 1700:], bad_v[1, :, 1700:] = torch.nan, torch.inf
    options = {"q_offset": "end", "kv_lengths": lengths, "invariant": True}
    assert torch.equal(fg.attention(last, bad_k, bad_v, causal, **options), want)
    pages = -(-n // size)
    order = torch.randperm(2 * pages, device=DEVICE)
    caches = []
    for x in (bad_k, bad_v):
        cache = torch.empty(2 * pages, size, 4, head_dim, device=DEVICE, dtype=dtype)
        rows = torch.nn.functional.pad(x, (0, 0, 0, pages * size - n), value=torch.nan)
        cache[order] = rows.transpose(1, 2).reshape(2 * pages, size, 4, head_dim)
        caches.append(cache)
    table = order.view(2, pages).to(torch.int32)
    assert torch.equal(fg.attention(last, *caches, causal, page_table=table, **options), want)


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_sequences_behind_each_other(pipeline):
    causal = on(load_spec("causal"), pipeline)
    q, k, v = (torch.randn(1, h, 2000, 128, **BF16) for h in (16, 4, 4))
    o = fg.attention(q, k, v, causal, invariant=True)
    rows = [x[0].transpose(0, 1) for x in (q, k, v)]
    queries, keys, values = torch.cat([rows[0][600:700], rows[0][1999:]]), *(torch.cat([x[:700], x]) for x in rows[1:])
    starts = [torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([0, 100, 101], [0, 700, 2700])]
    bounds = {"max_seqlen_q": 128, "max_seqlen_k": 3000, "q_offset": "end"}
    found = fg.attention_varlen(queries, keys, values, causal, *starts, **bounds, invariant=True)
    assert torch.equal(found[:100].transpose(0, 1), o[0, :, 600:700])
    assert torch.equal(found[100:].transpose(0, 1), o[0, :, 1999:])


def test_a_graph_takes_other_lengths():
    causal = load_spec("causal")
    q, k, v = (torch.randn(3, h, n, 128, **BF16) for h, n in ((16, 2), (4, 5000), (4, 5000)))
    keys = torch.tensor([5000, 1300, 2], dtype=torch.int32, device=DEVICE)

    def attend():
        return fg.attention(q, k, v, causal, q_offset="end", kv_lengths=keys, invariant=True)

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
        for b, n in enumerate(lengths):
            one = q[b : b + 1], k[b : b + 1, :, :n], v[b : b + 1, :, :n]
            assert torch.equal(o[b : b + 1], fg.attention(*one, causal, q_offset="end", invariant=True))


def test_what_the_pipeline_cannot_load_is_refused():
    causal, q = load_spec("causal"), torch.randn(1, 8, 1, 128, **BF16)
    cache = torch.randn(2, 40, 1, 2, 128, **BF16)
    table = torch.arange(40, dtype=torch.int32, device=DEVICE)[None]
    with pytest.raises(LaunchError, match="invariant=True has the bits of pipeline hopper"):
        fg.attention(q, *cache, causal, page_table=table, q_offset="end", invariant=True)
