"""What the command says of a request that cannot be: one clean message, exit code 2, no traceback."""

import subprocess
import sys

import numpy as np
import pytest
from cli import flashgen

from flashgen.cli.advice import in_options


def refusal(*arguments):
    return flashgen(*arguments, code=2).err


@pytest.mark.parametrize(
    "arguments, messages",
    [
        (["plan", "nope"], ["SpecError: there is no spec file nope", "causal"]),
        (["plan", "specs"], ["SpecError: specs is a folder; name one of its specs"]),
        (["plan", "causal", "--heads", "6", "--kv-heads", "4"], ["6 heads cannot share 4 kv_heads", "1, 2, 3, 6"]),
        (["plan", "causal", "--head-dim", "512"], ["PlanError: no tile of 'causal' (head_dim 512", "nearest: "]),
        (["plan", "causal", "--arch", "sm_75"], ["below sm_80", "nearest: sm_80"]),
        (["plan", "causal", "--arch", "sm_80", "--pipeline", "hopper"], ["sm_80 has no pipeline 'hopper'", "ampere"]),
        (["plan", "causal", "--tile", "64"], ["--tile '64' is not of the form QxKV", "nearest: --tile 128x64"]),
        (["plan", "full", "--arch", "sm_80", "--tile", "100x64"], ["tile 100x64", "multiples of 16", "nearest: 96x64"]),
        (["plan", "causal", "--dtype", "int8"], ["dtype 'int8' is not one of float16, bfloat16", "nearest: "]),
        (["plan", "causal", "--dtype", "foo"], ["dtype 'foo' is not one of", "nearest: bfloat16"]),
        (["plan", "causal", "--dtype", "float8"], ["nearest: float8_e4m3fn"]),
        (["plan", "causal", "--dtype", "fp16"], ["nearest: float16"]),
        (["plan", "causal", "--dtype", "bf16"], ["nearest: bfloat16"]),
        (["plan", "causal", "--head-dim", "0"], ["head_dim is 0: it must be positive", "nearest: 16"]),
        (["plan", "causal", "--v-head-dim", "0"], ["v_head_dim is 0: it must be positive"]),
        (["plan", "causal", "--batch", "-2"], ["batch is -2: it cannot be negative"]),
        (["plan", "causal", "--seqlen", "20000000"], ["lengths stay below 2^24"]),
        (["plan", "causal", "--heads", "20000000"], ["numbers of batches and heads stay below 2^24", "16777215"]),
        (["plan", "causal", "--seqlen", "-1"], ["seqlen (q_len) is -1: it cannot be negative"]),
        (["plan", "causal", "--param", "window=1"], ["'causal' has no parameter 'window'"]),
        (["plan", "sliding_window", "--param", "window"], ["--param 'window' is not of the form NAME=VALUE"]),
        (["plan", "sliding_window", "--param", "window=big"], ["--param window=big: 'big' is not a number"]),
        (["plan", "sliding_window", "--param", "window=0"], ["is 0: the least it may be is 1"]),
        (["plan", "sliding_window", "--param", "window=1.5"], ["give a whole number"]),
        (["plan", "causal", "--tensor", "doc=x.npy"], ["'causal' captures no tensor 'doc'", "none"]),
        (["plan", "document", "--tensor", "dic=x.npy"], ["captures no tensor 'dic' (did you mean 'doc'?)", "doc"]),
        (["plan", "document", "--tensor", "doc=nowhere.npy"], ["--tensor: there is no file nowhere.npy"]),
        (["plan", "document", "--tensor", "doc=specs"], ["--tensor: specs is a folder, not a .npy file"]),
        (
            ["plan", "document", "--tensor", "doc=README.md"],
            ["--tensor: README.md is no .npy file", "numpy.save('README"],
        ),
        (["plan", "document", "--tensor", "doc=a.npy", "--tensor", "doc=b.npy"], ["--tensor doc is given twice"]),
        (
            ["plan", "sliding_window", "--param", "window=3", "--param", "window=4"],
            ["--param window is given twice", "nearest: --param window=4 alone"],
        ),
        (["build", "sliding_window", "--param", "window=5"], ["'window' is a parameter", "one kernel serves every"]),
        (["build", "causal", "--jobs", "0"], ["--jobs", "greater than or equal to 1"]),
        (["plan", "causal", "--arch", "hopper"], ["'hopper' is not an architecture", "nearest: sm_90a"]),
        (["plan", "causal", "--layout", "Paged"], ["got 'Paged'", "nearest: --layout paged\n"]),
        (["plan", "causal", "--layout", "ragged"], ["got 'ragged'", "nearest: --layout varlen\n"]),
        (["plan", "causal", "--layout", "lines"], ["got 'lines'", "nearest: --layout dense\n"]),
        (["show", "causal", "--output", "/tmp/mask.gif"], ["writes .png and .svg", "nearest: /tmp/mask.png\n"]),
        (["plan", "causal", "--wrong"], ["No such option: --wrong"]),
        (["run", "causal", "--device", "tpu"], ["--device 'tpu' is neither cpu nor cuda"]),
        (["run", "specs", "--sweep", "--seqlen", "5"], ["--sweep chooses --seqlen itself"]),
        (["build", "causal", "--v-head-dims", "-64"], ["--v-head-dims '-64'", "is not a positive number"]),
        (["build", "causal", "--tile", "64"], ["--tile '64' is not of the form QxKV"]),
        (["build", "causal", "--deterministic"], ["nearest: --deterministic with --backward"]),
        (["emit", "causal", "--gradient", "x"], ["nearest: --gradient with --backward"]),
        (
            ["build", "causal", "--head-dims", "64,wide"],
            ["'wide' is not a positive number", "nearest: --head-dims 64,128"],
        ),
    ],
    ids=lambda value: " ".join(value) if value and value[0] in ("plan", "run", "build", "emit") else "",
)
def test_one_clean_message(arguments, messages):
    err = refusal(*arguments)
    for message in messages:
        assert message in err


