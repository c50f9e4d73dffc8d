"""One result: the bits of o and lse are a row's own, whichever kernel of the menu computes it, beside whatever rows."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from ptx_attention import ARCH, Work, replace, work
from tolerance import reference

from flashgen.codegen import emit
from flashgen.planning import planner
from flashgen.planning.plan import KernelPlan

#: The plan that a test's work begins with.
TILES = {"hopper": {"tile": (128, 128)}, "ampere": {"tile": (64, 64)}}

#: Maxima that follow only what would overflow.
LAGGING = {name: replace("SHARE = 0.0625f", "SHARE = 0x1p60f") for name in TILES}

#: Two heads that share keys, and tiles enough that a row's maximum is passed after its first.
SHAPE = {"q_len": 200, "kv_len": 330, "heads": 2, "kv_heads": 1}

#: Tiles enough that rows beside each other pass their maxima in different ones.
LONG = {**SHAPE, "kv_len": 520}


def peaked(w: Work) -> Work:
    """The same work with keys that some rows' scores pass every slack at, in one tile, and rows that none passes."""
    q, k, v = (x.double() for x in w.qkv)
    g = torch.Generator().manual_seed(7)
    for key in filter(lambda key: key < k.shape[2], (300, 131, 130, 5)):
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


def part(w: Work, **shape) -> Work:
    """A kernel's work of another shape, whose tensors the test gives."""
    p = w.problem
    sizes = {"heads": p.heads, "kv_heads": p.kv_heads, "head_dim": p.head_dim, "dtype": p.dtype, **shape}
    return work(w.variant.name, w.plan.pipeline, tile=(w.plan.tile.q, w.plan.tile.kv), stages=w.plan.stages, **sizes)


MENUS = [
    (pipeline, spec, dtype)
    for pipeline in ("hopper", "ampere")
    for spec in ("full", "causal", "softcap")
    for dtype in ("bfloat16", "float16")
]


@pytest.mark.sampled("hopper-causal-float16-0", "ampere-causal-bfloat16-0")
@pytest.mark.slow
@pytest.mark.parametrize("turn", range(4))
@pytest.mark.parametrize(("pipeline", "spec", "dtype"), MENUS)
def test_every_kernel_of_a_menu_gives_the_same_bits(pipeline, spec, dtype, turn):
    w = peaked(work(spec, pipeline, dtype=dtype, head_dim=128 if spec == "softcap" else 64, **TILES[pipeline], **SHAPE))
    plans = forms(w)
    assert len(plans) > 1
    first = bits(w, plans[0])
    for plan in plans[1 + turn :: 4]:
        assert differing(first, bits(w, plan)) == 0, plan.tile


@pytest.mark.sampled("1-ampere", "70-hopper")
@pytest.mark.slow
@pytest.mark.parametrize("pipeline", ["hopper", "ampere"])
@pytest.mark.parametrize("q_len", [1, 70])
def test_a_chunk_gives_the_bits_of_the_whole(pipeline, q_len):
    """The last queries alone: decode, and a chunk of a prefill."""
    w = peaked(work("causal_bottom_right", pipeline, **TILES[pipeline], **SHAPE))
    chunk = part(w, q_len=q_len, kv_len=SHAPE["kv_len"])
    q, k, v = w.qkv
    whole, found = bits(w, w.plan), bits(dataclasses.replace(chunk, qkv=(q[:, :, -q_len:], k, v)), w.plan)
    assert differing(tuple(x[:, :, -q_len:] for x in whole), found) == 0


