"""One result: the bits of o and lse are a row's own, whichever kernel of the menu computes it, beside whatever rows."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from ptx_attention import ARCH, Work, replace, work

from flashgen.codegen import emit
from flashgen.planning import planner
from flashgen.planning.plan import KernelPlan

#: Two heads that share keys, and tiles enough that a row's maximum is passed after its first.
SHAPE = {"q_len": 200, "kv_len": 520, "heads": 2, "kv_heads": 1}


def peaked(w: Work) -> Work:
    """The same work with keys that some rows' scores pass every slack at, in one tile, and rows that none passes."""
    q, k, v = (x.double() for x in w.qkv)
    g = torch.Generator().manual_seed(7)
    for key in (300, 131, 130, 5):
        row = int(torch.randint(q.shape[2], (), generator=g))
        k[0, 0, key] = 30 * q[0, key % 2, row]
    k[0, 0, 40] = 400 * q[0, 0, 17]  # P is infinite beside what the row has seen
    return dataclasses.replace(w, qkv=tuple(x.to(y.dtype) for x, y in zip((q, k, v), w.qkv, strict=True)))


def forms(w: Work, **fixed) -> tuple[KernelPlan, ...]:
    """Every kernel that a call of this work may pick."""
    p = w.problem
    pipeline = w.plan.pipeline
    return planner.menu(w.variant, ARCH[pipeline], p.dtype, p.head_dim, p.v_head_dim, pipeline=pipeline, **fixed).forms


def bits(w: Work, plan: KernelPlan, **options) -> tuple[np.ndarray, np.ndarray]:
    result = dataclasses.replace(w, plan=plan, source=emit(plan)).run(**options)
    return result.o.view(np.int32), result.lse.view(np.int32)


def differing(a: tuple[np.ndarray, np.ndarray], b: tuple[np.ndarray, np.ndarray]) -> int:
    return sum(int((x != y).sum()) for x, y in zip(a, b, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("spec", ["full", "causal", "causal_bottom_right"])
@pytest.mark.parametrize("pipeline", ["hopper", "ampere"])
def test_every_kernel_of_a_menu_gives_the_same_bits(pipeline, spec, dtype):
    w = peaked(work(spec, pipeline, dtype=dtype, tile=(128, 64) if pipeline == "ampere" else None, **SHAPE))
    plans = forms(w)
    assert len(plans) > 1
    first, *others = (bits(w, plan) for plan in plans)
    for plan, found in zip(plans[1:], others, strict=True):
        assert differing(first, found) == 0, plan.tile
