"""What cannot be traced is refused at the user's line, with the cure; what can be traced is traced."""

from __future__ import annotations

import numpy as np
import pytest

import flashgen as fg
from flashgen.errors import SpecError
from flashgen.lang.expr import DType, const
from flashgen.lang.load import load_spec

HEADER = """import math
import numpy as np
import flashgen as fg
w = fg.param("w", default=8, min=1)
t = fg.tensor("t", dims=("batch", "kv"), dtype="int32")
u = fg.tensor("u", dims=("batch", 4), dtype="int32")
rows = [1, 2, 3]
table = np.zeros((3, 4), np.int64)
whole = fg.variant(lambda b, h, q, k: k >= 0, name="whole")
"""


def refusal(tmp_path, body: str, *, header: str = HEADER) -> SpecError:
    """The error of a spec with this body of a mask or score function."""
    kind = "s, b, h, q, k" if "# score" in body else "b, h, q, k"
    call = "fg.variant().score" if "# score" in body else "fg.variant"
    lines = "".join(f"    {line}\n" for line in body.split("\n"))
    file = tmp_path / "spec.py"
    file.write_text(f"{header}@{call}\ndef spec({kind}):\n{lines}")
    with pytest.raises(SpecError) as caught:
        load_spec(file)
    return caught.value


