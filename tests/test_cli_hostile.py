"""The command where nothing is as it should be: odd values of every option, an output that ends, Ctrl-C, no UTF-8."""

import errno
import json
import os
import signal
import subprocess
import sys
import time

import pytest
import typer
from cli import flashgen
from full_disk import full_disk

from flashgen.cli.app import app
from flashgen.runtime import driver

#: What is no value of any option, or hardly one: each verb says so, or takes it, and never ends in a traceback.
ODD = ("", "0", "-1", "9" * 23, "9" * 5000, "1e309", "nan", "/nowhere/x", "²", "x=")

#: A small request of each verb, the arguments first.
SMALL = {
    "plan": (["causal"], ["--arch", "sm_80", "--head-dim", 32, "--seqlen", 32]),
    "show": (["causal"], ["--arch", "sm_80", "--head-dim", 32, "--seqlen", 32]),
    "emit": (["causal"], ["--arch", "sm_80", "--head-dim", 32]),
    "compile": (["causal"], ["--arch", "sm_80", "--head-dim", 16]),
    "build": (["causal"], ["--archs", "sm_80", "--head-dims", 16, "--dtypes", "float16"]),
    "run": (["causal"], ["--head-dim", 16, "--seqlen", 16, "--heads", 1, "--device", "cpu"]),
    "simulate": (["causal"], ["--arch", "sm_80", "--head-dim", 16, "--seqlen", 8, "--heads", 1]),
    "bench": (["ampere"], []),
    "cold": (["causal"], []),
    "counters": (["ampere"], []),
    "report": (["."], []),
    "tune": (["causal"], []),
    "golden": ([], ["--check"]),
}
COMMANDS = typer.main.get_command(app).commands


def invocations():
    """(verb, arguments) for every argument and option that takes a value, with every odd one."""
    for verb, (arguments, options) in SMALL.items():
        for parameter in COMMANDS[verb].params:
            for value in ODD:
                if parameter.param_type_name == "argument":
                    yield verb, [value, *options]
                elif not parameter.is_flag:
                    yield verb, [*arguments, *options, f"{parameter.opts[0]}={value}"]


def test_every_verb_is_tried():
    assert set(SMALL) == set(COMMANDS)


