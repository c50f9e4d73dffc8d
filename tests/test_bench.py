"""The benchmark's arithmetic, records and refusals; the timing itself needs a GPU."""

import contextlib
import itertools
import json
from collections import Counter

import numpy as np
import pytest
import torch
from cli import flashgen
from documents import ROOT
from rich.console import Console

from flashgen.analysis.tiles import Case
from flashgen.bench import backward, forward, record
from flashgen.bench.backward import sample
from flashgen.bench.cells import BACKWARD, FORWARD, TOKENS, WIDTH, cell, dropping
from flashgen.bench.contest import Measured, Setting, difference, join
from flashgen.bench.peers import flex, from_file, has_kernel, same_maths, sdpa
from flashgen.bench.protocol import MIN_ROUNDS, Timings, interleave, rotation, whole_turns
from flashgen.cli import kernels
from flashgen.errors import LaunchError
from flashgen.planning import planner
from flashgen.planning.problem import Problem
from flashgen.runtime.gradients import baseline_gradients
from flashgen.runtime.reference import Pairs


def test_a_ratio_compares_within_rounds_only():
    # The clock halves between rounds; within a round the peer always takes 1.5 times as long.
    timings = Timings(rounds={"flashgen": (1.0, 2.0, 4.0), "peer": (1.5, 3.0, 6.0)})
    ratio = timings.ratio("flashgen", "peer")
    assert (ratio.median, ratio.low, ratio.high) == (1.5, 1.5, 1.5)
    assert timings.median_ms("flashgen") == 2.0
    assert str(ratio) == "1.500 [1.500, 1.500]"


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8])
def test_every_contender_takes_every_place_and_follows_every_other_as_often(count):
    names = [f"n{i}" for i in range(count)]
    rounds = [rotation(names, i) for i in range(2 * count)]
    for order in rounds:
        assert sorted(order) == names
    for place in range(count):
        assert Counter(order[place] for order in rounds) == dict.fromkeys(names, 2)
    behind = Counter(pair for order in rounds for pair in itertools.pairwise(order))
    assert set(behind.values()) <= {2} and len(behind) == count * (count - 1)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6])
def test_rounds_are_whole_turns(count):
    names = [f"n{i}" for i in range(count)]
    rounds = whole_turns(MIN_ROUNDS, count)
    assert MIN_ROUNDS <= rounds < MIN_ROUNDS + 2 * count
    orders = [rotation(names, i) for i in range(rounds)]
    for place in range(count):
        assert len(set(Counter(order[place] for order in orders).values())) == 1
    behind = Counter(pair for order in orders for pair in itertools.pairwise(order))
    assert len(set(behind.values())) <= 1 and len(behind) == count * (count - 1)


def test_few_rounds_are_refused():
    with pytest.raises(ValueError, match=f"at least {MIN_ROUNDS}"):
        interleave({"a": lambda: None}, rounds=MIN_ROUNDS - 1)


def test_the_main_table_keeps_tokens_and_width():
    plain = (("full",), ("causal",))
    forward, backward = ([c for c in table["ampere"] if c.specs in plain] for table in (FORWARD, BACKWARD))
    assert (len(forward), len(backward)) == (36, 26)
    for c in (*forward, *backward):
        assert c.problem.batch * c.problem.q_len == TOKENS
        assert c.problem.heads * c.problem.head_dim == WIDTH
    for table in (FORWARD, BACKWARD):
        names = [str(c) for c in table["hopper"]]
        assert len(set(names)) == len(names)


def test_a_cell_names_its_variant():
    c = cell("causal+softcap", 128, 8192, batch=2, heads=16, cap=30.0)
    assert str(c) == "d128 causal+softcap cap 30 s8192 b2 h16"
    few = cell("full", 128, 4, batch=16, heads=32, kv_heads=8, kv_len=8192)
    assert str(few) == "d128 full s4:8192 b16 h32:8"
    assert {p.name for p in c.variant().params} == {"cap"}
    assert c.variant().mask is not None
    assert c.variant().score_node is not None


def test_a_record_is_read_back_with_its_machine(tmp_path):
    path = tmp_path / "deep" / "run.json"
    record.write(path, command="flashgen bench ampere", protocol={"rounds": 7}, cells=[{"cell": "a"}, {"cell": "b"}])
    read = json.loads(path.read_text())
    assert [c["cell"] for c in read["cells"]] == ["a", "b"]
    assert (
        read["versions"]["torch"] == torch.__version__.split("+")[0] or read["versions"]["torch"] == torch.__version__
    )
    assert {"command", "protocol", "gpu", "commit", "modified"} <= set(read)
    assert path.read_text().count("\n    {") == 2  # a cell a line
    assert list(path.parent.iterdir()) == [path]


def test_sdpa_only_stands_beside_masks_it_has():
    q = torch.randn(1, 2, 8, 64)
    assert sdpa("fa2", cell("sliding_window", 64, 512, window=64), q, q, q, {}) is None
    assert sdpa("fa2", cell("causal+document", 64, 512), q, q, q, {}) is None
    assert callable(sdpa("cudnn", cell("causal", 64, 512), q, q, q, {}))
    assert flex(cell("butterfly", 64, 512), q, q, q, {}) is None


