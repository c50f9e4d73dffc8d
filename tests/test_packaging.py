"""The wheel: what it carries, and that it works from another folder with nothing of the checkout in sight."""

import ast
import email
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from documents import DOCUMENTS

import flashgen

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    out = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(build, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    [path] = out.glob("*.whl")
    return path


@pytest.mark.slow
def test_the_source_archive_carries_the_documents_and_what_they_lead_to(tmp_path):
    build = [sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    done = subprocess.run(build, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    [path] = tmp_path.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        carried = {Path(*Path(name).parts[1:]).as_posix() for name in archive.getnames()}
    wanted = {"CHANGELOG.md", "constraints.txt", ".ci/run", *DOCUMENTS}
    for name, document in DOCUMENTS.items():
        links = re.findall(r"\]\(([^)#]+)", document.read_text())
        wanted |= {os.path.normpath(Path(name).parent / link) for link in links if "://" not in link}
    files = {path for path in wanted if (ROOT / path).is_file()}
    assert files and files <= carried


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The wheel alone in an empty folder; its dependencies are the environment's."""
    site = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(site)]
    done = subprocess.run([*pip, str(wheel)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return site


@pytest.fixture
def run(installed, tmp_path):
    """Runs Python from an empty folder with the installed wheel before everything else on the path."""

    def run(*arguments: str) -> str:
        environment = {**os.environ, "PYTHONPATH": str(installed), "FLASHGEN_CACHE_DIR": str(tmp_path / "cache")}
        folder = tmp_path / "elsewhere"
        folder.mkdir(exist_ok=True)
        done = subprocess.run([sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


def files(folder: str) -> set[str]:
    return {
        path.relative_to(ROOT / folder).as_posix()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_the_wheel_carries_the_measured_records(wheel):
    shipped = {f"flashgen/planning/records/{name}" for name in files("flashgen/planning/records")}
    assert shipped and shipped <= set(zipfile.ZipFile(wheel).namelist())


@pytest.mark.slow
def test_the_wheel_names_its_version_its_command_and_everything_it_imports(wheel):
    archive = zipfile.ZipFile(wheel)
    [info] = {name.split("/")[0] for name in archive.namelist() if ".dist-info/" in name}
    metadata = email.message_from_bytes(archive.read(f"{info}/METADATA"))
    assert metadata["Version"] == flashgen.__version__
    assert "flashgen = flashgen.cli:main" in archive.read(f"{info}/entry_points.txt").decode().splitlines()
    required = {
        re.match(r"[\w.-]+", line)[0].lower()
        for line in metadata.get_all("Requires-Dist")
        if "extra" not in line or "'integrations'" in line.replace('"', "'")
    }
    imported = {
        name.split(".")[0]
        for path in (ROOT / "flashgen").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import) or (isinstance(node, ast.ImportFrom) and not node.level)
        for name in ([node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
    }
    found = imported - set(sys.stdlib_module_names) - {"flashgen"}
    assert {"torch", "cuda", "jinja2"} <= found
    makers = packages_distributions()
    assert [
        name for name in sorted(found) if not required & {maker.lower() for maker in makers.get(name, [name])}
    ] == []


def test_the_wheel_says_that_it_is_typed(wheel):
    """PEP 561: a type checker reads the annotations of an installed package only where it finds this."""
    assert "flashgen/py.typed" in zipfile.ZipFile(wheel).namelist()


def test_the_extras_are_those_of_the_tests_and_of_the_integrations(wheel):
    archive = zipfile.ZipFile(wheel)
    [info] = {name.split("/")[0] for name in archive.namelist() if ".dist-info/" in name}
    metadata = email.message_from_bytes(archive.read(f"{info}/METADATA"))
    assert set(metadata.get_all("Provides-Extra")) == {"test", "integrations"}
    extra = [line.partition("; ") for line in metadata.get_all("Requires-Dist") if "extra" in line]
    # A checker of another version finds other faults.
    assert [line for line, _, where in extra if line.startswith("mypy") and "test" in where] == ["mypy==2.4.1"]
    assert [line for line, _, where in extra if "integrations" in where] == ["transformers>=5.17"]


@pytest.mark.parametrize("folder", ["templates", "specs"])
def test_the_wheel_carries_every_resource(wheel, folder):
    prefix = f"flashgen/_resources/{folder}/"
    carried = {name.removeprefix(prefix) for name in zipfile.ZipFile(wheel).namelist() if name.startswith(prefix)}
    assert carried == files(folder) != set()


def test_the_wheel_carries_the_package_and_the_licence_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"flashgen"}
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [name for name in names if "__pycache__" in name]


@pytest.mark.slow
def test_resources_come_from_the_wheel(run, installed):
    script = (
        "import flashgen\n"
        "from flashgen.resources import folder\n"
        "print(flashgen.__file__, folder('specs'), folder('templates'))"
    )
    package, specs, templates = run("-c", script).split()
    assert Path(package) == installed / "flashgen" / "__init__.py"
    assert Path(specs) == installed / "flashgen" / "_resources" / "specs"
    assert Path(templates) == installed / "flashgen" / "_resources" / "templates"


def test_the_command_works_from_another_folder(run, installed):
    assert "plan" in run(str(installed / "bin" / "flashgen"), "--help")


@pytest.mark.slow
def test_plan_and_emit_work_from_another_folder(run):
    assert "hbm" in run("-m", "flashgen", "plan", "sliding_window", "--arch", "sm_80", "--json")
    assert "attention_forward" in run("-m", "flashgen", "emit", "sliding_window", "--arch", "sm_80")


@pytest.mark.slow
def test_a_spec_of_ones_own_works_from_another_folder(run, tmp_path):
    spec = tmp_path / "mine.py"
    spec.write_text("import flashgen as fg\n\n\n@fg.variant()\ndef mine(b, h, q, k):\n    return k <= q\n")
    assert "mine" in run("-m", "flashgen", "plan", str(spec), "--seqlen", "256")
    assert "attention_forward" in run("-m", "flashgen", "emit", str(spec))
