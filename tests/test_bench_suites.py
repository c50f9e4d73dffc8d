"""Suites of `flashgen bench` on a CPU: contests are right at small sizes, and the command keeps what it has."""

import dataclasses
import functools
import json

import pytest
import torch
from cli import flashgen
from stub_timer import Stub
from test_bench_serving import GROUND, measure

from flashgen.bench import cells, flex, functions, masks, models, record, sdpa, serving, short, suite
from flashgen.bench.functions import Functions, problem
from flashgen.bench.protocol import Timings, in_time
from flashgen.bench.suite import Contest, Ground, Row, Suite
from flashgen.cli import suite as command
from flashgen.errors import LaunchError

SMALL = problem(160, batch=2, heads=2, head_dim=16)


# -- what a row makes of its contenders


def contest_of(**forms):
    return Contest(forms=forms, wrong=lambda name, found: [f"{name} is wrong"] if found == "wrong" else [])


def refusing():
    raise LaunchError("no such kernel\n  nearest: another")


def failing():
    raise RuntimeError("an illegal access")


def test_a_refusal_is_recorded_and_a_failure_is_wrong():
    found = measure(lambda ground: contest_of(flashgen=refusing, other=lambda: "right"))
    assert found.timings is None and found.reasons == ()
    assert found.absent == {"flashgen": "LaunchError: no such kernel"}
    assert found.as_json()["ratio"] == {} and found.rate() is None
    found = measure(lambda ground: contest_of(flashgen=lambda: "right", refused=refusing, broken=failing))
    assert list(found.timings.rounds) == ["flashgen"]
    assert found.absent.keys() == {"refused", "broken"}
    assert found.reasons == ("broken failed: RuntimeError: an illegal access",)
    found = measure(lambda ground: failing())
    assert found.timings is None and found.reasons == ("it could not be measured: RuntimeError: an illegal access",)
    found = measure(lambda ground: refusing())
    assert found.timings is None and found.reasons == ()


def test_a_row_that_cannot_be_timed_is_wrong_and_the_next_is_measured():
    class Broken(Stub):
        def time(self, calls, *, rounds, until=None):
            failing()

    row = Row(part="p", name="n", make=lambda ground: contest_of(flashgen=lambda: "right"), timer=Broken())
    found = suite.measure(row, GROUND, rounds=7)
    assert found.timings is None and found.reasons == ("it could not be measured: RuntimeError: an illegal access",)


def test_a_peer_that_fails_is_absent_and_one_that_lacks_a_row_is_not_named():
    right = lambda: "right"  # noqa: E731
    made = Contest(
        forms={"flashgen": right},
        peers={"late": lambda: failing, "early": failing, "none": lambda: None, "off": lambda: lambda: "wrong"},
        wrong=lambda name, found: [f"{name} is wrong"] if found == "wrong" else [],
    )
    found = measure(lambda ground: made)
    assert found.absent.keys() == {"late", "early"} and list(found.timings.rounds) == ["flashgen", "off"]
    assert found.reasons == ("off is wrong",)


def test_yardsticks_are_sums_over_contenders():
    timings = Timings(rounds={"flashgen": (6.0, 12.0), "a": (2.0, 4.0), "b": (10.0, 20.0)})
    told = suite.with_sums(timings, {"alone": {"a": 1.0, "b": 0.5}, "lacks": {"c": 1.0}})
    assert told.rounds["alone"] == (7.0, 14.0) and "lacks" not in told.rounds
    row = Row(part="p", name="n", make=None, timer=Stub(), bars={"alone": 0.93, "c": 1.0})
    found = suite.Found(row=row, subject="flashgen", timings=told, reasons=(), absent={}, flops=6 * 10**9)
    assert found.ratio("alone").median == pytest.approx(7 / 6) and found.more_us("alone") == -1500
    assert found.rate() == (pytest.approx(6 / 9), "TFLOP/s")
    assert found.as_json()["bars"] == {"alone": 0.93}


# -- suites