def test_a_yardstick_is_not_compared():
    capped = cell("causal+softcap", 64, 512, cap=30.0)
    assert callable(sdpa("cudnn", capped, *3 * [torch.randn(1, 2, 8, 64)], {}))
    assert not same_maths("cudnn", capped) and same_maths("flex", capped) and same_maths("of a file", capped)
    assert has_kernel(cell("causal", 64, 512)) and same_maths("cudnn", cell("causal", 64, 512))


def test_peers_join_refuse_or_differ():
    x = torch.ones(4)
    contenders = {"flashgen": lambda: x}

    def failing():
        raise RuntimeError("no kernel\nfor this")

    builders = {
        "same": lambda: lambda: x + 1e-3,
        "other": lambda: lambda: 2 * x,
        "none": lambda: None,
        "late": lambda: failing,
        "early": failing,
    }
    absent, reasons = join(contenders, builders, lambda name, theirs: difference(name, theirs, x))
    assert list(contenders) == ["flashgen", "same", "other"]
    assert absent == {name: "RuntimeError: no kernel" for name in ("late", "early")}
    assert reasons == ["other differs by 1"]
    with pytest.raises(LaunchError):
        join({}, {"broken": lambda: flashgen_error()}, lambda *_: [])


def flashgen_error():
    raise LaunchError("ours")


@pytest.mark.parametrize(
    ("shape", "scores", "batches", "kv_heads"),
    [
        (dict(batch=2, heads=4, kv_heads=4, q_len=10, kv_len=10), 1000, (0, 1), (0, 1, 2, 3)),
        (dict(batch=3, heads=8, kv_heads=4, q_len=10, kv_len=10), 1200, (0, 1, 2), (0, 3)),
        (dict(batch=1, heads=9, kv_heads=9, q_len=10, kv_len=10), 300, (0,), (0, 4, 8)),
        (dict(batch=5, heads=2, kv_heads=2, q_len=10, kv_len=10), 1, (0,), (0,)),
    ],
)
def test_what_is_compared_with_float64(shape, scores, batches, kv_heads):
    pairs = sample(Problem(head_dim=16, v_head_dim=16, **shape), scores)
    assert (pairs.batches, pairs.kv_heads) == (batches, kv_heads)


@pytest.mark.parametrize(
    "c",
    [
        cell("causal", 64, 40, batch=2, heads=4, kv_heads=2),
        cell("alibi", 64, 40, batch=1, heads=4),
        cell("causal+document", 64, 300, batch=2, heads=2),
    ],
    ids=str,
)
def test_gradients_are_compared_with_float64(c):
    """What is right passes on any part of the problem; one wrong head or row of it does not."""
    p, g = c.problem, torch.Generator().manual_seed(0)
    variant = c.variant()
    case = Case(
        sizes=p.sizes(),
        params=variant.values(dict(c.params)),
        tensors={t.name: np.asarray(t.example(p, np.random.default_rng(0))) for t in variant.tensors},
    )
    shapes = ((p.heads, 64), (p.kv_heads, 64), (p.kv_heads, 64), (p.heads, 64))
    tensors = [torch.randn(p.batch, heads, p.q_len, n, generator=g).bfloat16() for heads, n in shapes]
    q, k, v, do = tensors
    at = Setting(cell=c, variant=variant, inputs={}, case=case, q=q, k=k, v=v, do=do)
    right = baseline_gradients(variant.bind(), case, *tensors, scale=at.scale)[:3]
    some = Pairs(batches=(p.batch - 1,), kv_heads=(0, p.kv_heads - 1))
    for pairs in (sample(p, 1 << 29), some):
        assert backward.check(at, {"": right}, pairs) == []
        for i, name in enumerate(backward.OF_INPUTS):
            wrong = [x.clone() for x in right]
            wrong[i][-1, -1, 7] *= 1.5
            reasons = backward.check(at, {"": right, "other ": tuple(wrong)}, pairs)
            assert reasons and all(reason.startswith(f"other {name}: ") for reason in reasons)


def test_other_forms_are_given_as_a_part_of_the_speed():
    rounds = {"flashgen": (1.0, 2.0, 4.0), "peer": (1.5, 3.0, 6.0), "deterministic": (1.25, 2.5, 5.0)}
    c = cell("causal", 64, 512)
    plan = planner.menu(c.variant(), "sm_80", "bfloat16", 64).plans[0]
    one = Measured(
        cell=c,
        timings=Timings(rounds=rounds),
        flops=4 * 10**9,
        plan=plan,
        reasons=(),
        absent={},
        own=("deterministic",),
        extra={"flashgen": 4096},
        checked="all of it",
    )
    assert (one.ratio("peer").median, one.ratio("deterministic").median) == (1.5, 0.8)
    assert one.tflops("flashgen") == 2.0
    row = one.as_json()
    assert row["pipeline"] == "ampere" and row["extra_bytes"] == {"flashgen": 4096}
    assert set(row["ratio"]) == {"peer", "deterministic"}
    console = Console(width=200, highlight=False)
    with console.capture() as captured:
        console.print(kernels.table("backward", [one], ["peer", "absent"], 0.99))
    assert "each peer [low, high over rounds]; speed of deterministic beside it" in " ".join(captured.get().split())
    line = next(line for line in captured.get().splitlines() if "d64 causal" in line)
    assert [part.strip() for part in line.strip("│").split("│")][3:] == [
        "4 KiB",
        "1.500 [1.50, 1.50]",
        "-",
        "0.800 [0.80, 0.80]",
    ]


