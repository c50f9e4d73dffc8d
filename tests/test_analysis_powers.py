"""Scores as powers of two: what log2(e) joins at no cost, and that it is the same score."""

import math

import numpy as np
import pytest
from ptx_attention import replace, work

import flashgen as fg
from flashgen.analysis.powers import in_powers
from flashgen.analysis.tiles import Case

slopes = fg.tensor("slopes", dims=("heads",), dtype="float32", example=lambda p, rng: rng.random(p.heads, "float32"))
table = fg.tensor("table", dims=("q", "kv"), dtype="float32", example=lambda p, rng: rng.random((p.q_len, p.kv_len)))
strength = fg.param("strength", min=0.0)

FREE = {
    "slopes": lambda s, b, h, q, k: s - slopes[h] * fg.float32(q - k),
    "a parameter": lambda s, b, h, q, k: s - strength * fg.log(1.0 + fg.float32(abs(q - k))),
    "both signs": lambda s, b, h, q, k: -(0.5 * fg.float32(q) - s) + 1.0,
    "a choice": lambda s, b, h, q, k: fg.where(k <= q, s, -1e4),
    "a choice of biases": lambda s, b, h, q, k: s + fg.where(k <= q, slopes[h], 2.0 * fg.float32(k - q)),
    "nothing": lambda s, b, h, q, k: s,
}
COSTLY = {
    "a table": lambda s, b, h, q, k: s + table[q, k],
    "a distance": lambda s, b, h, q, k: s - fg.float32(q - k),
    "a product": lambda s, b, h, q, k: s * slopes[h],
    "a function": lambda s, b, h, q, k: fg.tanh(s),
    "asked for its score": lambda s, b, h, q, k: fg.where(s > 0.0, s, 0.0),
}


def root(score):
    return fg.variant(score=score, name="scored").score_node


@pytest.mark.parametrize("name", FREE)
def test_what_is_free(name):
    assert in_powers(root(FREE[name])) is not None


@pytest.mark.parametrize("name", COSTLY)
def test_what_costs_a_multiplication_for_each_score(name):
    assert in_powers(root(COSTLY[name])) is None


@pytest.mark.slow
@pytest.mark.sampled("slopes", "a choice of biases")
@pytest.mark.parametrize("name", FREE)
def test_kernels_of_powers_are_right(name):
    variant = fg.variant(score=FREE[name], name="scored")
    sizes, captured = {"q_len": 150, "kv_len": 211, "heads": 2, "kv_heads": 1, "batch": 1}, np.float32([0.2, 0.7])
    w = work(variant, "hopper", case=Case(sizes=sizes, params={"strength": 0.3}, tensors={"slopes": captured}))
    assert name == "nothing" or "rounded(score(p.scale * LOG2E * s[i]" in w.source
    assert w.wrong(w.run()) == ()
    if name != "nothing":  # where the score alone counts, that is another temperature
        assert w.wrong(w.run(replace("score(p.scale * LOG2E * s[i]", "score(p.scale * s[i]")))


def test_log2_of_e():
    assert in_powers(root(lambda s, b, h, q, k: s + 1.0)).operands[1].attr == math.log2(math.e)


def test_a_long_chain_is_walked_once():
    def long(s, b, h, q, k):
        for i in range(3000):
            s = s + 0.001 * i
        return s

    assert in_powers(root(long)).op == "add"
