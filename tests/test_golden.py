"""The CUDA kept in `generated/` is what is emitted now, for every shipped spec."""

from pathlib import Path

import pytest
from cli import flashgen

from flashgen.cli.golden import ARCHS, goldens
from flashgen.lang.load import shipped

FOLDER = Path(__file__).parents[1] / "generated"


@pytest.fixture(scope="module")
def emitted():
    return dict(goldens())


def test_every_shipped_spec_has_its_file_and_nothing_else_has(emitted):
    wanted = {Path(arch) / f"{name}_forward.cu" for arch in ARCHS for name in shipped()}
    assert set(emitted) == wanted
    kept = {path.relative_to(FOLDER) for arch in ARCHS for path in (FOLDER / arch).glob("*.cu")}
    assert kept == wanted, "refresh them with: flashgen golden"


@pytest.mark.parametrize("name", sorted(shipped()))
def test_the_kept_text_is_what_is_emitted(emitted, name):
    for path, text in emitted.items():
        if path.stem == f"{name}_forward":
            assert (FOLDER / path).read_text() == text, "refresh it with: flashgen golden"


def test_check_names_what_differs_and_golden_refreshes_it(tmp_path):
    ran = flashgen("golden", "--folder", tmp_path, "--check", code=1)
    assert f"{len(ARCHS) * len(shipped())} of the golden files differ; refresh them with: flashgen golden" in ran.err
    assert not list(tmp_path.rglob("*.cu"))
    assert "causal_forward.cu" in flashgen("golden", "--folder", tmp_path).err
    assert "the golden CUDA is what is emitted now" in flashgen("golden", "--folder", tmp_path, "--check").err
    (tmp_path / ARCHS[0] / "causal_forward.cu").write_text("changed\n")
    ran = flashgen("golden", "--folder", tmp_path, "--check", code=1)
    assert "-changed" in ran.out and "1 of the golden files differ" in ran.err
