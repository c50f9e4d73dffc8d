"""What a mask reads by a query or a key alone is read while products run, by one lane for each key: on an emulated
Hopper, against masks written out."""

import pytest
import torch
from emulated_gpu import install

import flashgen
from flashgen.codegen import emit
from flashgen.ops.attention import attention
from flashgen.planning import planner
from flashgen.planning.members import MaskAsBits, MaskByElement, MaskByLookups, MaskFromBits
from flashgen.runtime import nvrtc

DIM = 64


def plain(x):
    return x.as_subclass(torch.Tensor)


def ids(n):
    return torch.tensor([0, 0, 5, 5, 5, 2, 2, 2, 9, 9]).repeat_interleave(1 + n // 10)[:n].repeat(2, 1).int()


def flags(n):
    return (torch.arange(n) % 7 == 3).repeat(2, 1)


def places(n):
    return torch.arange(n).roll(n // 3)


MASKS = {
    "documents": ((ids,), lambda doc: lambda b, h, q, k: doc[b, q] == doc[b, k]),
    "documents of one batch, causal": ((ids,), lambda doc: lambda b, h, q, k: (doc[0, q] == doc[0, k]) & (k <= q)),
    "flags": ((flags,), lambda flag: lambda b, h, q, k: (abs(q - k) <= 20) | flag[b, q] | flag[b, k]),
    "places of 64 bits": ((places,), lambda at: lambda b, h, q, k: (at[k] <= q) & (q - at[k] < 50)),
    "keys alone": ((flags, ids), lambda flag, doc: lambda b, h, q, k: flag[b, k] | (doc[b, k] == 2)),
}


@pytest.mark.sampled("keys alone-150-130", "documents-129-200")
@pytest.mark.slow
@pytest.mark.parametrize("name, q_len, kv_len", [(name, 150, 130) for name in MASKS] + [("documents", 129, 200)])
def test_what_a_key_selects_reaches_every_lane(monkeypatch, name, q_len, kv_len):
    gpu = install(monkeypatch, (9, 0))
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(2, 1, n, DIM, generator=generator).to(torch.bfloat16) for n in (q_len, kv_len, kv_len)]
    makes, of = MASKS[name]
    captured = [make(max(q_len, kv_len)) for make in makes]
    found = attention(*map(gpu.put, drawn), flashgen.from_flex(of(*map(gpu.put, captured))))
    plan = next(plan for plan, *_ in gpu.launches)
    assert isinstance(plan.specialized.mask, MaskByLookups) and plan.looks_up
    b, h, q, k = (torch.arange(n) for n in (2, 1, q_len, kv_len))
    keep = of(*captured)(b[:, None, None, None], h[:, None, None], q[:, None], k)
    x, y, z = (t.double() for t in drawn)
    s = (x @ y.mT * DIM**-0.5).masked_fill(~keep, -torch.inf)
    wanted = torch.where(keep.any(-1, keepdim=True), s.softmax(-1), 0.0) @ z
    torch.testing.assert_close(plain(found).double(), wanted, rtol=0.03, atol=0.03)


def chosen(mask, **options):
    variant = flashgen.from_flex(mask).bare
    return planner.menu(variant, "sm_90a", "bfloat16", 128, **options).plans[0]


@pytest.mark.slow
def test_masks_that_read_by_a_query_or_a_key_look_up():
    doc, pairs = torch.zeros(2, 64, dtype=torch.int32), torch.zeros(64, 64, dtype=torch.bool)
    wide = torch.zeros(64, 5, dtype=torch.int64)
    looking = chosen(lambda b, h, q, k: doc[b, q] == doc[b, k])
    assert isinstance(looking.specialized.mask, MaskByLookups)
    assert isinstance(chosen(lambda b, h, q, k: k <= q).specialized.mask, MaskByElement), "it reads nothing"
    assert isinstance(chosen(lambda b, h, q, k: pairs[q, k]).specialized.mask, MaskFromBits), "both select"
    many = chosen(lambda b, h, q, k: (wide[q] == wide[k]).all(-1))
    assert isinstance(many.specialized.mask, MaskAsBits), "it reads more than registers hold"
    dropping = chosen(lambda b, h, q, k: doc[b, q] == doc[b, k], dropout=True)
    for plan in (looking, dropping):
        text = emit(plan)
        assert nvrtc.compile(text, plan.arch).resources.spills == 0
        assert text.count("look_up(") == 4 and "__shfl_sync(~0u, doc_k[place / 32]" in text
