"""The CUDA kept in `generated/` is what is emitted now, for every shipped spec."""

import shlex
from pathlib import Path

import pytest
from cli import flashgen
from kept import KEPT

import flashgen as fg
from flashgen.codegen import golden
from flashgen.codegen.golden import IN_WORDS, QUANTIZED
from flashgen.lang.load import load_spec, shipped

FOLDER = Path(__file__).parents[1] / "generated"


@pytest.fixture(scope="module")
def made():
    """Once for this file and the others that look at kept kernels."""
    return list(KEPT.made.values())


@pytest.fixture(scope="module")
def emitted(made):
    return {golden.path: golden.text for golden in made}


@pytest.mark.slow
def test_every_shipped_spec_has_its_file_and_nothing_else_has(made, emitted):
    assert {golden.path.stem for golden in made if golden.attends} == {*shipped(), IN_WORDS}
    assert {golden.path.stem for golden in made if not golden.attends} == set(QUANTIZED)
    kept = {path.relative_to(FOLDER) for path in FOLDER.rglob("*.cu")}
    assert kept == set(emitted), "refresh them with: flashgen golden"


@pytest.mark.parametrize("name", sorted([*shipped(), IN_WORDS, *QUANTIZED]))
def test_the_kept_text_is_what_is_emitted(emitted, name):
    paths = [path for path in emitted if path.stem == name]
    assert paths
    for path in paths:
        assert (FOLDER / path).read_text() == emitted[path], "refresh it with: flashgen golden"


def command(text):
    """The arguments of the command that a banner says makes the text."""
    banner = "".join(line.removeprefix("//") + " " for line in text.partition("\n\n")[0].splitlines())
    program, *arguments = shlex.split(banner.partition("made by")[2])
    assert program == "flashgen"
    return arguments


@pytest.mark.sampled(
    "blocks", "local_softcap", "log_distance", "longformer", "packed_softcap", "padding", "prefix_lm", "relative_bias"
)
@pytest.mark.slow
@pytest.mark.parametrize("name", sorted([*shipped(), IN_WORDS]))
def test_the_command_of_the_banner_makes_the_text(emitted, name):
    for path, text in emitted.items():
        if path.stem == name:
            assert flashgen(*command(text)).out == text, path


def test_the_command_names_a_file_and_its_constants(tmp_path, monkeypatch):
    (tmp_path / "my block.py").write_text(
        "import flashgen as fg\n\nblock = fg.constant('block', default=256, min=1)\n\n\n"
        "@fg.variant\ndef overlap(b, h, q, k):\n    return q // block == k // block\n"
    )
    monkeypatch.chdir(tmp_path)
    options = ("--head-dim", 64, "--v-head-dim", 128, "--arch", "sm_80", "--param", "block=32")
    for which in ((), ("--backward", "--deterministic", "--dropout")):
        text = flashgen("emit", "my block.py", *options, *which).out
        arguments = command(text)
        assert arguments[:2] == ["emit", "my block.py"] and "block=32" in arguments
        assert flashgen(*arguments).out == text
        assert max(map(len, text.partition("\n\n")[0].splitlines())) <= 120
    assert "block" not in command(flashgen("emit", "my block.py", *options[:-1], "block=256").out)[2:]


def test_a_variant_made_in_python_has_no_command():
    made = [load_spec("causal").then(lambda s, b, h, q, k: 2 * s), load_spec("causal").with_flipped_score()]
    for variant in (*made, fg.variant(lambda b, h, q, k: k < q, name="own")):
        assert "made by" not in fg.emit(fg.plan(variant, arch="sm_80"))


def test_check_where_there_is_nothing_to_compare(tmp_path):
    err = flashgen("golden", "--folder", tmp_path / "nowhere", "--check", code=2).err
    assert f"there is no folder {tmp_path / 'nowhere'} here to compare with" in err


@pytest.mark.slow
def test_check_names_what_differs_and_golden_refreshes_it(tmp_path, made, emitted, monkeypatch):
    monkeypatch.setattr(golden, "goldens", lambda: iter(made))  # emitted once, not by each command
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
