"""The CUDA kept in `generated/` is what is emitted now, for every shipped spec."""

from pathlib import Path

import pytest
from cli import flashgen

from flashgen.codegen.golden import goldens
from flashgen.lang.load import shipped

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def emitted():
    return {golden.path: golden.text for golden in goldens()}


def test_every_shipped_spec_has_its_file_and_nothing_else_has(emitted):
    assert {path.stem for path in emitted} == set(shipped())
    kept = {path.relative_to(ROOT) for path in (ROOT / "generated").rglob("*.cu")}
    assert kept == set(emitted), "refresh them with: flashgen golden"


@pytest.mark.parametrize("name", sorted(shipped()))
def test_the_kept_text_is_what_is_emitted(emitted, name):
    paths = [path for path in emitted if path.stem == name]
    assert paths
    for path in paths:
        assert (ROOT / path).read_text() == emitted[path], "refresh it with: flashgen golden"


def test_check_names_what_differs_and_golden_refreshes_it(tmp_path, emitted):
    ran = flashgen("golden", "--root", tmp_path, "--check", code=1)
    assert f"{len(emitted)} of the golden files differ; refresh them with: flashgen golden" in ran.err
    assert not list(tmp_path.rglob("*.cu"))
    assert "causal.cu" in flashgen("golden", "--root", tmp_path).err
    assert "the golden CUDA is what is emitted now" in flashgen("golden", "--root", tmp_path, "--check").err
    changed = next(path for path in emitted if path.stem == "causal")
    (tmp_path / changed).write_text("changed\n")
    ran = flashgen("golden", "--root", tmp_path, "--check", code=1)
    assert "-changed" in ran.out and "1 of the golden files differ" in ran.err