def test_a_syntax_error_points_at_the_line(tmp_path):
    spec = tmp_path / "broken.py"
    spec.write_text("import flashgen as fg\n\n\n@fg.variant\ndef broken(b, h, q, k)\n    return k <= q\n")
    err = refusal("plan", spec)
    assert "SpecError" in err and "broken.py:5" in err


def test_a_chained_comparison_points_at_the_line_and_says_the_cure(tmp_path):
    spec = tmp_path / "chained.py"
    spec.write_text("import flashgen as fg\n\n\n@fg.variant\ndef chained(b, h, q, k):\n    return 0 <= q - k < 9\n")
    err = refusal("plan", spec)
    assert "chained.py:6" in err and "put parentheses round each comparison" in err


def test_a_file_that_is_no_text(tmp_path):
    spec = tmp_path / "binary.py"
    spec.write_bytes(b"\x7fELF\0\0")
    assert f"SpecError: {spec} is not Python: " in refusal("plan", spec)


def test_a_parameter_that_nothing_reads(tmp_path):
    spec = tmp_path / "unread.py"
    spec.write_text(
        "import flashgen as fg\n\nwindow = fg.param('window', default=9)\n\n\n"
        "@fg.variant\ndef unread(b, h, q, k):\n    return k <= q\n"
    )
    err = refusal("plan", spec, "--param", "window=3")
    assert "'unread' has no parameter 'window'; it takes nothing: its mask and score read none" in err


def test_a_folder_is_for_a_sweep():
    assert "nearest: flashgen run specs --sweep" in refusal("run", "specs")


def test_paths_in_advice_are_quoted(tmp_path):
    folder = tmp_path / "my specs"
    assert f"nearest: mkdir -p '{folder}'" in refusal("emit", "causal", "-o", folder / "x.cu")
    folder.mkdir()
    assert f"nearest: flashgen run '{folder}' --sweep" in refusal("run", folder)
    assert f"nearest: --output '{folder}/NAME'" in refusal("emit", "causal", "-o", folder)
    (folder / "file").write_text("")
    assert f"nearest: --folder '{folder}'" in refusal("tune", "causal", "--folder", folder / "file")
    assert "nearest: --tensor 'doc=a b.npy' alone" in refusal("plan", "document", *["--tensor", "doc=a b.npy"] * 2)


def test_a_link_that_leads_nowhere(tmp_path):
    (tmp_path / "dangling.py").symlink_to("nowhere.py")
    err = refusal("plan", tmp_path / "dangling.py")
    assert "dangling.py is a link to nowhere.py, where there is no file" in err and "did you mean" not in err
    assert "did you mean" not in refusal("plan", tmp_path / "danglin.py")


