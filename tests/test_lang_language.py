"""The language table holds the whole language, and `import flashgen` costs nothing."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

import flashgen as fg
from flashgen.lang.language import language_table, markdown
from flashgen.lang.ops import OPS


def test_every_op_is_a_row():
    rows = {(row.group, row.write, row.meaning) for row in language_table()}
    for op in OPS.values():
        assert (op.group, op.spelling, op.doc) in rows


def test_every_public_name_of_the_language_is_in_the_table():
    written = " ".join(row.write for row in language_table())
    for name, (module, _) in fg._EXPORTS.items():
        if module.startswith("flashgen.lang.") and name not in ("Variant", "load_spec"):
            assert re.search(rf"fg\.{name}\b", written), name


def test_every_function_in_the_table_exists():
    for row in language_table():
        for name in re.findall(r"fg\.(\w+)", row.write):
            assert getattr(fg, name) is not None


def test_the_markdown_has_a_line_a_row_and_three_cells_a_line():
    lines = markdown().splitlines()
    assert len(lines) == 2 + len(language_table())
    assert all(len(re.findall(r"(?<!\\)\|", line)) == 4 for line in lines)
    assert "`x \\| y`" in markdown()


def test_public_names_are_there_and_others_are_refused_with_the_nearest():
    for name in ("param", "variant", "load_spec", "abs", "Variant", "SpecError"):
        assert name in dir(fg) and getattr(fg, name) is not None
    with pytest.raises(AttributeError, match=r"did you mean fg\.maximum\?"):
        fg.maxmum  # noqa: B018


def test_import_leaves_the_heavy_packages_out():
    code = (
        "import sys; before = set(sys.modules); import flashgen; flashgen.__version__; dir(flashgen);"
        "new = set(sys.modules) - before; print(sorted(m for m in new if not m.startswith('flashgen')))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    for heavy in ("torch", "sympy", "numpy", "cuda", "matplotlib", "jinja2"):
        assert f"'{heavy}'" not in out
    code = "import sys, flashgen as fg; fg.load_spec('alibi'); print('torch' in sys.modules or 'sympy' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "True" not in out, "and reading a spec needs NumPy alone"