@pytest.mark.parametrize(
    ("body", "cure"),
    [
        ("return k <= q & q - k < w", "put parentheses round each comparison"),
        ("return 0 <= q - k < w", "put parentheses round each comparison and join them with &"),
        ("return (k <= q) & q - k < w", "put parentheses round each comparison"),
        ("return k <= q and q - k < w", "`and` asks for one; write (k <= q) & (q - k < w)"),
        ("return k <= q or k < w", "`or` asks for one; write (k <= q) | (k < w)"),
        ("return not k <= q", "`not` asks for one; write ~(k <= q)"),
        ("return k in (1, 2)", "`in` cannot be traced; write (x == a) | (x == b)"),
        ("return k not in rows", "`in` cannot be traced"),
        ("return 3 in k", "`in` cannot"),
        ("if k <= q: return True", "`if` asks for one; write fg.where(condition, x, y)"),
        ("return True if k <= q else False", "write fg.where(condition, x, y)"),
        ("while k < q: pass", "loop over plain Python numbers"),
        ("assert k < q", "declare min= and max= instead"),
        ("return min(q, k) < w", "write fg.minimum(x, y)"),
        ("return max(q, k, w) < 3", "write fg.maximum(x, y)"),
        ("return any(k == r for r in rows)", "any() asks for one; join conditions with |"),
        ("return all([k == 1, q == 2])", "all() asks for one; join conditions with &"),
        ("return bool(k <= q)", "compare it, as in x != 0"),
        ("return int(k) <= q", "write fg.int32(x)"),
        ("return math.sqrt(k) <= q", "sqrt() needs a Python float and got a traced value; write fg.sqrt(x)"),
        ("return math.tan(k) <= q", "the functions of fg are abs, exp, exp2, log,"),
        ("return float(k) <= q", "write fg.float32(x)"),
        ("return '%f' % k == w", "needs a Python float and got a traced value"),
        (
            "return fg.gelu(k) < q",
            "flashgen has no 'gelu'; the functions of fg are abs, exp, exp2, log, log2, log1p, pow, sin, cos",
        ),
        ("return q.float() < k", "a traced value has no 'float'; write fg.float32(x)"),
        ("return q.exp() < k", "a traced value has no 'exp'; write fg.exp(x)"),
        ("return q.item() < k", "a traced value has no 'item'; leave it out"),
        ("return q.frobnicate() < k", "a traced value has no 'frobnicate'; the functions of fg are"),
        ("return q.clamp(0, 3) < k", "write fg.clamp(x, low, high), where a bound may be None"),
        ("return q.to(float) < k", "write fg.float32(x), fg.int32(x), fg.int64(x), or x != 0"),
        ("return q.bool()", "a traced value has no 'bool'; write x != 0"),
        ("return q.shape[0] < k", "a size is fg.q_len"),
        ("return t.shape[0] < k", "a captured tensor has no 'shape'; write t.size(i)"),
        ("return t.long() < k", "a captured tensor has no 'long'; tensor 't' has 2 dimensions and got 0 indices"),
        ("return np.square(q) < k", "np.square cannot be traced; write x * x"),
        ("return (k <= q) & t[b, k]", "compare the int32 with 0, as in (k <= q) & (x != 0)"),
        ("return t[b, k] | (k <= q)", "compare the int32 with 0, as in (k <= q) | (x != 0)"),
        ("return (k <= q & (q < w)) & (k > 1)", "put parentheses round each comparison"),
        ("return ((k <= q) & t[b, k]) == (k > 1)", "compare the int32 with 0"),
        ("return table[q, k] == k", 'declare table = fg.tensor("table", dims=(3, 4), dtype="int64")'),
        ("return fg.and_masks(q, k)", "flashgen has no 'and_masks'; combine variants instead, as in v & w or v | w"),
        ("return whole(b, h, q, k) & (k <= q)", "is no function of positions; combine variants, as in whole & other"),
        ("return s.masked_fill(k > q, 0.0) # score", "write fg.where(condition, value, x)"),
        ("return math.floor(q / w) == k", "write fg.floor(x)"),
        ("return math.ceil(q / w) == k", "write -fg.floor(-x)"),
        ("return math.trunc(q / w) == k", "write fg.int32(x)"),
        ("return round(q / w) == k", "write fg.floor(x + 0.5)"),
        ("return rows[q] == k", "capture a table with fg.tensor"),
        ("for i in range(q): pass", "loop over a plain Python number"),
        ("for i in q: pass", "cannot be looped over"),
        ("a, c = q", "cannot be looped over or unpacked"),
        ("return q[0] == k", "only what fg.tensor captures can be indexed"),
        ("return q(1) == k", "cannot be called"),
        ("return len(q) == k", "has no length"),
        ("return q ** 65 < k", "an exponent is a Python number from -64 to 64, and got 65"),
        ("return q ** k < k", "got a traced value; write fg.exp2(y * fg.log2(x)) for x > 0"),
        ("return 2 ** q < k", "write fg.exp2(x) for 2 ** x"),
        ("return q @ k", "`@` is not in the language"),
        ("return np.exp(q) < k", "np.exp cannot be traced; write fg.exp(x)"),
        ("return np.arctan(q) < k", "np.arctan cannot be traced; the functions of fg are"),
        ("return np.fmax(q, k) < k", "np.fmax cannot be traced"),
        ("return np.array(rows)[q] == k", "fg.tensor"),
        ("return np.array([1, 2]) + q < k", "declare arrays with fg.tensor"),
        ("return q + 'a' < k", "a str cannot be part of a mask or score"),
        ("return q + None < k", "nothing (a missing `return`?) cannot be part"),
        ("return q + [1] < k", "declare arrays with fg.tensor"),
        ("return q / w // 2 == k", "write fg.floor(x / y)"),
        ("return q % (w - 1) == k", "the divisor of `%` may be 0"),
        ("return k <= q + float('nan')", "a NaN constant"),
        ("return t[b] < k", "tensor 't' has 2 dimensions and got 1 index; write t[b, k]"),
        ("return t < k", "tensor 't' has 2 dimensions and got 0 indices; write t[b, k]"),
        ("return k < t", "write t[b, k]"),
        ("return k + t[b] < 3", "write t[b, k]"),
        ("return t[b, q, k] < k", "tensor 't' has 2 dimensions and got 3 indices"),
        ("return t[b, :] < k", "every index is a number"),
        ("return t[..., k] < k", "every index is a number"),
        ("return t[b, q / 2] < k", "an index of tensor 't' is float32; write fg.int32(x)"),
        ("return t[b, q < k] < k", "an index of tensor 't' is bool"),
        ("return u[b, -5] < k", "tensor 'u' got the index -5, and its dimension 1 has size 4"),
        ("return t.size(2) < k", "tensor 't' has dimensions 0..1; .size() got 2"),
        ("return t.size(q) < k", ".size() got <traced int32>"),
        ("return len(t) < k", "write t.size(0)"),
        ("for row in t: pass", "cannot be looped over"),
        ("return fg.clamp(q, None, None) < k", "a lower or an upper bound"),
        ("return fg.where(q, 1, 2) < k", "fg.where(x != 0, a, b)"),
        ("return ~(q / 2) < k", "fg.int32(x)"),
        ("return widow < k", "unknown symbol 'widow'"),
        ("return exp(q) < k", "unknown symbol 'exp': write fg.exp"),
        ("return fg.sofmax(q) < k", "flashgen has no 'sofmax'"),
        ("return rows.first < k", "AttributeError: 'list' object has no attribute 'first'"),
        ("return 1 // 0 == k", "ZeroDivisionError"),
        ("return s if k <= q else -s # score", "write fg.where(condition, x, y)"),
        ("return math.exp(s) # score", "write fg.exp(x)"),
    ],
)
def test_what_cannot_be_traced_names_the_line_and_the_cure(tmp_path, body, cure):
    error = refusal(tmp_path, body)
    assert cure in str(error)
    assert (error.where.path, error.where.line) == (str(tmp_path / "spec.py"), 12)
    assert error.where.text.strip() == body and "spec.py:12" in str(error)