@pytest.mark.parametrize("make, given", [(short.of_forward, "full"), (short.of_backward, "causal")])
def test_short_problems_are_checked(monkeypatch, make, given):
    at = cells.cell(given, 64, 50, batch=1, heads=2)
    entry = "peer" if make is short.of_forward else "backward"

    def peer(cell, q, k, v, *do, factor=1.0):
        attend = torch.nn.functional.scaled_dot_product_attention
        if not do:
            return lambda: factor * attend(q, k, v)
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        return lambda: [factor * x for x in torch.autograd.grad(attend(*leaves, is_causal=True), leaves, do)]

    files = {"mine": {entry: peer}, "off": {entry: functools.partial(peer, factor=1.1)}}
    found = measure(make, at, ground=Ground(device="cpu", files=files))
    assert found.absent == {} and list(found.timings.rounds) == ["flashgen", "mine", "off"]
    assert found.reasons and all("off differs" in reason for reason in found.reasons)
    assert found.flops == (4 if make is short.of_forward else 10) * 64 * 2 * (2500 if given == "full" else 1275)


def test_cudnns_backward_is_left_out_of_graphs_with_the_reason():
    at = cells.cell("causal", 128, 50, batch=1, heads=2)
    found = measure(short.of_backward, at, ground=Ground(device="cpu", names=("cudnn",)))
    assert found.absent == {"cudnn": "LeftOut: its backward makes an illegal access in a CUDA graph at head_dim 128"}


MADE = [*((of.name, of.make) for of in masks.table(False)), *((named.__name__, named) for named in flex.MASKS)]


@pytest.mark.parametrize("name, make", MADE, ids=[name for name, _ in MADE])
def test_masks_mean_what_torch_makes_of_them(monkeypatch, name, make):
    """Through flashgen beside float64, and beside what torch's own mask gives."""
    for constant, value in (("DRAFTS", 8), ("WINDOW", 30), ("WIDTH", 8), ("REACH", 2)):
        monkeypatch.setattr(masks, constant, value)
    for constant, value in (("WINDOW", 30), ("PREFIX", 20), ("BLOCK", 16)):
        monkeypatch.setattr(flex, constant, value)
    at = problem(64, batch=2, heads=2, head_dim=16, keys=96) if name == "trees over a cache" else SMALL
    if name.startswith("blocks"):
        make = functools.partial(masks.blocks, 16)
    of = Functions(name=name, problem=at, make=make)
    entrance = flex.forward if make in flex.MASKS else masks.forward
    found = measure(entrance, of)
    assert found.reasons == () and found.absent == {}
    made = functions.make(of, GROUND)
    if made.mods.mask is not None:
        b, h, q, k = torch.meshgrid(
            *(torch.arange(n) for n in (at.batch, at.heads, at.q_len, at.kv_len)), indexing="ij"
        )
        visible = made.mods.mask(b, h, q, k)
        assert found.flops == 4 * 16 * int(visible.sum()) and 0 < visible.float().mean() < 1


@pytest.mark.parametrize("make", [masks.dilated, masks.flags, flex.alibi])
def test_gradients_of_masks_are_checked(make):
    of = Functions(name="one", problem=SMALL, make=make)
    entrance = flex.both if make is flex.alibi else masks.backward
    found = measure(entrance, of)
    assert found.reasons == () and found.absent == {}
    assert list(found.timings.rounds) == ["flashgen"] + ["ampere"] * (entrance is masks.backward)
    made = functions.make(of, GROUND)
    leaves = [x.detach().requires_grad_() for x in made.tensors[:3]]
    run = functions.gradient(functools.partial(masks.attention, variant=made.variant), leaves, made.tensors.do)
    dq, dk, dv = run()
    assert {reason.partition(":")[0] for reason in made.wrong_gradients((dq, 1.05 * dk, dv))} == {"dk"}


