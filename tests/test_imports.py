"""Data flows one way: the import arrows between stages, and what `import flashgen` is allowed to pull in."""

import ast
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

import flashgen

PACKAGE = Path(flashgen.__file__).parent

#: Stages from source to sink; each may import those before it.  `frontends` lowers to `lang` and nothing else.
ORDER = ("lang", "analysis", "planning", "codegen", "runtime", "ops")
SINKS = ("integrations", "compat", "bench", "interpreter", "cli")
ALLOWED = {stage: set(ORDER[: i + 1]) for i, stage in enumerate(ORDER)}
ALLOWED["frontends"] = {"lang", "frontends"}
for sink in SINKS:
    ALLOWED[sink] = {*ORDER, "frontends", sink}
ALLOWED["cli"] |= set(SINKS)
for sink in ("compat", "bench"):
    ALLOWED[sink] |= {"integrations"}

#: Modules of the package itself that every stage may use.
COMMON = {"errors", "resources", "files", "jsonfile", "locks", "tuples"}

#: A call of attention() goes up through these, each of which imports those before it.
CALL = ("values", "tracing", "layouts", "memory", "sinks", "dropout", "menus", "float8", "pages", "sequences")
CALL += ("splits", "call")
CALL += (
    "out",
    "records",
    "forward",
    "backward",
    "library",
    "mapped",
    "autograd",
    "shards",
    "nested",
    "untraced",
    "attention",
)

#: What a function may import when it runs, because it is slow to import and most processes never need it.  A command
#: imports any stage so: `flashgen --help` and completion are quick.
LAZY = {
    *("torch", "cuda", "matplotlib", "jinja2", "numpy"),
    *("filelock", "threadpoolctl", "difflib", "importlib.metadata"),
    "flashgen.analysis.formula",  # SymPy
    "flashgen.ops.attention",
    "flashgen.ops.memory",  # torch
    "flashgen.ops.sites",  # torch._dynamo
    "flashgen.frontends.eager",  # and so does this
    "flashgen.ops.shards",  # torch.distributed, and so does this
    "flashgen.ops.untraced",  # torch._dynamo
    *("transformers", "flashgen.integrations.transformers"),
}

NO_TORCH = ("lang", "analysis", "planning", "codegen", "interpreter")


def modules(folder: Path = PACKAGE) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def imports(path: Path, *, within: type | tuple[type, ...] = ()) -> list[tuple[int, str]]:
    """(line, dotted name) of every import in a file, `from a import b` as a.b, relative ones resolved; only those
    `within` a kind of node, if one is given."""
    package = ["flashgen", *path.relative_to(PACKAGE).parts[:-1]]
    tree = ast.parse(path.read_text())
    nodes = [node for node in ast.walk(tree) if isinstance(node, within)] if within else [tree]
    found = []
    for node in {inner: None for outer in nodes for inner in ast.walk(outer)}:
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base += node.module.split(".") if node.module else []
            found += [(node.lineno, ".".join([*base, alias.name])) for alias in node.names]
    return found


def stage_of(path: Path) -> str | None:
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else None


def backward_imports(path: Path) -> list[str]:
    stage = stage_of(path)
    wrong = []
    for line, name in imports(path):
        parts = name.split(".")
        if parts[0] != "flashgen" or len(parts) < 2 or stage is None:
            continue
        target = parts[1]
        if (PACKAGE / target).is_dir() and target not in ALLOWED[stage]:
            wrong.append(f"{path.relative_to(PACKAGE)}:{line} imports flashgen.{target}")
        if not (PACKAGE / target).is_dir() and stage != "cli" and target not in COMMON:
            wrong.append(f"{path.relative_to(PACKAGE)}:{line} imports {name} from the package itself")
    return wrong


def module_of(name: str) -> str | None:
    """The module of flashgen that a dotted name is, or is a name in."""
    parts = name.split(".")
    while parts and parts[0] == "flashgen":
        path = PACKAGE.joinpath(*parts[1:])
        if path.with_suffix(".py").is_file() or (path / "__init__.py").is_file():
            return ".".join(parts)
        parts.pop()
    return None


