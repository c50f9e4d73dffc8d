"""attention() on an emulated GPU: validation, records, packing, tensor maps and emitted kernels, against float64."""

import pytest
import torch
from emulated_gpu import install
from tolerance import judge_lse, reference

import flashgen as fg
from flashgen.analysis.tiles import Case
from flashgen.ops.attention import attention
from flashgen.ops.backward import Given, run_backward
from flashgen.ops.call import Call
from flashgen.ops.records import calls_of
from flashgen.planning.arch import ARCHS
from flashgen.runtime.gradients import reference_gradients

window = fg.param("window", default=40, min=1)
slope = fg.param("slope", default=0.5)
table = fg.tensor("table", dims=("heads", None), dtype="bfloat16")
lengths = fg.tensor("lengths", dims=("batch",), dtype="int64")


@fg.variant
def causal_window(b, h, q, k):
    return (k <= q) & (q - k < window)


@fg.variant(score=lambda s, b, h, q, k: s - slope * abs(q - k) + table[h, fg.clamp(q - k, 0, 15)])
def captured(b, h, q, k):
    return k < lengths[b]


full = fg.variant()
PIPELINES = [((8, 0), "ampere"), ((9, 0), ARCHS["sm_90a"].pipelines[0])]


#: What CI runs of a test whose subject is no pipeline: TMA has more to get wrong than pointers.
HOPPER_ALONE = "sm_90-hopper"


@pytest.fixture(params=PIPELINES, ids=lambda p: f"sm_{p[0][0]}{p[0][1]}-{p[1]}")
def gpu(request, monkeypatch):
    gpu = install(monkeypatch, request.param[0])
    gpu.pipeline = request.param[1]
    return gpu


def inputs(gpu, *, batch=2, heads=2, kv_heads=1, q_len=70, kv_len=90, dim=32, v_dim=32, dtype=torch.bfloat16, seed=0):
    random = torch.Generator().manual_seed(seed)
    shapes = (batch, heads, q_len, dim), (batch, kv_heads, kv_len, dim), (batch, kv_heads, kv_len, v_dim)
    return [gpu.put(torch.randn(shape, generator=random).to(dtype)) for shape in shapes]


def check(got, variant, tensors, *, scale=None, params=None, arrays=None):
    """Far looser than the tolerance rule: what goes wrong between torch and a kernel is not a rounding."""
    q, k, v = (t.as_subclass(torch.Tensor) for t in tensors)
    (batch, heads, q_len, _), (_, kv_heads, kv_len, _) = q.shape, k.shape
    sizes = {"batch": batch, "heads": heads, "kv_heads": kv_heads, "q_len": q_len, "kv_len": kv_len}
    case = Case(sizes=sizes, params=variant.values(params or {}), tensors=arrays or {})
    o, lse = reference(variant.bind(), case, q, k, v, scale=q.shape[-1] ** -0.5 if scale is None else scale)
    mine, mine_lse = (t.as_subclass(torch.Tensor) for t in got)
    torch.testing.assert_close(mine.double(), o, rtol=0.03, atol=0.03)
    assert judge_lse(mine_lse, lse) == ()


@pytest.mark.slow
def test_a_call_and_its_repetition(gpu):
    tensors = inputs(gpu)
    check(attention(*tensors, causal_window, return_lse=True), causal_window, tensors)
    again = inputs(gpu, seed=1)
    got = attention(*again, causal_window, window=7, scale=0.3, return_lse=True)
    check(got, causal_window, again, scale=0.3, params={"window": 7})
    assert len(gpu.plans) == 1 and len(gpu.launches) == 2
    assert {plan.pipeline for plan, *_ in gpu.launches} == {gpu.pipeline}


@pytest.mark.sampled(HOPPER_ALONE)
@pytest.mark.slow
def test_split_keys(gpu):
    tensors = inputs(gpu, batch=1, q_len=3, kv_len=300)
    for splits in (3, 2, 3):
        check(attention(*tensors, full, return_lse=True, kv_splits=splits), full, tensors)
    assert len(gpu.plans) == 1 and {plan.keys.split for plan, *_ in gpu.launches} == {True}


