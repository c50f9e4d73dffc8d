"""The repository's own Python is as ruff wants it, and nothing is kept from its formatter."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("flashgen", "specs", "tests")

#: Lines of a file of Python: what has more is about more than one thing.
MOST_LINES = 700


def files() -> list[Path]:
    """Every file of Python."""
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    assert len(found) > 100
    return found


@pytest.mark.parametrize("command", [("check",), ("format", "--check")], ids=" ".join)
def test_ruff_has_nothing_to_say(command):
    done = subprocess.run([sys.executable, "-m", "ruff", *command, *FOLDERS], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_the_type_checker_has_nothing_to_say():
    """Strict on planning, codegen and ops, and on every signature: see [tool.mypy]."""
    done = subprocess.run([sys.executable, "-m", "mypy"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_test_reads_a_clock():
    """A time says what else the machine did: tests count (tests/effort.py), and `flashgen bench` times."""
    clock = re.compile(r"\b(perf_counter|process_time|thread_time|monotonic|time\.time)(_ns)?\(")
    tests = [path for path in (ROOT / "tests").rglob("*.py") if "fuzz" not in path.parts]  # it has a budget of seconds
    assert [path.relative_to(ROOT) for path in tests if clock.search(path.read_text())] == []


def test_no_file_turns_the_formatter_off():
    marks = [f"# fmt: {word}" for word in ("skip", "off")]
    assert [path.relative_to(ROOT) for path in files() if any(mark in path.read_text() for mark in marks)] == []


def test_no_file_is_longer_than_the_house_allows():
    lines = {path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines()) for path in files()}
    assert {name: count for name, count in lines.items() if count > MOST_LINES} == {}