def circles() -> list[str]:
    """Modules that import each other, at the top of the file or in a function; imports for types alone aside."""
    arrows = {}
    for path in modules():
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(["flashgen", *parts[: -1 if parts[-1] == "__init__" else None]])
        types = [
            found
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            for found in range(node.lineno, node.end_lineno + 1)
        ]
        arrows[name] = {module_of(target) for line, target in imports(path) if line not in types} - {name}
    while ends := {name for name, targets in arrows.items() if not targets & arrows.keys()}:
        arrows = {name: targets for name, targets in arrows.items() if name not in ends}
    while starts := arrows.keys() - {target for targets in arrows.values() for target in targets}:
        arrows = {name: targets for name, targets in arrows.items() if name not in starts}
    return sorted(arrows)


def late(path: Path) -> list[tuple[int, str]]:
    """Imports inside functions, as the entry of LAZY that they load, or by their own name."""
    found = []
    for line, name in imports(path, within=(ast.FunctionDef, ast.AsyncFunctionDef)):
        parts = name.split(".")
        prefixes = [".".join(parts[:i]) for i in range(1, len(parts) + 1)]
        found.append((line, next((prefix for prefix in prefixes if prefix in LAZY), name)))
    return found


@pytest.mark.slow
def test_no_modules_import_each_other():
    assert circles() == []


def test_a_circle_is_caught_inside_functions_too(tmp_path, monkeypatch):
    files = {
        "a": "from flashgen.b import x\n",
        "b": "def f():\n    from flashgen import a\n",
        "c": "import flashgen.a\n",
        "d": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from flashgen import e\n",
        "e": "from . import d\n",
    }
    for name, text in files.items():
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "__init__.py").write_text("")
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    monkeypatch.setattr(sys.modules[__name__], "modules", lambda: sorted(tmp_path.rglob("*.py")))
    assert circles() == ["flashgen.a", "flashgen.b"]


@pytest.mark.slow
def test_functions_import_only_what_is_slow_to_import():
    found = {path: late(path) for path in modules() if stage_of(path) != "cli"}
    assert [
        f"{path.relative_to(PACKAGE)}:{line} imports {name} inside a function"
        for path, lines in found.items()
        for line, name in lines
        if name not in LAZY
    ] == []
    assert {name for lines in found.values() for _, name in lines} == LAZY, "some of LAZY is imported at once"


def test_ops_import_nothing_inside_a_function_but_what_is_slow_to_import():
    assert {name for path in modules(PACKAGE / "ops") for _, name in late(path)} == {
        *("flashgen.ops.sites", "flashgen.ops.shards", "flashgen.ops.untraced")
    }


def test_a_call_of_attention_goes_one_way():
    for i, module in enumerate(CALL):
        names = {name.split(".")[2] for _, name in imports(PACKAGE / "ops" / f"{module}.py") if "flashgen.ops." in name}
        assert names <= {*CALL[:i], "sites"}, f"flashgen/ops/{module}.py"


def test_every_folder_has_a_place_in_the_order():
    folders = {p.parent.relative_to(PACKAGE).parts[0] for p in modules() if p.parent != PACKAGE}
    folders -= {"_resources"}
    assert folders <= set(ALLOWED), f"no arrow is known for {folders - set(ALLOWED)}"


@pytest.mark.slow
def test_imports_point_one_way():
    assert [line for path in modules() for line in backward_imports(path)] == []


def test_a_backward_import_is_caught(tmp_path, monkeypatch):
    (tmp_path / "lang").mkdir()
    (tmp_path / "planning").mkdir()
    bad = tmp_path / "lang" / "bad.py"
    bad.write_text("def f():\n    from ..planning import plan\n")
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    assert backward_imports(bad) == ["lang/bad.py:2 imports flashgen.planning"]


