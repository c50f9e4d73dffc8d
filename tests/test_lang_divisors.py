"""Divisors and shift counts: of constants, checked when these are bound; of others, with the bound that cures."""

import re

import pytest

import flashgen as fg
from flashgen.errors import SpecError

width = fg.constant("width", default=8, min=1)
stride = fg.param("stride", default=8, min=1)
wide = fg.param("wide", default=8, min=1, dtype="int64")
number = fg.param("number", default=8)
parts = fg.tensor("parts", dims=("batch",), dtype="int32", min=1, max=64)


def made(divisor, op="//"):
    if op == "<<":
        return fg.variant(lambda b, h, q, k: (1 << divisor(b)) > q - k)
    return fg.variant(lambda b, h, q, k: (q // divisor(b) if op == "//" else q % divisor(b)) == 0)


@pytest.mark.parametrize("op", ["//", "%"])
@pytest.mark.parametrize("divisor", [lambda b: width // 2, lambda b: width - 1, lambda b: 4 - width % 4])
def test_a_divisor_of_constants_is_checked_when_they_are_bound(divisor, op):
    variant = made(divisor, op)
    assert variant.bind().mask is not None


@pytest.mark.parametrize("op", ["//", "%"])
def test_a_divisor_that_bound_constants_make_0(op):
    variant = made(lambda b: width // 2, op)
    with pytest.raises(SpecError, match=f"`{op}` by 0"):
        variant.bind(width=1)


def test_a_count_of_constants_is_checked_when_they_are_bound():
    variant = made(lambda b: width - 8, "<<")
    assert variant.bind(width=39).mask is not None
    with pytest.raises(SpecError, match=r"may leave 0\.\.31"):
        variant.bind(width=40)


@pytest.mark.parametrize(
    ("divisor", "cure"),
    [
        (lambda b: stride // 2, "declare fg.param('stride', ..., min=2), or write x // fg.maximum(y, 1)"),
        (lambda b: wide * wide, "declare fg.param('wide', ..., max=2147483648), or"),
        (lambda b: number * 2, "declare fg.param('number', ..., min=1), or"),
        (lambda b: parts[b] - 1, "declare fg.tensor('parts', ..., min=2), or"),
        (lambda b: stride - number, "; write x // fg.maximum(y, 1)"),
        (lambda b: number, "declare fg.param('number', ..., min=1)"),
    ],
)
def test_the_cure_is_a_bound_that_helps(divisor, cure):
    with pytest.raises(SpecError, match=re.escape(cure)):
        made(divisor)


def test_the_cure_of_a_count():
    with pytest.raises(SpecError, match=re.escape("declare fg.param('stride', ..., max=32), or write")):
        made(lambda b: stride - 1, "<<")
