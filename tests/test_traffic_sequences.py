"""Predicted traffic of sequences with lengths of their own: what the walk and the emitted kernel count, to the byte."""

import json
import re

import numpy as np
import pytest
from cli import flashgen
from padded import batch
from split import split_batch
from test_padded import walked

import flashgen as fg
from flashgen.errors import PlanError
from flashgen.lang.load import load_spec, shipped
from flashgen.planning.layout import AT_END, Varlen
from flashgen.planning.planner import backward_menu
from flashgen.planning.traffic import predict
from flashgen.planning.traffic_sequences import OwnLengths, own_lengths
from flashgen.runtime import tiles

PADDED = {"q_offset": "end", "q_lengths": (100, 33), "kv_lengths": (130, 211)}
VARLEN = {"layout": Varlen(), "q_lengths": (100, 33, 0, 64), "kv_lengths": (130, 33, 20, 0), "poisoned": 2}
LAYOUTS = {"padded": PADDED, "varlen": VARLEN}

#: Masks that have summaries in other layouts.
SUMMARISED = ("rotated", "key_padding", "global_flags")


def predicted(w):
    own = [OwnLengths(q_rows=x.q_rows, kv_len=x.kv_len, q_offset=x.q_offset) for x in w.sequences]
    return predict(w.plan, w.problem, w.case, sequences=own)


def check(w):
    """Tiles, pairs and bytes are those of the walk; both, as there may be keys that are NaN, without its arithmetic."""
    found = predicted(w)
    with np.errstate(all="ignore"):
        counted = walked(w).traffic
    told = found.tiles
    assert (told.total, told.empty, told.partial, told.full) == (
        *(counted.total, counted.empty, counted.partial, counted.full),
    )
    assert (told.visited_elements, told.visible) == (counted.elements, counted.visible)
    assert (found.hbm.read_bytes, found.hbm.write_bytes) == (counted.read_bytes, counted.write_bytes)
    return found


@pytest.mark.slow
@pytest.mark.sampled(spec=("full", "causal_bottom_right", "document", "blocks", "padding", "prefix_lm", "rotated"))
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@pytest.mark.parametrize("spec", [*sorted(shipped()), *SUMMARISED])
def test_the_prediction_is_what_the_walk_counts(spec, layout):
    check(batch(spec, "ampere", **LAYOUTS[layout]))


@pytest.mark.slow
@pytest.mark.sampled("padded")
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_the_prediction_is_what_the_kernel_moves(layout):
    w = batch("causal", "ampere", **LAYOUTS[layout])
    found, report = predicted(w).hbm, w.run().report
    assert sum(report.bytes(buffer=name) for name in ("q", "k", "v")) == found.read_bytes
    assert sum(report.bytes(buffer=name) for name in ("o", "lse")) == found.write_bytes


def test_sequences_that_a_mask_tells_apart_by_their_number():
    check(batch(fg.variant(mask=lambda b, h, q, k: (k <= q + 64 * b) & (h * 32 <= k)), "ampere", **PADDED))


def test_lengths():
    assert own_lengths(2, 5, 9, None, None) == (OwnLengths(q_rows=5, kv_len=9),) * 2
    found = own_lengths(None, None, None, (1, 0), (7, 30), AT_END)
    assert [(x.q_offset, x.q_len) for x in found] == [(6, 7), (30, 30)]
    assert [x.kv_len for x in own_lengths(None, None, None, (1, 4), None)] == [4, 4]
    assert [x.q_rows for x in own_lengths(None, None, None, None, (1, 4))] == [4, 4]
    assert [x.kv_len for x in own_lengths(2, 4, 9, (1, 4), None)] == [9, 9]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            (None, None, None, (1, 0), (7,)),
            "names 2 sequences and kv_lengths 1: one number for each in both\n  nearest: 1 number",
        ),
        ((None, None, None, (8,), (7,), AT_END), "sequence 0 has 8 queries and 7 keys: at the end"),
        ((None, None, None, (1 << 24,), None), "lengths are 0 to 2"),
        ((None, None, None, (), None), "q_lengths is empty: it has a number for each sequence"),
        (
            (None, 100, None, (3, 4), (5, 6)),
            "seqlen is 100 and the longest of q_lengths 4\n  nearest: seqlen 4",
        ),
        ((None, None, 7, (3, 4), (5, 6)), "kv_seqlen is 7 and the longest of kv_lengths 6"),
        ((7, None, None, (3, 4), (5, 6)), "batch is 7 and q_lengths names 2 sequences\n  nearest: batch 2, or none"),
    ],
)
def test_lengths_that_contradict(given, said):
    with pytest.raises(PlanError, match=re.escape(said)):
        own_lengths(*given)


