"""The documents: commands run or parse, code works, paths exist, generated parts are what is generated now."""

import importlib.util
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib

import limits
import pytest
import typer
from cli import flashgen
from documents import BLOCK, BLOCKS, DOCUMENTS, ROOT, SAMPLES, blocks, shape, written

import flashgen as fg
from flashgen.cli.app import app
from flashgen.lang.language import language_table
from flashgen.planning.arch import ARCHS
from flashgen.planning.problem import Problem

TEXTS = {name: path.read_text() for name, path in DOCUMENTS.items()}

#: What the README and docs/ say together.
REFERENCE = "\n".join(text for name, text in TEXTS.items() if name == "README.md" or name.startswith("docs/"))

VERBS = typer.main.get_command(app).commands


def marked(marker: str) -> list:
    """A parameter for each fenced block after a marker, in any document."""
    return [
        pytest.param(block, id=f"{name}-{i}")
        for name, text in TEXTS.items()
        for i, block in enumerate(blocks(text, marker))
    ]


def prose(text: str) -> str:
    """A document without its code, its generated parts and its comments."""
    text = re.sub(r"```.*?```", "", BLOCK.sub("", text), flags=re.DOTALL)
    return re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)


# -- commands


def commands():
    """The lines; a sweep over all specs takes as long as the others together, and a build of whole menus as long."""
    at_night = pytest.mark.nightly(sibling="test_commands_run")
    for line in (line for p in marked("commands") for line in p.values[0].strip().splitlines()):
        yield pytest.param(line, marks=at_night) if re.search("--sweep|^flashgen build", line) else line


@pytest.mark.slow
@pytest.mark.parametrize("line", list(commands()))
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


#: What begins a command: in a `sh` block every line does, in a sentence what stands in backquotes and begins like this.
PROGRAMS = r"flashgen|python|pytest|\.venv/bin/\w+|\.ci/\w+"


def commands(text: str) -> list[tuple[str, bool]]:
    """The commands of a document; of each whether it is complete, as those of a `sh` block are."""
    lines = [line for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]
    shown = [(step, True) for line in lines for step in line.partition("#")[0].split("&&") if step.strip()]
    said = re.findall(rf"`((?:{PROGRAMS})\s[^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    return shown + [(" ".join(command.split()), False) for command in said]


def wrong_with(command: str, complete: bool) -> str | None:
    """Why a command would not start, or None."""
    words = shlex.split(command)
    while words and (re.match(r"\w+=", words[0]) or words[0] == "nice"):
        words = words[1:]
    program, *arguments = words
    program = program.removeprefix(".venv/bin/")
    if program in ("python", "python3") and arguments[:2] == ["-m", "flashgen"]:
        program, arguments = "flashgen", arguments[2:]
    if program == "flashgen":
        return wrong_with_verb(arguments, complete)
    if program in ("python", "python3") and arguments[0] == "-m":
        [module] = arguments[1:2]
        inside = (ROOT / module.replace(".", "/")).exists()
        return None if inside or importlib.util.find_spec(module) else f"there is no module {module}"
    if program.startswith(".ci/"):
        return None if os.access(ROOT / program, os.X_OK) else f"there is no script {program}"
    if program == "pytest":
        expressions = [b for a, b in itertools.pairwise(arguments) if a == "-m"]
        known = {line.split(":")[0] for line in pytest_options()["markers"]} | {"not", "and", "or"}
        unknown = {word for expression in expressions for word in expression.split()} - known
        if unknown:
            return f"there is no marker {unknown}"
    elif program not in ("python", "python3", "pip", "git", "ruff", "pre-commit"):
        return f"nothing is known of {program}"
    paths = [word.partition("::")[0] for word in arguments if re.match(r"(tests|flashgen|specs|\.ci)/", word)]
    return next((f"there is no {path}" for path in paths if not (ROOT / path).exists()), None)


def wrong_with_verb(arguments: list[str], complete: bool) -> str | None:
    if arguments[0].startswith("--") or arguments[0] in ("VERB", "..."):
        return None
    verb, *rest = arguments
    if verb not in VERBS:
        return f"there is no verb {verb}"
    if complete:
        try:
            VERBS[verb].make_context(verb, list(rest))
        except Exception as error:  # click's usage errors, however typer carries them
            return f"{type(error).__name__}: {error}"
    known = {option for p in VERBS[verb].params for option in (*p.opts, *p.secondary_opts)} | {"--help"}
    unknown = [word for word in rest if word.startswith("--") and word.partition("=")[0] not in known]
    return f"flashgen {verb} has no option {unknown}" if unknown else None


def pytest_options() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]


