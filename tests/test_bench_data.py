"""`flashgen bench data` on a CPU: the inputs are what their names say, errors are those of each draw, and what is wrong
is said.  The peers are PyTorch's own maths, and the clock is a made-up one."""

import json
import math

import pytest
import torch
from cli import flashgen
from rich.console import Console

from flashgen.bench import data, record
from flashgen.bench.cells import cell
from flashgen.bench.data import DataCell, Errors
from flashgen.bench.inputs import INPUTS, draw
from flashgen.bench.protocol import MIN_ROUNDS, Timings
from flashgen.cli.data import table
from flashgen.planning.problem import Problem

# -- inputs


def drawn(name, seed=0, **given):
    shape = {"batch": 2, "heads": 4, "kv_heads": 2, "q_len": 256, "kv_len": 256, "head_dim": 128, "dtype": "bfloat16"}
    shape |= given
    problem = Problem(**shape, v_head_dim=shape["head_dim"])
    return draw(problem, seed, name, device="cpu")


def scores(x):
    """In nats, [batch, heads, queries, keys]."""
    k = x.k.float().repeat_interleave(x.q.shape[1] // x.k.shape[1], dim=1)
    return x.q.float() @ k.mT * x.q.shape[-1] ** -0.5


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", INPUTS)
def test_every_input_is_finite_and_lies_in_memory_as_a_models_does(name, dtype):
    x = drawn(name, dtype=dtype, head_dim=64, q_len=64, kv_len=64)
    for one, heads in zip(x, (4, 2, 2, 4), strict=True):
        assert one.shape == (2, heads, 64, 64) and one.dtype == getattr(torch, dtype)
        assert one.transpose(1, 2).is_contiguous() and one.isfinite().all()
    again, other = (drawn(name, seed, dtype=dtype, head_dim=64, q_len=64, kv_len=64) for seed in (0, 1))
    assert all(torch.equal(a, b) for a, b in zip(x, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(x, other, strict=True))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("name, std", [("normal", 1), ("std2", 2), ("std4", 4), ("std8", 8), ("std16", 16)])
def test_the_standard_deviation_of_scores(name, std, head_dim):
    x = drawn(name, head_dim=head_dim)
    assert float(scores(x).std()) == pytest.approx(std, rel=0.03)
    assert float(x.v.float().std()) == pytest.approx(1, rel=0.03) and float(x.do.float().std()) == pytest.approx(
        1, rel=0.03
    )


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_sink_stands_above_the_rest(head_dim):
    s = scores(drawn("sink", head_dim=head_dim))
    assert float((s[..., 0] - s[..., 1:].mean(-1)).mean()) == pytest.approx(12, abs=0.25)
    assert float(s[..., 1:].std()) == pytest.approx(1, rel=0.03)
    assert (s[..., 0] > s[..., 1:].amax(-1)).float().mean() > 0.99


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_each_querys_own_key_stands_above_the_rest(head_dim):
    s = scores(drawn("own", head_dim=head_dim))
    own = s.diagonal(dim1=-2, dim2=-1)
    rest = (s.sum(-1) - own) / (s.shape[-1] - 1)
    assert float((own - rest).mean()) == pytest.approx(9, abs=0.1)
    assert float(own.std()) == pytest.approx(1, rel=0.1)


@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize("name, first, last", [("rising", 60, 0), ("falling", 0, 60)])
def test_scores_rise_toward_one_end(name, first, last, head_dim):
    """A kernel begins with the last keys: there `rising` has its least."""
    by_key = scores(drawn(name, head_dim=head_dim)).mean((0, 1, 2))
    assert float(by_key[0]) == pytest.approx(first, abs=0.7) and float(by_key[-1]) == pytest.approx(last, abs=0.7)
    by_tile = by_key.view(8, -1).mean(-1)
    steps = by_tile.diff() * (1 if last > first else -1)
    assert float(steps.min()) > 5 and float(steps.max()) < 10  # of 60 / 8, and what is random


def test_outliers_are_as_rare_and_as_large_as_in_flashattention_3():
    x = drawn("outliers", q_len=2048, kv_len=2048)
    for one in x[:3]:
        one = one.float()
        share = float((one.abs() > 6).float().mean())
        assert share == pytest.approx(1e-3 * math.erfc(6 / math.sqrt(2 * 101)), rel=0.1)
        assert float(one.var()) == pytest.approx(1.1, rel=0.02)
    assert float(x.do.float().abs().max()) < 6.5


# -- the measurement


SHAPE = cell("causal", 64, 96, batch=2, heads=2)
OPTIONS = {"rounds": MIN_ROUNDS, "draws": 2, "names": (), "device": "cpu"}


def clock(contenders, *, rounds):
    """The i-th contender takes i + 1 ms."""
    for call in contenders.values():
        call()
    return Timings(rounds={name: (1.0 + i,) * rounds for i, name in enumerate(contenders)})


def torchs(cell, q, k, v):
    """A peer that computes when its call is made: of stale tensors, were it not made anew for each draw."""
    o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=cell.specs == ("causal",))
    return lambda: o


def torchs_lse(cell, q, k, v):
    s = q.float() @ k.float().mT * q.shape[-1] ** -0.5
    lse = torch.logsumexp(s.masked_fill(torch.ones(s.shape[-2:], dtype=bool).triu(1), -math.inf), -1)
    return lambda: lse[..., None]  # as cuDNN has it


def torchs_gradients(cell, q, k, v, do):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    o = torchs(cell, *leaves)()
    return lambda: torch.autograd.grad(o, leaves, do, retain_graph=True)


def measure(of, files, *inputs, **options):
    cells = [DataCell(cell=SHAPE, input=name) for name in inputs]
    return list(data.measure(cells, of, files=files, time=clock, **{**OPTIONS, **options}))


def test_the_forward_beside_a_peer():
    files = {"fa3": {"peer": torchs, data.LSE_ENTRY: torchs_lse}}
    results = measure(data.forward, files, "std4", "sink")
    assert [str(one.cell) for one in results] == ["d64 causal s96 b2 h2 std4", "d64 causal s96 b2 h2 sink"]
    for one in results:
        assert one.reasons == () and one.absent == {}
        assert list(one.errors) == ["o", "lse"]
        for by in one.errors.values():
            assert set(by) == {"exact", "flashgen", "fa3"}
        assert 5e-4 < one.errors["o"]["exact"].rms < 3e-3
        assert 0.98 < one.beside("o", "exact").rms < 1.02 and 0.9 < one.beside("o", "fa3").rms < 1.1
        assert one.errors["lse"]["fa3"].largest < 1e-5
        assert one.faster("fa3").median == 2.0 and one.sample == 2 * 2 * 96 * 64
        assert json.loads(json.dumps(one.as_json()))["times_error"]["o"].keys() == {"exact", "fa3"}
    assert results[0].errors["o"]["exact"] != results[1].errors["o"]["exact"]


def test_the_backward_beside_a_peer():
    (one,) = measure(data.backward, {"fa3": {"backward": torchs_gradients}}, "std2")
    assert one.reasons == () and list(one.errors) == ["dq", "dk", "dv"]
    for what, by in one.errors.items():
        assert set(by) == {"exact", "flashgen", "fa3"}
        assert 0.98 < one.beside(what, "exact").rms < 1.02
        assert 5e-4 < by["fa3"].rms < 1e-2


def test_what_refuses_is_absent_and_what_computes_something_else_is_named():
    def refuses(*_):
        raise RuntimeError("no kernel for this\nat all")

    files = {
        "refuses": {"peer": refuses},
        "lacks": {"peer": lambda *_: None},
        "full": {"peer": lambda _, q, k, v: torchs(cell("full", 64, 96), q, k, v)},
        "mute": {"peer": torchs, data.LSE_ENTRY: refuses},
    }

    (one,) = measure(data.forward, files, "normal", draws=1)
    why = "RuntimeError: no kernel for this"
    assert one.absent == {"refuses": why, "mute, its lse": why}
    assert set(one.errors["o"]) == {"exact", "flashgen", "full", "mute"}
    (reason,) = one.reasons
    assert reason.startswith("full: its o is off by") and "does not compute this attention" in reason


@pytest.mark.parametrize("spoil, said", [((1.01, 0.0), "RMS error"), ((1.0, 0.01), "lse is off by")])
def test_a_wrong_result_is_said(monkeypatch, spoil, said):
    def off(*given, return_lse=False, **named):
        o, lse = right(*given, return_lse=True, **named)
        return (o * spoil[0], lse + spoil[1]) if return_lse else o * spoil[0]

    right = data.attention
    monkeypatch.setattr(data, "attention", off)
    (one,) = measure(data.forward, {}, "normal", draws=1)
    assert any(said in reason for reason in one.reasons), one.reasons


def test_gradients_that_are_wrong_are_said(monkeypatch):
    class Off(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, dx):
            return 1.02 * dx

    right = data.attention
    monkeypatch.setattr(data, "attention", lambda q, k, v, *rest, **named: right(q, Off.apply(k), v, *rest, **named))
    (one,) = measure(data.backward, {}, "normal", draws=1)
    assert {reason.partition(":")[0] for reason in one.reasons} == {"dk"}


def test_heads_are_other_ones_in_each_draw():
    p = Problem(batch=2, heads=8, kv_heads=4, q_len=4096, kv_len=4096, head_dim=64, v_head_dim=64)
    first = [data.sample(p, i) for i in range(4)]
    assert [x.batches for x in first] == [(0,), (1,), (0,), (1,)]
    assert [x.kv_heads for x in first] == [(0, 1), (0, 1), (2, 3), (2, 3)]  # 2 x 2 x 4096 x 64 = 2^20
    assert data.sample(p, 4) == first[0]
    small = Problem(batch=1, heads=3, kv_heads=3, q_len=8, kv_len=8, head_dim=64, v_head_dim=64)
    assert data.sample(small, 5).kv_heads == (0, 1, 2)


def test_errors_over_draws():
    draws = [data.Drawn(rms=r, largest=m, tail=t, of=2.0) for r, m, t in ((3, 9, 5), (4, 7, 6), (5, 100, 4))]
    assert data.pooled(draws) == Errors(rms=math.sqrt(50 / 3) / 2, largest=9, tail=5)
    assert Errors(rms=1, largest=6, tail=1).over(Errors(rms=2, largest=3, tail=4)) == Errors(
        rms=0.5, largest=2, tail=0.25
    )
    found = data.errors_of(torch.tensor([0.0] * 19_999 + [5.0]), torch.tensor([1.0] * 20_000, dtype=torch.float64))
    assert (found.largest, found.tail, found.of) == (4.0, 1.0, 1.0)


def test_what_is_above_its_bar():
    def of(rms, largest=1.0, tail=1.0):
        return Errors(rms=rms, largest=largest, tail=tail)

    (one,) = measure(data.forward, {}, "normal", draws=1)
    errors = {
        "o": {"flashgen": of(1.08), "exact": of(2), "cudnn": of(1.0), "fa3": of(1.1, largest=0.7), "fa2": of(0.5)},
        "lse": {"flashgen": of(1.0, largest=1.3), "exact": of(1), "fa3": of(1, largest=9)},
    }
    one = data.dataclasses.replace(one, errors=errors)
    assert one.over_bars("o") == {"rms": pytest.approx(1.08), "largest": pytest.approx(1 / 0.7)}
    assert one.over_bars("lse") == {"largest": 1.3}
    console = Console(width=300, color_system="truecolor", force_terminal=True)
    with console.capture() as captured:
        console.print(table([one], ["cudnn", "fa3"], 0.99, backward=False))
    text = captured.get()
    assert "\x1b[31m1.08\x1b[0m / 1.00 / 1.00" in text and "0.98 / \x1b[31m1.43\x1b[0m / 1.00" in text


# -- the command


@pytest.mark.slow
def test_the_command_writes_a_record(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(record, "environment", lambda: {"gpu": {"name": "none"}, "versions": {}})
    whole = data.measure
    monkeypatch.setattr(data, "measure", lambda *given, **named: whole(*given, **named, device="cpu", time=clock))
    peer = tmp_path / "peer.py"
    peer.write_text(
        "import torch\n"
        "def peer(cell, q, k, v):\n"
        "    return lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)\n"
    )
    asked = ["--seqlen", 64, "--cells", "d64 causal", "--inputs", "sink,normal", "--draws", 1, "--peers", ""]
    ran = flashgen("bench", "data", *asked, "--peer-file", f"mine={peer}", "--folder", tmp_path / "new")
    assert "d64 causal s64 b2 h16 float16 sink" in ran.out and "error / mine" in ran.out
    read = json.loads((tmp_path / "new" / "data.json").read_text())
    assert [row["cell"] for row in read["cells"]] == [
        f"d64 causal s64 b2 h16{dtype} {name}" for dtype in ("", " float16") for name in ("normal", "sink")
    ]
    assert set(read["protocol"]["inputs"]) == {"normal", "sink"}
    told = json.loads(flashgen("bench", "data", *asked, "--backward", "--folder", tmp_path, "--json").out)
    assert told["path"] == str(tmp_path / "data_backward.json") and len(told["cells"]) == 4
    monkeypatch.setattr(data, "judge_lse", lambda *_: ("lse is off",))
    assert "b2 h16 sink: lse is off" in flashgen("bench", "data", *asked, "--folder", tmp_path, code=1).err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["data", "--inputs", "std3"], "no input 'std3'\n  nearest: normal, std2"),
        (["data", "--cells", "d512"], "no cell's name contains 'd512'"),
        (["data", "--pipeline", "volta"], "no pipeline 'volta'\n  nearest: ampere, hopper"),
        (["data", "--peers", "fa9"], "no peer 'fa9'"),
        (["hopper", "--draws", "3"], "flashgen bench hopper takes no --draws"),
        (["host", "--inputs", "sink"], "nearest: flashgen bench data --inputs sink"),
    ],
)
def test_refusals(args, message):
    assert message in flashgen("bench", *args, code=2).err


def test_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for options in ([], ["--backward"]):
        assert "needs a GPU" in flashgen("bench", "data", *options, code=2).err
