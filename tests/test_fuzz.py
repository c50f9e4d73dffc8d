"""Random specs, fresh ones in every run, by every judge; and that each judge can fail.

The seed is in pytest's header and in a failure; FLASHGEN_FUZZ_SEED sets it, FLASHGEN_FUZZ_SECONDS the time of a judge.
`python -m tests.fuzz JUDGE` does the same by the thousand.
"""

import ast
import functools
import math
import os
from pathlib import Path

import numpy as np
import padded
import pytest
import torch
from fuzz import evaluator, grammar
from fuzz.engine import REFUSALS, search, try_one
from fuzz.judges import JUDGES, load
from ptx_attention import replace

from flashgen.analysis import counts
from flashgen.codegen import emit
from flashgen.lang import ops
from flashgen.lang.expr import walk
from flashgen.ops import supports

SEED = int(os.environ["FLASHGEN_FUZZ_SEED"])
SECONDS = float(os.environ.get("FLASHGEN_FUZZ_SECONDS", "6"))
SHRINK = 60.0
NAMES = [name for name in JUDGES if name != "gpu"]


@pytest.mark.sampled("analysis")
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_wrong(name):
    judge = JUDGES[name]
    tally = search(judge, SEED, count=100_000, seconds=SECONDS)
    print(tally)
    for failure in tally.failures.values():
        small = try_one(judge, SEED, int(failure.repro.rsplit(" ", 1)[1]), shrink=SHRINK)
        pytest.fail(str(next(iter(small.failures.values()), failure)), pytrace=False)
    share = 0.3 if name == "compile" else 0.6  # which asks for what cannot be had
    chance = 2 * math.sqrt(tally.tried)  # four standard deviations: a busy machine tries few
    assert tally.outcomes["held"] >= share * tally.tried - chance, (tally, tally.reasons)


# ---------------------------------------------------------------------------------------------------------------------
# The generator and the evaluator


@functools.cache
def drawn(name, count):
    """The cases of a fixed seed, as the judge sees them."""
    seen = []
    keeping = type(JUDGES[name])(name, JUDGES[name].draw, seen.append)
    search(keeping, 1, count=count)
    return tuple(seen)


@pytest.mark.slow
def test_the_generator_writes_every_operation():
    missing = set(ops.OPS)
    for case in drawn("text", 100):
        try:
            roots = load(case).roots
        except REFUSALS:
            continue
        missing -= {n.op for n in walk(roots)}
        if not missing:
            return
    pytest.fail(f"no case has {missing}")


@pytest.mark.slow
def test_few_texts_are_refused():
    refused = 0
    cases = drawn("analysis", 150)
    for case in cases:
        try:
            load(case)
        except REFUSALS:
            refused += 1
    assert refused < len(cases) / 10


@pytest.mark.slow
def test_a_case_is_the_same_again_and_its_report_is_a_spec_file(tmp_path):
    one, two = (drawn.__wrapped__("text", 12) for _ in range(2))
    assert [case.report() for case in one] == [case.report() for case in two]
    from flashgen.lang.load import load_spec

    for i, case in enumerate(one):
        file = tmp_path / f"case{i}.py"
        file.write_text(case.report())
        try:
            variant = load_spec(file)
        except REFUSALS:
            continue
        for tensor in variant.tensors:
            array = np.asarray(tensor.example(None, None))
            np.testing.assert_array_equal(array, case.values("tensor")[tensor.name])


@pytest.mark.slow
def test_the_evaluator_imports_nothing_of_the_compiler():
    tree = ast.parse(Path(evaluator.__file__).read_text())
    modules = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    modules += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    assert modules and not [name for name in modules if name.startswith(("flashgen", "."))]