def test_a_folder_without_specs(tmp_path):
    assert f"the folder {tmp_path} holds no spec" in refusal("run", tmp_path, "--sweep")


def test_a_captured_tensor_without_an_example(tmp_path):
    spec = tmp_path / "bare.py"
    spec.write_text(
        "import flashgen as fg\n\nids = fg.tensor('ids', dims=('kv',), dtype='int32')\n\n\n"
        "@fg.variant\ndef bare(b, h, q, k):\n    return ids[k] == 0\n"
    )
    told = refusal("plan", spec)
    assert "'bare' needs the captured tensor 'ids', int32 [kv]\n  nearest: ids=... in a call" in told
    assert f"--tensor ids=FILE.npy of a command, or example= of the fg.tensor that {spec}:6 is made of" in told


@pytest.mark.parametrize(
    "example, messages",
    [
        ("rng.integers(0, 3, (p.batch, p.seqlen))", ["no attribute 'seqlen'", "a problem has batch, heads, kv_heads,"]),
        ("1 // 0", ["ZeroDivisionError"]),
    ],
)
def test_an_example_that_fails_points_at_its_line(tmp_path, example, messages):
    spec = tmp_path / "failing.py"
    spec.write_text(
        "import flashgen as fg\n\nids = fg.tensor('ids', dims=('batch', 'kv'), dtype='int32',\n"
        f"    example=lambda p, rng: {example})\n\n\n@fg.variant\ndef failing(b, h, q, k):\n    return ids[b, k] == 0\n"
    )
    err = refusal("plan", spec)
    assert "failing.py:4" in err and "the example of captured tensor 'ids' of 'failing' failed" in err
    for message in messages:
        assert message in err


def test_a_npy_file_that_is_cut_short(tmp_path):
    file = tmp_path / "doc.npy"
    np.save(file, np.zeros((1, 256), np.int32))
    file.write_bytes(file.read_bytes()[:-100])
    assert f"--tensor: the .npy file {file} cannot be read" in refusal("plan", "document", "--tensor", f"doc={file}")
    np.save(file, np.array([None, 1]))
    assert f"--tensor: the .npy file {file} cannot be read" in refusal("plan", "document", "--tensor", f"doc={file}")


def header(text):
    """A .npy file with this header and no data."""
    line = text.encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(line).to_bytes(2, "little") + line


@pytest.mark.parametrize(
    "shape", ["(1000000000000000,)", f"({1 << 80},)", "(3,", "(" * 60, "-" * 3000 + "1"], ids=lambda shape: shape[:9]
)
def test_a_npy_file_whose_header_is_damaged(tmp_path, shape):
    """NumPy has no room, an OverflowError, a TokenError, a SyntaxError and a RecursionError for these."""
    file = tmp_path / "doc.npy"
    file.write_bytes(header(f"{{'descr': '<i4', 'fortran_order': False, 'shape': {shape}, }}"))
    err = refusal("plan", "document", "--tensor", f"doc={file}")
    assert f"--tensor: the .npy file {file} cannot be read: " in err and "nearest: write it again" in err


def test_a_missing_npy_file_names_those_beside_it(tmp_path):
    np.save(tmp_path / "docs.npy", np.zeros(1))
    assert "beside it: docs.npy" in refusal("plan", "document", "--tensor", f"doc={tmp_path / 'doc.npy'}")


@pytest.mark.parametrize("verb", ["plan", "show", "run"])
def test_a_promise_that_is_broken(tmp_path, verb):
    file = tmp_path / "doc.npy"
    np.save(file, np.arange(64, 0, -1, dtype=np.int32)[None])
    err = refusal(verb, "document", "--seqlen", 64, "--tensor", f"doc={file}")
    assert f"captured tensor 'doc' of 'document' ({file}) is declared with sorted=True and decreases" in err


@pytest.mark.parametrize("shape", [(128,), (3, 256), (1, 5)])
def test_a_captured_tensor_of_the_wrong_shape(tmp_path, shape):
    file = tmp_path / "doc.npy"
    np.save(file, np.zeros(shape, np.int32))
    err = refusal("plan", "document", "--batch", 2, "--seqlen", 256, "--tensor", f"doc={file}")
    assert "'doc'" in err and str(shape[-1]) in err