@pytest.mark.slow
@pytest.mark.parametrize("pipeline", ["hopper", "ampere"])
def test_other_rows_and_later_keys_leave_no_trace(pipeline):
    """A causal prefill of 150 tokens, and one of 260 in which each other query is another, in a batch of two."""
    w = peaked(work("causal", pipeline, q_len=150, kv_len=150, heads=2, kv_heads=1, **TILES[pipeline]))
    longer = peaked(part(w, batch=2, q_len=260, kv_len=260))
    q, k, v = (x.clone() for x in longer.qkv)
    q[1, :, :150:2], k[1, :, :150], v[1, :, :150] = w.qkv[0][0, :, ::2], w.qkv[1][0], w.qkv[2][0]
    alone, found = bits(w, w.plan), bits(dataclasses.replace(longer, qkv=(q, k, v)), w.plan)
    assert differing(tuple(x[0, :, ::2] for x in alone), tuple(x[1, :, :150:2] for x in found)) == 0


#: What a row's bits hang on; without it rows that others stand beside differ.
OWN_MAXIMUM = replace(
    "ex2(fmaf(highest[r], scale, -row_max[r])) > limit[r];",
    "__any_sync(~0u, ex2(fmaf(highest[r], scale, -row_max[r])) > limit[r]);",
)


@pytest.mark.slow
def test_a_maximum_that_rows_share_shows_in_the_bits():
    """The last queries of a chunk stand beside others than those of the whole."""
    w = peaked(work("causal_bottom_right", "hopper", **TILES["hopper"], **LONG))
    q, k, v = w.qkv
    found = []
    for q_len in (LONG["q_len"], 70):
        chunk = dataclasses.replace(part(w, q_len=q_len, kv_len=LONG["kv_len"]), qkv=(q[:, :, -q_len:], k, v))
        result = chunk.run(OWN_MAXIMUM)
        found.append((result.o[:, :, -70:].view(np.int32), result.lse[:, :, -70:].view(np.int32)))
    assert differing(*found) > 0


#: How O += P V takes the slices of a tile of keys.  The interpreter adds too exactly to show their order in bits.
SLICES = {
    "hopper": "for (int n = 0; n < TILE_KV; n += 16) wgmma_pv(",
    "ampere": "for (int n = 0; n < TILE_KV / 16; n++) {",
}


@pytest.mark.parametrize(("pipeline", "spec"), [(p, s) for p in SLICES for s in ("full", "causal", "softcap")])
def test_slices_of_keys_are_added_in_one_order(pipeline, spec):
    for plan in forms(work(spec, pipeline, **TILES[pipeline])):
        assert SLICES[pipeline] in emit(plan)


@pytest.mark.slow
def test_tiles_of_other_keys_give_other_bits():
    """Why the kernels of a menu share their tile of keys."""
    w = peaked(work("full", "ampere", tile=(64, 64), **SHAPE))
    other = work("full", "ampere", tile=(64, 32), **SHAPE)
    assert differing(bits(w, w.plan), bits(w, other.plan)) > 0


@pytest.mark.sampled("hopper-float16")
@pytest.mark.slow
@pytest.mark.parametrize(("pipeline", "dtype"), [("hopper", "bfloat16"), ("hopper", "float16"), ("ampere", "bfloat16")])
def test_a_key_that_outweighs_its_row_is_exact(pipeline, dtype):
    """The maximum follows it; where that of the first tile stays, its P is rounded and the sum is not."""
    w = work("full", pipeline, dtype=dtype, **TILES[pipeline], **SHAPE)
    q, k, v = (torch.zeros_like(x, dtype=torch.float64) for x in w.qkv)
    q[..., 0] = torch.linspace(7.2, 8.8, q.shape[2])
    k[..., 0], k[:, :, 33, 0], k[:, :, -1, 0] = -60, 9, 0
    w = dataclasses.replace(w, qkv=tuple(x.to(y.dtype) for x, y in zip((q, k, v), w.qkv, strict=True))[:2] + w.qkv[2:])
    ref, _ = reference(w.variant, w.case, *w.qkv, scale=w.scale)

    def rms(edit):
        return (torch.from_numpy(w.run(edit).o).double() - ref).square().mean().sqrt()

    assert rms(None) < 0.8 * rms(LAGGING[pipeline])