@pytest.mark.sampled("simulate-0", "bench-0", "cold-0", "counters-0", "report-0", "tune-0")
@pytest.mark.slow
@pytest.mark.parametrize("turn", (0, 1))
@pytest.mark.parametrize("verb", SMALL)
def test_no_value_of_any_option_ends_in_a_traceback(verb, turn, tmp_path, monkeypatch):
    """In this process an exception that is not said would come through."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(driver, "gpus", lambda: 0)
    # Every second value of an option in CI, of the next verb the others: what verbs share meets all of them.
    tried = [arguments for one, arguments in invocations() if one == verb]
    start = (list(SMALL).index(verb) + turn) % 2
    assert len(ODD) % 2 == 0
    for arguments in tried[start::2]:
        try:
            code = flashgen(verb, *arguments, code=None).code
        except BaseException as error:
            pytest.fail(f"flashgen {verb} {arguments}: {error!r}")
        assert code in (0, 1, 2), arguments


@pytest.mark.sampled(
    "--stages=0-0 stages for-plan",
    "--stages=0-0 stages for-simulate",
    "--arch=-'' is not an architecture-show",
    "--arch=-'' is not an architecture-compile",
    "--pipeline=-has no pipeline ''-emit",
    "--dtype=-dtype '' is not one of-run",
    "--tile=---tile '' is not of the form QxKV-plan",
    "--tile=---tile '' is not of the form QxKV-show",
    "--tile=---tile '' is not of the form QxKV-emit",
    "--tile=---tile '' is not of the form QxKV-compile",
    "option5-is not of the form QxKV-plan",
)
@pytest.mark.parametrize("verb", ["plan", "show", "emit", "compile", "run", "simulate"])
@pytest.mark.parametrize(
    "option, says",
    [
        ("--stages=0", "0 stages for"),
        ("--arch=", "'' is not an architecture"),
        ("--pipeline=", "has no pipeline ''"),
        ("--dtype=", "dtype '' is not one of"),
        ("--tile=", "--tile '' is not of the form QxKV"),
        ("--tile=" + "9" * 5000 + "x64", "is not of the form QxKV"),
    ],
)
def test_nothing_and_zero_are_values(verb, option, says):
    arguments, options = SMALL[verb]
    assert says in flashgen(verb, *arguments, *options, option, code=2).err


@pytest.mark.parametrize(
    "option, says",
    [
        ("--archs=", "--archs '' has a place between commas with nothing in it"),
        ("--dtypes=float16,", "--dtypes 'float16,' has a place"),
        ("--head-dims=", "--head-dims '' has a place"),
        ("--head-dims=" + "9" * 5000, "is not a positive number"),
        ("--head-dims=0", "'0' is not a positive number"),
        ("--stages=0", "0 stages for"),
        ("--pipeline=", "has no pipeline ''"),
    ],
)
def test_build_takes_no_empty_list(option, says):
    assert says in flashgen("build", "causal", "--archs", "sm_80", "--head-dims", 16, option, code=2).err


@pytest.mark.parametrize("option, says", [("--head-dim=0", "--head-dim is 0"), ("--v-head-dim=0", "--v-head-dim is 0")])
def test_tune_takes_no_zero(option, says):
    assert says in flashgen("tune", "causal", option, code=2).err


@pytest.mark.parametrize("verb, suffix", [("emit", ".cu"), ("compile", ".cubin"), ("show", ".png")])
def test_an_output_in_no_folder_is_refused_before_the_work(verb, suffix, tmp_path, monkeypatch):
    from flashgen.lang import load

    monkeypatch.setattr(load, "load_spec", None)
    arguments = [verb, "causal", "--output"]
    file = tmp_path / "missing" / f"causal{suffix}"
    told = flashgen(*arguments, file, code=2).err
    assert f"there is no folder {file.parent}\n  nearest: mkdir -p {file.parent}" in told
    assert not file.parent.exists()
    assert f"{tmp_path} is a folder" in flashgen(*arguments, tmp_path, code=2).err
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert "cannot be written by this user" in flashgen(*arguments, tmp_path / f"causal{suffix}", code=2).err


#: What Rich would read as the end of a style that nobody began.
BRACKETED = "x[/y]"


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["plan", "show", "compile", "build", "run", "simulate"])
def test_names_are_no_markup(verb, tmp_path):
    spec = tmp_path / f"{BRACKETED}.py"
    spec.parent.mkdir(exist_ok=True)
    _, options = SMALL[verb]
    spec.write_text(f"import flashgen as fg\n\n_ = fg.variant(lambda b, h, q, k: k <= q, name={BRACKETED!r})\n")
    assert BRACKETED in flashgen(verb, spec, *options).out


def test_a_sweep_names_files_as_they_are_called(tmp_path):
    spec = tmp_path / f"{BRACKETED}.py"
    spec.parent.mkdir()
    pins = "head_dims=(16,), dtypes=('float16',), only=True"
    spec.write_text(f"import flashgen as fg\n\nv = fg.variant(lambda b, h, q, k: k <= q, {pins})\n")
    assert f"{spec} " in flashgen("run", spec, "--sweep", "--device", "cpu", columns=400).out


@pytest.mark.parametrize("verb", ["bench", "cold", "counters", "tune"])
def test_results_do_not_go_into_a_file(verb, tmp_path):
    (tmp_path / "file").write_text("")
    arguments, options = SMALL[verb]
    told = flashgen(verb, *arguments, *options, "--folder", tmp_path / "file", code=2).err
    assert f"--folder {tmp_path / 'file'} is a file" in told


@pytest.mark.sampled("emit-.cu", "compile-.cubin")
@pytest.mark.slow
@pytest.mark.parametrize("verb, suffix", [("emit", ".cu"), ("compile", ".cubin"), ("show", ".svg")])
def test_a_full_disk_leaves_what_was_there(verb, suffix, tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "cache"))
    file = tmp_path / "out" / f"causal{suffix}"
    file.parent.mkdir()
    arguments, options = SMALL[verb]
    arguments = [verb, *arguments, *options, "--output", file]
    flashgen(*arguments)
    before = file.read_bytes()
    assert len(before) > 100
    full_disk(monkeypatch)
    assert "OSError: [Errno 28] No space left on device" in flashgen(*arguments, code=2).err
    assert file.read_bytes() == before and list(file.parent.iterdir()) == [file]


def test_an_output_that_is_a_device_is_written_as_it_is(tmp_path):
    small = ("emit", *SMALL["emit"][0], *SMALL["emit"][1])
    text = flashgen(*small).out
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen(["cat", pipe], stdout=subprocess.PIPE, text=True) as reader:
        flashgen(*small, "-o", pipe)
        assert reader.communicate(timeout=60)[0] == text
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "file")
    flashgen(*small, "-o", link)
    assert link.is_symlink() and (tmp_path / "file").read_text() == text


def process(*arguments, **named):
    return subprocess.Popen([sys.executable, "-m", "flashgen", *map(str, arguments)], stderr=subprocess.PIPE, **named)


@pytest.mark.sampled("plan --json")
@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["emit"], ["plan"], ["plan", "--json"], ["show"]], ids=" ".join)
def test_an_output_that_nobody_reads_ends_the_command_quietly(arguments):
    verb, *flags = arguments
    read, write = os.pipe()
    os.close(read)
    with process(verb, *SMALL[verb][0], *SMALL[verb][1], *flags, stdout=write) as running:
        os.close(write)
        _, err = running.communicate(timeout=120)
    assert running.returncode == 1 and err == b""


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
def test_an_output_that_is_full_is_said():
    with open("/dev/full", "wb") as full, process("emit", "causal", "--arch", "sm_80", stdout=full) as running:
        _, err = running.communicate(timeout=120)
    assert running.returncode == 2 and err.decode() == f"OSError: [Errno 28] {os.strerror(errno.ENOSPC)}\n"


@pytest.mark.sampled("utf-8")
@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp437", "utf-8"])
def test_show_on_a_terminal_of_another_encoding(encoding, tmp_path):
    spec = tmp_path / "named.py"
    spec.write_text(
        "import flashgen as fg\n\n\n@fg.variant\ndef named(b, h, q, k):\n"
        '    """Größer \u2265 und \u6f22."""\n    return k <= q\n'
    )
    environment = {**os.environ, "PYTHONIOENCODING": encoding, "COLUMNS": "160"}
    arguments = (spec, "--arch", "sm_80", "--head-dim", 32, "--seqlen", 64)
    with process("show", *arguments, stdout=subprocess.PIPE, env=environment) as running:
        out, err = running.communicate(timeout=120)
    assert running.returncode == 0 and b"Traceback" not in err
    text = out.decode(encoding)
    if encoding in ("cp437", "utf-8"):
        assert "██" in text and "k \u2264 q" in text
    else:
        assert "mask  = k <= q" in text and "##" in text and ". 0 empty, + 1 partial, # 0 full" in text
    assert ("\u6f22" if encoding == "utf-8" else "\\u6f22") in text


INTERRUPTED = """
import os, signal, sys
sys.argv = ["flashgen", "run", "causal", "--seqlen", "16", "--device", "cpu"]
from importlib.abc import MetaPathFinder

