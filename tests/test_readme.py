"""The README: its commands run, its code works, its paths exist, its generated parts are what is generated now."""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import fields

import pytest
from cli import flashgen
from readme_blocks import BLOCK, BLOCKS, README, ROOT, written

import flashgen as fg
from flashgen.cli import app
from flashgen.lang.language import language_table
from flashgen.planning.arch import ARCHS
from flashgen.planning.problem import Problem

TEXT = README.read_text()

#: The pinned versions where there is no GPU; beside one, what pip finds.
PINNED = "$(nvidia-smi -L > /dev/null 2>&1 || echo -c constraints.txt)"


def after(marker: str) -> list[str]:
    """The fenced blocks that follow a marker."""
    return re.findall(rf"<!-- {marker} -->\n```\w*\n(.*?)```", TEXT, re.DOTALL)


def steps(marker: str) -> list[str]:
    [block] = after(f"command: {marker}")
    return [step.strip() for step in block.strip().split("&&")]


# -- the two commands


def test_one_command_installs_and_runs_the_main_job():
    venv, install, job = steps("run")
    assert venv == "python3 -m venv .venv"
    assert install == f".venv/bin/pip install {PINNED} ."
    assert job == ".venv/bin/flashgen run specs/sliding_window.py"
    assert "checked against float64" in flashgen(*job.split()[1:]).out


def test_one_command_installs_and_runs_the_tests():
    venv, install, job = steps("test")
    assert venv == steps("run")[0]
    assert install == f".venv/bin/pip install {PINNED} -e '.[test]'"
    assert job == ".venv/bin/pytest -n auto --durations=15"
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert "test" in extras and any(name.startswith("pytest") for name in extras["test"])


def test_ci_runs_both_commands_of_the_readme():
    """.ci/run takes them from here; in CI it executes them, in a clean copy."""
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    out = subprocess.run([script, "--commands"], capture_output=True, text=True, check=True).stdout
    assert out.splitlines() == [block.strip() for block in after("command: run") + after("command: test")]


def test_versions_are_pinned_without_a_gpu_alone(tmp_path):
    def flags(*folders):
        path = {"PATH": ":".join(map(str, folders))}
        done = subprocess.run(["/bin/sh", "-c", f"echo {PINNED}"], env=path, capture_output=True, text=True)
        return done.stdout.split()

    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho GPU 0\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    assert flags(tmp_path) == []
    assert flags(tmp_path / "nothing") == ["-c", "constraints.txt"]


def test_constraints_pin_what_the_package_asks_for():
    pinned = [line.split("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line]
    asked = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert "torch" in pinned
    assert set(pinned) <= {re.split(r"[><=]", name)[0] for name in asked}


# -- commands, code and paths


@pytest.mark.slow
@pytest.mark.parametrize("line", [line for block in after("commands") for line in block.strip().splitlines()])
def test_commands_run(line, tmp_path, monkeypatch):
    for name in ("specs", "generated"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "cache"))
    program, *arguments = shlex.split(line)
    assert program == "flashgen"
    ran = flashgen(*arguments)
    assert ran.out or ran.err
    for name in re.findall(r"--output (\S+)", line):
        assert (tmp_path / name).stat().st_size > 0


def test_every_verb_is_in_the_table():
    verbs = {command.name for command in app.app.registered_commands}
    assert set(re.findall(r"^\| `flashgen (\w+)", TEXT, re.MULTILINE)) == verbs
    for verb in verbs:
        assert "Usage" in flashgen(verb, "--help").out


@pytest.mark.slow
@pytest.mark.parametrize("code", after("python"))
def test_python_runs(code, monkeypatch):
    monkeypatch.chdir(ROOT)
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("code", after("spec"))
def test_specs_run(code, tmp_path):
    spec = tmp_path / "spec.py"
    spec.write_text(code)
    assert "checked" in flashgen("run", spec, "--seqlen", 300, "--head-dim", 64, "--device", "cpu").out
    assert "0.0% misclassified" in flashgen("show", spec, "--seqlen", 1024, "--arch", "sm_80", "--tile", "64x64").out


def test_paths_exist():
    linked = re.findall(r"\]\(([^)#]+)\)", TEXT)
    named = re.findall(r"`((?:flashgen|specs|templates|generated|tests|\.ci)/[\w./]*)`", TEXT)
    assert linked and named
    missing = [path for path in [*linked, *named] if not (ROOT / path).exists()]
    assert missing == []


# -- what is generated


@pytest.mark.parametrize("name", list(BLOCKS))
def test_generated_parts_are_what_is_generated_now(name):
    present = {match[2]: match[0] for match in BLOCK.finditer(TEXT)}
    assert set(present) == set(BLOCKS)
    assert written(present[name]) == present[name], "refresh it with: python tests/readme_blocks.py"


def test_the_language_is_there_in_full():
    """Each spelling of the language table, which a test of its own holds against the op table."""
    [table] = [match[0] for match in BLOCK.finditer(TEXT) if match[2] == "language"]
    table = table.replace("\\|", "|")
    rows = language_table()
    assert len(rows) > 40
    for row in rows:
        for spelling in row.write.split("; "):
            assert f"`{spelling}`" in table, spelling


@pytest.mark.parametrize("name", fg.__all__)
def test_every_public_name_is_there(name):
    assert re.search(rf"\b(fg|flashgen)\.{name}\b", TEXT)


@pytest.mark.parametrize("name", ["FLASHGEN_CACHE_DIR", "FLASHGEN_CACHE_BYTES", *(f.name for f in fields(Problem))])
def test_variables_and_fields_of_a_problem_are_there(name):
    assert f"`{name}`" in TEXT


def test_every_pipeline_is_named():
    for name in {pipeline for arch in ARCHS.values() for pipeline in arch.pipelines}:
        assert f"`{name}`" in TEXT


def test_the_spec_shown_has_ten_lines_or_so():
    assert len((ROOT / "specs" / "sliding_window.py").read_text().splitlines()) <= 12


def test_no_figure_is_claimed_before_it_is_measured():
    prose = re.sub(r"```.*?```", "", TEXT, flags=re.DOTALL)
    assert not re.search(r"\d+(\.\d+)?\s*(x faster|times faster|TFLOP|% faster)", prose)
