"""Whole kernels whose masks, scores or derivatives hold signs beside signs, choices beside choices, sums in indices."""

from operator import neg

import numpy as np
import pytest
import variant_kernel
from ptx_attention import ARCH, work
from ptx_backward import Backward, check

import flashgen as fg
from flashgen.analysis.facts import analyse
from flashgen.analysis.tiles import Case
from flashgen.codegen import emit
from flashgen.lang.evaluate import evaluate
from flashgen.planning import planner
from flashgen.planning.plan import Tile
from flashgen.runtime import nvrtc

slope = fg.constant("slope", -0.5)
way = fg.param("way", default=1)
bias = fg.tensor("bias", dims=(4, 8), dtype="float32", example=lambda p, r: r.normal(size=(4, 8)).astype(np.float32))

VARIANTS = {
    "mask": fg.variant(lambda b, h, q, k: neg(-k) <= q),
    "flipped": fg.variant().score(lambda s, b, h, q, k: 4.0 * fg.sigmoid(-s)).bind().with_flipped_score(),
    "constant": fg.variant().score(lambda s, b, h, q, k: s + -slope * (q - k)),
    "tanh": fg.variant().score(lambda s, b, h, q, k: -fg.tanh(-s)),
    "from_one": fg.variant().score(lambda s, b, h, q, k: 1 - fg.tanh(-s)),
    "exp": fg.variant().score(lambda s, b, h, q, k: fg.float32(q) * 0.01 - fg.exp(-s)),
    "twice": fg.variant().score(lambda s, b, h, q, k: s - (fg.float32(q) * 0.01 - s)),
    "choice": fg.variant(lambda b, h, q, k: fg.where(way > 0, b > 0, h > 0)),
}

SHAPE = {"q_len": 70, "kv_len": 75}


COMPILED = [(name, arch) for name in VARIANTS for arch in ARCH.values()]


@pytest.mark.sampled("constant-sm_80", "exp-sm_90a")
@pytest.mark.slow
@pytest.mark.parametrize(("name", "arch"), COMPILED)
def test_both_passes_compile(name, arch):
    for menu in (planner.menu, planner.backward_menu):
        nvrtc.ptx(emit(menu(VARIANTS[name].bind(), arch, "bfloat16", 64, 64).plans[0]), arch)


@pytest.mark.sampled("mask-hopper", "flipped-ampere")
@pytest.mark.slow
@pytest.mark.parametrize("pipeline", ARCH)
@pytest.mark.parametrize("name", ["mask", "flipped"])
def test_forwards_are_right(name, pipeline):
    w = work(VARIANTS[name], pipeline, **SHAPE)
    assert w.wrong(w.run()) == ()


@pytest.mark.slow
@pytest.mark.parametrize("pipeline", ARCH)
def test_a_backward_is_right(pipeline):
    check(Backward(VARIANTS["from_one"], pipeline=pipeline, **SHAPE))


def test_a_condition_of_a_choice_alone_decides_about_tiles():
    facts = analyse(VARIANTS["choice"].bind())
    case = Case(sizes={"batch": 2, "heads": 2, "kv_heads": 1, "q_len": 9, "kv_len": 9}, params={"way": 1}, tensors={})
    visited, kept, _ = variant_kernel.run(facts, case, Tile(q=4, kv=4))
    b, h = np.ogrid[:2, :2]
    expected = evaluate(facts.variant.mask, b=b, h=h, sizes=case.sizes, params=case.params, tensors={})
    assert (kept == np.broadcast_to(expected, (2, 2))[:, :, None, None]).all()
    assert ((visited != 0) == np.broadcast_to(expected, (2, 2))[:, :, None, None]).all()


@pytest.mark.sampled("<lambda>0")
@pytest.mark.slow
@pytest.mark.parametrize("at", [lambda h, k: (h & 3, k & 7), lambda h, k: (h & 3, fg.where(k > 4, 7, 0))])
def test_the_gradient_of_an_element_goes_to_its_own_place(at):
    variant = fg.variant().score(lambda s, b, h, q, k: s + bias[at(h, k)])
    check(Backward(variant, head_dim=32, **SHAPE))


@pytest.mark.slow
def test_the_gradient_of_an_element_that_the_score_selects():
    variant = fg.variant().score(lambda s, b, h, q, k: s + bias[h, fg.int32(fg.clamp(s + 4, 0, 7))])
    check(Backward(variant, head_dim=32, **SHAPE))