def test_torchs_functions_and_tensors_say_what_to_write():
    import torch
    from torch.nn.attention.flex_attention import and_masks

    table = torch.zeros(8, 16, dtype=torch.float16)
    told = {
        'x // y for rounding_mode="floor"': lambda s, b, h, q, k: s + torch.div(q, 4, rounding_mode="floor"),
        "write fg.clamp(x, low, high), where a bound may be None": lambda s, b, h, q, k: torch.clamp(s, min=0),
        "write fg.maximum(x, 0)": lambda s, b, h, q, k: torch.nn.functional.relu(s),
        "write x * x": lambda s, b, h, q, k: torch.square(s),
        "write fg.maximum(x, y)": lambda s, b, h, q, k: torch.max(s, s + 1),
        "write fg.where(c, x, y)": lambda s, b, h, q, k: torch.where(k <= q, s, 0.0),
        "write x & y": lambda s, b, h, q, k: s + torch.bitwise_and(q, k),
        'table = fg.tensor("table", dims=(8, 16), dtype="float16")': lambda s, b, h, q, k: s + table[h, q - k],
        "combine variants instead, as in v & w or v | w": lambda s, b, h, q, k: and_masks(lambda *at: k < q)(
            b, h, q, k
        ),
    }
    for cure, function in told.items():
        with pytest.raises(SpecError) as caught:
            fg.variant(score=function)
        assert cure in str(caught.value) and caught.value.where.path == __file__, cure


@pytest.mark.parametrize(
    ("body", "cure"),
    [
        ("return k", "returned int32: compare it, as in x != 0"),
        ("k <= q", "returned nothing (a missing `return`?): return a condition"),
        ("return 1", "returned an int: return a condition"),
        ("return None # score", "returned nothing (a missing `return`?); return the new score"),
        ("return k <= q # score", "belongs in the mask, or write fg.where(condition, s, -math.inf)"),
        ("return True # score", "return the new score"),
        ("return '1' # score", "returned a str; return the new score"),
    ],
)
def test_what_cannot_be_returned_names_the_function(tmp_path, body, cure):
    error = refusal(tmp_path, body)
    assert cure in str(error)
    assert (error.where.path, error.where.line) == (str(tmp_path / "spec.py"), 11)
    assert error.where.text.startswith("def spec(")


def test_the_line_is_that_of_the_offence_not_of_the_function(tmp_path):
    error = refusal(tmp_path, "first = k <= q\n\nsecond = q - k < w\nreturn first and second")
    assert error.where.line == 15 and error.where.text.strip() == "return first and second"
    error = refusal(tmp_path, "return helper(k, q)", header=HEADER + "def helper(x, y):\n    return x and y\n")
    assert error.where.text.strip() == "return x and y"


def test_the_cure_fits_the_construct_among_several_on_a_line(tmp_path):
    error = refusal(tmp_path, "return (k <= q) & (not (q < w)) if rows else (k in rows)")
    assert "`not` asks" in str(error)