class Interrupt(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == {at!r}:
            os.kill(os.getpid(), signal.SIGINT)
            sys.meta_path.remove(self)

sys.meta_path.insert(0, Interrupt())
from flashgen.cli import main
main()
"""


@pytest.fixture
def interruptible():
    """Ctrl-C reaches what a test starts, also where the tests are a background job of a shell, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.sampled("typer", "rich.console", "flashgen.cli.run")
@pytest.mark.slow
@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("at", ["typer", "rich.console", "flashgen.cli.run", "flashgen.lang.load", "torch"])
def test_ctrl_c_in_the_middle_of_an_import_is_one_line(at):
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED.format(at=at)], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr.splitlines()[-1:]) == (130, ["interrupted"])
    assert "Traceback" not in done.stderr and done.stdout == ""


@pytest.mark.slow
@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_while_it_runs_is_one_line(tmp_path):
    spec, running_now = tmp_path / "slow.py", tmp_path / "running"
    spec.write_text(
        "import pathlib, time\n\nimport flashgen as fg\n\n"
        f"pathlib.Path({str(running_now)!r}).touch()\ntime.sleep(60)\nfull = fg.variant()\n"
    )
    with process("plan", spec, stdout=subprocess.PIPE) as running:
        for _ in range(1200):
            if running_now.exists():
                break
            time.sleep(0.05)
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=60)
    assert (running.returncode, out, err) == (130, b"", b"interrupted\n")


def test_the_version_is_one_line():
    from importlib.metadata import version

    import flashgen as fg
    from flashgen.runtime import nvrtc

    out = flashgen("--version").out
    assert out.startswith(f"flashgen {fg.__version__} (Python ") and out.count("\n") == 1
    for part in (f"torch {version('torch')}", f"NVRTC {nvrtc.version()}", f"cuda-bindings {version('cuda-bindings')}"):
        assert part in out


def test_the_version_needs_nothing(monkeypatch):
    from importlib import metadata

    from flashgen.errors import CompileError
    from flashgen.runtime import nvrtc

    def absent(*_):
        raise metadata.PackageNotFoundError

    def no_compiler():
        raise CompileError("none")

    monkeypatch.setattr(metadata, "version", absent)
    monkeypatch.setattr(nvrtc, "version", no_compiler)
    assert flashgen("--version").out.endswith("no torch, no NVRTC, no cuda-bindings)\n")


