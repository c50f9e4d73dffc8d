"""from_flex on what the language has not: the reason, the line, and what to write instead."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

import flashgen

WEIGHTS = torch.randn(4, requires_grad=True)
IDS = torch.arange(64)
DOUBLE = torch.randn(4, dtype=torch.float64)
COMPLEX, WIDE_COMPLEX = torch.randn(4, dtype=torch.complex64), torch.randn(4, dtype=torch.complex128)
BYTES = torch.zeros(64, dtype=torch.uint8)
TABLE = np.arange(64)


def branches(b, h, q_idx, kv_idx):
    if q_idx >= kv_idx:  # here
        return kv_idx > 3
    return False


def branches_on_data(b, h, q_idx, kv_idx):
    if IDS.max() > 3:  # here
        return q_idx >= kv_idx
    return q_idx > kv_idx


def joins(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx and kv_idx > 3  # here


def chains(b, h, q_idx, kv_idx):
    return 0 < q_idx - kv_idx < 5  # here


def negates(b, h, q_idx, kv_idx):
    return not q_idx < kv_idx  # here


def picks_the_least(b, h, q_idx, kv_idx):
    return min(q_idx, kv_idx) > 3  # here


def ranges(b, h, q_idx, kv_idx):
    return sum(IDS[i] == kv_idx for i in range(q_idx)) > 0  # here


def floats(score, b, h, q_idx, kv_idx):
    return score + math.exp(-q_idx)  # here


def reads_an_item(score, b, h, q_idx, kv_idx):
    return score * WEIGHTS[2].item()  # here


def reads_a_number(score, b, h, q_idx, kv_idx):
    return score * float(WEIGHTS[2])  # here


def reads_a_list(b, h, q_idx, kv_idx):
    return kv_idx == IDS.tolist()[3]  # here


def detaches(score, b, h, q_idx, kv_idx):
    return score * WEIGHTS[h].detach()  # here


def cuts_the_gradient(score, b, h, q_idx, kv_idx):
    with torch.no_grad():  # here
        factor = WEIGHTS[h] * 2
    return score * factor


def pads(score, b, h, q_idx, kv_idx):
    return score + torch.nn.functional.embedding(h, WEIGHTS.view(4, 1), padding_idx=0)[0]  # here


def adds_up(b, h, q_idx, kv_idx):
    return torch.cumsum(IDS, 0)[q_idx] > kv_idx  # here


def has_no_nearest(score, b, h, q_idx, kv_idx):
    return torch.hypot(score, score)  # here


def nearest_of_none(score, b, h, q_idx, kv_idx):
    return score.shrt()  # here


def unknown(score, b, h, q_idx, kv_idx):
    return torch.special.bessel_j0(score)  # here


def misspelt(score, b, h, q_idx, kv_idx):
    return score.sqare()  # here


def in_place(score, b, h, q_idx, kv_idx):
    return score.clamp_(min=0)  # here


def writes(b, h, q_idx, kv_idx):
    IDS[0] = 1  # here
    return q_idx >= kv_idx


def writes_a_tensor(b, h, q_idx, kv_idx):
    IDS.add_(1)  # here
    return q_idx >= kv_idx


def random_numbers(score, b, h, q_idx, kv_idx):
    return score + torch.rand(())  # here


def dropped(score, b, h, q_idx, kv_idx):
    return torch.nn.functional.dropout(score)  # here


def doubles(score, b, h, q_idx, kv_idx):
    return score * DOUBLE[h]  # here


def complexes(score, b, h, q_idx, kv_idx):
    return score + COMPLEX[h]  # here


def wide_complexes(score, b, h, q_idx, kv_idx):
    return score + WIDE_COMPLEX[h]  # here


def rounds_to_half(score, b, h, q_idx, kv_idx):
    return score.to(torch.bfloat16)  # here


def shifts_a_byte(b, h, q_idx, kv_idx):
    return BYTES[kv_idx] >> 1 > 3  # here


def inverts_a_byte(b, h, q_idx, kv_idx):
    return ~BYTES[kv_idx] > 100  # here


def numpys_function(b, h, q_idx, kv_idx):
    return np.abs(q_idx - kv_idx) < 4  # here


def a_dict(b, h, q_idx, kv_idx):
    return {0: 1, 1: 2}[h] < kv_idx  # here


def a_set(b, h, q_idx, kv_idx):
    return q_idx in {1, 2}  # here


def wraps(b, h, q_idx, kv_idx):
    return BYTES[q_idx] + BYTES[kv_idx] > 3  # here


def selects_by_condition(b, h, q_idx, kv_idx):
    return IDS[q_idx > kv_idx] > 3  # here


def too_many_indices(b, h, q_idx, kv_idx):
    return IDS[b, q_idx] > 3  # here


def out_of_bounds(b, h, q_idx, kv_idx):
    return IDS[64] > q_idx  # here


def subtracts_conditions(b, h, q_idx, kv_idx):
    return (q_idx > kv_idx) - (q_idx > 3) > 0  # here


def a_row(b, h, q_idx, kv_idx):  # here
    return kv_idx == IDS


def numbers_for_a_mask(b, h, q_idx, kv_idx):  # here
    return q_idx - kv_idx


def nothing(b, h, q_idx, kv_idx):  # here
    _ = q_idx >= kv_idx


def a_text(b, h, q_idx, kv_idx):  # here
    return "causal"


def too_few(b, h, q_idx):  # here
    return q_idx > 3


def numpy_table(b, h, q_idx, kv_idx):
    return TABLE[q_idx] > 3  # here


def numpy_function(score, b, h, q_idx, kv_idx):
    return np.exp(score)  # here


def two_powers(score, b, h, q_idx, kv_idx):
    return score**kv_idx  # here


def branches_of_torch(b, h, q_idx, kv_idx):
    return torch.cond(q_idx > kv_idx, lambda: True, lambda: False)  # here


def loops_of_torch(b, h, q_idx, kv_idx):
    return torch.while_loop(lambda n: n < kv_idx, lambda n: (n + 1,), (q_idx,))[0] > 3  # here


def slices_by_a_position(b, h, q_idx, kv_idx):
    return IDS[q_idx:].sum() > kv_idx  # here


def averages_integers(b, h, q_idx, kv_idx):
    return IDS.mean() > kv_idx  # here


def powers_of_two(b, h, q_idx, kv_idx):
    return 2 ** (kv_idx % 5) > q_idx  # here


def powers_below_zero(b, h, q_idx, kv_idx):
    return (-3) ** (kv_idx % 5) > q_idx  # here


def made_here(b, h, q_idx, kv_idx):
    return torch.arange(100)[kv_idx] > q_idx  # here


def raises(b, h, q_idx, kv_idx):
    raise KeyError("none")  # here


def unknown_name(b, h, q_idx, kv_idx):
    return q_idx >= kv_index  # here  # noqa: F821


def a_row_among_numbers(b, h, q_idx, kv_idx):
    return torch.isin(IDS, kv_idx)  # here


MASKS = {
    branches: "`if` asks for one; write torch.where",
    branches_on_data: "`if`, `and`, .* write torch.where",
    joins: "`and` asks for one; write",
    chains: "chained comparison",
    negates: "`not` asks for one; write ~",
    picks_the_least: r"min\(\) asks for one; write torch.minimum",
    ranges: "needs a Python integer|range",
    reads_a_list: "torch's 'tolist' cannot be traced: it needs a value",
    adds_up: "torch's 'cumsum' cannot be traced: compute it before, and capture the result",
    writes: "changes no tensor: write torch.where",
    writes_a_tensor: r"'add_' changes a tensor.*x = x.add\(...\)",
    wraps: r"`\+` of uint8 wraps in torch.*write x.int\(\) first",
    shifts_a_byte: "`>>` of uint8 is not traced: write x.int",
    inverts_a_byte: r"`~` of uint8 is 255 - x in torch: write 255 - x.int\(\)",
    numpys_function: "NumPy's functions know no traced values: write the function of that name of torch",
    a_dict: "a traced value is no key of a dict and in no set: capture a table as a tensor",
    a_set: r"in no set: .* write \(x == a\) \| \(x == b\)",
    selects_by_condition: "an index of bool",
    too_many_indices: "a tensor of 1 dimension got 2 indices",
    out_of_bounds: "index 64 is out of bounds for a dimension of size 64",
    subtracts_conditions: r"write x.int\(\) - y.int\(\)",
    a_row: r"a row of shape \[64\].*reduce it",
    a_row_among_numbers: "torch.isin of a row",
    numbers_for_a_mask: "returned int32: compare it",
    nothing: "returned nothing",
    a_text: "returned a str",
    too_few: r"takes \(b, h, q_idx\); it is called with \(b, h, q_idx, kv_idx\)",
    numpy_table: r"index torch.from_numpy\(array\)",
    branches_of_torch: r"torch's 'cond' cannot be traced: write torch.where\(condition, x, y\)",
    loops_of_torch: "torch's 'while_loop' cannot be traced: write a loop of a number of rounds that Python knows",
    slices_by_a_position: r"a slice by a traced value .* torch.where\(at >= q_idx, t, 0\) for t\[q_idx:\]",
    averages_integers: r"mean\(\) of int64 is an error in torch: write x.float\(\).mean\(\)",
    powers_of_two: r"2 to the power of a traced value: .*write 2.0 \*\* y \(or, of .*bitwise_left_shift\(1, y\)\)",
    powers_below_zero: r"-3 to the power .*write torch.where\(y % 2 == 0, 1, -1\) \* 3.0 \*\* y for whole y",
    made_here: "made? outside|make it outside",
    raises: "KeyError: 'none'",
    unknown_name: "unknown symbol 'kv_index'",
}

SCORES = {
    floats: "needs a Python float",
    reads_an_item: "torch's 'item' cannot be traced: it needs a value",
    reads_a_number: "torch's 'float' cannot be traced: it needs a value|needs a Python float",
    detaches: "detach the tensor before the function captures it",
    cuts_the_gradient: "torch.no_grad in a score_mod: detach tensors before",
    pads: "padding_idx of an embedding",
    has_no_nearest: r"torch's 'hypot' cannot be traced: write torch.sqrt\(x \* x \+ y \* y\)",
    nearest_of_none: "torch's 'shrt' cannot be traced; the nearest is torch's '(?!short)",
    unknown: "cannot be traced",
    misspelt: "the nearest is torch's 'square'",
    in_place: r"'clamp_' changes a tensor.*x = x.clamp\(...\)",
    random_numbers: "torch's 'rand' cannot be traced: draw before",
    dropped: "torch's 'dropout' cannot be traced: draw before",
    doubles: r"'DOUBLE' is float64.*capture DOUBLE.float\(\)",
    complexes: r"'COMPLEX' is complex64.*capture COMPLEX.real or COMPLEX.imag",
    wide_complexes: r"capture WIDE_COMPLEX.real.float\(\) or WIDE_COMPLEX.imag.float\(\)",
    rounds_to_half: r"rounded to bfloat16.*x.float\(\)",
    numpy_function: "NumPy|ufunc",
    two_powers: "a power of two traced values",
}


def here(function):
    """The line of the file that has the mark."""
    first = function.__code__.co_firstlineno
    lines = Path(__file__).read_text().splitlines()
    return next(n for n, line in enumerate(lines[first - 1 :], first) if "# here" in line)


@pytest.mark.parametrize("function", [*MASKS, *SCORES], ids=lambda f: f.__name__)
def test_what_cannot_be_traced_is_refused_at_its_line(function):
    given = {"mask_mod": function} if function in MASKS else {"score_mod": function}
    with pytest.raises(flashgen.SpecError, match=(MASKS | SCORES)[function]) as refused:
        flashgen.from_flex(**given)
    assert (refused.value.where.path, refused.value.where.line) == (__file__, here(function))


@pytest.mark.parametrize("given", [3, "causal", torch.zeros(3), flashgen.variant(), torch.nn.Linear], ids=repr)
def test_what_is_no_function_is_refused(given):
    with pytest.raises(flashgen.SpecError, match="mask_mod is a function of positions"):
        flashgen.from_flex(given)


def test_a_mask_has_no_gradient_to_cut():
    def mask_mod(b, h, q_idx, kv_idx):
        with torch.no_grad():
            return (WEIGHTS[h] > 0) | (q_idx >= kv_idx)

    assert list(flashgen.from_flex(mask_mod).given) == ["WEIGHTS"]
    assert torch.is_grad_enabled()


def test_a_refused_function_is_refused_again():
    for _ in range(2):
        with pytest.raises(flashgen.SpecError):
            flashgen.from_flex(branches)


def test_traced_values_say_so_when_they_are_used_later():
    kept = {}
    flashgen.from_flex(lambda b, h, q, k: kept.setdefault("q", q) is None or q >= k)
    with pytest.raises(flashgen.SpecError, match="when its function had ended"):
        torch.exp(kept["q"])
    for use in (lambda q: q + 1, lambda q: q.float()):
        with pytest.raises(flashgen.SpecError, match="when its function had ended"):
            use(kept["q"])


def test_a_place_for_a_result_is_refused():
    place = torch.zeros(())
    for score_mod in (
        lambda score, b, h, q, k: torch.add(score, 1.0, out=place),
        lambda score, b, h, q, k: torch.exp(score, out=place),
    ):
        with pytest.raises(flashgen.SpecError, match="out= changes a tensor"):
            flashgen.from_flex(score_mod=score_mod)


def test_types_that_the_language_lacks_are_refused_by_name():
    for score_mod, reason in (
        (lambda score, b, h, q, k: score.double(), "'double' cannot be traced: it would round"),
        (lambda score, b, h, q, k: score * torch.tensor(0.5, dtype=torch.float64), "float64 is no type"),
    ):
        with pytest.raises(flashgen.SpecError, match=reason):
            flashgen.from_flex(score_mod=score_mod)


def test_a_captured_tensor_of_another_device_is_refused_by_its_name():
    table = torch.zeros(4, device="meta")
    variant = flashgen.from_flex(score_mod=lambda score, b, h, q, k: score + table[h])
    q = torch.randn(1, 4, 8, 16)
    with pytest.raises(flashgen.LaunchError, match=r"'table'.*is on meta and q on cpu"):
        flashgen.attention(q, q, q, variant)


def test_what_a_function_changes_is_refused():
    """A kernel does not call the function: what it counts or keeps would stand still."""
    kept, counter = [], {"calls": 0}

    def keeps(b, h, q_idx, kv_idx):
        kept.append(q_idx)
        return q_idx >= kv_idx

    def counts(b, h, q_idx, kv_idx):
        counter["calls"] += 1
        return q_idx >= kv_idx + counter["calls"]

    with pytest.raises(flashgen.SpecError, match=r"^'keeps' changes a container(?s:.*)nearest: compute it before"):
        flashgen.from_flex(keeps)
    with pytest.raises(flashgen.SpecError, match=r"^'counts' changes the number 'calls' that it reads"):
        flashgen.from_flex(counts)


def test_what_a_function_makes_once_is_kept():
    class Window:
        size = None

        def __call__(self, b, h, q_idx, kv_idx):
            if self.size is None:
                self.size = 3
            return q_idx - kv_idx < self.size

    q = torch.randn(1, 1, 8, 4, dtype=torch.float64)
    found = flashgen.attention(q, q, q, flashgen.from_flex(Window()))
    torch.testing.assert_close(found, flashgen.attention(q, q, q, flashgen.from_flex(lambda b, h, q, k: q - k < 3)))


def test_an_index_outside_is_told_what_keeps_it_inside():
    q = torch.zeros(1, 1, 64, 16)
    with pytest.raises(flashgen.CapturedIndexError, match=r"or i\.clamp\(0, IDS\.size\(0\) - 1\) where .* PyTorch"):
        flashgen.attention(q, q, q, flashgen.from_flex(lambda b, h, q, k: IDS[q + k] > 3))
    flashgen.attention(q, q, q, flashgen.from_flex(lambda b, h, q, k: IDS[(q + k).clamp(0, IDS.size(0) - 1)] > 3))
