"""What a mask reads by a query or a key alone is read while products run, by one lane for each key: on an emulated
Hopper, against masks written out."""

import pytest
import torch
from emulated_gpu import install

import flashgen
from flashgen.codegen import emit
from flashgen.ops.attention import attention
from flashgen.planning import planner
from flashgen.planning.members import MaskAsBits, MaskByElement, MaskByLookups, MaskFromBits, MaskInWords
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


#: Masks whose elements are each asked for, given what lanes pass on: of conditions, words.
BY_ELEMENT = {
    "documents": ((ids,), lambda doc: lambda b, h, q, k: doc[b, q] == doc[b, k]),
    "documents of one batch, causal": ((ids,), lambda doc: lambda b, h, q, k: (doc[0, q] == doc[0, k]) & (k <= q)),
    "places of 64 bits": ((places,), lambda at: lambda b, h, q, k: (at[k] <= q) & (q - at[k] < 50)),
    "documents and flags": (
        (ids, flags),
        lambda doc, flag: lambda b, h, q, k: (doc[b, q] == doc[b, k]) & ~flag[b, k] | flag[b, q],
    ),
}


def twice(x, y, z):
    """A condition of which x is a part two times."""
    return (x & y) | (~x & z)


#: Masks that are asked for 32 keys at a time.
IN_WORDS = {
    "flags": ((flags,), lambda flag: lambda b, h, q, k: (abs(q - k) <= 20) | flag[b, q] | flag[b, k]),
    "keys alone": ((flags, ids), lambda flag, doc: lambda b, h, q, k: flag[b, k] | (doc[b, k] == 2)),
    "padding, causal": ((flags,), lambda flag: lambda b, h, q, k: ~flag[b, k] & (k <= q + 9)),
    "outside of a window": ((flags,), lambda flag: lambda b, h, q, k: (abs(k - q) > 33) & (flag[b, k] | (q != k - 50))),
    "flags in several words": (
        (flags, ids),
        lambda flag, doc: lambda b, h, q, k: twice(twice(k <= q, flag[b, k], doc[b, q] == 2), q - k < 40, flag[b, q]),
    ),
    "differing flags": (
        (flags, ids),
        lambda flag, doc: lambda b, h, q, k: flag[b, q] ^ (doc[b, k] < 5) & (3 * q < 200),
    ),
}

MASKS = BY_ELEMENT | IN_WORDS


@pytest.mark.sampled("flags in several words-150-130", "documents-129-200")
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
    assert isinstance(plan.specialized.mask, MaskInWords if name in IN_WORDS else MaskByLookups) and plan.looks_up
    b, h, q, k = (torch.arange(n) for n in (2, 1, q_len, kv_len))
    keep = of(*captured)(b[:, None, None, None], h[:, None, None], q[:, None], k)
    x, y, z = (t.double() for t in drawn)
    s = (x @ y.mT * DIM**-0.5).masked_fill(~keep, -torch.inf)
    wanted = torch.where(keep.any(-1, keepdim=True), s.softmax(-1), 0.0) @ z
    torch.testing.assert_close(plain(found).double(), wanted, rtol=0.03, atol=0.03)


def chosen(mask, **options):
    variant = flashgen.from_flex(mask).bare
    return planner.menu(variant, "sm_90a", "bfloat16", 128, **options).plans[0]


@pytest.mark.sampled(dropout=(False,))
@pytest.mark.slow
@pytest.mark.parametrize("dropout", [False, True])
def test_masks_that_read_by_a_query_or_a_key_look_up(dropout):
    doc, pairs = torch.zeros(2, 64, dtype=torch.int32), torch.zeros(64, 64, dtype=torch.bool)
    wide = torch.zeros(64, 5, dtype=torch.int64)
    looking = chosen(lambda b, h, q, k: doc[b, q] == doc[b, k], dropout=dropout)
    assert isinstance(looking.specialized.mask, MaskByLookups)
    assert isinstance(chosen(lambda b, h, q, k: k <= q).specialized.mask, MaskByElement), "it reads nothing"
    assert isinstance(chosen(lambda b, h, q, k: pairs[q, k]).specialized.mask, MaskFromBits), "both select"
    many = chosen(lambda b, h, q, k: (wide[q] == wide[k]).all(-1))
    assert isinstance(many.specialized.mask, MaskAsBits), "it reads more than registers hold"
    text = emit(looking)
    assert nvrtc.compile(text, looking.arch).resources.spills == 0
    assert text.count("look_up(") == 4 and "__shfl_sync(~0u, doc_k[place / 32]" in text


def test_a_mask_without_flags_of_keys_or_with_more_than_words_say_is_asked_for_elements():
    flag, place = torch.zeros(64, dtype=torch.bool), torch.zeros(64, dtype=torch.int32)
    others = {
        "it reads no key": lambda b, h, q, k: (q - k < 9) & flag[q],
        "of both": lambda b, h, q, k: flag[k] & (place[q] <= place[k]),
        "a product": lambda b, h, q, k: flag[k] | (2 * k <= q),
        "of the head too": lambda b, h, q, k: flag[(k + h) % 64] | (k <= q),
        "whatever an element is": lambda b, h, q, k: flag[k] | (k <= place[q]),
    }
    for why, mask in others.items():
        assert not isinstance(chosen(mask).specialized.mask, MaskInWords), why