@pytest.mark.parametrize(
    "array, message",
    [
        (np.zeros((1, 64)), "holds float64 and is declared int32"),
        (np.full((1, 64), 1 << 40), "holds values that int32 cannot"),
    ],
)
def test_a_captured_tensor_of_the_wrong_type(tmp_path, array, message):
    np.save(tmp_path / "doc.npy", array)
    assert message in refusal("plan", "document", "--seqlen", 64, "--tensor", f"doc={tmp_path / 'doc.npy'}")


def test_no_gpu_is_said(monkeypatch):
    from flashgen.runtime import driver

    monkeypatch.setattr(driver, "gpus", lambda: 0)
    assert "the driver shows no GPU\n  nearest: --device cpu" in refusal("run", "causal", "--device", "cuda")


def test_a_pytorch_without_cuda_is_said(monkeypatch):
    import torch

    from flashgen.runtime import driver

    monkeypatch.setattr(driver, "gpus", lambda: 1)
    monkeypatch.setattr(
        driver, "gpu", lambda i: driver.Gpu(index=i, name="A100", capability=(8, 0), sms=108, memory_bytes_per_s=1.6e12)
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    said = f"the driver shows a GPU, and PyTorch {torch.__version__} cannot use it"
    assert f"--device cuda: {said}\n  nearest: --device cpu" in refusal("run", "causal", "--device", "cuda")
    ran = flashgen("run", "causal", "--arch", "sm_80", "--tile", "64x64", "--seqlen", 64)
    assert f"{said}: running on the CPU" in ran.err and "checked against float64" in ran.out


def test_the_help_says_that_specs_run_with_the_users_rights():
    assert "runs with your rights" in flashgen("--help").out
    assert "runs with your rights" in " ".join(flashgen("plan", "--help").out.replace("│", " ").split())


def test_a_process_exits_with_2_and_prints_no_traceback():
    done = subprocess.run([sys.executable, "-m", "flashgen", "plan", "nope"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout == "" and done.stderr.startswith("SpecError: there is no spec file nope")


@pytest.mark.parametrize(
    "arguments, nearest",
    [
        (["plan", "causal", "--kv-splits", 9999], "--kv-splits 512, or none: flashgen chooses"),
        (["plan", "causal", "--accuracy", "fast"], "leave out --accuracy"),
        (["plan", "causal", "--kv-dtype", "float8_e4m3fn", "--accuracy", "fast"], "--accuracy exact"),
        (["plan", "causal", "--q-stages", 2, "--arch", "sm_80"], "leave out --q-stages"),
        (["plan", "causal", "--q-stages", 9, "--arch", "sm_90a"], "--q-stages 2"),
        (["plan", "causal", "--backward", "--gradient", "x"], "leave out --gradient"),
        (["plan", "relative_bias", "--backward", "--gradient", "x"], "--gradient table"),
        (["plan", "causal", "--invariant", "--kv-splits", 4], "--invariant alone"),
        (["plan", "causal", "--dtype", "float8_e4m3fn", "--dropout"], "leave out --dropout"),
        (["run", "causal", "--device", "cpu", "--dropout", 1.5], "--dropout 0.99"),
    ],
    ids=lambda value: None if isinstance(value, list) else value,
)
def test_advice_names_options_of_the_command_line(arguments, nearest):
    assert f"\n  nearest: {nearest}\n" in refusal(*arguments)


@pytest.mark.parametrize(
    "line, said",
    [
        ("nearest: kv_splits=1, or dropout=False", "nearest: leave out --split-keys, or leave out --dropout"),
        ("nearest: gradients=('a', 'b'), or head_dim 128", "nearest: --gradient a --gradient b, or head_dim 128"),
        ("nearest: flashgen.plan(spec, packed=False)", None),
        ("nearest: --param tile=4 alone", None),
        ("nearest: fg.param('x', min=2), or window=3", None),
        ("kv_splits=4 beside invariant=True", None),
    ],
)
def test_only_arguments_in_advice_become_options(line, said):
    assert in_options(f"what was asked\n  {line}", ["--split-keys"]) == f"what was asked\n  {said or line}"