@pytest.mark.parametrize("named", [masks.alibi, masks.bias])
def test_gradients_of_captured_tensors_are_checked(monkeypatch, named):
    found = measure(masks.captured, named, SMALL)
    assert found.reasons == () and found.absent == {} and list(found.timings.rounds) == ["flashgen", "without"]
    made = functions.make(Functions(name="one", problem=SMALL, make=functools.partial(named, True)), GROUND)
    (name,) = made.captured()
    leaves = [x.detach().requires_grad_() for x in made.tensors[:3]]
    attend = functools.partial(masks.attention, variant=made.variant)
    *of_inputs, of_captured = functions.gradient(attend, leaves, made.tensors.do, made.mods.wanted)()
    assert made.wrong_gradients((*of_inputs, of_captured)) == []
    (reason,) = made.wrong_gradients((*of_inputs, of_captured + of_captured.abs().max() / 10))
    assert reason.startswith(f"d{name}: largest error")


@pytest.mark.parametrize("named", [flex.first_call, flex.another_length, flex.another_number, flex.another_content])
def test_calls_that_differ_from_the_last_are_right(named):
    found = measure(named, problem(48, batch=1, heads=2, head_dim=16))
    assert found.reasons == () and found.absent == {}


@pytest.mark.parametrize("make", [sdpa.forward, sdpa.backward])
@pytest.mark.parametrize("name", sdpa.MASKS)
def test_masks_that_are_tensors_are_judged(make, name):
    """Also where only one row is not what it should be."""
    at, ground = problem(40, batch=2, heads=2, head_dim=16), Ground(device="cpu", names=tuple(sdpa.BACKENDS))
    ready = make(name, at, ground)
    found = ready.forms["flashgen"]()
    assert ready.wrong("flashgen", found) == [] and ready.wrong("cudnn", found) == []
    first = found if make is sdpa.forward else found[0]
    first[-1, -1, 30] += 1.0
    assert ready.wrong("flashgen", found)
    lacking = [peer for peer, build in ready.peers.items() if build() is None]
    assert lacking == (["cudnn"] if name == "float32 bias" else [])


def test_the_share_of_summaries():
    told = masks.shares({"attention_summaries": 2.0, "attention_forward": 98.0})
    assert told["summaries_us"] == 2.0 and told["summaries_share"] == 0.02
    told = masks.shares({"attention_summaries": 2.0, "attention_order": 3.0, "attention_forward": 95.0})
    assert told["summaries_us"] == 5.0 and told["summaries_share"] == 0.05
    assert masks.shares({}) == {"kernels": "the profiler saw no kernel"}


@pytest.mark.parametrize("name", command.SUITES)
def test_rows_have_names_of_their_own(name):
    made = command.load(name)
    assert made.name == name and name in command.WHAT
    for backward in (False, True)[: 1 + made.backward]:
        names = [str(row) for row in made.rows(backward)]
        assert names and len(set(names)) == len(names)


# -- the command


def rows_of(*names, fails=()):
    def make(name, ground):
        return contest_of(flashgen=(lambda: "wrong") if name in fails else (lambda: "right"), other=lambda: "right")

    return [
        Row(part=name.split()[0], name=name, make=functools.partial(make, name), timer=Stub(), bars={"other": 3.0})
        for name in names
    ]


@pytest.fixture
def made_up(monkeypatch):
    """A suite of rows that take no time, on a GPU that is not there."""

    def install(*rows):
        made = Suite(
            name="serving", doc="made up", rows=lambda _: rows, peers=("cudnn",), entries=("decode",), minutes=1
        )
        monkeypatch.setattr(serving, "SUITE", made)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(suite, "_give_back", lambda device: None)
    monkeypatch.setattr(record, "environment", lambda: {"gpu": {"name": "A GPU"}, "versions": {}})
    return install


