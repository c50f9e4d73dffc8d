"""The benchmark's arithmetic, records and refusals; the timing itself needs a GPU."""

import json

import pytest
import torch
from cli import flashgen

from flashgen.bench import record
from flashgen.bench.cells import FORWARD, TOKENS, WIDTH, cell
from flashgen.bench.peers import flex, from_file, sdpa
from flashgen.bench.protocol import MIN_ROUNDS, Timings, interleave, rotation
from flashgen.errors import LaunchError


def test_a_ratio_compares_within_rounds_only():
    # The clock halves between rounds; within a round the peer always takes 1.5 times as long.
    timings = Timings(rounds={"flashgen": (1.0, 2.0, 4.0), "peer": (1.5, 3.0, 6.0)})
    ratio = timings.ratio("flashgen", "peer")
    assert (ratio.median, ratio.low, ratio.high) == (1.5, 1.5, 1.5)
    assert timings.median_ms("flashgen") == 2.0
    assert str(ratio) == "1.500 [1.500, 1.500]"


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_every_contender_takes_every_place(count):
    names = [f"n{i}" for i in range(count)]
    rounds = [rotation(names, i) for i in range(2 * count)]
    for order in rounds:
        assert sorted(order) == names
    for place in range(count):
        assert {order[place] for order in rounds} == set(names)


def test_few_rounds_are_refused():
    with pytest.raises(ValueError, match=f"at least {MIN_ROUNDS}"):
        interleave({"a": lambda: None}, rounds=MIN_ROUNDS - 1)


def test_the_main_table_keeps_tokens_and_width():
    table = [c for c in FORWARD["ampere"] if c.specs in (("full",), ("causal",))]
    assert len(table) == 36
    for c in table:
        assert c.problem.batch * c.problem.q_len == TOKENS
        assert c.problem.heads * c.problem.head_dim == WIDTH
    names = [str(c) for c in FORWARD["hopper"]]
    assert len(set(names)) == len(names)


def test_a_cell_names_its_variant():
    c = cell("causal+softcap", 128, 8192, batch=2, heads=16, cap=30.0)
    assert str(c) == "d128 causal+softcap cap 30 s8192 b2 h16"
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
    assert sdpa("fa2", cell("sliding_window", 64, 512, window=64), q, q, q) is None
    assert callable(sdpa("cudnn", cell("causal", 64, 512), q, q, q))
    assert flex(cell("butterfly", 64, 512), q, q, q, {}) is None


def test_a_peer_file(tmp_path):
    good, bad = tmp_path / "good.py", tmp_path / "bad.py"
    good.write_text("def peer(cell, q, k, v):\n    return lambda: q\n")
    bad.write_text("")
    assert from_file(good)(None, 1, 2, 3)() == 1
    with pytest.raises(LaunchError, match=r"defines no peer\(cell, q, k, v\)"):
        from_file(bad)
    with pytest.raises(LaunchError, match="cannot be read"):
        from_file(tmp_path / "absent.py")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["volta"], "no benchmark of pipeline 'volta'"),
        (["ampere", "--peers", "fa9"], "no peer 'fa9'"),
        (["ampere", "--cells", "d7"], "no cell's name contains 'd7'"),
    ],
)
def test_refusals(args, message):
    ran = flashgen("bench", *args, code=2)
    assert message in ran.err
    assert "nearest" in ran.err or "cells:" in ran.err


def test_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "needs a GPU" in flashgen("bench", "ampere", code=2).err
