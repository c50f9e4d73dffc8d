"""The host's part: what a slot and a round are, what fresh processes are asked, and what is recorded."""

import contextlib
import gc
import json

import pytest
import torch
from cli import flashgen

from flashgen.bench import cold, contest, host, record
from flashgen.bench.cells import cell
from flashgen.bench.host import ALLOCATION, Contender, Row, interleave
from flashgen.bench.protocol import MIN_ROUNDS, rotation
from flashgen.errors import LaunchError
from flashgen.ops import memory
from flashgen.runtime import captured


@pytest.mark.slow
def test_a_round_is_a_slot_of_every_contender():
    happened = []

    def contender(name):
        def call():
            assert not gc.isenabled()
            happened.append(name)

        @contextlib.contextmanager
        def around():
            happened.append(f"{name} in")
            yield
            happened.append(f"{name} out")

        return Contender(call=call, around=around)

    us = interleave({"a": contender("a"), "b": contender("b")}, lambda: happened.append("settle"), rounds=4)
    assert gc.isenabled()
    assert set(us) == {"a", "b"} and all(len(values) == 4 and min(values) > 0 for values in us.values())
    slots = [
        [f"{name} in", *host.WARM_CALLS * [name], "settle", *host.CALLS * [name], "settle", f"{name} out"]
        for index in range(4)
        for name in rotation(["a", "b"], index)
    ]
    assert happened == [x for slot in slots for x in slot]


@pytest.mark.slow
def test_fresh_processes_measure_themselves():
    rows = host.processes(1)
    assert [row.what for row in rows] == ["import flashgen", "first plan of a process", "plan"]
    assert all(len(row.us["flashgen"]) == 1 and row.us["flashgen"][0] > 0 for row in rows)


def test_a_process_that_fails_says_why(monkeypatch):
    monkeypatch.setattr(host, "PROCESS", "raise SystemExit('no such thing')")
    with pytest.raises(LaunchError, match="ended with 1: no such thing"):
        host.processes(1)


def test_a_first_call_finds_what_an_earlier_process_left(monkeypatch):
    asked = []

    def process(spec, problem, device, folder):
        asked.append((spec, problem, device, folder))
        assert folder.exists()
        return 1.0, float(len(asked))

    monkeypatch.setattr(cold, "process", process)
    row = host.first_call(9)
    assert row.us == {"flashgen": (2e6, 3e6, 4e6)}  # what the first took is not among them, and three are enough
    assert set(asked) == {("causal", host.CELLS[0].problem, "cuda", asked[0][3])}
    assert not asked[0][3].exists()


