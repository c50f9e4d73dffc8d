"""`flashgen bench fp8` on a CPU, where attention walks the kernels' tiles."""

import functools

import pytest
import torch
from test_bench_serving import measure

from flashgen.bench import fp8
from flashgen.bench.cells import cell
from flashgen.bench.flex import window
from flashgen.bench.functions import Functions, problem
from flashgen.bench.suite import Ground

SMALL = cell("causal", 64, 160, batch=1, heads=2)


@pytest.fixture
def results(monkeypatch):
    """By how much those of attention() in 8 bits are off."""
    off = {"factor": 1.0}
    right = fp8.attention

    def attend(q, *given, **named):
        o = right(q, *given, **named)
        return off["factor"] * o if q.dtype == torch.float8_e4m3fn else o

    monkeypatch.setattr(fp8, "attention", attend)
    return off


def peer(cell, q, k, v, *descales):
    wide = [fp8.dequantised(*pair).float() for pair in zip((q, k, v), descales, strict=True)]
    return lambda: torch.nn.functional.scaled_dot_product_attention(*wide, is_causal=True).bfloat16()


@pytest.mark.parametrize("accuracy", fp8.ERROR_BARS)
def test_a_form_is_checked_beside_the_best_of_its_algorithm(results, accuracy):
    ground = Ground(device="cpu", files={"mine": {"fp8": peer}})
    found = measure(fp8.speed, SMALL, accuracy, ground=ground)
    assert found.reasons == () and list(found.timings.rounds) == ["flashgen", "bfloat16", "mine"]
    errors = found.about["errors"]
    assert 0 < errors["flashgen"]["best"] < 0.05
    # P of the peer is not rounded: the error is that of o in bfloat16.
    assert 0 < errors["mine"]["rms"] < 0.2 * errors["mine"]["best"]
    assert found.flops == 2 * 2 * 64 * 2 * 160 * 161 // 2
    results["factor"] = 1.2
    (reason,) = measure(fp8.speed, SMALL, accuracy).reasons
    assert "times that of the best" in reason


def test_errors_over_the_length_and_on_peaked_rows(results):
    long = functools.partial(fp8.long, 300, 1.0, "exact", queries=40, head_dim=64)
    assert measure(long).reasons == ()
    peaked = functools.partial(fp8.speed, SMALL, "fast", name="sink")
    assert measure(peaked).reasons == ()
    results["factor"] = 0.9  # what one level loses where V has a mean
    assert measure(long).reasons


def test_outliers_are_told_beside_one_scale(results):
    found = measure(fp8.outliers, cell("full", 64, 256, batch=1, heads=2))
    told = found.about["rms"]
    assert told["flashgen"] > 0 and told["times lower"] == pytest.approx(told["one scale"] / told["flashgen"], rel=1e-3)


def test_other_parts(results):
    found = measure(functools.partial(fp8.quantising, 64, 128, elements=3 * 2048 * 20))
    assert found.reasons == () and found.bytes == 3 * 3 * 2048 * 20
    ms = {name: each[0] for name, each in found.timings.rounds.items()}
    assert ms["the copy's rate"] == 0.75 * ms["copy"]
    turned = measure(functools.partial(fp8.quantising, 64, 128, elements=3 * 2048 * 20, turned=True))
    assert turned.reasons == () and list(turned.timings.rounds) == ["flashgen", "without", "copy", "the copy's rate"]
    assert turned.bytes == found.bytes + 2 * 2 * 20 * 32 * 2  # of q and of k, cos and sin of 20 rows
    of = Functions(name="window", problem=problem(160, batch=1, heads=2, head_dim=64), make=window)
    assert measure(fp8.masked, of, "fast").reasons == ()
    for wide in (False, True):
        decoding = functools.partial(fp8.decoding, 2, 96, heads=4, kv_heads=2, wide=wide)
        found = measure(decoding)
        assert found.reasons == () and found.about["errors"]["flashgen"] < 0.06
    results["factor"] = 1.2
    assert measure(fp8.masked, of, "fast").reasons


def test_rows_of_every_form():
    rows = fp8.SUITE.rows(False)
    assert {row.part for row in rows} >= {*fp8.ERROR_BARS, "peaked", "length", "quantize", "masks", "decode"}
    fast = {row.name: row.bars for row in rows if row.part == "fast"}
    assert fast["fast d128 full s8192 b2 h16"] == {"fa3": 1.2, "fa3_two_levels": 1.25, "cudnn": 0.97, "bfloat16": 1.3}
