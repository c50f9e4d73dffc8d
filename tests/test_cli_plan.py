"""`flashgen plan`: the table, the JSON object, and the shared options."""

import json
import re

import numpy as np
import pytest
from cli import flashgen

import flashgen as fg
from flashgen.lang.load import shipped

WHAT = {"variant", "arch", "pipeline", "tile", "stages", "warps", "roles", "smem_bytes", "registers_estimate"}
COST = {"hbm", "compulsory", "standard", "lower_bound_bytes", "flops", "flops_useful", "tiles", "predicted_ms"}
FIELDS = WHAT | COST | {"too_large", "rejected"}


def flags(**values):
    """Options of the command."""
    return [word for name, value in values.items() for word in (f"--{name.replace('_', '-')}", value)]


def plan(*arguments, **options):
    return json.loads(flashgen("plan", *arguments, "--json", **options).out)


def test_the_json_object_of_a_causal_plan():
    asked = flags(seqlen=8192, heads=16, head_dim=128, dtype="bfloat16", arch="sm_80", pipeline="ampere")
    got = plan("specs/causal.py", *asked)
    assert got.keys() >= FIELDS
    assert got["tile"].keys() == {"q", "kv"}
    for moved in ("hbm", "compulsory", "standard"):
        assert got[moved].keys() == {"read_bytes", "write_bytes"}
    tiles = got["tiles"]
    assert tiles["empty"] + tiles["partial"] + tiles["full"] == tiles["total"]
    rows = 16 * 8192
    assert got["compulsory"] == {"read_bytes": 3 * rows * 128 * 2, "write_bytes": rows * (128 * 2 + 4)}
    assert got["flops_useful"] == 4 * 128 * 16 * (8192 * 8193 // 2)
    assert all(entry.keys() >= {"tile", "reason"} for entry in got["rejected"])


@pytest.mark.sampled("alibi", "causal", "causal_bottom_right", "document", "full", "longformer", "relative_bias")
@pytest.mark.parametrize("name", sorted(shipped()))
def test_every_shipped_spec_is_planned_by_its_bare_name(name):
    assert plan(name, "--seqlen", 512, "--arch", "sm_80")["variant"] == name


def test_the_table_says_what_was_chosen_why_it_fits_and_what_it_moves():
    out = flashgen("plan", "sliding_window", "--seqlen", 4096, "--arch", "sm_80").out
    assert "sliding_window: batch 1, heads 8, seqlen 4096, head_dim 128, bfloat16, window 1024" in out
    for part in (
        "shared memory",
        "registers per thread",
        "HBM traffic",
        "compulsory",
        "standard",
        "decides",
        "rejected",
    ):
        assert part in out
    assert "more (--all)" in out
    everything = flashgen("plan", "sliding_window", "--seqlen", 4096, "--arch", "sm_80", "--all").out
    assert "more (--all)" not in everything and len(everything) > len(out)


def test_shape_options_reach_the_problem():
    shape = {"batch": 3, "heads": 12, "kv_heads": 4, "head_dim": 64, "v_head_dim": 96}
    got = plan("full", *flags(**shape, seqlen=70, kv_seqlen=90, dtype="float16", arch="sm_86"))
    assert got["shape"] == {**shape, "q_len": 70, "kv_len": 90}
    assert (got["dtype"], got["arch"]) == ("float16", "sm_86")


@pytest.mark.slow
def test_formulas_of_a_band():
    full = ("plan", "full", "--seqlen", 256, "--formulas")
    assert "write_bytes = batch*heads*q_len*(itemsize*v_head_dim + 4)" in flashgen(*full).out
    assert plan(*full[1:])["formula"].keys() == {"read_bytes", "write_bytes", "flops", "flops_useful"}
    assert "no formulas: the mask is no single band" in flashgen("plan", "butterfly", "--formulas").out
    assert "formula" not in plan("full", "--seqlen", 256)


def test_a_tile_is_taken_as_it_is():
    assert plan("full", "--seqlen", 256, "--arch", "sm_80", "--tile", "64x32")["tile"] == {"q": 64, "kv": 32}


@pytest.mark.slow
def test_parameters_and_constants():
    narrow, wide = (plan("sliding_window", "--seqlen", 4096, "--param", f"window={w}") for w in (16, 4096))
    assert narrow["flops_useful"] < wide["flops_useful"]
    small, large = (plan("chunked", "--seqlen", 4096, "--param", f"chunk={c}") for c in (64, 4096))
    assert small["flops_useful"] < large["flops_useful"]


def test_a_captured_tensor_from_a_file(tmp_path):
    file = tmp_path / "doc.npy"
    np.save(file, np.zeros((1, 256), np.int32))
    one = plan("document", "--seqlen", 256, "--tensor", f"doc={file}")
    assert one["flops_useful"] == plan("full", "--seqlen", 256)["flops_useful"]
    np.save(file, np.arange(256, dtype=np.int32)[None])
    assert plan("document", "--seqlen", 256, "--tensor", f"doc={file}")["flops_useful"] == 256 * 8 * 4 * 128


def test_the_default_head_dim_and_dtype_are_ones_that_the_spec_names(tmp_path):
    spec = tmp_path / "narrow.py"
    spec.write_text(
        "import flashgen as fg\n\n\n@fg.variant(head_dims=(32, 64), dtypes=('float16',))\n"
        "def narrow(b, h, q, k):\n    return k <= q\n"
    )
    got = plan(spec, "--seqlen", 64)
    assert (got["shape"]["head_dim"], got["dtype"]) == (64, "float16")


# -- the backward


def test_a_backward_is_planned_beside_its_forward():
    got = plan("causal", "--seqlen", 1024, "--arch", "sm_90a", "--backward")
    assert got["pass"] == "forward" and got.keys() >= FIELDS
    back = got["backward"]
    assert back.keys() >= FIELDS and (back["pass"], back["pipeline"]) == ("backward", "hopper")
    assert back["passed_over"] is None and back["fallbacks"] == []
    assert (back["deterministic"], back["dropout"], back["gradients"]) == (False, False, [])
    assert back["flops_useful"] == 10 * 128 * 8 * (1024 * 1025 // 2)
    assert sum(kernel["read_bytes"] for kernel in back["kernels"]) == back["hbm"]["read_bytes"]
    assert "backward" not in plan("causal", "--seqlen", 1024, "--arch", "sm_90a")


def test_the_forward_beside_a_backward_is_the_one_that_runs(tmp_path):
    """Of few queries the window decides among how many blocks keys are split."""
    spec = tmp_path / "late.py"
    spec.write_text(
        "import flashgen as fg\n"
        "window = fg.param('window', default=1 << 20)\n"
        "@fg.variant\n"
        "def late(b, h, q, k):\n"
        "    at = q + fg.kv_len - fg.q_len\n"
        "    return (k <= at) & (at - k < window)\n"
    )
    asked = [spec, *flags(seqlen=1, kv_seqlen=65_536, heads=32, kv_heads=8, arch="sm_90a", param="window=300")]
    alone, beside = plan(*asked), plan(*asked, "--backward")
    assert beside.pop("backward")["pass"] == "backward" and alone == beside
    assert alone["kv_splits"] < plan(*asked[:-2])["kv_splits"]


def test_the_table_says_which_pass_runs_where():
    out = flashgen("plan", "causal", "--seqlen", 1024, "--arch", "sm_90a", "--backward").out
    assert "passes" in out and "attention_backward_prepare" in out and "workspaces" in out
    rows = [line.split() for line in out.splitlines()]
    forward = plan("causal", "--seqlen", 1024, "--arch", "sm_90a")["pipeline"]
    assert any(row[:3] == ["forward", forward, "sm_90a"] for row in rows)
    assert any(row[:3] == ["backward", "hopper", "sm_90a"] for row in rows)


def test_a_backward_that_the_best_pipeline_lacks_says_why():
    asked = ("causal", "--seqlen", 1024, "--arch", "sm_90a", "--head-dim", 192, "--backward", "--dropout")
    back = plan(*asked)["backward"]
    why, nearest = "its backward has dropout for head dims up to 128", "head_dim 128, or dropout=False"
    assert back["pipeline"] == "ampere" and back["passed_over"] == f"pipeline hopper: {why}"
    assert back["fallbacks"] == [{"pipeline": "hopper", "reason": why, "nearest": nearest, "pinned": False}]
    line = rf"^instead of hopper +{why} \(nearest: {nearest}\) *$"
    assert re.search(line, flashgen("plan", *asked).out, re.MULTILINE)


def test_a_deterministic_backward_on_hopper():
    asked = ("causal", "--seqlen", 1024, "--arch", "sm_90a", "--backward", "--deterministic")
    back = plan(*asked)["backward"]
    assert (back["pipeline"], back["passed_over"], back["deterministic"]) == ("hopper", None, True)
    assert [kernel["entry"] for kernel in back["kernels"]][-1] == "attention_backward_finish"
    assert "dq_semaphore" in flashgen("plan", *asked).out


@pytest.mark.slow
def test_options_of_a_backward():
    options = ("--arch", "sm_80", "--backward", "--deterministic", "--dropout", "--gradient", "table")
    got = plan("relative_bias", "--seqlen", 512, *options)
    assert got["dropout"] and got["backward"]["dropout"] and got["backward"]["deterministic"]
    assert got["backward"]["gradients"] == ["table"]
    entries = [kernel["entry"] for kernel in got["backward"]["kernels"]]
    assert "attention_backward_dq" in entries and "attention_backward_gradients" in entries
    for wrong, message in (
        (("--deterministic",), "--deterministic is of the backward"),
        (("--gradient", "table"), "--gradient is of the backward"),
        (("--backward", "--gradient", "q"), "'q' has no gradient"),
    ):
        assert message in flashgen("plan", "relative_bias", "--arch", "sm_80", *wrong, code=2).err


def test_the_other_kernels_of_the_menu_are_named():
    shown = flashgen("plan", "causal", "--arch", "sm_80", "--seqlen", 8192, "--json")
    plan = json.loads(shown.out)
    assert plan["others"], "a menu of one kernel"
    asked = [(o["tile"]["q"], o["tile"]["kv"], o["stages"]) for o in plan["others"]]
    assert (plan["tile"]["q"], plan["tile"]["kv"], plan["stages"]) not in asked
    text = flashgen("plan", "causal", "--arch", "sm_80", "--seqlen", 8192).out.replace(", heads packed", "")
    assert "; ".join(f"{q}x{kv}, {stages} stages" for q, kv, stages in asked) in text


ROUNDS = """import flashgen as fg

@fg.variant
def rounds(b, h, q, k):
    x = q
    for i in range({rounds}):
        x = fg.where(x > k + i, x - k, x + i)
    return (x <= 40) & (k <= q)
"""


@pytest.mark.slow
def test_what_was_too_large_to_take_apart_is_said(tmp_path):
    spec = tmp_path / "rounds.py"
    asked = [spec, "--seqlen", 256, "--arch", "sm_80"]
    spec.write_text(ROUNDS.format(rounds=12))
    (note,) = plan(*asked)["judged_whole"]
    assert f"{spec}:8" in note and "may be visited and masked" in note
    for verb in ("plan", "show"):
        out = " ".join(flashgen(verb, *asked).out.split())
        assert "`return (x <= 40) & (k <= q)`" in out and "too large to take apart" in out
    spec.write_text(ROUNDS.format(rounds=1))
    assert plan(*asked)["judged_whole"] == []
    assert "too large to take apart" not in flashgen("plan", *asked).out


def test_a_batch_is_that_of_the_lengths():
    padded = ("causal", "--arch", "sm_80", "--layout", "padded", "--q-lengths", "3,4,5")
    assert plan(*padded)["shape"]["batch"] == plan(*padded, "--batch", 3)["shape"]["batch"] == 3
    for batch in (1, 2):
        err = flashgen("plan", *padded, "--batch", batch, code=2).err
        assert f"batch is {batch} and q_lengths names 3 sequences\n  nearest: batch 3, or none" in err


def test_sequences_without_lengths_are_alike():
    """As a call that gives none: they are not split for one that may be longer."""
    asked = ("causal", "--arch", "sm_90a", "--layout", "padded", "--batch", 32, "--heads", 32, "--kv-heads", 8)
    asked += ("--seqlen", 1, "--kv-seqlen", 8192, "--q-offset", "end")
    named = ",".join(["8192"] * 32)
    alike, may_differ = (flashgen("plan", *asked, *more).out for more in ((), ("--kv-lengths", named)))
    assert "may be longer than others" in may_differ and "may be longer" not in alike
    sizes = {"batch": 32, "heads": 32, "kv_heads": 8, "arch": "sm_90a", "layout": "padded"}
    assert not fg.plan("causal", seqlen=1, kv_seqlen=8192, **sizes).keys.split
    assert fg.plan("causal", q_lengths=[1] * 32, kv_lengths=[8192] * 32, **sizes).keys.split


@pytest.mark.parametrize("option", ["--q-lengths", "--kv-lengths", "--q-offset"])
@pytest.mark.parametrize("text", ["9" * 5000, "\u0663", "1,,2", "-1"])
def test_what_is_no_length_is_refused(option, text):
    err = flashgen("plan", "causal", "--arch", "sm_80", "--layout", "padded", f"{option}={text}", code=2).err
    other = " or end" if option == "--q-offset" else ""
    cure = f"is no whole number from 0 on of at most 9 digits\n  nearest: {option} 4096{other}\n"
    assert f"{option}: '" in err and cure in err