RULES = {
    "(0 * k - 7) // 2": -4,
    "(0 * k + 7) // -2": -4,
    "(0 * k - 7) % 4": 1,
    "(0 * k + 7) % -4": -1,
    "fg.int64(0 * k + 1) << 63": -(1 << 63),
    "(fg.int64(0 * k) - 9223372036854775807 - 1) // -1": -(1 << 63),
    "fg.int32(fg.int64(0 * k) + 4294967297)": 1,
    "fg.int32(fg.float32(0 * k) + 3e9)": (1 << 31) - 1,
    "fg.int32(-2.75 + 0 * k)": -2,
    "fg.int32(fg.log(-1.0 + 0 * k))": 0,
    "fg.int64(fg.log(-1.0 + 0 * k))": -(1 << 63),
    "fg.int32(fg.minimum(fg.log(-1.0 + 0 * k), 5.0))": 5,
    "fg.int32(fg.clamp(fg.log(-1.0 + 0 * k), 2, 3))": 2,
    "~(0 * k + 5)": -6,
    "(0 * k - 9) >> 1": -5,
}


@pytest.mark.parametrize("rule", RULES)
def test_the_evaluator_reads_the_language(rule):
    text = f"import flashgen as fg\nx = fg.variant(lambda b, h, q, k: {rule} == {RULES[rule]})\n"
    sizes = dict.fromkeys(evaluator.SIZES, 1)
    visible, decided = evaluator.Spec(text, sizes, {}, {}).mask()
    assert visible.all() and decided.all()


@pytest.mark.parametrize(
    "condition", ["fg.cos({}) == fg.float32(k)", "fg.sin({}) != 0.0 * k", "fg.cos({}) < 1.0 + 0 * k"]
)
def test_a_mask_hangs_on_no_wave_that_a_kernel_does_not_promise(condition):
    """Of cos(2^61) an H200 gives 1, which is that of whole turns."""
    for argument, known in (("2.0**61 + 0 * k", False), ("1.0 + 0 * k", True)):
        text = f"import flashgen as fg\nx = fg.variant(lambda b, h, q, k: {condition.format(argument)})\n"
        _, decided = evaluator.Spec(text, dict.fromkeys(evaluator.SIZES, 2), {}, {}).mask()
        assert bool(decided.all()) == known