KEYS = {
    "plan": {"variant", "pass", "hbm", "tile"},
    "show": {"dtype", "shape", "params", "b", "h", "formula", "visible", "pairs", "tile", "tiles", "misclassified"}
    | {"block_mask", "decided", "hint", "judged_whole"},
    "emit": {"kernel", "cuda"},
    "compile": {"kernel", "resources", "cubin_bytes", "cached", "seconds"},
    "build": {"kernels"},
    "run": {
        *("passed", "device", "seed", "dropout", "seconds", "dtype", "shape", "params", "kernel", "predicted_bytes"),
        *("counted_bytes", "checked", "lse_reasons"),
    },
    "simulate": {
        *("dtype", "shape", "params", "seed", "dropout", "kernel", "traffic", "predicted_bytes", "instructions"),
        *("conflicts", "steps", "seconds", "passed", "reasons"),
    },
}


def refuse_constant(name):
    raise AssertionError(f"{name} is no JSON")


@pytest.mark.sampled("plan", "show", "emit", "run")
@pytest.mark.slow
@pytest.mark.parametrize("verb", KEYS)
def test_json_has_the_keys_that_help_names(verb, tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path))
    arguments, options = SMALL[verb]
    found = json.loads(flashgen(verb, *arguments, *options, "--json").out, parse_constant=refuse_constant)
    if verb == "plan":
        assert KEYS[verb] <= set(found)
        return
    assert set(found) == KEYS[verb]
    told = " ".join(flashgen(verb, "--help").out.replace("│", " ").split())
    for key in found:
        assert key in told
    kernel = {"build": lambda: found["kernels"][0]["kernel"], "show": lambda: {"variant": "causal"}}
    assert kernel.get(verb, lambda: found["kernel"])()["variant"] == "causal"


def test_json_of_what_is_no_number_is_null(capsys):
    from flashgen.cli.console import write_json

    write_json({"a": float("nan"), "b": [float("inf"), 1.5], "c": (True, None, "x")})
    assert json.loads(capsys.readouterr().out) == {"a": None, "b": [None, 1.5], "c": [True, None, "x"]}


def test_json_of_a_sweep_names_each_case(tmp_path):
    spec = tmp_path / "only.py"
    spec.write_text("import flashgen as fg\n\nfull = fg.variant(head_dims=(64,), dtypes=('float16',), only=True)\n")
    found = json.loads(flashgen("run", spec, "--sweep", "--device", "cpu", "--json").out)
    assert found["passed"] and {case["passed"] for case in found["cases"]} == {True}
    assert all(case["command"].startswith(f"flashgen run {spec} ") for case in found["cases"])


PRINTING = """\
import flashgen as fg

print("the file")
def example(problem, rng):
    print("the example")
    return rng.standard_normal(problem.heads).astype("float32")
slopes = fg.tensor("slopes", ("heads",), "float32", example=example)
@fg.variant(head_dims=(32,))
def loud(b, h, q, k):
    print("the mask")
    return k <= q
@loud.score
def _(s, b, h, q, k):
    return s + slopes[h]
"""


@pytest.mark.parametrize("verb", ["plan", "show", "emit", "run", "simulate"])
def test_what_a_spec_prints_is_not_in_the_json(verb, tmp_path):
    spec = tmp_path / "loud.py"
    spec.write_text(PRINTING)
    options = [*SMALL[verb][1], "--head-dim", 32]  # the last one counts
    ran = flashgen(verb, spec, *options, "--json")
    assert isinstance(json.loads(ran.out), dict) and "the file\n" in ran.err and "the mask\n" in ran.err
    assert "the file\n" in flashgen(verb, spec, *options).out


def test_json_of_a_failed_check_exits_with_1(monkeypatch):
    from flashgen.cli import run

    judged = run.check

    def wrong(*given, **named):
        found = judged(*given, **named)
        return run.Checked(verdict=found.verdict, lse_reasons=("lse is wrong",), seconds=float("inf"))

    monkeypatch.setattr(run, "check", wrong)
    ran = flashgen("run", *SMALL["run"][0], *SMALL["run"][1], "--json", code=1)
    found = json.loads(ran.out, parse_constant=refuse_constant)
    assert found["passed"] is False and found["seconds"] is None and found["lse_reasons"] == ["lse is wrong"]


@pytest.mark.parametrize("verb", ["run", "simulate"])
def test_a_problem_beyond_all_memory_is_said(verb, monkeypatch):
    monkeypatch.setattr(driver, "gpus", lambda: 0)
    most = (1 << 24) - 1
    told = flashgen(verb, "causal", "--batch", most, "--heads", most, "--seqlen", most, "--head-dim", 64, code=2).err
    assert "the CPU has no room for this problem" in told and "nearest: a smaller --seqlen" in told