def test_without_a_source_file_the_cure_lists_all():
    scope = {"fg": fg}
    exec("def mask(b, h, q, k):\n    return k <= q and k > 0", scope)
    with pytest.raises(SpecError, match=r"`if`, `and`, `or`, `not`, `in` and chained comparisons cannot be traced"):
        fg.variant(scope["mask"])


@pytest.mark.parametrize(
    ("signature", "given"),
    [("q, k", "(q, k)"), ("b, h, q, k, s", "(b, h, q, k, s)"), ("", "()"), ("*, b, h, q, k", "(*, b, h, q, k)")],
)
def test_a_mask_with_the_wrong_arguments(tmp_path, signature, given):
    file = tmp_path / "spec.py"
    file.write_text(f"import flashgen as fg\n\n@fg.variant\ndef spec({signature}):\n    return True\n")
    with pytest.raises(SpecError) as caught:
        load_spec(file)
    assert f"the mask function 'spec' takes {given}; it is called with (b, h, q, k)" in str(caught.value)
    assert caught.value.where.line == 4


@pytest.mark.parametrize(
    ("kind", "signature", "order"),
    [
        ("mask", "h, b, k, q", "b, h, q, k"),
        ("mask", "b, h, k, q", "b, h, q, k"),
        ("score", "b, h, q, k, s", "s, b, h, q, k"),
    ],
)
def test_arguments_in_another_order_would_be_another_variant(tmp_path, kind, signature, order):
    file = tmp_path / "spec.py"
    made = "@fg.variant" if kind == "mask" else "@fg.variant().score"
    file.write_text(f"import flashgen as fg\n\n{made}\ndef spec({signature}):\n    return k <= q\n")
    with pytest.raises(SpecError) as caught:
        load_spec(file)
    assert f"the {kind} function 'spec' takes ({signature}), and arguments come in one order" in str(caught.value)
    assert f"write ({order})" in str(caught.value) and caught.value.where.line == 4


def test_a_score_with_the_wrong_arguments():
    with pytest.raises(SpecError, match=r"called with \(s, b, h, q, k\)"):
        fg.variant(score=lambda b, h, q, k: q)
    fg.variant(lambda *positions: True, score=lambda s, *positions: s)
    fg.variant(lambda b, h, q, k, extra=3: k < extra)


def test_what_is_not_a_function():
    with pytest.raises(SpecError, match="a mask is a function \\(b, h, q, k\\), not an int"):
        fg.variant(3)


# ---------------------------------------------------------------------------------------------------------------------
# What is traced


def mask(function):
    return fg.variant(function).mask


def test_constants_are_masks_and_scores():
    assert mask(lambda b, h, q, k: True) is None
    assert mask(lambda b, h, q, k: np.True_) is None
    assert mask(lambda b, h, q, k: fg.minimum(1, 2) == 1) is None, "folded to true"
    assert mask(lambda b, h, q, k: False) is const(False)
    assert fg.variant(score=lambda s, b, h, q, k: 0).score_node is const(0.0)
    assert fg.variant(score=lambda s, b, h, q, k: np.float32(1.5)).score_node is const(1.5)
    assert fg.variant(score=lambda s, b, h, q, k: q).score_node.op == "cast"


def test_python_and_numpy_numbers_work_on_either_side():
    for number in (3, np.int32(3), np.int64(3), np.uint8(3), np.array(3)):
        assert mask(lambda b, h, q, k, n=number: n + q < k) is mask(lambda b, h, q, k: 3 + q < k)
        assert mask(lambda b, h, q, k, n=number: q - n < k) is mask(lambda b, h, q, k: q - 3 < k)
        assert mask(lambda b, h, q, k, n=number: n * q % n < n) is mask(lambda b, h, q, k: 3 * q % 3 < 3)
        assert mask(lambda b, h, q, k, n=number: (n & q) | (n ^ k) == n) is mask(
            lambda b, h, q, k: (3 & q) | (3 ^ k) == 3
        )
        assert mask(lambda b, h, q, k, n=number: (n << (q % 9)) == (k >> n)) is mask(
            lambda b, h, q, k: (3 << (q % 9)) == (k >> 3)
        )
    half = np.float64(0.5)
    assert mask(lambda b, h, q, k: half * q < k) is mask(lambda b, h, q, k: 0.5 * q < k)
    assert mask(lambda b, h, q, k: np.True_ & (k <= q)) is mask(lambda b, h, q, k: True & (k <= q))
    assert mask(lambda b, h, q, k: np.int64(7) // (k + 1) < np.int64(7) - q) is mask(
        lambda b, h, q, k: 7 // (k + 1) < 7 - q
    )