def test_both_forms_of_the_evaluators_gradients_agree():
    """By autograd, and by the formulas that round to 16 bits: to float64 they round nothing."""
    text = (
        "import flashgen as fg\nt = fg.tensor('t', ('heads',), 'float32')\n"
        "x = fg.variant(lambda b, h, q, k: k <= q, lambda s, b, h, q, k: fg.tanh(s) * t[h] + s)\n"
    )
    sizes = {"batch": 2, "heads": 4, "kv_heads": 2, "q_len": 5, "kv_len": 4}
    spec = evaluator.Spec(text, sizes, {}, {"t": np.array([0.5, -1, 2, 0], np.float32)})
    g = torch.Generator().manual_seed(0)
    q, d_o = (torch.randn(2, 4, 5, 8, generator=g, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(2, 2, 4, 8, generator=g, dtype=torch.float64) for _ in range(2))
    dlse = torch.randn(2, 4, 5, generator=g, dtype=torch.float64)
    call = evaluator.Call(spec, q, k, v, -0.4, spec.mask()[0], d_o, dlse, ("t",))
    one, two = call.attend(), call.rounded(torch.float64)
    torch.testing.assert_close(two.o, one.o)
    assert set(one.gradients) == {"q", "k", "v", "t"}
    for name, gradient in one.gradients.items():
        torch.testing.assert_close(two.gradients[name], gradient)
    causal = torch.nn.functional.scaled_dot_product_attention(
        q[:, :, :4], k, v, is_causal=True, scale=0.3, enable_gqa=True
    )
    plain = evaluator.Spec("import flashgen as fg\nx = fg.variant(lambda b, h, q, k: k <= q)\n", sizes, {}, {})
    o = evaluator.Call(plain, q, k, v, 0.3, plain.mask()[0]).attend().o
    torch.testing.assert_close(o[:, :, :4], causal)


# ---------------------------------------------------------------------------------------------------------------------
# Every judge can fail


@pytest.fixture
def broken():
    """Sets a column of a row of the table of operations, and puts it back."""
    kept = []

    def set_column(name, column, value):
        row = ops.OPS[name]
        kept.append((row, column, getattr(row, column)))
        object.__setattr__(row, column, value)

    yield set_column
    for row, column, value in kept:
        object.__setattr__(row, column, value)


def notices(name, count, seed=7):
    """Whether a judge finds something wrong, and not an accident, in the first cases of a seed."""
    return [kind.split()[0] for kind in search(JUDGES[name], seed, count=count).failures] == ["Wrong"]


@pytest.mark.slow
def test_analysis_notices_a_wrong_range(broken):
    broken("maximum", "abstract", ops.OPS["minimum"].abstract)
    assert notices("analysis", 200)


@pytest.mark.slow
def test_text_notices_wrong_cuda(broken):
    broken("sub", "cuda", ops.OPS["add"].cuda)
    assert notices("text", 40)


@pytest.mark.slow
def test_kernels_notice_a_wrong_derivative(broken):
    broken("sub", "derivative", ops.OPS["add"].derivative)
    assert notices("kernels", 40, seed=2)  # of which an early and small case shows it


@pytest.mark.slow
def test_gradients_notice_a_wrong_derivative(broken):
    broken("tanh", "derivative", ops.OPS["sigmoid"].derivative)
    assert notices("gradients", 60)


@pytest.mark.slow
def test_layouts_notice_keys_that_are_left_out(monkeypatch):
    whole, half = "? keys.length : 0;", "? (keys.length + 1) / 2 : 0;"
    monkeypatch.setattr(padded, "emit", lambda plan: replace(whole, half)(emit(plan)))
    assert notices("layouts", 4)


def test_compile_notices_a_refusal_that_supports_does_not_know(monkeypatch):
    monkeypatch.setattr(supports, "_refusal", lambda variant, options: None)
    assert notices("compile", 20)


@pytest.mark.slow
def test_counts_notice_a_pair_too_many(monkeypatch):
    counted = counts._visible_pairs

    def one_more(*given):
        kept, pairs = counted(*given)
        return kept + 1, pairs

    monkeypatch.setattr(counts, "_visible_pairs", one_more)
    assert notices("counts", 40)


@pytest.mark.slow
def test_a_failure_is_shrunk():
    """Of masks that read a parameter, the smallest is little more than that."""

    def reads(case):
        if "fg.param" in case.text:  # by `assert`, pytest would compare texts and quote them: slow, and a kind for each
            raise AssertionError("reads a parameter")

    judge = type(JUDGES["analysis"])("reads", JUDGES["analysis"].draw, reads)
    (failure,) = search(judge, 3, count=50).failures.values()
    index = int(failure.repro.rsplit(" ", 1)[1])
    (small,) = try_one(judge, 3, index, shrink=20.0).failures.values()
    assert small.report.count("fg.") <= 6 and small.repro == failure.repro
    assert len(small.report) < len(failure.report)


@pytest.mark.slow
def test_profiles_reach_the_awkward_lengths():
    lengths = {case.sizes[name] for case in drawn("kernels", 200) for name in ("q_len", "kv_len")}
    assert {1, 2, 3, 13, 63, 64, 65} <= lengths
    cases = drawn("text", 100)
    assert any(case.scale < 0 for case in cases) and any(case.scale == 0 for case in cases)
    data = [x for case in cases for x in case.values("tensor").values() if x.dtype.kind == "f" and x.size]
    assert any(np.isnan(x).any() for x in data) and any(np.isinf(x).any() for x in data)
    assert any(abs(int(v)) > 1 << 60 for case in cases for v in case.values("param").values() if math.isfinite(v))
    assert grammar.EDGES["int64"][0] == -(1 << 63)