@pytest.mark.sampled(HOPPER_ALONE)
@pytest.mark.slow
def test_captured_tensors_and_parameters(gpu):
    tensors = inputs(gpu, dtype=torch.float16)
    values = torch.randn(1, 16, generator=torch.Generator().manual_seed(3)).bfloat16()
    ends = torch.tensor([90, 31])
    got = attention(
        *tensors, captured, table=gpu.put(values), lengths=gpu.put(ends), slope=0.25, scale=-0.2, return_lse=True
    )
    arrays = {"table": values.float().numpy(), "lengths": ends.numpy()}
    check(got, captured, tensors, scale=-0.2, params={"slope": 0.25}, arrays=arrays)


@pytest.mark.sampled(HOPPER_ALONE)
@pytest.mark.slow
def test_strided_views(gpu):
    """q as [batch, q_len, heads, dim]; k and v every second row of memory that is NaN elsewhere."""
    q, k, v = inputs(gpu, heads=4, kv_heads=2, dim=40, v_dim=24)
    q = gpu.put(q.as_subclass(torch.Tensor).transpose(1, 2).contiguous().transpose(1, 2))
    spread = []
    for t in (k, v):
        batch, heads, length, dim = t.shape
        room = gpu.empty((batch, heads, 2 * length, dim), (2 * length * heads * dim, dim, heads * dim, 1), t.dtype)
        view = room[:, :, 1::2]
        view.as_subclass(torch.Tensor).copy_(t.as_subclass(torch.Tensor))
        spread.append(view)
    got = attention(q, *spread, causal_window, return_lse=True)
    check(got, causal_window, (q, k, v))
    assert got[0].transpose(1, 2).is_contiguous()


@pytest.mark.sampled("sm_90-hopper-True")
@pytest.mark.slow
@pytest.mark.parametrize("turned", [False, True])
def test_few_queries_of_heads_that_share_keys(gpu, turned):
    """Packed into one tile, whatever the layout of q and o."""
    q, k, v = inputs(gpu, heads=8, kv_heads=2, q_len=5, v_dim=40)
    if turned:
        q = gpu.put(q.as_subclass(torch.Tensor).transpose(1, 2).contiguous().transpose(1, 2))
    for variant in (full, causal_window):
        check(attention(q, k, v, variant, return_lse=True), variant, (q, k, v))
        plan, config, _ = gpu.launches[-1]
        assert (plan.packed, config.gridDimX) == (True, 4)


@pytest.mark.slow
def test_expanded_keys(gpu, caplog):
    """Stride 0, which TMA cannot address: pipeline ampere serves it, and says so once, not for each call or length."""
    for kv_len in (90, 90, 70):
        q, k, v = inputs(gpu, batch=1, kv_heads=1, kv_len=kv_len)
        k, v = (t.expand(-1, 2, -1, -1) for t in (k, v))
        check(attention(q, k, v, full, return_lse=True), full, (q, k, v))
        assert gpu.launches[-1][0].pipeline == "ampere"
    said = (
        "the forward of 'full' (head_dim 32, bfloat16) runs on pipeline ampere instead of hopper: its TMA cannot"
        " address k: its head stride is 0 (expanded)\n  nearest: k.contiguous(), a copy"
    )
    told = [("flashgen", "WARNING", said)] if gpu.pipeline == "hopper" else []
    assert [(record.name, record.levelname, record.getMessage()) for record in caplog.records] == told


@pytest.mark.sampled(HOPPER_ALONE)
@pytest.mark.slow
def test_rows_and_lengths_at_the_edges(gpu):
    for q_len, kv_len in ((1, 1), (3, 65), (129, 2)):
        tensors = inputs(gpu, batch=1, q_len=q_len, kv_len=kv_len)
        check(attention(*tensors, causal_window, return_lse=True), causal_window, tensors)