@pytest.mark.slow
@pytest.mark.parametrize("stage", NO_TORCH)
def test_folders_that_need_no_gpu_never_import_torch_or_cuda(stage):
    found = [
        f"{path.relative_to(PACKAGE)}:{line} imports {name}"
        for path in modules(PACKAGE / stage)
        for line, name in imports(path)
        if name.split(".")[0] in ("torch", "cuda")
    ]
    assert found == []


@pytest.mark.slow
def test_cuda_python_is_imported_in_the_runtime_only():
    users = {
        str(path.relative_to(PACKAGE))
        for path in modules()
        for _, name in imports(path)
        if name.split(".")[0] == "cuda"
    }
    assert {Path(user).parts[0] for user in users} <= {"runtime"}


def test_import_is_light():
    """60 ms is what it may take (`flashgen bench host` measures it): one module, and little of the standard library."""
    script = (
        "import json, sys\n"
        "before = set(sys.modules)\n"
        "import flashgen\n"
        "print(json.dumps(sorted(set(sys.modules) - before)))\n"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    added = json.loads(out)
    library = [name for name in added if name.split(".")[0] in sys.stdlib_module_names]
    assert [name for name in added if name not in library] == ["flashgen"]
    assert len(library) < 10, library


@pytest.mark.slow
def test_an_eager_call_leaves_the_compiler_of_torch_alone():
    """They take seconds to import, which a first call would wait for."""
    script = (
        "import sys, torch, flashgen\n"
        "q = torch.randn(1, 1, 20, 16, requires_grad=True)\n"
        "flashgen.attention(q, q, q, flashgen.load_spec('causal')).sum().backward()\n"
        "print([name for name in ('torch._dynamo', 'torch._inductor', 'sympy', 'jinja2') if name in sys.modules])\n"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


#: Modules for those who have a package that flashgen does not ask for.
OPTIONAL = {"flashgen.integrations.transformers": "transformers"}


def first_import(path: Path) -> str | None:
    """The module of flashgen that a file imports before any other; none where its package imports some."""
    if path.parent != PACKAGE and imports(path.parent / "__init__.py"):
        return None
    top = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)]
    found = (module_of(name) for line, name in sorted(imports(path)) if any(line == node.lineno for node in top))
    return next((name for name in found if name and name != "flashgen"), None)


#: Each module in a fork of the process that has imported alone what the module imports first: what comes after is as
#: in a process of its own, and none pays again for what came before, nor for PyTorch and SymPy.
FORK = """
import gc, importlib, json, os, sys, traceback
import jinja2, numpy, rich.console, sympy, torch, typer

gc.disable()  # a collection would copy the pages that a fork shares

after = json.loads(sys.argv[1])

def visit(names):
    right = True
    for name in names:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                importlib.import_module(name)
                print(name, flush=True)
                status = 0 if visit(after.get(name, ())) else 1
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
            finally:
                os._exit(status)
        if os.waitpid(child, 0)[1]:
            print(name, "or what imports it first does not import alone", file=sys.stderr, flush=True)
            right = False
    return right

sys.exit(not visit(after[""]))
"""


@pytest.mark.sampled("0")
@pytest.mark.slow
@pytest.mark.parametrize("part", range(12))
def test_every_stage_imports_alone(part):
    """No stage leans on another having been imported first (no cycles, no side effects at import)."""
    paths = {
        ".".join(["flashgen", *path.relative_to(PACKAGE).with_suffix("").parts]): path
        for path in modules()
        if path.name not in ("__init__.py", "__main__.py")
    }
    names = [name for name in paths if name not in OPTIONAL or importlib.util.find_spec(OPTIONAL[name])]
    after = {}
    for name in names:
        first = first_import(paths[name])
        after.setdefault(first if first in names else "", []).append(name)
    after[""] = after[""][part::12]
    done = subprocess.run([sys.executable, "-c", FORK, json.dumps(after)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split()) == sorted(beginning(after[""], after))


def beginning(names, after):
    """These, and all that come after them."""
    return [found for name in names for found in (name, *beginning(after.get(name, ()), after))]
