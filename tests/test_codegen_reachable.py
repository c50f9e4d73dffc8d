"""What no entry of a kernel reaches is not emitted."""

from collections import Counter
from pathlib import Path

import pytest

from flashgen.codegen.reachable import _blocks, reachable

ROOT = Path(__file__).parents[1]

KERNEL = """\
constexpr int TILE = 64;

// -------------------------------- masks
// A rare type.
struct Rare { int x; };

// Whether a key is hidden.
DEVICE bool hidden(const Rare& r) { return r.x > 0; }

// -------------------------------- scores
typedef float S[TILE / 8][4];

template <int N>
DEVICE void scale(float (&s)[N][4]) {
  for (int i = 0; i < N; i++) s[i][0] *= 2.f;
}

struct Consumer {
  int row;

  // Only {0} calls this.
  DEVICE void apply(S& s) { scale(s); }

  DEVICE void run() {
    S s;
    {1}
  }
};

extern "C" __global__ void kernel() { Consumer{0}.run(); }
"""


def test_definitions_without_a_use_go_with_what_only_they_use():
    text = KERNEL.replace("{1}", "s[0][0] = 0.f;")
    kept = reachable(text)
    assert "hidden" not in kept and "Rare" not in kept and "apply" not in kept and "void scale" not in kept
    assert "typedef float S" in kept and "DEVICE void run()" in kept and "constexpr int TILE" in kept
    assert "-- masks" not in kept and "-- scores" in kept
    assert "\n\n\n" not in kept


def test_what_a_used_definition_uses_stays_and_nothing_is_moved():
    text = KERNEL.replace("{1}", "if (hidden(Rare{1})) apply(s);")
    assert reachable(text) == text


def test_a_definition_that_uses_only_itself_goes():
    assert "f(" not in reachable("DEVICE int f(int x) { return x > 0 ? f(x - 1) : 0; }\n\nint g;\n")


def test_a_struct_with_functions_stays_whole_where_nothing_uses_it():
    text = "struct Role {\n  int a = {};\n\n  DEVICE void run() {}\n};\n\nint g = run;\n"
    assert reachable(text) == text
    assert "Message" not in reachable("struct Message {\n  int a;\n};\n\nstruct Pair { int a, b; };  // two\n\nint g;")


#: The kept kernels of pipeline hopper, whose texts are what is emitted (test_golden).
HOPPER = sorted((ROOT / "generated" / "sm_90a").rglob("*.cu"))

#: Member functions of several structs: each struct that has one calls it.
ROLES = {"run", "step"}

#: Products by all keys of a tile, and by its first keys alone: a template calls both.
BY_KEYS = {"wgmma_qk", "wgmma_qk_first"}


@pytest.mark.parametrize("path", HOPPER, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_what_may_be_left_out_shares_its_name_with_nothing_that_stays(path):
    """A use is found by its name: a second function of that name would keep one that nothing calls."""
    names = Counter(name for _, _, name in _blocks(path.read_text()) if name is not None)
    assert {name for name, count in names.items() if count > 1} <= ROLES | BY_KEYS
