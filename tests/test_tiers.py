"""The tiers: what runs at night alone has a smaller sibling in CI, and the quick tier touches every package."""

import ast
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
ROOT = TESTS.parent

#: Collects in a process of its own, and prints what conftest.py keeps of every test.
COLLECT = """
import json, sys
import pytest

class Collected:
    def pytest_collection_finish(self, session):
        (conftest,) = (p for p in session.config.pluginmanager.get_plugins() if hasattr(p, "COLLECTED"))
        print("rows:" + json.dumps(session.config.stash[conftest.COLLECTED], default=sorted))

sys.exit(pytest.main([*sys.argv[1:], "--collect-only", "-q", "-p", "no:cacheprovider"], plugins=[Collected()]))
"""


@dataclass(frozen=True, slots=True)
class Collected:
    file: Path
    function: str
    parameters: tuple[str, ...]  # their id, and name=value of those that a sampled mark has values of
    marks: frozenset[str]
    nightly: tuple | None
    sampled: tuple[str, ...] | None

    def __str__(self) -> str:
        return f"{self.file.name}::{self.function}"


def collect(*arguments: str, cwd: Path = ROOT) -> list[Collected]:
    done = subprocess.run([sys.executable, "-c", COLLECT, *arguments], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (rows,) = [line.removeprefix("rows:") for line in done.stdout.splitlines() if line.startswith("rows:")]
    return of_rows(json.loads(rows))


def of_rows(rows) -> list[Collected]:
    return [
        Collected(
            Path(file), function, tuple(names), frozenset(marks), nightly, None if named is None else tuple(named)
        )
        for file, function, names, marks, nightly, named in rows
    ]


def without_sibling(tests: list[Collected]) -> set[str]:
    """The nightly tests whose mark names no test of CI."""
    in_ci = {(test.file, test.function) for test in tests if test.nightly is None}
    found = set()
    for test in tests:
        if test.nightly is None:
            continue
        arguments, options = test.nightly
        file, _, function = str(options.get("sibling", "")).rpartition("::")
        if (
            arguments
            or set(options) != {"sibling"}
            or (test.file.parent / file if file else test.file, function) not in in_ci
        ):
            found.add(str(test))
    return found


def named_in_vain(tests: list[Collected]) -> set[str]:
    """What sampled marks name that no test has."""
    there = {(test.file, test.function, name) for test in tests for name in test.parameters}
    return {
        f"{test}[{name}]"
        for test in tests
        for name in test.sampled or ()
        if (test.file, test.function, name) not in there
    }


@pytest.fixture(scope="module")
def tests(pytestconfig):
    """All of them: as this run found them, where it looked at every file, and not at single tests."""
    conftest = pytestconfig.pluginmanager.get_plugin(str(TESTS / "conftest.py"))
    found = of_rows(pytestconfig.stash[conftest.COLLECTED])
    partly = any("::" in argument for argument in pytestconfig.args)
    everything = {test.file for test in found} >= set(TESTS.rglob("test_*.py"))
    return found if everything and not partly else collect("--nightly")


@pytest.mark.slow
def test_what_runs_at_night_only_has_a_smaller_sibling_in_ci(tests):
    assert any(test.nightly for test in tests)
    assert without_sibling(tests) == named_in_vain(tests) == set()


@pytest.mark.slow
def test_the_quick_tier_touches_every_package(tests):
    packages = {path.parent.name for path in (ROOT / "flashgen").glob("*/*.py")}
    assert {"lang", "analysis", "planning", "codegen", "runtime", "ops", "bench", "cli"} <= packages
    quick = {test.file for test in tests if not test.marks & {"slow", "nightly", "gpu"}}
    touched = {
        name.split(".")[1]
        for file in quick
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module
        for name in (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
        if name.startswith("flashgen.")
    }
    assert packages - touched == set()


PLANTED = """
import pytest

@pytest.mark.parametrize("n", [1, pytest.param(2, marks=pytest.mark.nightly(sibling="test_grid"))])
def test_grid(n): pass

@pytest.mark.sampled("1-x", "3-x")
@pytest.mark.parametrize("letter", ["x", "y"])
@pytest.mark.parametrize("n", [1, 2])
def test_sweep(n, letter): pass

@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_every_third(n): pass

@pytest.mark.sampled(n=(2, 4), letter=("y", "z"))
@pytest.mark.parametrize("letter", ["x", "y"])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_by_values(n, letter): pass

@pytest.mark.sampled("3")
@pytest.mark.parametrize("n", [1])
def test_sample_of_none(n): pass

@pytest.mark.nightly(sibling="test_grid")
def test_broad(): pass

@pytest.mark.nightly(sibling="test_other.py::test_elsewhere")
def test_broad_beside_another_file(): pass

@pytest.mark.nightly
def test_silent(): pass

@pytest.mark.nightly("it is long")
def test_with_a_reason_alone(): pass

@pytest.mark.nightly(sibling="test_gone")
def test_beside_nothing(): pass

@pytest.mark.nightly(sibling="test_broad")
def test_beside_what_is_nightly_itself(): pass
"""


@pytest.fixture
def planted(tmp_path):
    (tmp_path / "conftest.py").write_text((TESTS / "conftest.py").read_text())
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    (tmp_path / "test_planted.py").write_text(PLANTED)
    (tmp_path / "test_other.py").write_text("def test_elsewhere(): pass\n")
    return tmp_path


@pytest.mark.slow
def test_a_mark_without_a_sibling_is_noticed(planted):
    found = collect("--nightly", ".", cwd=planted)
    wrong = ("test_silent", "test_with_a_reason_alone", "test_beside_nothing", "test_beside_what_is_nightly_itself")
    assert without_sibling(found) == {f"test_planted.py::{name}" for name in (*wrong, "test_sample_of_none")}
    assert named_in_vain(found) == {
        f"test_planted.py::{name}"
        for name in ("test_sweep[3-x]", "test_by_values[n=4]", "test_by_values[letter='z']", "test_sample_of_none[3]")
    }


@pytest.mark.slow
def test_nightly_tests_are_left_out_and_it_is_said(planted):
    def run(*arguments):
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
        return subprocess.run(command, cwd=planted, capture_output=True, text=True).stdout

    plain, nightly = run("."), run(".", "--nightly")
    assert "nightly tests: left out (--nightly runs them)" in plain and "6 passed, 19 deselected" in plain
    assert "nightly tests: run too" in nightly and "25 passed" in nightly


def test_the_nightly_script_is_ci_with_more():
    printed = [
        subprocess.run([ROOT / ".ci" / name, "--commands"], capture_output=True, text=True, check=True).stdout
        for name in ("run", "nightly")
    ]
    assert printed[0] == printed[1] != ""
    text = (ROOT / ".ci" / "nightly").read_text()
    assert "--nightly" in text and "FLASHGEN_FUZZ_SECONDS" in text
