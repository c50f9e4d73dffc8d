"""`flashgen run`: a checked result, the numbers beside it, and what a failed check does."""

import json

import pytest
import torch
from cli import flashgen

from flashgen.lang.load import shipped
from flashgen.ops import attention as ops_attention
from flashgen.runtime import gradients


def run(*arguments, code=0):
    return flashgen("run", *arguments, "--device", "cpu", code=code)


def test_a_run_on_the_cpu():
    out = run("sliding_window", "--seqlen", 200, "--head-dim", 64, "--param", "window=50").out
    assert "sliding_window: batch 1, heads 8, seqlen 200, head_dim 64, bfloat16, window 50" in out
    for line in ("ran on", "the CPU", "time", "largest error", "RMS error", "row max in bfloat16", "predicted IO"):
        assert line in out
    assert "(as predicted)" in out
    assert "checked against float64: 102,400 elements, seed 0" in out


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_every_dtype_of_the_cpu(dtype):
    assert f"exact row max in {dtype}" in run("causal", "--seqlen", 70, "--head-dim", 64, "--dtype", dtype).out


@pytest.mark.sampled(
    "alibi", "causal", "full", "gpt_oss", "local_softcap", "log_distance", "sink_window", "sliding_window", "softcap"
)
@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(shipped()))
def test_every_shipped_spec(name):
    options = ("--batch", 2, "--heads", 4, "--kv-heads", 2, "--seqlen", 67, "--head-dim", 64, "--v-head-dim", 32)
    assert "checked" in run(name, *options).out


@pytest.mark.parametrize("options", [(), ("--deterministic",)])
@pytest.mark.parametrize("name", ["causal", "local_softcap", "relative_bias"])
def test_gradients_are_checked_where_asked(name, options):
    shape = ("--heads", 4, "--kv-heads", 2, "--seqlen", 67, "--kv-seqlen", 90, "--head-dim", 64, "--v-head-dim", 32)
    out = run(name, *shape, "--backward", *options).out
    captured = ["dtable,"] if name == "relative_bias" else []
    assert [line.split()[0] for line in out.splitlines() if ", largest" in line] == ["dq,", "dk,", "dv,", *captured]
    # o, dq, dk and dv of one draw: the smallest of q, k and v has more elements than the pool.
    elements = 67 * 4 * (32 + 64) + 90 * 2 * (64 + 32) + (4 * 257 if captured else 0)
    assert f"checked against float64: {elements:,} elements, seed 0" in out


@pytest.mark.slow
def test_what_is_dropped_is_dropped_in_float64_too(monkeypatch):
    shape = ("--heads", 4, "--kv-heads", 2, "--seqlen", 67, "--head-dim", 64, "--dropout", 0.3, "--seed", 5)
    assert "checked against float64" in run("softcap", *shape, "--backward", "--deterministic").out
    got = json.loads(run("causal", *shape, "--json").out)
    assert (got["dropout"], got["passed"]) == (0.3, True)
    assert "dropout" not in run("causal", *shape[:-4]).out
    right = ops_attention.attention

    def spoiled(given, **named):
        monkeypatch.setattr(ops_attention, "attention", lambda *a, **k: right(*a, **{**k, **given(k), **named}))
        return run("causal", *shape, "--backward", code=1).err

    err = spoiled(lambda k: {"seed": k["seed"] + 1})  # other pairs
    assert all(f"check failed: {name}" in err for name in ("largest error", "dq: ", "dk: ", "dv: "))
    assert "check failed: RMS error" in spoiled(lambda k: {}, dropout=0.0)


@pytest.mark.slow
def test_few_elements_drop_others_each_time():
    assert (
        "elements"
        in run("causal", "--seqlen", 1, "--kv-seqlen", 9, "--heads", 1, "--head-dim", 64, "--dropout", 0.5).out
    )


def test_what_is_no_chance_is_refused():
    for chance, nearest in ((1, 0.99), (-0.5, 0.0), ("nan", 0.0)):
        assert f"nearest: --dropout {nearest}" in run("causal", "--seqlen", 64, f"--dropout={chance}", code=2).err


@pytest.mark.parametrize("name", ["causal", "softcap"])
def test_gradients_in_float64(name):
    assert "dv, largest" in run(name, "--seqlen", 150, "--head-dim", 64, "--backward", "--dtype", "float64").out


def test_the_blocks_that_divide_keys_are_those_of_the_call_with_gradients_too(monkeypatch):
    right, asked = ops_attention.attention, []

    def noted(*given, **named):
        asked.append((named.get("kv_splits"), given[0].requires_grad))
        return right(*given, **named)

    monkeypatch.setattr(ops_attention, "attention", noted)
    shape = ("--seqlen", 64, "--heads", 1, "--head-dim", 64)
    assert "checked" in run("causal", *shape, "--backward", "--kv-splits", 3).out
    assert set(asked) == {(3, False), (3, True)}


