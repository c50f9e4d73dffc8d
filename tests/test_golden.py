"""The CUDA kept in `generated/` is what is emitted now, for every shipped spec."""

from pathlib import Path

import pytest
from cli import flashgen

from flashgen.codegen.golden import goldens
from flashgen.lang.load import shipped

FOLDER = Path(__file__).parents[1] / "generated"


@pytest.fixture(scope="module")
def emitted():
    return {golden.path: golden.text for golden in goldens()}


def test_every_shipped_spec_has_its_file_and_nothing_else_has(emitted):
    assert {path.stem for path in emitted} == set(shipped())
    kept = {path.relative_to(FOLDER) for path in FOLDER.rglob("*.cu")}
    assert kept == set(emitted), "refresh them with: flashgen golden"


@pytest.mark.parametrize("name", sorted(shipped()))
def test_the_kept_text_is_what_is_emitted(emitted, name):
    paths = [path for path in emitted if path.stem == name]
    assert paths
    for path in paths:
        assert (FOLDER / path).read_text() == emitted[path], "refresh it with: flashgen golden"


def test_check_names_what_differs_and_golden_refreshes_it(tmp_path, emitted):
    ran = flashgen("golden", "--folder", tmp_path, "--check", code=1)
    assert f"{len(emitted)} of the golden files differ; refresh them with: flashgen golden" in ran.err
    assert not list(tmp_path.rglob("*.cu"))
    assert "causal.cu" in flashgen("golden", "--folder", tmp_path).err
    assert "the golden CUDA is what is emitted now" in flashgen("golden", "--folder", tmp_path, "--check").err
    changed = tmp_path / next(path for path in emitted if path.stem == "causal")
    changed.write_text("changed\n")
    (stray := changed.with_name("stray.cu")).write_text("no spec has this name\n")
    ran = flashgen("golden", "--folder", tmp_path, "--check", code=1)
    assert "-changed" in ran.out and "2 of the golden files differ" in ran.err
    ran = flashgen("golden", "--folder", tmp_path)
    assert f"wrote {changed}" in ran.err and f"removed {stray}" in ran.err and not stray.exists()
