"""Tiles of queries that see many keys are taken from a counter when the keys of the one before are loaded."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from emulated_gpu import install
from padded import batch
from ptx_attention import replace, work
from split import split_pages
from test_ops_emulated import causal_window, check, inputs
from test_split_pages import check as in_pages

from flashgen.codegen import emit
from flashgen.interpreter import errors
from flashgen.lang.load import load_spec
from flashgen.ops import memory
from flashgen.ops.attention import attention
from flashgen.planning import planner
from flashgen.planning.layout import Padded, Varlen
from flashgen.planning.members import InTimeScheduler, StaticScheduler

DECODES = {"tile": (64, 128), "batch": 3, "heads": 2, "q_len": 2, "head_dim": 16}

#: Of sequences: many keys, none, few, and no query.
LENGTHS = {"q_lengths": (2, 1, 2, 0, 1), "kv_lengths": (1000, 0, 140, 1000, 930)}


#: The same where two blocks divide the keys.
LONG = {"q_lengths": (2, 1, 0, 1), "kv_lengths": (2100, 0, 2000, 150)}


def decoding(kv_len=1000):
    """Six tiles of queries, for which there are two SMs."""
    return work("full", "hopper", kv_len=kv_len, **DECODES)


@pytest.mark.slow
def test_who_takes_a_tile_changes_no_bit():
    w = decoding()
    assert isinstance(w.plan.specialized.scheduler, InTimeScheduler)
    found = w.run(sms=2, step_limit=4_000_000)
    assert w.wrong(found) == ()
    for one in (w.run(sms=1, step_limit=4_000_000), w.run(sms=4, seed=1, step_limit=4_000_000)):
        assert np.array_equal(one.o, found.o) and np.array_equal(one.lse, found.lse)


@pytest.mark.slow
def test_of_few_keys_each_block_has_its_share():
    w = decoding(kv_len=7 * 128)
    found = w.run(sms=2)
    assert w.wrong(found) == () and found.report.bytes(buffer="counters") == 0
    assert decoding().run(sms=2).report.bytes(buffer="counters") > 0


@pytest.mark.slow
@pytest.mark.parametrize("layout", [Padded(), Varlen()], ids=["padded", "varlen"])
def test_sequences_with_lengths_of_their_own(layout):
    w = batch("full", "hopper", layout=layout, tile=(64, 128), q_len=2, kv_len=1000, head_dim=16, **LENGTHS)
    assert w.plan.specialized.scheduler.in_time
    assert not w.wrong(w.run(sms=2, step_limit=4_000_000))


@pytest.mark.slow
def test_parts_of_keys_in_pages():
    w = split_pages("full", "hopper", 16, tile=(64, 128), q_len=2, kv_len=2100, head_dim=16, **LONG)
    assert w.plan.specialized.scheduler.in_time
    in_pages(w, 2)


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, InTimeScheduler), ({"tile": (128, 128)}, StaticScheduler)],
    ids=["one warpgroup", "two"],
)
def test_whose_tiles_are_taken_in_time(options, expected):
    plan = planner.menu(load_spec("full"), "sm_90a", "bfloat16", 128, **{"tile": (64, 128), **options}).plans[0]
    assert type(plan.specialized.scheduler) is expected
    assert plan.loads_q_ahead, "of few keys the next tile is known"
    assert ("let_draw" in emit(plan)) == (expected is InTimeScheduler)


@pytest.mark.slow
def test_a_loader_that_says_nothing_is_waited_for():
    with pytest.raises(errors.Trap):
        decoding().run(replace("      if (tile == 0 && sees_many(work, p)) let_draw();\n", ""), sms=2)


@pytest.mark.slow
def test_counters_of_launches_in_graphs(monkeypatch):
    """Each launch that is captured has counters which no other has, and leaves them 0 for the next replay; where none
    are left they are cleared in the graph."""
    gpu = install(monkeypatch, (9, 0))
    tensors = inputs(gpu, q_len=200)  # more tiles than SMs
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7, raising=False)
    monkeypatch.setattr(memory, "_PLACES", 2)
    captured, real = [], memory.of_graph
    monkeypatch.setattr(memory, "of_graph", lambda index: captured.append(real(index)) or captured[-1])
    for captures in (False, True, True, True):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda now=captures: now)
        check(attention(*tensors, causal_window, return_lse=True), causal_window, tensors)
    (kept,), places = memory._kept, [counters.data_ptr() - memory._kept[0].data_ptr() for counters in captured]
    assert sorted(places[:2]) == [0, memory._PLACE] and places[2] not in range(kept.nbytes) and not memory._of_graphs[0]
    assert not any(x.as_subclass(torch.Tensor).any() for x in (kept, captured[2]))
    assert not memory._of_streams[0, 7][:2].as_subclass(torch.Tensor).any()