@pytest.fixture
def on_a_cpu(monkeypatch):
    """Cells are called on the CPU walk, one call a slot."""
    on_device = captured.on_device
    monkeypatch.setattr(captured, "on_device", lambda variant, arrays, _: on_device(variant, arrays, "cpu"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(memory, "empty_strided", lambda shape, strides, dtype: torch.empty_strided(shape, strides))
    monkeypatch.setattr(host, "CALLS", 1)
    monkeypatch.setattr(host, "WARM_CALLS", 0)

    def draw(p, seed, device="cpu"):
        g = torch.Generator().manual_seed(seed)
        shapes = ((p.heads, p.q_len), (p.kv_heads, p.kv_len), (p.kv_heads, p.kv_len), (p.heads, p.q_len))
        return tuple(torch.randn(p.batch, *shape, p.head_dim, generator=g).to(torch.bfloat16) for shape in shapes)

    monkeypatch.setattr(contest, "draw", draw)


@pytest.mark.slow
def test_both_passes_of_a_cell_are_checked_and_timed_beside_peers(on_a_cpu, monkeypatch):
    forward, both = host.calls(cell("causal", 16, 20, batch=1, heads=2), rounds=MIN_ROUNDS, names=("fa2",))
    assert (forward.what, both.what) == ("forward", "forward + backward")
    assert list(forward.us) == ["flashgen", ALLOCATION, "fa2"] and list(both.us) == ["flashgen", "fa2"]
    assert all(len(values) >= MIN_ROUNDS for row in (forward, both) for values in row.us.values())
    assert forward.reasons == both.reasons == () and forward.absent == both.absent == {}
    assert set(forward.as_json()["ratio"]) == {"fa2"}

    @contextlib.contextmanager
    def refusing(name):
        raise RuntimeError(f"no {name} here")
        yield

    monkeypatch.setattr(host.peers, "backend", refusing)
    forward, both = host.calls(cell("causal", 16, 20, batch=1, heads=2), rounds=MIN_ROUNDS, names=("fa2",))
    assert list(forward.us) == ["flashgen", ALLOCATION] and list(both.us) == ["flashgen"]
    assert forward.absent == both.absent == {"fa2": "RuntimeError: no fa2 here"}


@pytest.mark.slow
def test_calls_that_differ_from_the_one_before(on_a_cpu, monkeypatch):
    """Each in one thing, beside the same call again."""
    from flashgen.ops import attention

    asked = []
    monkeypatch.setattr(host, "LENGTHS", range(3, 20))
    real = attention.attention
    monkeypatch.setattr(attention, "attention", lambda *x, **named: asked.append((x, named)) or real(*x, **named))
    wanted = {"sliding_window": ["a new length", "a new parameter"], "causal+document": ["new content"]}
    for specs, changes in wanted.items():
        params = {"window": 5} if specs == "sliding_window" else {}
        rows = host.changes(cell(specs, 16, 20, batch=1, heads=2, **params), rounds=MIN_ROUNDS)
        for what, row in zip(changes, rows, strict=True):
            assert row.what == what and list(row.us) == ["flashgen", host.REPEATED]
            turns = len(row.us["flashgen"])
            lengths = [[x.shape[2] for x in given[:3]] for given, _ in asked]
            held = [[x.data_ptr() if isinstance(x, torch.Tensor) else x for x in n.values()] for _, n in asked]
            seen, other = (lengths, held) if what == "a new length" else (held, lengths)
            assert len(seen) == 1 + 2 * turns and len(set(map(str, other))) == 1
            # The one again and again, and a first call that is not timed; two copies take turns.
            assert len(set(map(str, seen))) == (3 if what == "new content" else 2 + turns)
            asked.clear()


@pytest.mark.slow
def test_a_peer_of_other_results_is_named(on_a_cpu, monkeypatch):
    monkeypatch.setattr(host.peers, "bare", lambda name: lambda cell, q, k, v, inputs: lambda: 2 * (q * k * v))
    rows = host.calls(cell("causal", 16, 20, batch=1, heads=2), rounds=MIN_ROUNDS, names=("fa2",))
    reasons = [reason for row in rows for reason in row.reasons]
    assert reasons and all("fa2 differs by" in reason for reason in reasons)
    assert {reason.split(":")[0] for reason in reasons if ": " in reason} == {"dq", "dk", "dv"}


def test_cells_have_queries_that_every_peer_takes():
    assert host.CELLS[0].specs == ("causal",)
    for at in host.CELLS:
        assert at.problem.q_len % 64 == 0 and at.variant().uses("b") == ("document" in at.specs)


def row(what, **us):
    return Row(what=what, where="here", us={name: tuple(values) for name, values in us.items()}, absent={})


def measured(monkeypatch, *, gpu=True, late=False):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(record, "environment", lambda: {"gpu": "one"})
    monkeypatch.setattr(cold, "bytecode", lambda: True)
    took = 70e3 if late else 20e3
    monkeypatch.setattr(host, "processes", lambda rounds: [row("import flashgen", flashgen=rounds * [took])])
    monkeypatch.setattr(host, "first_call", lambda rounds: row(host.FIRST_CALL, flashgen=rounds * [9e4]))

    def calls(cell, *, rounds, names, seed):
        assert (rounds, names, seed) == (8, ("fa2", "flex"), 0)
        yield row("forward", flashgen=(10.0, 20.0, 40.0), fa2=(15.0, 30.0, 60.0), **{ALLOCATION: (1.0, 2.0, 3.0)})

    def changes(cell, *, rounds, seed):
        yield row("a new length", flashgen=(50.0, 60.0, 80.0), **{host.REPEATED: (10.0, 20.0, 30.0)})

    monkeypatch.setattr(host, "calls", calls)
    monkeypatch.setattr(host, "changes", changes)


def test_the_record(monkeypatch, tmp_path):
    measured(monkeypatch)
    asked = ("bench", "host", "--rounds", 8, "--peers", "fa2,flex", "--folder", tmp_path, "--cells", "causal s64")
    ran = flashgen(*asked)
    assert "20 ms [20 ms, 20 ms] of 60 ms" in ran.out
    told = ran.err.splitlines()
    assert f"1 cells; all of host take about {host.MINUTES} minutes on an H200" in told
    assert [line.partition(":")[0] for line in told if ": flashgen" in line][-2:] == [
        "forward, here",
        "a new length, here",
    ]
    line = next(line for line in ran.out.splitlines() if "forward" in line)
    assert [part.strip() for part in line.strip("│").split("│")] == [
        *("forward", "here", "20 us [10 us, 40 us]", "2 us [1 us, 3 us]", "-", "30 us [15 us, 60 us]", "-"),
    ]
    line = next(line for line in ran.out.splitlines() if "a new length" in line)
    assert [part.strip() for part in line.strip("│").split("│")] == [
        *("a new length", "here", "60 us [50 us, 80 us]", "-", "20 us [10 us, 30 us]", "-", "-"),
    ]
    read = json.loads((tmp_path / "host.json").read_text())
    assert [(one["what"], one["us"]["flashgen"]) for one in read["cells"]] == [
        ("import flashgen", 8 * [20e3]),
        (host.FIRST_CALL, 8 * [9e4]),
        ("forward", [10.0, 20.0, 40.0]),
        ("a new length", [50.0, 60.0, 80.0]),
    ]
    assert [one["ratio"] for one in read["cells"][-2:]] == [{"fa2": [1.5, 1.5, 1.5]}, {}]
    assert read["command"] == "flashgen bench host --rounds 8 --peers fa2,flex --seed 0 --cells 'causal s64'"
    assert read["protocol"]["unit"] == "microseconds" and read["gpu"] == "one"
    assert read["protocol"]["bytecode"] == "compiled beforehand, as pip leaves it"
    assert json.loads(flashgen(*asked, "--json").out)["cells"] == read["cells"]


def test_without_a_gpu_what_needs_none_is_measured_and_recorded_apart(monkeypatch, tmp_path):
    measured(monkeypatch, gpu=False, late=True)
    ran = flashgen("bench", "host", "--folder", tmp_path)
    assert "there is no GPU that PyTorch can use: calls were not measured" in ran.err
    assert "70 ms [70 ms, 70 ms] of 60 ms" in ran.out
    assert [path.name for path in tmp_path.iterdir()] == ["host_without_gpu.json"]


def test_a_run_that_is_cut_off_leaves_what_it_has(monkeypatch, tmp_path):
    measured(monkeypatch)

    def cut(cell, **_):
        raise KeyboardInterrupt

    monkeypatch.setattr(host, "changes", cut)
    flashgen("bench", "host", "--folder", tmp_path, code=None)
    assert [one["what"] for one in json.loads((tmp_path / "host.json").read_text())["cells"]][-1] == host.FIRST_CALL


def test_a_wrong_result_ends_with_1(monkeypatch, tmp_path):
    measured(monkeypatch)
    wrong = Row(what="forward", where="here", us={"flashgen": (1.0,)}, reasons=("it is wrong",), absent={})
    monkeypatch.setattr(host, "calls", lambda *_, **__: iter([wrong]))
    assert "forward, here: it is wrong" in flashgen("bench", "host", "--folder", tmp_path, code=1).err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--backward"], "takes no --backward: that is of ampere"),
        (["--peer-file", "a=b.py"], "takes no --peer-file"),
        (["--cells", "d7"], "no cell's name contains 'd7'\n  cells: d64 causal s64"),
        (["--peers", "fa9"], "no peer 'fa9'"),
    ],
)
def test_refusals(args, message):
    assert message in flashgen("bench", "host", *args, code=2).err