def test_pythons_own_operators():
    assert mask(lambda b, h, q, k: abs(q - k) < 3) is mask(lambda b, h, q, k: fg.abs(q - k) < 3)
    assert mask(lambda b, h, q, k: +q < -k) is mask(lambda b, h, q, k: q < -k)
    assert mask(lambda b, h, q, k: divmod(q, 4)[0] == divmod(k, 4)[1]) is mask(lambda b, h, q, k: q // 4 == k % 4)
    ten = 10
    assert mask(lambda b, h, q, k: ten > k) is mask(lambda b, h, q, k: k < 10), "Python turns it round"


def test_a_python_loop_unrolls():
    def strides(b, h, q, k):
        seen = q == k
        for stride in (1, 2, 4):
            seen = seen | (q - k == stride)
        return seen

    assert mask(strides) is mask(lambda b, h, q, k: (q == k) | (q - k == 1) | (q - k == 2) | (q - k == 4))


def test_a_traced_value_is_unhashable_but_prints():
    seen = []
    fg.variant(lambda b, h, q, k: seen.append(q) or k <= q)
    assert repr(seen[0]) == "<traced int32>"
    with pytest.raises(TypeError, match="unhashable"):
        {seen[0]}


def test_torch_functions_and_tensors_are_refused():
    import torch

    with pytest.raises(SpecError, match=r"torch's 'exp' cannot be traced; write fg\.exp"):
        fg.variant(score=lambda s, b, h, q, k: torch.exp(s))
    slopes = torch.ones(4)
    with pytest.raises(SpecError, match=r"a Tensor cannot be part|fg\.tensor"):
        fg.variant(score=lambda s, b, h, q, k: s + slopes)
    with pytest.raises(SpecError, match=r"fg\.tensor"):
        fg.variant(score=lambda s, b, h, q, k: slopes * s)
    with pytest.raises(SpecError, match=r"fg\.tensor"):
        fg.variant(score=lambda s, b, h, q, k: s + slopes[h])


# ---------------------------------------------------------------------------------------------------------------------
# Declarations


def declared(expression):
    return expression.node.attr


def test_parameters_take_their_type_from_what_is_given():
    assert declared(fg.param("w", default=3)).dtype is DType.INT32
    assert declared(fg.param("w", default=3, max=9.5)).dtype is DType.FLOAT32
    assert declared(fg.param("w", min=1)).default is None
    assert declared(fg.param("w", dtype=float)).dtype is DType.FLOAT32
    assert declared(fg.param("w", default=2, dtype="float32")).default == 2.0
    assert declared(fg.param("w", default=2, dtype=np.int64)).dtype is DType.INT64
    assert declared(fg.constant("block", 64, min=1)).min == 1
    assert declared(fg.param("w", default=np.int64(4))).default == 4


def test_a_captured_tensor_is_declared_with_its_dimensions():
    t = fg.tensor("t", dims=["batch", 3, None], dtype=np.float32, min=-1, max=1, doc="A table.")
    assert t.tensor.dims == ("batch", 3, None) and t.tensor.dtype == "float32" and t.tensor.min == -1.0
    assert repr(t[0]) == "<captured t, 1 of 3 indices>"


@pytest.mark.parametrize(
    ("declare", "message"),
    [
        (lambda: fg.param("not a name", default=1), "is not a Python name"),
        (lambda: fg.param("lambda", default=1), "is not a Python name"),
        (lambda: fg.param(3, default=1), "is not a Python name"),
        (lambda: fg.param("größe", default=1), "the name 'größe' is not ASCII"),
        (lambda: fg.tensor("größe", dims=("kv",), dtype="int32"), "the name 'größe' is not ASCII"),
        (lambda: fg.param("_w", default=1), "starts with an underscore"),
        (lambda: fg.param("scale", default=1), "'scale' belongs to the call or to the language"),
        (lambda: fg.param("q_len", default=1), "'q_len' belongs to the call"),
        (lambda: fg.tensor("dropout", dims=("kv",), dtype="int32"), "'dropout' belongs to the call"),
        (lambda: fg.param("w"), "needs a default, a bound or dtype=int or float"),
        (lambda: fg.param("w", default="3"), "is an int or a float and got '3'"),
        (lambda: fg.param("w", default=True), "is an int or a float and got True"),
        (lambda: fg.param("w", default=float("nan")), "got NaN"),
        (lambda: fg.param("w", default=1, dtype="int8"), "dtype is int, float, 'int32', 'int64' or 'float32'"),
        (lambda: fg.param("w", default=1.5, dtype=int), "default=1.5 is not a whole number"),
        (lambda: fg.param("w", max=float("inf"), dtype=int), "max=inf is not a whole number"),
        (lambda: fg.param("w", default=1 << 31), "default=2147483648 does not fit into -2^31 to 2^31 - 1"),
        (lambda: fg.param("w", default=9, min=1, max=8), "the default 9 is outside min=1 and max=8"),
        (lambda: fg.param("w", default=0, min=1), "the default 0 is outside min=1"),
        (lambda: fg.param("w", min=3, max=2), "min=3 is above max=2"),
        (lambda: fg.constant("c", None), "needs a default"),
        (lambda: fg.tensor("t", dims="kv", dtype="int32"), 'dims is a tuple, as in dims=("batch", "kv")'),
        (lambda: fg.tensor("t", dims=(), dtype="int32"), "a single number is an fg.param"),
        (lambda: fg.tensor("t", dims=("kv",)), "tensor 't' needs a dtype, one of bool"),
        (
            lambda: fg.tensor("t", np.zeros((3, 4), np.float32)),
            'write t = fg.tensor("t", dims=(3, 4), dtype="float32")',
        ),
        (lambda: fg.tensor("t", np.float32(3)), 'write t = fg.param("t", dtype=float)'),
        (lambda: fg.tensor("t", dims=("head",), dtype="int32"), "got 'head' (did you mean 'heads'?)"),
        (lambda: fg.tensor("t", dims=(0,), dtype="int32"), "positive numbers or None, and got 0"),
        (lambda: fg.tensor("t", dims=(1.5,), dtype="int32"), "positive numbers or None, and got 1.5"),
        (lambda: fg.tensor("t", dims=("kv",), dtype="float64"), "dtype 'float64' is not one of bool, uint8"),
        (lambda: fg.tensor("t", dims=("kv",), dtype="bool", min=0), "has no min, max or order"),
        (
            lambda: fg.param("w", default=1e300),
            "'w' is float32: default=1e+300 does not fit; the largest is 3.40282e+38",
        ),
        (lambda: fg.param("w", default=1.0, max=-1e39), "max=-1e+39 does not fit"),
        (lambda: fg.param("w", dtype=float, max=10**400), "does not fit"),
        (lambda: fg.tensor("t", dims=("kv",), dtype="uint8", max=256), "max=256 is outside uint8"),
        (lambda: fg.tensor("t", dims=("kv",), dtype="float32", min=float("nan")), "'t': min is NaN"),
        (lambda: fg.tensor("t", dims=("kv",), dtype="int32", max=float("nan")), "'t': max is NaN"),
        (lambda: fg.tensor("t", dims=("kv",), dtype="float16", max=1e5), "'t' is float16: max=100000.0 does not fit"),
        (lambda: fg.tensor("t", dims=("kv",), dtype="bfloat16", min=-3.4e38), "'t' is bfloat16: min=-3.4e+38"),
        (lambda: fg.tensor("t", dims=("kv",), dtype="int32", min=2, max=1), "min=2 is above max=1"),
        (lambda: fg.tensor("t", dims=("kv",), dtype="int32", min=0.5), "min=0.5 is not a whole number"),
        (lambda: fg.tensor("t", dims=("kv",), dtype="int32", min="a"), "min='a' is not a number"),
        (lambda: fg.tensor("t", dims=("kv",), dtype="int32", example=[1]), "example is a function (problem, rng)"),
    ],
)
def test_a_bad_declaration_is_refused(declare, message):
    with pytest.raises(SpecError) as caught:
        declare()
    assert message in str(caught.value)
    assert caught.value.where.path == __file__


def test_equal_names_unify_only_if_declared_alike():
    one, same, other = fg.param("w", default=8), fg.param("w", default=8), fg.param("w", default=9)
    assert fg.variant(lambda b, h, q, k: (q - k < one) & (k < same)).params == (declared(one),)
    with pytest.raises(SpecError) as caught:
        fg.variant(lambda b, h, q, k: (q - k < one) & (k < other))
    text = str(caught.value)
    assert "'w' is declared twice, differently" in text and "default 8" in text and "default 9" in text
    assert text.count(__file__) >= 2, "both lines are named"
    with pytest.raises(SpecError, match="declared twice"):
        t = fg.tensor("w", dims=("kv",), dtype="int32")
        fg.variant(lambda b, h, q, k: t[k] < one)


def test_a_tensor_and_its_size_are_one_declaration():
    t = fg.tensor("t", dims=(None,), dtype="int32", example=lambda problem, rng: np.zeros(3))
    assert fg.variant(lambda b, h, q, k: t[k % t.size(0)] == 0).tensors == (t.tensor,)


NONSENSE = {
    "a documentation that is no text": (lambda: fg.param("w", 1, doc=3), "'w': doc is a text and got 3"),
    "no documentation of a tensor": (lambda: fg.tensor("t", ("kv",), "int32", doc=None), "doc is a text and got None"),
    "an order in words": (
        lambda: fg.tensor("t", ("kv",), "int32", sorted="no"),
        "sorted is True or False and got 'no'",
    ),
    "a size beyond int32": (lambda: fg.tensor("t", (2**40,), "int32"), "numbers from 1 to 2^31 - 1 or None, and got"),
    "a name that is a number": (lambda: fg.variant(name=3), "name is a text, as in name='causal', and got 3"),
    "a name of nothing": (lambda: fg.variant(name=""), "name is a text, as in name='causal', and got ''"),
    "a variant's documentation": (lambda: fg.variant(doc=3), "doc is a text and got 3"),
    "a float head dim": (lambda: fg.variant(head_dims=64.0), "head_dims is a tuple of positive integers"),
    "a number for dtypes": (lambda: fg.variant(dtypes=3), "dtypes is a tuple of 'float16' and 'bfloat16', and got 3"),
    "only in words": (lambda: fg.variant(only="yes", head_dims=64), "only is True or False and got 'yes'"),
    "an empty pipeline": (lambda: fg.variant(pipeline=""), "pipeline is a name, as in pipeline='ampere', and got ''"),
    "an empty arch": (lambda: fg.variant(arch=""), "arch is a name, as in arch='sm_80', and got ''"),
}


@pytest.mark.parametrize("name", NONSENSE)
def test_declared_nonsense(name):
    declare, message = NONSENSE[name]
    with pytest.raises(SpecError) as caught:
        declare()
    assert message in str(caught.value) and caught.value.where is not None


@pytest.mark.parametrize("declare", [fg.param, fg.constant])
@pytest.mark.parametrize("value", [True, "3", [], np.bool_(True), np.array(3), 1j, 2**40])
def test_a_scalar_that_is_no_number(declare, value):
    with pytest.raises(SpecError):
        declare("x", value)
    with pytest.raises(SpecError):
        declare("x", 1, min=value)
    for dtype in ("", "bool", "INT32", 3, bool, [], b"int32", True):
        with pytest.raises(SpecError, match="dtype is int, float, 'int32', 'int64' or 'float32'"):
            declare("x", 1, dtype=dtype)