@pytest.mark.parametrize("name", TEXTS)
def test_commands_parse(name):
    wrong = {command: found for command, complete in commands(TEXTS[name]) if (found := wrong_with(command, complete))}
    assert wrong == {}


def test_what_runs_before_a_commit_would_start():
    text = (ROOT / ".pre-commit-config.yaml").read_text()
    assert re.findall(r"repo: (.*)", text) == ["local"], "no hook comes from elsewhere"
    entries = re.findall(r"entry: (.*)", text)
    assert len(entries) == 4
    assert [wrong for entry in entries if (wrong := wrong_with(entry, True))] == []


@pytest.mark.parametrize(("name", "script"), [("ci", ".ci/run"), ("nightly", ".ci/nightly")])
def test_hosted_workflows_run_a_script_of_the_repository_and_nothing_else(name, script):
    text = (ROOT / ".github" / "workflows" / f"{name}.yml").read_text()
    assert re.findall(r"- run: (.*)", text) == [script]
    assert wrong_with(script, True) is None
    used = re.findall(r"uses: (.*)@", text)
    assert used == ["actions/checkout", "actions/setup-python"]
    assert "cancel-in-progress: true" in text and "timeout-minutes: " in text


@pytest.mark.parametrize(
    "command",
    [
        *("flashgen plam causal", "flashgen plan causal --tle 64x64", "flashgen plan causal --seqlen long"),
        *("flashgen plan", "pytest -q tests/test_no.py", "pytest -m never", "python -m no_module", ".ci/no", "rm -r x"),
    ],
)
def test_commands_that_would_not_start_are_found(command):
    assert wrong_with(command, True)


