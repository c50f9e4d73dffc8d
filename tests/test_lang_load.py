"""Spec files: finding the one variant of a file, importing neighbours, and what goes wrong."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

import flashgen as fg
from flashgen.errors import SpecError
from flashgen.lang.load import shipped

CAUSAL = '''"""Causal."""
import flashgen as fg

@fg.variant
def causal(b, h, q, k):
    return k <= q
'''


def write(folder, **files):
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    return folder


def refused(path) -> SpecError:
    with pytest.raises(SpecError) as caught:
        fg.load_spec(path)
    return caught.value


def test_a_file_is_found_by_path_and_a_shipped_spec_by_name(tmp_path):
    write(tmp_path, causal=CAUSAL)
    loaded = fg.load_spec(tmp_path / "causal.py")
    assert (loaded.name, loaded.doc) == ("causal", "Causal.")
    assert fg.load_spec(str(tmp_path / "causal.py")) == loaded
    assert fg.load_spec("causal").mask is loaded.mask
    assert fg.load_spec(shipped()["causal"]).doc != loaded.doc


def test_the_variant_nothing_was_built_from(tmp_path):
    write(
        tmp_path,
        spec="import flashgen as fg\n"
        "near = fg.variant(lambda b, h, q, k: q - k < 8)\n"
        "past = fg.variant(lambda b, h, q, k: k <= q)\n"
        "_both = near & past\n"
        "@_both.score\n"
        "def final(s, b, h, q, k):\n"
        "    return s * 2\n"
        "alias = final\n",
    )
    loaded = fg.load_spec(tmp_path / "spec.py")
    assert loaded.name == "final" and loaded.score_node is not None and len(loaded.parents) == 1


def test_the_name_is_the_variable(tmp_path):
    write(tmp_path, spec="import flashgen as fg\nevery = fg.variant()\n")
    assert fg.load_spec(tmp_path / "spec.py").name == "every"
    write(tmp_path, spec="import flashgen as fg\n_hidden = fg.variant(name='shown')\n")
    assert fg.load_spec(tmp_path / "spec.py").name == "shown"


SCORED = "@{mask}.score\ndef doubled(s, b, h, q, k):\n    return s * 2\n"


def test_a_mask_with_a_score_keeps_the_name_of_the_mask(tmp_path):
    write(tmp_path, causal=CAUSAL, spec=CAUSAL + SCORED.format(mask="causal"))
    spec = fg.load_spec(tmp_path / "spec.py")
    assert spec.name == "causal" and spec.score_node is not None
    write(tmp_path, spec="from causal import causal\n" + SCORED.format(mask="causal"))
    assert fg.load_spec(tmp_path / "spec.py").name == "doubled", "a mask of another file has a name of its own there"
    write(tmp_path, spec=CAUSAL + "steep = causal.score(lambda s, b, h, q, k: s * 2)\n")
    assert fg.load_spec(tmp_path / "spec.py").name == "steep", "a variable that was chosen"
    write(tmp_path, spec="import flashgen as fg\n" + SCORED.format(mask="fg.variant()"))
    assert fg.load_spec(tmp_path / "spec.py").name == "doubled"


def test_specs_import_their_neighbours(tmp_path):
    write(
        tmp_path,
        causal=CAUSAL,
        local="import flashgen as fg\nfrom causal import causal\n"
        "local = causal & fg.variant(lambda b, h, q, k: q - k < 8)\n",
        deep="from local import local\nfrom causal import causal\ndeep = ~local\n",
    )
    local = fg.load_spec(tmp_path / "local.py")
    assert local.mask.operands[0] is fg.load_spec(tmp_path / "causal.py").mask
    assert fg.load_spec(tmp_path / "deep.py").name == "deep", "what is only imported is not of the file"


def test_what_a_neighbours_function_makes_is_of_the_file_that_calls_it(tmp_path):
    write(
        tmp_path,
        windows="import flashgen as fg\ndef near(reach):\n    return fg.variant(lambda b, h, q, k: q - k < reach)\n",
        spec="from windows import near\nspec = near(8)\n",
        two="from windows import near\nsome = near(8)\nmore = near(9)\n",
    )
    assert fg.load_spec(tmp_path / "spec.py").name == "spec"
    assert f"'some' ({tmp_path / 'windows.py'}:3) and 'more'" in str(refused(tmp_path / "two.py"))


def test_two_folders_may_use_the_same_names(tmp_path):
    first, second = tmp_path / "one", tmp_path / "two"
    for folder, window in ((first, 3), (second, 4)):
        folder.mkdir()
        write(
            folder,
            base=f"import flashgen as fg\nbase = fg.variant(lambda b, h, q, k: q - k < {window})\n",
            spec="from base import base\nspec = ~base\n",
        )
    a, b = fg.load_spec(first / "spec.py"), fg.load_spec(second / "spec.py")
    assert a.mask is not b.mask
    assert "base" not in sys.modules and not any(type(f).__name__ == "_Siblings" for f in sys.meta_path)


def test_a_module_of_the_same_name_is_left_alone(tmp_path, monkeypatch):
    marker = object()
    monkeypatch.setitem(sys.modules, "causal", marker)
    write(tmp_path, causal=CAUSAL, spec="from causal import causal\nspec = ~causal\n")
    fg.load_spec(tmp_path / "spec.py")
    assert sys.modules["causal"] is marker


def test_a_spec_does_not_hide_the_standard_library(tmp_path):
    write(tmp_path, random="raise SystemError('imported')\n", spec=CAUSAL + "import random\nrandom.random()\n")
    assert fg.load_spec(tmp_path / "spec.py").name == "causal"


def test_a_shipped_spec_may_be_built_upon_from_anywhere(tmp_path):
    write(tmp_path, spec="import flashgen as fg\nspec = ~fg.load_spec('causal')\n")
    assert fg.load_spec(tmp_path / "spec.py").name == "spec"


def test_a_changed_file_is_read_again(tmp_path):
    write(tmp_path, spec=CAUSAL)
    before = fg.load_spec(tmp_path / "spec.py")
    write(tmp_path, spec=CAUSAL.replace("k <= q", "q <= k"))
    assert fg.load_spec(tmp_path / "spec.py").mask is not before.mask
    write(tmp_path, spec=CAUSAL.replace("k <= q", "wrong"))
    assert refused(tmp_path / "spec.py").where.text.strip() == "return wrong"


def test_threads_load_at_the_same_time(tmp_path):
    write(tmp_path, causal=CAUSAL, spec="from causal import causal\nspec = ~causal\n")
    with ThreadPoolExecutor(4) as pool:
        loaded = list(pool.map(fg.load_spec, [tmp_path / "spec.py"] * 16))
    assert len({id(v.mask) for v in loaded}) == 1


DATA = """from __future__ import annotations
from dataclasses import dataclass
import flashgen as fg