def test_a_wrong_gradient_exits_with_1_and_says_which(monkeypatch):
    """Beside a baseline of none but rounding errors, what a kernel's algorithm gives is one."""
    same, true = gradients.baseline_gradients, gradients.reference_gradients
    monkeypatch.setattr(
        gradients, "baseline_gradients", lambda *a, **k: same(*a, **k)._replace(dk=true(*a, **k).dk.bfloat16())
    )
    ran = run("causal", "--seqlen", 64, "--head-dim", 64, "--backward", code=1)
    assert "check failed: dk: " in ran.err and "dq: " not in ran.err and "dv: " not in ran.err


def test_a_wrong_gradient_of_a_captured_tensor_exits_with_1_and_says_which(monkeypatch):
    """Beside a baseline without errors, what a kernel's algorithm gives is one."""
    same, true = gradients.baseline_gradients, gradients.reference_gradients
    monkeypatch.setattr(
        gradients, "baseline_gradients", lambda *a, **k: same(*a, **k)._replace(captured=true(*a, **k).captured)
    )
    ran = run("relative_bias", "--heads", 2, "--seqlen", 70, "--head-dim", 64, "--backward", code=1)
    assert "check failed: dtable: largest error" in ran.err and "dq: " not in ran.err


def test_options_of_gradients_are_refused_where_there_are_none():
    assert "nearest: --deterministic with --backward" in run("causal", "--deterministic", code=2).err
    assert "nearest: --backward without --sweep" in run("causal", "--backward", "--sweep", code=2).err


@pytest.mark.parametrize("dims", [(20, 20), (512, 64), (64, 264), (3, 1)])
def test_head_dims_that_no_kernel_takes_run_on_the_cpu_as_a_call_does(dims):
    out = run("causal", "--seqlen", 70, "--heads", 2, "--head-dim", dims[0], "--v-head-dim", dims[1]).out
    assert "(as predicted)" in out and "checked" in out


def test_few_elements_are_drawn_until_there_are_enough():
    out = run("causal", "--seqlen", 1, "--heads", 1, "--head-dim", 64).out
    assert "checked against float64: 4,096 elements" in out


def test_no_elements():
    assert "checked against float64: 0 elements" in run("causal", "--seqlen", 0).out


def test_a_tile_is_the_one_that_runs():
    ran = run("causal", "--seqlen", 100, "--head-dim", 64, "--arch", "sm_80", "--tile", "32x16")
    assert "tiles of 32 x 16 (ampere, sm_80)" in ran.out


def spoil(monkeypatch, change):
    """Attention with a fault in it."""
    right = ops_attention.attention

    def wrong(*args, **named):
        o, lse = right(*args, **named)
        return change(o, lse)

    monkeypatch.setattr(ops_attention, "attention", wrong)


@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda o, lse: (o * 1.05, lse), "RMS error"),
        (lambda o, lse: (o.index_fill(2, torch.tensor([3]), 0.0), lse), "largest error"),
        (lambda o, lse: (o.index_fill(2, torch.tensor([3]), float("nan")), lse), "nan"),
        (lambda o, lse: (o, lse + 0.01), "lse is off by"),
    ],
)
def test_a_wrong_result_exits_with_1_and_says_why(monkeypatch, change, reason):
    spoil(monkeypatch, change)
    ran = run("causal", "--seqlen", 64, "--head-dim", 64, code=1)
    assert "check failed:" in ran.err and reason in ran.err
    assert "checked against" not in ran.out


def test_a_position_that_a_captured_tensor_does_not_reach_is_refused_whatever_the_tiles():
    # Documents of 200 keys; what the ends of tiles are clamped to would settle every tile of the queries beyond.
    shape = ("--seqlen", 300, "--kv-seqlen", 200, "--head-dim", 64)
    err = flashgen("run", "document", *shape, "--device", "cpu", code=2).err
    assert "tensor 'doc': index 200 is outside dimension 1 of size 200" in err
    assert "checked" in run("document", "--seqlen", 200, "--kv-seqlen", 300, "--head-dim", 64).out
    assert "checked" in run("document", "--seqlen", 300, "--kv-seqlen", 0, "--head-dim", 64).out


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("Unable to allocate 64.0 GiB for an array"),
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory: you tried"),
    ],
)
def test_memory_that_runs_out_is_one_message(monkeypatch, error):
    def full(*args, **named):
        raise error

    monkeypatch.setattr(ops_attention, "attention", full)
    err = flashgen("run", "causal", "--seqlen", 64, "--kv-seqlen", 32, "--head-dim", 64, code=2).err
    assert "LaunchError: the CPU has no room for this problem: q, k, v and o take 192 KiB" in err
    assert str(error) in err and "nearest: a smaller --seqlen, --heads or --batch" in err