def test_the_command_records_every_row(made_up, tmp_path):
    made_up(*rows_of("a 1", "a 2", "b 1"))
    ran = flashgen("bench", "serving", "--folder", tmp_path)
    assert "other 2.000 [2.00, 2.00] of 3" in ran.out and "a: a 1: 1 ms" in " ".join(ran.err.split())
    read = json.loads((tmp_path / "serving.json").read_text())
    assert [row["cell"] for row in read["cells"]] == ["a 1", "a 2", "b 1"]
    assert read["cells"][0]["ratio"] == {"other": [2.0, 2.0, 2.0]} and "left" not in read["protocol"]
    flashgen("bench", "serving", "--part", "b", "--folder", tmp_path)
    assert [row["cell"] for row in json.loads((tmp_path / "serving_b.json").read_text())["cells"]] == ["b 1"]
    told = json.loads(flashgen("bench", "serving", "--cells", "1", "--folder", tmp_path, "--json").out)
    assert [row["cell"] for row in told["cells"]] == ["a 1", "b 1"] and told["left"] == []


def test_a_wrong_row_ends_with_1_and_the_others_are_measured(made_up, tmp_path):
    made_up(*rows_of("a 1", "a 2", fails=("a 1",)))
    ran = flashgen("bench", "serving", "--folder", tmp_path, code=1)
    assert "a: a 1: flashgen is wrong" in ran.err
    assert len(json.loads((tmp_path / "serving.json").read_text())["cells"]) == 2


def test_a_run_that_is_cut_off_leaves_what_it_has(made_up, tmp_path):
    def cut(ground):
        raise KeyboardInterrupt

    one, two = rows_of("a 1", "a 2")
    made_up(one, Row(part="a", name="cut", make=cut, timer=Stub()), two)
    flashgen("bench", "serving", "--folder", tmp_path, code=None)
    read = json.loads((tmp_path / "serving.json").read_text())
    assert [row["cell"] for row in read["cells"]] == ["a 1"] and read["protocol"]["left"] == ["a: cut", "a: a 2"]


def test_a_budget_leaves_rows_and_names_them(made_up, tmp_path, monkeypatch):
    rows, now = rows_of("a 1", "a 2", "a 3"), [0.0]

    def slowly(row, ground, **how):
        now[0] += 3.0
        return real(row, ground, **how)

    made_up(*rows)
    real = suite.measure
    monkeypatch.setattr(suite, "measure", slowly)
    monkeypatch.setattr(command.time, "monotonic", lambda: now[0])
    ran = flashgen("bench", "serving", "--budget", 2, "--folder", tmp_path)
    assert "the budget was spent before 2 rows: a: a 2, a: a 3" in ran.err
    assert json.loads((tmp_path / "serving.json").read_text())["protocol"]["left"] == ["a: a 2", "a: a 3"]


def test_a_row_ends_with_its_budget(made_up, tmp_path, monkeypatch):
    """Peers that are not made yet are left out, and rounds that have not begun."""
    now = [0.0]

    class Slow(Stub):
        def time(self, calls, *, rounds, until=None):
            begun = []
            for index in in_time(rounds, until):
                begun.append(index)
                now[0] += 1.5
            return Timings(rounds={name: (1.0,) * len(begun) for name in calls})

    def peer(seconds):
        now[0] += seconds
        return lambda: "right"

    peers = {"quick": lambda: peer(0.0), "slow": lambda: peer(3.0), "late": lambda: peer(0.0)}
    made = Contest(forms={"flashgen": lambda: "right"}, peers=peers, wrong=lambda name, found: [])
    made_up(Row(part="a", name="one", make=lambda ground: made, timer=Slow()))
    monkeypatch.setattr(command.time, "monotonic", lambda: now[0])
    for budget, rounds, absent in ((2, 1, {"late"}), (6, 3, set()), (90, 8, set())):
        now[0] = 0.0
        ran = flashgen("bench", "serving", "--budget", budget, "--folder", tmp_path)
        (read,) = json.loads((tmp_path / "serving.json").read_text())["cells"]
        assert {len(each) for each in read["ms"].values()} == {rounds}
        assert read["absent"] == dict.fromkeys(absent, suite.SPENT)
        assert (f"a: one: {rounds} of 7 rounds, as the budget was spent" in ran.err) == (rounds < 7)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["serving", "--part", "meals"], "no part 'meals'\n  nearest: decode, pages"),
        (["serving", "--cells", "b7"], "no cell's name contains 'b7'"),
        (["serving", "--backward"], "flashgen bench serving has no --backward"),
        (["serving", "--peers", "flex"], "has no peer 'flex'\n  nearest: cudnn, fa2"),
        (["serving", "--draws", "3"], "flashgen bench serving takes no --draws: that is of data"),
        (["hopper", "--part", "decode"], "flashgen bench hopper takes no --part"),
        (["data", "--budget", "60"], "flashgen bench data takes no --budget"),
    ],
)
def test_refusals(args, message):
    assert message in flashgen("bench", *args, code=2).err


