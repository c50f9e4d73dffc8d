"""The README: its two commands, what it shows, and how long it may be; of all documents see test_documents.py."""

import inspect
import os
import re
import subprocess
import tomllib

import pytest
from cli import flashgen
from documents import DOCUMENTS, README, ROOT, blocks

import flashgen as fg

TEXT = README.read_text()

#: The pinned versions where there is no GPU; beside one, what pip finds.
PINNED = "$(nvidia-smi -L > /dev/null 2>&1 || echo -c constraints.txt)"


def steps(marker: str) -> list[str]:
    [block] = blocks(TEXT, f"command: {marker}")
    return [step.strip() for step in block.strip().split("&&")]


# -- the two commands


@pytest.mark.slow
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
    assert job == ".venv/bin/pytest -n auto --dist worksteal --durations=15"
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert "test" in extras and any(name.startswith("pytest") for name in extras["test"])


def test_ci_runs_both_commands_of_the_readme():
    """.ci/run takes them from here; in CI it executes them, in a clean copy."""
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    out = subprocess.run([script, "--commands"], capture_output=True, text=True, check=True).stdout
    assert out.splitlines() == [block.strip() for block in blocks(TEXT, "command: run") + blocks(TEXT, "command: test")]


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
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *project["optional-dependencies"]["test"]]
    assert "torch" in pinned
    assert set(pinned) <= {re.split(r"[><=]", name)[0] for name in asked}


# -- what it shows


def arguments(call: str) -> list[tuple[list[str], list[str]]]:
    """Of each row of a table of arguments their names, and what they are unless given."""
    text = TEXT if call == "attention" else DOCUMENTS["docs/planning.md"].read_text()
    [table] = re.findall(rf"<!-- arguments: {call} -->\n((?:\|.*\n)+)", text)
    rows = [row.split("|")[1:3] for row in table.splitlines()[2:]]
    return [
        (re.findall(r"`([*\w]+)`", names), [d.strip().strip("`") for d in given.split(",")]) for names, given in rows
    ]


def signature(call: str) -> dict[str, inspect.Parameter]:
    """The parameters of a public function, by their names as a table writes them."""
    parameters = inspect.signature(getattr(fg, call)).parameters.values()
    return {"*" * (2 * (p.kind is p.VAR_KEYWORD)) + p.name: p for p in parameters}


@pytest.mark.parametrize("call", ["attention", "plan"])
def test_the_table_of_arguments_is_the_signature(call):
    known, rows = signature(call), arguments(call)
    positional = [] if call == "attention" else ["variant"]  # which stands in the sentence before
    assert sorted(positional + [name for names, _ in rows for name in names]) == sorted(known)
    for names, given in rows:
        if len(given) == len(names) or len(given) == 1:
            for name, said in zip(names, given if len(given) > 1 else given * len(names), strict=True):
                default = known[name].default
                assert said == repr(default) or default in (None, inspect.Parameter.empty), name


def test_supports_takes_what_plan_takes_but_for_the_problem():
    problem = {name for names, _ in arguments("plan")[:2] for name in names}
    assert set(signature("supports")) == set(signature("plan")) - problem
    assert {"seqlen", "batch"} <= problem


def test_the_spec_shown_has_ten_lines_or_so():
    assert len((ROOT / "specs" / "sliding_window.py").read_text().splitlines()) <= 12


def test_it_is_read_in_one_sitting():
    assert len(TEXT.splitlines()) <= 300


def test_it_leads_to_every_document():
    linked = set(re.findall(r"\]\(([^)#]+)", TEXT))
    names = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md")}
    assert names | {"ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE"} <= linked


def test_it_shows_one_table_and_one_picture_of_measurements():
    assert len(re.findall(r"!\[", TEXT)) == 1
    assert re.findall(r"<!-- generated: (measured\w*|counters) -->", TEXT) == ["measured_forward"]