@pytest.mark.sampled(dropout=(True,))
@pytest.mark.parametrize("dropout", [False, True])
def test_no_element_of_a_mask_in_words_is_passed_on(dropout):
    flag = torch.zeros(64, dtype=torch.bool)
    plan = chosen(lambda b, h, q, k: (abs(q - k) <= 128) | flag[q] | flag[k], dropout=dropout)
    text = emit(plan)
    assert (
        isinstance(plan.specialized.mask, MaskInWords) and "keep(" not in text and "__shfl_sync(~0u, flag" not in text
    )
    assert "return ((ones_from(q - 128 - k) & ones_below(q + 129 - k)) | ones_if(at.flag_q)) | at.flag_k;" in text
    assert nvrtc.compile(text, plan.arch).resources.spills == 0


def test_a_word_that_others_are_made_of_is_written_once():
    flag = torch.zeros(64, dtype=torch.bool)
    text = emit(chosen(lambda b, h, q, k: twice(twice(k <= q, flag[k], q < 9), q - k < 40, flag[q])))
    body = text.partition("DEVICE u32 visible_keys(")[2].partition("\n}")[0]
    assert "const u32 seen1 = (ones_below(q + 1 - k) & at.flag_k) | (~ones_below(q + 1 - k) & ones_if(q < 9));" in body
    assert "return (seen1 & ones_from(q - 39 - k)) | (~seen1 & ones_if(at.flag_q));" in body


def wanted_of(mask, b, start, x, y, z):
    """o of one head in float64, of queries from a position on."""
    q, k = start + torch.arange(len(x)), torch.arange(len(y))
    keep = mask(torch.tensor(b), torch.tensor(0), q[:, None], k[None, :])
    s = (x.double() @ y.double().mT * DIM**-0.5).masked_fill(~keep, -torch.inf)
    return torch.where(keep.any(-1, keepdim=True), s.softmax(-1), 0.0) @ z.double()


def window_and_flags(flag):
    return lambda b, h, q, k: (abs(q - k) <= 20) & ~flag[b, k] | flag[b, q]


def window_without_flags(flag):  # of packed heads nothing is told of queries
    return lambda b, h, q, k: (q - k <= 20) & ~flag[b, k]


@pytest.mark.sampled("joined")
@pytest.mark.slow
@pytest.mark.parametrize("how", ["padded", "joined", "packed", "8 bits"])
def test_words_are_right_wherever_rows_lie(monkeypatch, how):
    gpu = install(monkeypatch, (9, 0))
    generator = torch.Generator().manual_seed(1)
    flag, of = flags(170), window_without_flags if how == "packed" else window_and_flags
    variant, lengths, start = flashgen.from_flex(of(gpu.put(flag))), [(70, 90), (33, 150)], 0
    q, k, v = (torch.randn(2, 1, n, DIM, generator=generator).to(torch.bfloat16) for n in (70, 150, 150))
    rows = [(b, q[b, 0, :q_len], k[b, 0, :kv_len], v[b, 0, :kv_len]) for b, (q_len, kv_len) in enumerate(lengths)]
    of_q, of_k = (torch.tensor(n, dtype=torch.int32) for n in zip(*lengths, strict=True))
    if how == "padded":
        o = plain(attention(*map(gpu.put, (q, k, v)), variant, q_lengths=gpu.put(of_q), kv_lengths=gpu.put(of_k)))
        found = [o[b, 0, :q_len] for b, (q_len, _) in enumerate(lengths)]
    elif how == "joined":
        joined = [gpu.put(torch.cat([one[i] for one in rows])[:, None]) for i in (1, 2, 3)]
        ends = [gpu.put(torch.nn.functional.pad(n.cumsum(0), (1, 0)).int()) for n in (of_q, of_k)]
        o = flashgen.attention_varlen(*joined, variant, *ends, max_seqlen_q=70, max_seqlen_k=150)
        found = plain(o)[:, 0].split(of_q.tolist())
    elif how == "packed":
        x, start = torch.randn(2, 4, 3, DIM, generator=generator).to(torch.bfloat16), 60
        o = plain(attention(*map(gpu.put, (x, k, v)), variant, q_offset=start, kv_splits=1))
        rows = [(b, x[b, h], k[b, 0], v[b, 0]) for b in range(2) for h in range(4)]
        found = o.flatten(0, 1)
    else:
        narrow = [x.to(torch.float8_e4m3fn) for x in (q, k, v)]
        o = plain(attention(*map(gpu.put, narrow), variant, **{f"{n}_descale": gpu.put(torch.ones(1)) for n in "qkv"}))
        rows = [(b, *(x[b, 0].float() for x in narrow)) for b in range(2)]
        found = o.squeeze(1)
    plan = next(plan for plan, *_ in gpu.launches if plan.specialized is not None)
    assert isinstance(plan.specialized.mask, MaskInWords) and plan.packed == (how == "packed")
    rough = 0.15 if how == "8 bits" else 0.03
    for (b, *xyz), o in zip(rows, found, strict=True):
        torch.testing.assert_close(o.double(), wanted_of(of(flag), b, start, *xyz), rtol=rough, atol=rough)
