"""The README: its two commands, what it shows, and how long it may be; of all documents see test_documents.py."""

import os
import re
import subprocess
import tomllib

from cli import flashgen
from documents import README, ROOT, blocks

TEXT = README.read_text()

#: The pinned versions where there is no GPU; beside one, what pip finds.
PINNED = "$(nvidia-smi -L > /dev/null 2>&1 || echo -c constraints.txt)"


def steps(marker: str) -> list[str]:
    [block] = blocks(TEXT, f"command: {marker}")
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
    asked = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert "torch" in pinned
    assert set(pinned) <= {re.split(r"[><=]", name)[0] for name in asked}


# -- what it shows


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