@pytest.mark.sampled(HOPPER_ALONE)
@pytest.mark.slow
def test_gradients(gpu):
    """Two calls of one record: inputs, results, workspaces and sums of a captured tensor, wherever they lie."""
    slopes = torch.randn(1, 16, generator=torch.Generator().manual_seed(3)).bfloat16()
    ends = torch.tensor([35])
    for seed in (0, 1):
        q, k, v = inputs(gpu, batch=1, q_len=33, kv_len=40, seed=seed)
        q = gpu.put(q.as_subclass(torch.Tensor).transpose(1, 2).contiguous().transpose(1, 2))
        named = {"table": gpu.put(slopes), "lengths": gpu.put(ends), "slope": 0.25}
        o, lse = attention(q, k, v, captured, return_lse=True, **named)
        given = torch.Generator().manual_seed(seed + 2)
        do, dlse = (gpu.put(torch.randn(x.shape, generator=given).to(x.dtype)) for x in (o, lse))
        got = run_backward(Given(do, dlse, q, k, v, o, lse), Call(captured, None, named), ("table",))
        sizes = {"batch": 1, "heads": 2, "kv_heads": 1, "q_len": 33, "kv_len": 40}
        tensors = {"table": slopes.float().numpy(), "lengths": ends.numpy()}
        case = Case(sizes=sizes, params={"slope": 0.25}, tensors=tensors)
        q, k, v, do, dlse = (x.as_subclass(torch.Tensor) for x in (q, k, v, do, dlse))
        right = reference_gradients(captured.bind(), case, q, k, v, do, scale=q.shape[-1] ** -0.5, dlse=dlse)
        for mine, wanted in zip((*got[:3], *got.captured), (*right[:3], right.captured["table"]), strict=True):
            torch.testing.assert_close(mine.as_subclass(torch.Tensor).double(), wanted, rtol=0.03, atol=0.06)
    assert len(calls_of(captured).backward) == 1
    assert {plan.pipeline for plan, *_ in gpu.launches} == {gpu.pipeline}


flag = fg.tensor("flag", dims=("batch", "kv"), dtype="bool")
position = fg.tensor("position", dims=("kv",), dtype="int32")


@fg.variant
def rotated_with_flags(b, h, q, k):
    return (position[k] <= q) & (q - position[k] < 24) | flag[b, k] & flag[b, q]


@pytest.mark.sampled(HOPPER_ALONE)
@pytest.mark.slow
def test_summaries_of_each_call(gpu):
    """Made anew in both passes, of whatever the tensors hold by then, in memory that is the call's own."""
    for seed, turn in ((0, 40), (1, 70)):
        q, k, v = inputs(gpu, seed=seed, heads=1, kv_len=90, q_len=90)
        arrays = {"flag": torch.zeros(2, 90, dtype=torch.bool), "position": torch.arange(90).int().roll(turn)}
        arrays["flag"][seed, 3] = True
        named = {name: gpu.put(x) for name, x in arrays.items()}
        arrays = {name: x.numpy() for name, x in arrays.items()}
        o, lse = attention(q, k, v, rotated_with_flags, return_lse=True, **named)
        check((o, lse), rotated_with_flags, (q, k, v), arrays=arrays)
        do = gpu.put(torch.ones(o.shape, dtype=o.dtype))
        got = run_backward(Given(do, None, q, k, v, o, lse), Call(rotated_with_flags, None, named, None, False), ())
        sizes = {"batch": 2, "heads": 1, "kv_heads": 1, "q_len": 90, "kv_len": 90}
        case = Case(sizes=sizes, params={}, tensors=arrays)
        plain = [x.as_subclass(torch.Tensor) for x in (q, k, v, do)]
        expected = reference_gradients(rotated_with_flags.bind(), case, *plain, scale=32**-0.5)
        for name in ("dq", "dk", "dv"):
            mine = getattr(got, name).as_subclass(torch.Tensor)
            torch.testing.assert_close(mine.double(), getattr(expected, name), rtol=0.05, atol=0.05)
    assert len(gpu.plans) == 2
    assert gpu.launches[-1][0].summaries