def test_every_verb_is_in_the_table():
    rows = re.findall(r"^\| `flashgen (\w+)", TEXTS["docs/command_line.md"], re.MULTILINE)
    assert sorted(rows) == sorted(VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help(verb):
    assert "Usage" in flashgen(verb, "--help").out


# -- code


#: A fork for each piece of code that it reads: each starts without flashgen, and none imports PyTorch again.
FORKS = """
import json, os, sys, traceback
import numpy, sympy, torch

for line in sys.stdin:
    code, said = json.loads(line)
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT), 2)
        status = 0
        try:
            exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
        except BaseException:
            traceback.print_exc()
            status = 1
        sys.stderr.flush()
        os._exit(status)
    print(os.waitpid(child, 0)[1], flush=True)
"""


@pytest.fixture(scope="module")
def forks():
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", FORKS], cwd=ROOT, env=environment, **options) as process:
        yield process
        process.stdin.close()


@pytest.mark.slow
@pytest.mark.parametrize("code", marked("python"))
def test_python_runs(code, forks, tmp_path):
    said = tmp_path / "stderr"
    forks.stdin.write(json.dumps([code, str(said)]) + "\n")
    forks.stdin.flush()
    assert forks.stdout.readline() == "0\n", said.read_text()


@pytest.mark.sampled("docs/language.md-2", "docs/language.md-3")
@pytest.mark.slow
@pytest.mark.parametrize("code", marked("spec"))
def test_specs_run(code, tmp_path):
    spec = tmp_path / "spec.py"
    spec.write_text(code)
    assert "checked" in flashgen("run", spec, "--seqlen", 300, "--head-dim", 64, "--device", "cpu").out
    assert "0.0% misclassified" in flashgen("show", spec, "--seqlen", 1024, "--arch", "sm_80", "--tile", "64x64").out


# -- paths and words


def anchors(text: str) -> set[str]:
    """What a link to a heading names."""
    heads = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("name", TEXTS)
def test_links_lead_somewhere(name):
    missing = []
    for link in re.findall(r"\]\(([^)]+)\)", re.sub(r"```.*?```", "", TEXTS[name], flags=re.DOTALL)):
        if re.match(r"https?:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (DOCUMENTS[name].parent / path).resolve() if path else DOCUMENTS[name]
        if not target.exists() or (anchor and anchor not in anchors(target.read_text())):
            missing.append(link)
    assert missing == []


@pytest.mark.parametrize("name", TEXTS)
def test_paths_exist(name):
    named = re.findall(r"`((?:flashgen|specs|templates|generated|tests|docs|\.ci|\.github)/[\w./]*)`", TEXTS[name])
    assert [path for path in named if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("name", ["ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_names_of_the_code_are_in_the_code(name):
    """A function, field, constant or marker in backquotes."""
    folders = ("flashgen", "templates", "tests", "specs", ".ci", "pyproject.toml")
    paths = [path for folder in folders for path in [ROOT / folder, *(ROOT / folder).rglob("*")] if path.is_file()]
    known = set(re.findall(r"\w+", " ".join(path.read_text() for path in paths if "__pycache__" not in path.parts)))
    text = re.sub(r"```.*?```", "", TEXTS[name], flags=re.DOTALL)
    assert [word for word in re.findall(r"`([A-Za-z_]\w+)`", text) if word not in known] == []


@pytest.mark.parametrize("name", sorted(TEXTS.keys() - {"docs/glossary.md"}))  # which names what it replaces
def test_words_are_the_fields(name):
    """The words that readers stumbled over, with what the field says."""
    words = {"multiprocessor": "SM", "registers a thread": "registers per thread"}
    assert [f"{word} -> {better}" for word, better in words.items() if word in prose(TEXTS[name])] == []


@pytest.mark.parametrize("name", TEXTS)
def test_no_figure_is_claimed_before_it_is_measured(name):
    assert not re.search(r"\d+(\.\d+)?\s*(x faster|times faster|TFLOP|% faster)", prose(TEXTS[name]))


# -- what is generated


PRESENT = {(name, match[2]): match[0] for name, text in TEXTS.items() for match in BLOCK.finditer(text)}


#: Blocks that plan hundreds of kernels.
LONG = {"masks", "served_forward", "served_backward", "architectures"}


@pytest.mark.parametrize(
    ("name", "block"), [pytest.param(*key, marks=[pytest.mark.slow] * (key[1] in LONG)) for key in PRESENT]
)
def test_generated_parts_are_what_is_generated_now(name, block):
    text = PRESENT[name, block]
    assert written(text) == text, "refresh it with: python tests/documents.py"


def test_a_sample_keeps_its_numbers_and_nothing_else():
    before = "time  409 ms\nadd.s32   1,553  11.4%\nregisters  186 per thread\n"
    assert shape(before) == shape("time  1.2 s\nmul.wide.u16:x 2  1%\nregisters     90 per thread\n")
    for other in (before.replace("time", "times"), before.replace("per thread", ""), before + "one more\n"):
        assert shape(before) != shape(other)
    assert set(SAMPLES) <= set(BLOCKS)


def test_every_generated_part_has_its_place():
    assert {block for _, block in PRESENT} == set(BLOCKS)


@pytest.mark.slow
@pytest.mark.parametrize("backward", [False, True])
def test_where_there_is_one_pipeline_it_serves_every_feature(backward):
    """As docs/limits.md says; of an architecture with the least shared memory."""
    for head_dim, one in itertools.product((16, 256), limits.BACKWARD if backward else limits.FORWARD):
        assert limits.pipeline(one, head_dim, backward, "sm_86") == "ampere", (head_dim, one.name)


# -- nothing is left out


def test_the_language_is_there_in_full():
    """Each spelling of the language table, which a test of its own holds against the op table."""
    table = PRESENT["docs/language.md", "language"].replace("\\|", "|")
    rows = language_table()
    assert len(rows) > 40
    for row in rows:
        for spelling in row.write.split("; "):
            assert f"`{spelling}`" in table, spelling


@pytest.mark.parametrize("name", fg.__all__)
def test_every_public_name_is_there(name):
    assert re.search(rf"\b(fg|flashgen)\.{name}\b", REFERENCE)


@pytest.mark.parametrize("name", ["FLASHGEN_CACHE_DIR", "FLASHGEN_CACHE_BYTES", *Problem._fields])
def test_variables_and_fields_of_a_problem_are_there(name):
    assert f"`{name}`" in REFERENCE


def test_every_pipeline_is_named():
    for name in {pipeline for arch in ARCHS.values() for pipeline in arch.pipelines}:
        assert f"`{name}`" in TEXTS["docs/pipelines.md"]