def test_of_a_backward_nothing_is_predicted():
    w = batch("causal", "ampere", **PADDED)
    plan = backward_menu(w.variant, "sm_90a", "bfloat16", 64, layout=w.plan.layout).plans[0]
    with pytest.raises(PlanError, match="predicted for sequences of one length, and the plan's layout is padded"):
        predict(plan, w.problem, w.case, sequences=[OwnLengths(q_rows=1, kv_len=1)])


def test_decode_reads_keys_once_and_no_more_than_there_are():
    lengths = (1000, 37, 4096)
    given = ["--q-lengths", "1,1,1", "--kv-lengths", ",".join(map(str, lengths)), "--q-offset", "end"]
    sizes = ["--heads", "8", "--kv-heads", "2", "--head-dim", "128", "--arch", "sm_90a"]
    done = flashgen("plan", "causal", "--layout", "padded", *given, *sizes, "--kv-splits", "1", "--json")
    found = json.loads(done.out)
    assert found["layout"] == "padded"
    assert [own["q_offset"] for own in found["sequences"]] == [999, 36, 4095]
    of_pack = 8 // 2 // found["pack"]
    columns = 2 * 128 * 2
    assert found["hbm"]["read_bytes"] == 3 * 8 * 128 * 2 + of_pack * 2 * sum(lengths) * columns
    assert found["hbm"]["write_bytes"] == 3 * 8 * (128 * 2 + 4)
    text = flashgen("plan", "causal", "--layout", "varlen", *given, *sizes).out
    assert "varlen: 3 of 1 query, 3 in all; 37 to 4096 keys, 5133 in all" in text