@pytest.mark.parametrize("entry", [forward.ENTRY, backward.ENTRY])
def test_a_peer_file(tmp_path, entry):
    good, bad = tmp_path / "good.py", tmp_path / "bad.py"
    good.write_text(f"def {entry}(cell, *tensors):\n    return lambda: tensors[0]\n")
    bad.write_text("")
    assert from_file(good, entry)(None, 1, 2, 3)() == 1
    with pytest.raises(LaunchError, match=f"defines no function {entry}"):
        from_file(bad, entry)
    with pytest.raises(LaunchError, match="cannot be read"):
        from_file(tmp_path / "absent.py", entry)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["volta"], "no benchmark of pipeline 'volta'"),
        (["ampere", "--peers", "fa9"], "no peer 'fa9'"),
        (["ampere", "--cells", "d7"], "no cell's name contains 'd7'"),
        (["ampere", "--backward", "--cells", "d256 causal s512"], "no cell's name contains 'd256 causal s512'"),
    ],
)
def test_refusals(args, message):
    ran = flashgen("bench", *args, code=2)
    assert message in ran.err
    assert "nearest" in ran.err or "cells:" in ran.err


def test_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for options in ([], ["--backward"]):
        assert "needs a GPU" in flashgen("bench", "ampere", *options, code=2).err


@pytest.mark.slow
@pytest.mark.parametrize("bench", [forward, backward], ids=["forward", "backward"])
def test_dropout_is_checked_with_the_pairs_that_it_drops(monkeypatch, bench):
    """Peers drop others and are not compared; the same call without dropout stands beside it."""

    def clock(contenders, *, rounds):
        for call in contenders.values():
            call()
        return Timings(rounds={name: (1.0,) * rounds for name in contenders})

    asked = {"rounds": MIN_ROUNDS, "names": ("cudnn",), "files": {"mine": None}, "device": "cpu", "time": clock}
    monkeypatch.setattr("flashgen.bench.peers.backend", lambda name: contextlib.nullcontext())
    c = cell("causal", 64, 96, batch=1, heads=2)
    one = bench.measure(c, "ampere", dropout=0.25, seed=3, **asked)
    assert one.reasons == () and "no dropout" in one.own and list(one.timings.rounds)[-1] == "cudnn"
    right = bench.attention

    def other_pairs(*given, **named):
        return right(*given, **{**named, **({"seed": 4} if "seed" in named else {})})

    monkeypatch.setattr(bench, "attention", other_pairs)
    assert bench.measure(c, "ampere", dropout=0.25, seed=3, **asked).reasons


def test_cells_of_dropout():
    chosen = [str(c) for c in dropping(FORWARD["hopper"])]
    assert len(chosen) == 12 and "d128 causal s8192 b2 h16" in chosen


@pytest.mark.nightly(sibling="test_a_contender_elsewhere_is_asked_for_its_slots")
def test_another_checkouts_kernels_are_timed_between_ours(tmp_path):
    """A process of its own with the package of another folder: here with this one's."""
    c = cell("causal", 64, 64, batch=1, heads=1)
    asked = {"rounds": MIN_ROUNDS, "names": (), "files": {}, "device": "cpu"}
    slots = []

    def clock(contenders, *, rounds):
        slots.extend(contenders["before"].slot(1.0) for _ in range(2)) if "before" in contenders else None
        return Timings(rounds={name: (2.0,) * rounds for name in contenders})

    one = forward.measure(c, "ampere", before=ROOT, time=clock, **asked)
    assert one.reasons == () and list(one.timings.rounds) == ["flashgen", "before"]
    assert len(slots) == 2 and all(ms > 0 for ms in slots) and one.as_json()["ratio"]["before"] == [1.0] * 3
    package = tmp_path / "flashgen"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('an older torch')\n")
    broken = backward.measure(c, "ampere", before=tmp_path, time=clock, **asked)
    assert "before" not in broken.timings.rounds and "an older torch" in broken.absent["before"]


def test_a_contender_elsewhere_is_asked_for_its_slots():
    class Elsewhere:
        def slot(self, slot_ms):
            return slot_ms / 4

    assert interleave({"a": Elsewhere()}, rounds=MIN_ROUNDS, slot_ms=8.0).rounds == {"a": (2.0,) * MIN_ROUNDS}


def test_a_folder_without_a_checkout_is_refused(tmp_path):
    told = flashgen("bench", "ampere", "--against", tmp_path, code=2).err
    assert "is no checkout of flashgen" in told and "nearest: git worktree add" in told