def test_a_peers_file_needs_one_of_the_functions(tmp_path):
    peer = tmp_path / "peer.py"
    peer.write_text("def peer(*given):\n    return None\n")
    told = flashgen("bench", "serving", "--peer-file", f"mine={peer}", code=2).err
    assert "defines none of the functions that this benchmark calls\n  nearest: decode, paged" in told
    assert "calls no function of a peer's file" in flashgen("bench", "flex", "--peer-file", f"mine={peer}", code=2).err


@pytest.mark.parametrize("name", command.SUITES)
def test_without_a_gpu(monkeypatch, name):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "needs a GPU" in flashgen("bench", name, code=2).err


@pytest.mark.parametrize("make", [models.prefill, models.training])
@pytest.mark.parametrize("family, options", [("Llama", {}), ("Mistral", {"sliding_window": 4})])
def test_models_are_compared_with_sdpas(make, family, options):
    pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    of = models.Model(family=family, batch=2, length=11, sizes=sizes, options=options)
    found = measure(models.contest, of, make, ground=Ground(device="cpu", names=("sdpa", "fa2")))
    assert found.reasons == () and list(found.timings.rounds) == ["flashgen", "sdpa"]
    assert "fa2" in found.absent
    ready = models.contest(of, make, Ground(device="cpu"))
    (reason,) = ready.wrong("flashgen", 2 * ready.forms["flashgen"]())
    assert reason.startswith("flashgen: it differs from sdpa by ")


@pytest.mark.parametrize("make", [models.prefill, models.training])
def test_a_model_whose_scores_are_capped_has_a_reference_and_peers_that_cap_them(make):
    pytest.importorskip("transformers", reason="transformers is not installed")
    (row,) = (row for row in models.SUITE.rows(False) if row.part == make.__name__ and "Gemma2" in row.name)
    of, _ = row.make.args
    sizes = {**of.sizes, "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    options = {**of.options, "sliding_window": 4, "attn_logit_softcapping": 0.5}
    options |= {"initializer_range": 0.2, "query_pre_attn_scalar": 16}  # else scores are too small for any cap
    short = dataclasses.replace(of, batch=2, length=11, sizes={**sizes, "head_dim": 16}, options=options)
    assert (short.reference, short.peers) == ("flex_attention", ("fa2", "flex"))
    right = dataclasses.replace(short, reference="eager")  # flex_attention compiles for minutes on a CPU
    ready = models.contest(right, make, Ground(device="cpu", names=("sdpa", "fa2")))
    assert list(ready.peers) == ["fa2"]
    found = ready.forms["flashgen"]()
    assert ready.wrong("flashgen", found) == []
    uncapped = dataclasses.replace(right, options={**options, "attn_logit_softcapping": None})
    other = models.contest(uncapped, make, Ground(device="cpu")).forms["flashgen"]()
    assert not torch.equal(found, other), "the cap is seen"


def test_rows_of_models_are_long_and_say_what_they_must_reach():
    rows = models.SUITE.rows(False)
    bars = [(row.part, row.name.split()[0], dict(row.bars)) for row in rows]
    usual = [("Llama", {"sdpa": 1.0, "fa2": 1.0}), ("Mistral", {"flex": 1.3}), ("Gemma2", {"flex": 1.3})]
    assert bars == [(part, *each) for part in ("prefill", "training") for each in usual]
    tokens = {row.part: row.make.args[0].batch * row.make.args[0].length for row in rows}
    assert tokens == {"prefill": 2 * 16_384, "training": 16_384}