def test_decode_from_pages_whose_keys_are_split():
    lengths = (1000, 37, 4096)
    given = ["--q-lengths", "1,1,1", "--kv-lengths", ",".join(map(str, lengths)), "--q-offset", "end"]
    given += ["--layout", "paged_varlen", "--page-size", "64"]
    sizes = ["--heads", "8", "--kv-heads", "8", "--head-dim", "128", "--arch", "sm_90a"]
    found = json.loads(flashgen("plan", "causal", *given, *sizes, "--kv-splits", "7", "--json").out)
    assert (found["layout"], found["page_size"], found["pages"]) == ("paged_varlen", 64, 16 + 1 + 64)
    assert (found["kv_splits"], found["kv_splits_why"]) == (7, "as asked")
    visits, combines = found["kernels"]
    of_keys = [-(-n // found["tile"]["kv"]) for n in lengths]
    rows = 8 * sum(min(7, n) for n in of_keys)  # of parts that see a key
    parts = rows * 128 * 4 + 3 * 8 * 7 * 8
    assert visits["read_bytes"] == rows * 128 * 2 + 8 * sum(lengths) * 2 * 128 * 2 + 4 * found["pages"]
    assert visits["write_bytes"] == parts
    assert combines["read_bytes"] == 3 * 8 * 7 * (128 * 4 + 8)  # so few are all read
    assert combines["write_bytes"] == 3 * 8 * (128 * 2 + 4)
    text = flashgen("plan", "causal", *given, *sizes).out
    assert "37 to 4096 keys, 5133 in all; 81 pages of 64 rows" in text and "attention_combine" in text
    assert "tiles of queries on 132 SMs" in text


def test_a_window_reads_entries_of_its_own_keys_alone():
    given = ["--layout", "paged", "--kv-lengths", "5000", "--q-lengths", "1", "--q-offset", "end", "--kv-splits", "1"]
    sizes = ["--heads", "4", "--head-dim", "64", "--arch", "sm_80", "--json"]
    for spec, own, window in (("sliding_window", ["--param", "window=100"], 100), ("full", [], 5000)):
        found = json.loads(flashgen("plan", spec, *given, *sizes, *own).out)
        tile = found["tile"]["kv"]
        first = (5000 - window) // tile * tile
        of_table = found["hbm"]["read_bytes"] - 4 * 64 * 2 - 4 * (5000 - first) * 2 * 64 * 2
        assert of_table == 4 * (found["pages"] - first // 16)


def test_pages_that_a_pipeline_cannot_load():
    given = ["full", "--arch", "sm_90a", "--layout", "paged", "--kv-lengths", "70"]
    found = json.loads(flashgen("plan", *given, "--page-size", "5", "--json").out)
    assert found["pipeline"] == "ampere" and "pages of 5 rows are no boxes" in found["passed_over"]
    plan = fg.plan("full", arch="sm_90a", layout="paged", page_size=5)
    assert (plan.pipeline, fg.plan("full", arch="sm_90a", layout="paged").pipeline) == ("ampere", "hopper")
    with pytest.raises(PlanError, match=r"pipeline hopper: .*pages of 5 rows.*\n  nearest: pages of 16 rows, or"):
        fg.plan("full", arch="sm_90a", layout="paged", page_size=5, pipeline="hopper")
    with pytest.raises(PlanError, match="page_size is of keys that lie in pages, and the layout is padded"):
        fg.plan("full", arch="sm_90a", layout="padded", page_size=16)
    with pytest.raises(PlanError, match="pages have 1 to 2"):
        fg.plan("full", arch="sm_90a", layout="paged", page_size=0)


def test_split_keys_of_a_batch():
    """The walk's bytes, where parts of keys are added."""
    w = split_batch("causal", "ampere", **PADDED)
    own = [OwnLengths(q_rows=x.q_rows, kv_len=x.kv_len, q_offset=x.q_offset) for x in w.sequences]
    told = predict(w.plan, w.problem, w.case, sequences=own, splits=3).hbm
    run = {"scale": w.scale, "dtype": "bfloat16", "sequences": tuple(x.walked(b) for b, x in enumerate(w.sequences))}
    counted = tiles.walk(w.plan, w.facts, w.case, *w.qkv, **run, kv_splits=3).traffic
    assert counted.parts and (told.read_bytes, told.write_bytes) == (counted.read_bytes, counted.write_bytes)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--page-size", "16"], "--page-size is of keys that lie in pages"),
        (["--kv-lengths", "5"], "--kv-lengths is of sequences with lengths of their own"),
        (["--layout", "varlen", "--q-lengths", "5,x"], "--q-lengths: 'x' is no whole number"),
        (["--layout", "varlen", "--q-lengths", "5", "--formulas"], "formulas are those of sequences of one length"),
        (["--layout", "varlen", "--backward"], "a backward's traffic is predicted for sequences of one length"),
    ],
)
def test_what_is_refused(given, message):
    done = flashgen("plan", "full", "--arch", "sm_90a", *given, code=2)
    assert message in " ".join(done.err.split())


def test_the_plan_of_a_batch():
    plan = fg.plan("causal", layout="varlen", q_lengths=[1, 1], kv_lengths=[100, 9000], arch="sm_90a", head_dim=128)
    assert plan.layout == Varlen() and plan.pass_name == "forward"
    variant = load_spec("causal")
    for given, cure in ((["1", 1], r"\[17, 8\]"), (np.array([1, 1]), r"q_lengths.tolist\(\)"), (7, r"\[17, 8\]")):
        with pytest.raises(
            PlanError, match=f"q_lengths is .*: it is a list of whole numbers\n  nearest: q_lengths={cure}"
        ):
            fg.plan(variant, layout="varlen", q_lengths=given, kv_lengths=[1, 1], arch="sm_90a")
    with pytest.raises(PlanError, match="q_lengths are of sequences with lengths of their own"):
        fg.plan(variant, q_lengths=[1, 1], arch="sm_90a")