@dataclass
class Window:
    reach: int = {reach}

@fg.variant
def spec(b, h, q, k):
    return q - k < Window().reach
"""


def test_a_dataclass_with_postponed_annotations(tmp_path):
    before = set(sys.modules)
    folders = [tmp_path / name for name in "abcd"]
    for reach, folder in enumerate(folders, 3):
        folder.mkdir()
        write(folder, spec=DATA.format(reach=reach), other="from spec import spec\nother = ~spec\n")
    with ThreadPoolExecutor(4) as pool:
        loaded = list(pool.map(fg.load_spec, [folder / "spec.py" for folder in folders * 4]))
        negated = list(pool.map(fg.load_spec, [folder / "other.py" for folder in folders]))
    assert [v.mask.operands[1].attr for v in loaded] == [3, 4, 5, 6] * 4
    assert [v.mask.operands[0] for v in negated] == [v.mask for v in loaded[:4]]
    assert not {name for name in sys.modules if "spec" in name and "flashgen_spec" in name} - before
    write(folders[0], spec=DATA.format(reach=3) + "1 / 0\n")
    refused(folders[0] / "spec.py")
    assert not any("flashgen_spec" in name for name in sys.modules)


def test_a_file_beside_a_spec_does_not_hide_an_installed_package(tmp_path):
    hiding = dict.fromkeys(("flashgen", "numpy", "torch", "jinja2"), "raise SystemError('imported')\n")
    write(tmp_path, **hiding, helper="import numpy\nREACH = 8\n")
    text = "import flashgen as fg\nimport jinja2, numpy, torch\nfrom helper import REACH\n"
    write(tmp_path, spec=text + "spec = fg.variant(lambda b, h, q, k: q - k < REACH)\n")
    assert fg.load_spec(tmp_path / "spec.py").mask.operands[1].attr == 8
    assert sys.modules["flashgen"] is fg


# ---------------------------------------------------------------------------------------------------------------------
# What goes wrong


@pytest.mark.parametrize("asked", [None, 3, [], True])
def test_what_is_no_path(asked):
    assert str(refused(asked)).startswith(f"a spec is a path or the name of a shipped spec, and got {asked!r}; shipped")


def test_paths_that_lead_nowhere(tmp_path, monkeypatch):
    assert "the path of the spec is empty; shipped specs, by name: alibi" in str(refused(""))
    assert "File name too long; shipped" in str(refused("x" * 5000)) and len(str(refused("x" * 5000))) < 800
    write(tmp_path, causal=CAUSAL)
    assert fg.load_spec(bytes(tmp_path / "causal.py")).name == "causal"

    def closed(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("pathlib.Path.read_bytes", closed)  # a superuser may read everything
    assert str(refused(tmp_path / "causal.py")).startswith(f"cannot read the spec {tmp_path / 'causal.py'}: Permission")


def test_a_file_in_another_encoding(tmp_path):
    latin = "# café\n".encode("latin-1") + CAUSAL.encode()
    (tmp_path / "spec.py").write_bytes(latin)
    assert "save it as UTF-8, or name its encoding in the first line" in str(refused(tmp_path / "spec.py"))
    (tmp_path / "spec.py").write_bytes(CAUSAL.encode() + b"\n\n# caf\xe9\n")
    assert "can't decode byte 0xe9" in str(refused(tmp_path / "spec.py"))
    (tmp_path / "spec.py").write_bytes(b"# coding: latin-1\n" + latin)
    assert fg.load_spec(tmp_path / "spec.py").name == "causal"


def test_no_such_file(tmp_path):
    write(tmp_path, causal=CAUSAL)
    error = refused(tmp_path / "casual.py")
    assert "there is no spec file" in str(error) and f"did you mean '{tmp_path / 'causal.py'}'?" in str(error)
    assert "did you mean 'causal'?" in str(refused("cusal"))
    assert "sliding_window" in str(refused("nothing_like_it")), "lists the shipped specs"
    assert "is a folder; name one of its specs: causal.py" in str(refused(tmp_path))


def test_a_syntax_error(tmp_path):
    write(tmp_path, spec="import flashgen as fg\n\ndef spec(b, h, q, k)\n    return True\n")
    error = refused(tmp_path / "spec.py")
    assert "the spec is not Python: expected ':'" in str(error)
    assert (error.where.path, error.where.line) == (str(tmp_path / "spec.py"), 3)
    assert error.where.text.strip() == "def spec(b, h, q, k)"


def test_a_syntax_error_in_a_neighbour(tmp_path):
    write(tmp_path, other="def :\n", spec="import other\n")
    assert refused(tmp_path / "spec.py").where.path == str(tmp_path / "other.py")


@pytest.mark.parametrize("junk", [b"\x00\x01", b"\xff\xfe\xfa"])
def test_a_file_that_is_no_text(tmp_path, junk):
    (tmp_path / "spec.py").write_bytes(junk)
    assert "SpecError" in type(refused(tmp_path / "spec.py")).__name__


def test_an_unknown_symbol(tmp_path):
    write(tmp_path, spec="import flashgen as fg\nw = parm('w', default=1)\n")
    error = refused(tmp_path / "spec.py")
    assert "unknown symbol 'parm' (fg.param is the nearest)" in str(error) and error.where.line == 2
    write(tmp_path, spec="import flashgen as fg\nw = fg.parm('w', default=1)\n")
    error = refused(tmp_path / "spec.py")
    assert "flashgen has no 'parm' (did you mean fg.param?)" in str(error) and error.where.line == 2


def test_an_import_that_fails(tmp_path):
    write(tmp_path, spec="import flashgen as fg\nfrom nowhere_at_all import thing\n")
    error = refused(tmp_path / "spec.py")
    assert "ModuleNotFoundError: No module named 'nowhere_at_all'" in str(error) and error.where.line == 2


@pytest.mark.parametrize("line", ["raise SystemExit(3)", "1 / 0", "raise KeyError('k')"])
def test_a_spec_that_raises(tmp_path, line):
    write(tmp_path, spec=f"import flashgen as fg\n\n\n{line}\n")
    assert refused(tmp_path / "spec.py").where.line == 4


def test_no_variant(tmp_path):
    write(tmp_path, causal=CAUSAL, spec="import flashgen as fg\nwindow = fg.param('window', default=3)\n")
    assert "the spec has no variant: decorate a function (b, h, q, k) with @fg.variant" in str(
        refused(tmp_path / "spec.py")
    )
    write(tmp_path, spec="from causal import causal\n")
    error = refused(tmp_path / "spec.py")
    assert "the spec has no variant; it imports causal, which other files describe" in str(error)
    write(tmp_path, spec="")
    assert "no variant" in str(refused(tmp_path / "spec.py"))


def test_two_variants_are_named_with_their_lines(tmp_path):
    write(tmp_path, spec=CAUSAL + "\nlocal = fg.variant(lambda b, h, q, k: q - k < 8)\nunused = ~local\n")
    error = refused(tmp_path / "spec.py")
    assert "the spec has 2 variants, 'causal' (line 4) and 'unused' (line 9)" in str(error)


def test_loops_of_imports(tmp_path):
    write(tmp_path, a="from b import b\na = ~b\n", b="from a import a\nb = ~a\n")
    assert "ImportError" in str(refused(tmp_path / "a.py"))