def test_another_error_of_pytorch_stays_what_it_is(monkeypatch):
    def broken(*args, **named):
        raise RuntimeError("something else")

    monkeypatch.setattr(ops_attention, "attention", broken)
    with pytest.raises(RuntimeError, match="something else"):
        flashgen("run", "causal", "--seqlen", 64, "--head-dim", 64)


def test_an_index_outside_a_captured_tensor_is_one_message(tmp_path):
    spec = tmp_path / "outside.py"
    spec.write_text(
        "import numpy as np\nimport flashgen as fg\n\n"
        "ids = fg.tensor('ids', dims=(None,), dtype='int32', example=lambda p, rng: np.zeros(5, np.int32))\n\n\n"
        "@fg.variant\ndef outside(b, h, q, k):\n    return ids[k] == 0\n"
    )
    err = flashgen("run", spec, "--device", "cpu", "--seqlen", 9, code=2).err
    assert "tensor 'ids': index 5 is outside dimension 0 of size 5" in err


@pytest.mark.slow
def test_a_sweep_on_the_cpu(tmp_path):
    for name in ("causal", "alibi"):
        (tmp_path / f"{name}.py").write_text(shipped()[name].read_text())
    ran = run(tmp_path, "--sweep")
    assert "no GPU: the kernels' tiles are walked on the CPU, at lengths (1, 127)" in ran.err
    assert "48 of 48 cases pass on the CPU" in ran.out  # 2 specs x 2 dtypes x 3 head dims x 2 kv_heads x 2 lengths


@pytest.mark.slow
def test_a_sweep_that_fails_says_how_to_repeat_the_case(tmp_path, monkeypatch):
    spoil(monkeypatch, lambda o, lse: (o * (1.05 if o.dtype == torch.float16 else 1.0), lse))
    ran = run("causal", "--sweep", code=1)
    assert "12 of 24 cases pass" in ran.out
    assert (
        "flashgen run causal --dtype float16 --head-dim 64 --heads 8 --kv-heads 8 --seqlen 127 --seed 0 --device cpu\n"
        "  largest error"
    ) in ran.err


@pytest.mark.slow
def test_a_sweep_repeats_what_it_was_given_and_goes_on_behind_what_cannot_be_planned(tmp_path):
    (tmp_path / "causal.py").write_text(shipped()["causal"].read_text())
    (tmp_path / "pinned.py").write_text(
        "import flashgen as fg\n\nw = fg.param('w', default=4)\n\n\n"
        "@fg.variant(tile=(64, 64), stages=2, pipeline='ampere', arch='sm_80', head_dims=(64,))\n"
        "def pinned(b, h, q, k):\n    return k <= q + w\n"
    )
    ran = run(tmp_path / "pinned.py", "--sweep", "--param", "w=7", code=1)
    assert "16 of 24 cases pass" in ran.out and "tile 64x64 of 'pinned' (head_dim 256, float16) does not fit" in ran.err
    repeated = "--dtype float16 --head-dim 256 --heads 8 --kv-heads 1 --seqlen 1 --param w=7 --seed 0 --device cpu"
    assert repeated in ran.err
    assert "40 of 48 cases pass" in run(tmp_path, "--sweep", code=1).out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--backward"], "no backward in 8 bits"),
        (["--dtype", "float64"], "q is float64 and k float8_e4m3fn: beside 8-bit keys and values q has 8 or 16 bits"),
    ],
)
def test_what_8_bits_lack_is_refused(options, said):
    ran = run("causal", "--seqlen", 40, "--head-dim", 64, "--kv-dtype", "float8_e4m3fn", *options, code=2)
    assert said in ran.err


def test_a_sweep_keeps_to_what_a_spec_allows(tmp_path):
    spec = tmp_path / "narrow.py"
    spec.write_text(
        "import flashgen as fg\n\n\n@fg.variant(head_dims=(64,), dtypes=('float16',), only=True)\n"
        "def narrow(b, h, q, k):\n    return k <= q\n"
    )
    assert "4 of 4 cases pass" in run(spec, "--sweep").out


@pytest.mark.gpu
def test_a_run_on_the_gpu():
    out = flashgen("run", "causal", "--seqlen", 500, "--head-dim", 64, "--device", "cuda").out
    assert "checked against float64" in out and "predicted IO" in out
