"""quantize() of sequences that lie behind each other, are padded or nested: each is what it is alone, whatever lies
beside it; the emitted kernels beside the CPU's bits, graphs, and what is refused."""

import numpy as np
import pytest
import test_quantize
import torch
from test_quantize import bits, both, drawn, interpreted

import flashgen
from flashgen.codegen.quantize import emit, params_bytes
from flashgen.errors import LaunchError
from flashgen.interpreter.errors import Trap
from flashgen.lang.load import load_spec
from flashgen.ops import own_rows
from flashgen.ops import quantize_eager as ops
from flashgen.ops.own_rows import Own
from flashgen.ops.rope import Rope
from flashgen.planning import quantize as planning
from flashgen.planning.layout import Padded, Varlen
from flashgen.planning.quantize import Angles
from flashgen.runtime import nvrtc

CAUSAL = load_spec("causal")

#: A sequence has no query, one no key; rows lie before the first and behind the last.
QUERIES, KEYS, BEFORE, BEHIND = (70, 0, 261, 3), (70, 33, 300, 0), 5, 9


def starts_of(lengths, before=BEFORE):
    return torch.tensor([before, *(before + np.cumsum(lengths))], dtype=torch.int32)


def rows_of(lengths, heads, head_dim=64, seed=0):
    """[rows, heads, head_dim] whose rows of no sequence are no numbers."""
    x = drawn(BEFORE + sum(lengths) + BEHIND, heads, head_dim, seed=seed)
    x[:BEFORE], x[BEFORE + sum(lengths) :] = torch.nan, torch.inf
    return x


def joined(**options):
    """q, k and v, and the arguments of a call on them; one sequence's keys and values hold what is no number."""
    q, k, v = rows_of(QUERIES, 4), rows_of(KEYS, 2, seed=1), rows_of(KEYS, 2, seed=2)
    k[BEFORE + 75, 1, 3], v[BEFORE + 76, 0, 3] = torch.nan, torch.inf
    given = {"cu_seqlens_q": starts_of(QUERIES), "cu_seqlens_k": starts_of(KEYS)}
    return (q, k, v), {**given, "max_seqlen_q": max(QUERIES), "max_seqlen_k": max(KEYS), **options}


def spans(starts):
    return [slice(*pair) for pair in zip(starts.tolist(), starts.tolist()[1:], strict=False)]


def alone(x, span):
    """The rows of one sequence as [1, heads, rows, head_dim]."""
    return x[span].transpose(0, 1)[None]


def angles(positions, head_dim, sequences=None):
    at = torch.arange(positions, dtype=torch.float64)
    at = at if sequences is None else at + 7 * torch.arange(sequences, dtype=torch.float64)[:, None]
    turns = at[..., None] * 10000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    return turns.cos().float(), turns.sin().float()


LEAST = np.float32(2.0**-100 / 448)


# -- each is what it is alone


@pytest.mark.parametrize("block", [None, 128, 256])
@pytest.mark.parametrize(
    "options", [{}, {"hadamard": False}, {"smooth_k": True}, {"angles": None}, {"angles": 4}], ids=str
)
def test_each_sequence_has_the_bits_that_it_has_alone(block, options):
    """Codes, scales and means; with angles, which are of positions, or of each sequence's own; bounds may be loose."""
    options = {"block": block, **options}
    cos_sin = None
    if "angles" in options:
        cos_sin = angles(320, 64, options.pop("angles"))
        options["smooth_k"] = True
    (q, k, v), given = joined(**options)
    given |= {"max_seqlen_q": 300} if cos_sin is None else {"cos": cos_sin[0], "sin": cos_sin[1]}
    found = flashgen.quantize(q, k, v, **given)
    for name, x, codes, longest in (
        ("q", q, found.q, given["max_seqlen_q"]),
        ("k", k, found.k, 300),
        ("v", v, found.v, 300),
    ):
        blocks = () if block is None else (-(-longest // block),)
        assert found.descales[f"{name}_descale"].shape == (4, x.shape[1], *blocks)
        assert (codes.shape, codes.stride()) == (x.shape, x.stride())
        assert not bits(codes[:BEFORE]).any() and not bits(codes[-BEHIND:]).any()
    pairs = zip(spans(given["cu_seqlens_q"]), spans(given["cu_seqlens_k"]), strict=True)
    for b, (of_q, of_k) in enumerate(pairs):
        own = dict(options)
        if cos_sin is not None:
            lengths = [span.stop - span.start for span in (of_q, of_k)]
            own |= {
                name: tuple((x if x.dim() == 2 else x[b])[:n] for n in lengths)
                for name, x in zip(("cos", "sin"), cos_sin, strict=True)
            }
        no_keys = of_k.start == of_k.stop
        if no_keys and options.get("smooth_k"):
            own["smooth_k"] = torch.zeros(1, 2, 64)
            assert not found.k_mean[b].any()
        one = flashgen.quantize(alone(q, of_q), alone(k, of_k), alone(v, of_k), **own)
        for name, span in (("q", of_q), ("k", of_k), ("v", of_k)):
            assert torch.equal(bits(alone(getattr(found, name), span)), bits(getattr(one, name)))
            mine, its = found.descales[f"{name}_descale"][b], one.descales[f"{name}_descale"][0]
            if block is None:
                assert torch.equal(mine, its)
            else:
                assert torch.equal(mine[:, : its.shape[1]], its) and bool(
                    (mine[:, its.shape[1] :] == LEAST.item()).all()
                )
        if options.get("smooth_k") and not no_keys:
            torch.testing.assert_close(found.k_mean[b], one.k_mean[0], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("block", [None, 128])
@pytest.mark.parametrize("smooth_k", [False, True])
def test_rows_beyond_lengths_count_for_nothing(block, smooth_k):
    q, k, v = drawn(3, 4, 200, 64), drawn(3, 2, 300, 64, seed=1), drawn(3, 2, 300, 64, seed=2)
    q_lengths, kv_lengths = (torch.tensor(of, dtype=torch.int32) for of in ((200, 0, 130), (140, 300, 0)))
    for x, lengths in ((q, q_lengths), (k, kv_lengths), (v, kv_lengths)):
        for b, n in enumerate(lengths.tolist()):
            x[b, :, n:] = torch.nan
    cos, sin = angles(300, 64)
    options = {"block": block, "smooth_k": smooth_k, "cos": (cos[:200], cos), "sin": (sin[:200], sin)}
    found = flashgen.quantize(q, k, v, q_lengths=q_lengths, kv_lengths=kv_lengths, **options)
    for name, x, lengths in (("q", q, q_lengths), ("k", k, kv_lengths), ("v", v, kv_lengths)):
        codes, descale = getattr(found, name), found.descales[f"{name}_descale"]
        assert codes.shape == x.shape and bool((descale > 0).all())
        for b, n in enumerate(lengths.tolist()):
            if n == 0:
                assert bool((descale[b] == LEAST.item()).all()) and not bits(codes[b]).any()
                continue
            pair = {"cos": (cos[:n], cos[:n]), "sin": (sin[:n], sin[:n])}
            given = {"smooth_k": found.k_mean[b : b + 1]} if smooth_k and name == "k" else {"smooth_k": False}
            of = [x[b : b + 1, :, :n]] * 2
            one = flashgen.quantize(*of, of[0], **{**options, **pair, **given})
            assert torch.equal(bits(codes[b : b + 1, :, :n]), bits(getattr(one, name)))
            assert not bits(codes[b, :, n:]).any()
            its = one.descales[f"{name}_descale"][0]
            assert torch.equal(descale[b] if block is None else descale[b, :, : its.shape[1]], its)
    if smooth_k:
        one = flashgen.quantize(
            q[:1], k[:1, :, :140], v[:1, :, :140], smooth_k=True, cos=(cos[:200], cos[:140]), sin=(sin[:200], sin[:140])
        )
        assert torch.equal(found.k_mean[:1], one.k_mean) and not found.k_mean[2].any()
    whole = drawn(3, 4, 200, 64)
    only_keys = flashgen.quantize(whole, k, v, kv_lengths=kv_lengths, block=block)
    assert torch.equal(only_keys.q_descale, flashgen.quantize(whole, whole, whole, block=block).q_descale)


def test_nested_tensors():
    lengths = (70, 0, 261)
    starts = starts_of(lengths, before=0)
    rows = [drawn(331, heads, 64, seed=heads) for heads in (4, 2, 1)]
    rows[2] = drawn(331, 2, 64, seed=9)
    offsets = starts.long()
    q, k, v = (torch.nested.nested_tensor_from_jagged(x, offsets).transpose(1, 2) for x in rows)
    given = {"block": 128, "smooth_k": True}
    found = flashgen.quantize(q, k, v, **given)
    flat = flashgen.quantize(*rows, cu_seqlens_q=starts, max_seqlen_q=331, **given)
    assert found.q.is_nested and torch.equal(bits(found.k.values().transpose(0, 1)), bits(flat.k))
    assert torch.equal(found.v_descale, flat.v_descale) and found.v_descale.shape == (3, 2, 3)
    o, lse = flashgen.attention(found.q, found.k, found.v, CAUSAL, **found.descales, return_lse=True)
    of_rows = flashgen.attention_varlen(
        flat.q, flat.k, flat.v, CAUSAL, starts, max_seqlen_q=331, return_lse=True, **flat.descales
    )
    assert torch.equal(o.values().transpose(0, 1), of_rows[0])
    corrected = found.corrected_lse(lse, q)
    right = flat.corrected_lse(of_rows[1], rows[0])
    assert corrected.is_nested and torch.equal(corrected.transpose(1, 2).values().T, right)
    with pytest.raises(LaunchError, match="max_seqlen_q was given beside nested tensors"):
        flashgen.quantize(q, k, v, max_seqlen_q=3)


# -- attention of them


@pytest.mark.parametrize("block", [None, 128])
def test_attention_takes_what_quantize_makes(block):
    """Against attention of the values, and lse with the mean that keys lost."""
    (q, k, v), given = joined(block=block, smooth_k=True)
    k, v = k.nan_to_num(0), v.nan_to_num(0, 0)
    k += 4 * drawn(1, 2, 64, seed=7)
    found = flashgen.quantize(q, k, v, **given)
    told = {name: given[name] for name in ("max_seqlen_q", "max_seqlen_k")}
    starts = given["cu_seqlens_q"], given["cu_seqlens_k"]
    o, lse = flashgen.attention_varlen(
        found.q, found.k, found.v, CAUSAL, *starts, **told, **found.descales, return_lse=True, accuracy="exact"
    )
    wide = [x.nan_to_num(0, 0).float() for x in (q, k, v)]
    right, right_lse = flashgen.attention_varlen(*wide, CAUSAL, *starts, **told, return_lse=True)
    assert float((o - right).norm() / right.norm()) < 0.06
    inside = slice(BEFORE, -BEHIND)
    corrected, finite = found.corrected_lse(lse, q)[:, inside], right_lse[:, inside].isfinite()
    off, uncorrected = (float((x - right_lse[:, inside])[finite].abs().mean()) for x in (corrected, lse[:, inside]))
    assert off < 0.1 < uncorrected and bool(finite.any()) and not bool(finite.all())


def test_attention_of_padded_sequences():
    q, k, v = drawn(2, 4, 40, 64), drawn(2, 2, 200, 64, seed=1), drawn(2, 2, 200, 64, seed=2)
    k = k + 4 * drawn(1, 2, 1, 64, seed=7)
    lengths = {"q_lengths": torch.tensor([40, 7]), "kv_lengths": torch.tensor([130, 200])}
    lengths = {name: x.int() for name, x in lengths.items()}
    k[0, :, 130:], v[0, :, 130:], q[1, :, 7:] = torch.nan, torch.inf, torch.nan
    found = flashgen.quantize(q, k, v, block=128, smooth_k=True, **lengths)
    given = {**lengths, "q_offset": "end", "return_lse": True}
    o, lse = flashgen.attention(found.q, found.k, found.v, CAUSAL, **found.descales, **given, accuracy="exact")
    right, right_lse = flashgen.attention(q.float(), k.float(), v.float(), CAUSAL, **given)
    assert float((o - right).norm() / right.norm()) < 0.06
    corrected = found.corrected_lse(lse, q)
    assert torch.equal(corrected.isinf(), right_lse.isinf()) and bool((corrected[1, :, 7:] == -torch.inf).all())
    assert float((corrected - right_lse).nan_to_num(0).abs().mean()) < 0.1


@pytest.mark.parametrize("rope", [False, True])
@pytest.mark.parametrize("layout", ["joined", "padded"])
def test_means_that_nobody_waits_for(layout, rope, monkeypatch):
    """What a GPU does, beside the CPU's: NaN of a sequence stays there, rows of none join nothing."""
    monkeypatch.setattr(own_rows, "WIDE_ELEMENTS", 100 * 2 * 64)  # in parts
    cos, sin = angles(300, 64, 4) if layout == "joined" else angles(450, 64)
    turned = Rope(cos=cos if cos.dim() == 3 else cos[None], sin=sin if sin.dim() == 3 else sin[None], interleaved=False)
    turned = turned if rope else None
    if layout == "joined":
        (_, k, _), given = joined()
        k, starts = own_rows.in_heads("k", k), given["cu_seqlens_k"]
        own = Own(True, starts, 4, 300, tuple((0, span.start, span.stop - span.start) for span in spans(starts)))
    else:
        k, lengths = drawn(4, 2, 450, 64), (450, 33, 0, 200)
        for b, n in enumerate(lengths):
            k[b, :, n:] = torch.nan
        own = Own(
            False, torch.tensor(lengths, dtype=torch.int32), 4, 450, tuple((b, 0, n) for b, n in enumerate(lengths))
        )
    right, found = own_rows.mean(k, own, turned), own_rows.mean(k, own._replace(spans=None), turned)
    assert right.isnan().sum() == (0 if layout == "padded" else 1 + rope)
    torch.testing.assert_close(found, right, rtol=1e-6, atol=1e-7, equal_nan=True)


# -- the emitted kernels


def own_of(lengths, *, loose=0, starts=None):
    starts = starts_of(lengths) if starts is None else starts
    spans = tuple((0, first, n) for first, n in zip(starts.tolist(), lengths, strict=False))
    return Own(True, starts, len(lengths), max(lengths) + loose, spans)


def group_of(block, *, head_dim=16, loose=0, centred=True, rope=True):
    """Rows of q, which may turn, of keys that lose a mean, and of values."""
    signs = ops._signs(head_dim, 5)
    q, k, v = (
        own_rows.in_heads("", rows_of(lengths, heads, head_dim, seed))
        for lengths, heads, seed in ((QUERIES, 3, 0), (KEYS, 1, 1), (KEYS, 1, 2))
    )
    v[0, 0, BEFORE + 75, 3], q[0, 1, BEFORE + 71, 2] = torch.nan, torch.inf
    of_q, of_k = own_of(QUERIES), own_of(KEYS, loose=loose)
    cos, sin = angles(270, head_dim, 4)
    turned = Rope(cos=cos, sin=sin, interleaved=False) if rope else None
    mean = drawn(4, 1, head_dim, seed=4, dtype=torch.float32) if centred else None
    return [
        ops.Rows.of(q, block, signs=signs, rope=turned, own=of_q),
        ops.Rows.of(k, block, signs=signs, mean=mean, own=of_k),
        ops.Rows.of(v, block, own=of_k),
    ]


def same_rows(group, found, wanted):
    """Descales, and codes of sequences; other codes nobody writes."""
    for rows, (codes, descales), (right, right_descales) in zip(group, found, wanted, strict=True):
        np.testing.assert_array_equal(descales, right_descales)
        written = np.zeros(codes.shape, bool)
        for batch, first, n in rows.own.spans:
            written[batch, :, first : first + n] = True
        np.testing.assert_array_equal(codes[written], right[written])
        assert (codes[~written] == 0xFF).all()


@pytest.mark.slow
@pytest.mark.sampled("128-sm_90a-3")
@pytest.mark.parametrize(
    ("block", "arch", "blocks"),
    [(128, "sm_90a", 3), (256, "sm_80", 2), (None, "sm_90a", 3), (256, "sm_90a", 40)],
)
def test_kernels_of_sequences_behind_each_other(block, arch, blocks):
    """Of other lengths, a loose bound, angles and means of each sequence, and rows of none, which are no numbers."""
    group = group_of(block, loose=500)
    found, wanted, _ = both(group, block, arch, blocks)
    same_rows(group, found, wanted)


@pytest.mark.slow
@pytest.mark.sampled("None")
@pytest.mark.parametrize("block", [128, None])
def test_kernels_of_padded_sequences(block):
    lengths = torch.tensor([261, 0, 130], dtype=torch.int32)
    x, v = drawn(3, 2, 261, 16), drawn(3, 1, 150, 16, seed=1)
    for b, n in enumerate(lengths.tolist()):
        x[b, :, n:] = torch.nan
    spans = tuple((b, 0, n) for b, n in enumerate(lengths.tolist()))
    mean = drawn(3, 2, 16, seed=4, dtype=torch.float32)
    cos, sin = angles(261, 16)
    rope = Rope(cos=cos[None], sin=sin[None], interleaved=False)
    group = [
        ops.Rows.of(x, block, signs=ops._signs(16, 5), mean=mean, rope=rope, own=Own(False, lengths, 3, 261, spans)),
        ops.Rows.of(v, block, own=Own(False, None, 3, 150, tuple((b, 0, 150) for b in range(3)))),
    ]
    found, wanted, _ = both(group, block)
    same_rows(group, found, wanted)


@pytest.mark.slow
def test_groups_of_heads_whose_sequences_share_scales(monkeypatch):
    """Where L2 holds three of four heads: each two have their own turn over all sequences."""
    monkeypatch.setattr(test_quantize.runtime, "GROUP_BYTES", 3 * 300 * 16 * 2)
    x = own_rows.in_heads("", rows_of(KEYS, 4, 16))
    rows = ops.Rows.of(x, None, own=own_of(KEYS))
    ((plan, group),) = ops.planned([rows], None)
    assert rows.sizes.group(plan) == 2
    found, wanted, _ = both(group, None)
    same_rows(group, found, wanted)


@pytest.mark.sampled("starts1-128")
@pytest.mark.parametrize(
    ("starts", "block"),
    [
        ((0, 300, 100, 400), None),
        pytest.param((400, 0, 50, 2000), 128, marks=pytest.mark.slow),
        pytest.param((-7, -3, 90, 60), None, marks=pytest.mark.slow),
    ],
)
def test_what_is_no_sum_of_lengths_harms_nobody(block, starts):
    """Nothing outside of tensors is read or written, and no thread block waits for ever."""
    x = own_rows.in_heads("", drawn(400, 2, 16))
    own = Own(True, torch.tensor(starts, dtype=torch.int32), 3, 256, None)
    ((plan, group),) = ops.planned([ops.Rows.of(x, block, own=own)], block)
    ((codes, _),), _ = interpreted(group, plan)
    assert (codes[0, :, 390:] == 0xFF).all() and not (codes == 0xFF).all()


MUTATIONS = {
    "the first sequence's angles": ("at.batch * t.cos_batch", "0 * t.cos_batch"),
    "rows of the next sequence count": ("there = row + i < at.length;", "there = true;"),
    "rows of the next sequence are written": ("(of_warp, i) && row + i < at.length)", "(of_warp, i))"),
    "all begin with the tensor": ("at.first = rows.first;", "at.first = 0;"),
    "scales of no rows are left": ("descales[i] = LEAST / LARGEST;", ";"),
    "a sequence without rows is left": ("return at.row == 0 || (", "return ("),
    "a mean is taken off behind the last row": ("row_of(at) < at.length ? -1.f : 0.f", "-1.f"),
}


@pytest.mark.sampled("rows of the next sequence count", "a sequence without rows is left")
@pytest.mark.parametrize(
    "name", [*list(MUTATIONS)[:2], *(pytest.param(name, marks=pytest.mark.slow) for name in list(MUTATIONS)[2:])]
)
def test_a_mutation_is_seen(name, monkeypatch):
    group = group_of(128, loose=200)
    plan = ops.planned(group, 128)[0][0]
    (old, new), text = MUTATIONS[name], emit(plan)
    assert text.count(old) == 1
    monkeypatch.setattr(test_quantize, "emit", lambda plan: text.replace(old, new))
    with pytest.raises((AssertionError, Trap)):
        same_rows(group, *both(group, 128)[:2])


@pytest.mark.sampled("sm_80-128-None-padded", "sm_90a-240-128-varlen")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("head_dim", "block", "layout"),
    [(240, 128, Varlen()), (256, None, Varlen()), (128, None, Padded())],
    ids=["240-128-varlen", "256-None-varlen", "128-None-padded"],
)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_kernels_spill_nothing(arch, head_dim, block, layout):
    plan = planning.plan(
        *(arch, "bfloat16", head_dim),
        block=block,
        rotated=True,
        centred=True,
        angles=Angles(dtype="float32"),
        layout=layout,
    )
    compiled = nvrtc.compile(emit(plan), arch)
    assert compiled.resources.spills == 0 and compiled.performance_losses == ()


@pytest.mark.parametrize("block", [128, None])
def test_what_a_launch_is_told(block):
    """Addresses of the tensors themselves, and a stride of 0 from sequence to sequence where they lie in one batch."""
    group = group_of(block, loose=500)
    ((plan, _),) = ops.planned(group, block)
    told = [ops.told(plan, rows) for rows in group]
    assert [of["starts"] for of in told] == [rows.own.numbers.data_ptr() for rows in group]
    assert {(of["x_batch"], of["codes_batch"]) for of in told} == {(0, 0)}
    rows = BEFORE + sum(KEYS) + BEHIND
    assert [told[1][name] for name in ("sequences", "slots", "rows", "length")] == [4, rows // 128 + 4, rows, 800]
    padded = ops.Rows.of(drawn(2, 1, 20, 16), block, own=Own(False, None, 2, 20, ((0, 0, 20), (1, 0, 20))))
    for of in (group, [padded]):
        ((plan, _),) = ops.planned(of, block)
        assert len(ops.packed(plan, of, [ops.told(plan, rows) for rows in of], 0, 1)) == params_bytes(plan)
    assert ops.told(plan, padded)["lengths"] == 0


def test_kernels_of_one_length_know_nothing_of_it():
    for block in (128, None):
        plan = planning.plan("sm_90a", "bfloat16", 128, block=block, rotated=True, centred=True)
        assert not any(word in emit(plan) for word in ("starts", "lengths", "sequence", "in_sequence", "next_tile"))


# -- graphs


def operands():
    """Arguments of flashgen::quantize: of one length, padded, and behind each other."""
    (q, k, v), given = joined()
    k, v = k.nan_to_num(0), v.nan_to_num(0, 0)
    cos, sin = angles(300, 64)
    none = [None] * 6
    dense = drawn(2, 4, 20, 64), drawn(2, 2, 20, 64), drawn(2, 2, 20, 64)
    lengths = torch.tensor([20, 3], dtype=torch.int32)
    yield (*dense, 128, 3, True, None, *[None] * 4, False, *none)
    yield (*dense, None, None, False, drawn(2, 2, 64).float(), *[None] * 4, False, *none[:4], lengths, lengths)
    bounds = [given[name] for name in own_rows.JOINED]
    yield (q, k, v, 128, 3, True, None, cos, sin, None, None, False, *bounds, None, None)


@pytest.mark.slow
def test_opcheck():
    from flashgen.ops import quantize_library  # noqa: F401 - it defines the op

    for arguments in operands():
        torch.library.opcheck(torch.ops.flashgen.quantize.default, arguments)


@pytest.mark.slow
@pytest.mark.sampled("dense")
@pytest.mark.parametrize("layout", ["dense", "joined"])
def test_graphs_hold_calls(layout):
    options = {"block": 128, "smooth_k": True}
    if layout == "joined":
        (q, k, v), given = joined(**options)
        k, v, given["cos"], given["sin"] = k.nan_to_num(0), v.nan_to_num(0, 0), *angles(300, 64)
    else:
        q, k, v, given = drawn(2, 4, 20, 64), drawn(2, 2, 30, 64), drawn(2, 2, 30, 64), options

    def call(q, k, v, lse):
        x = flashgen.quantize(q, k, v, **given)
        return x.q.view(torch.uint8), x.k.view(torch.uint8), *x.descales.values(), x.k_mean, x.corrected_lse(lse, q)

    lse = torch.zeros(q.shape[:3] if layout == "dense" else q.shape[:2][::-1])
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for mine, right in zip(compiled(q, k, v, lse), call(q, k, v, lse), strict=True):
        torch.testing.assert_close(mine, right, rtol=0, atol=0, equal_nan=True)


# -- what is refused

ROWS = [drawn(100, heads, 64) for heads in (4, 2, 2)]
STARTS = torch.tensor([0, 40, 100], dtype=torch.int32)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "q is no tensor of.*nearest: q.unsqueeze.0., or cu_seqlens_q"),
        ({"cu_seqlens_q": STARTS}, "max_seqlen_q is None: it is a whole number.*nearest: max_seqlen_q=100"),
        ({"cu_seqlens_q": STARTS, "max_seqlen_q": 30}, "sequence 0 of cu_seqlens_q has 40 rows and max_seqlen_q is 30"),
        ({"cu_seqlens_q": STARTS.long(), "max_seqlen_q": 60}, r"cu_seqlens_q is int64: it is an int32 .*nearest: cu_s"),
        ({"cu_seqlens_q": STARTS.to("meta"), "max_seqlen_q": 60}, "cu_seqlens_q is on meta: it is"),
        ({"cu_seqlens_q": STARTS[None], "max_seqlen_q": 60}, r"cu_seqlens_q is \[1, 3\]: it is"),
        ({"cu_seqlens_q": [0, 100], "max_seqlen_q": 60}, "cu_seqlens_q is a list: it is"),
        (
            {"cu_seqlens_q": STARTS, "cu_seqlens_k": STARTS[:2], "max_seqlen_q": 60},
            r"cu_seqlens_k is \[2\].*nearest: 3",
        ),
        ({"cu_seqlens_q": STARTS.flip(0), "max_seqlen_q": 60}, "cu_seqlens_q decreases from 100 to 40"),
        ({"cu_seqlens_q": STARTS + 1, "max_seqlen_q": 60}, "cu_seqlens_q goes from 1 to 101: the tensor has rows 0 to"),
        ({"cu_seqlens_k": STARTS, "max_seqlen_q": 60}, "cu_seqlens_k is given without cu_seqlens_q"),
        ({"cu_seqlens_q": STARTS, "max_seqlen_q": 60, "kv_lengths": STARTS}, "kv_lengths is of padded sequences"),
        ({"cu_seqlens_q": STARTS, "max_seqlen_q": 60, "smooth_k": torch.zeros(1, 2, 64)}, r"a mean \[2, 2, 64\]"),
        (
            {"cu_seqlens_q": STARTS, "max_seqlen_q": 60, "cos": angles(50, 64)[0], "sin": angles(50, 64)[1]},
            "cos has 50 rows and a sequence of q up to 60.*nearest: cos of 60 positions or more, or max_seqlen_q=50",
        ),
        (
            {"cu_seqlens_q": STARTS, "max_seqlen_q": 60, "cos": angles(60, 64, 3)[0], "sin": angles(60, 64, 3)[1]},
            r"cos is \[3, 60, 32\].*sequences = 2, positions",
        ),
    ],
    ids=lambda x: ",".join(x) if isinstance(x, dict) else "",
)
def test_refusals(options, says):
    with pytest.raises(LaunchError, match=f"(?s){says}"):
        flashgen.quantize(*ROWS, **options)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"cu_seqlens_q": STARTS, "max_seqlen_q": 60}, "q has 4 dimensions.*nearest: quantize without cu_seqlens_q"),
        ({"kv_lengths": STARTS}, r"kv_lengths is \[3\]: it is an int32 tensor \[batch\]"),
        ({"kv_lengths": STARTS[:1] + 200}, r"kv_lengths\[0\] is 200: lengths are 0 to kv_len = 100"),
        ({"q_lengths": [3]}, "q_lengths is a list"),
    ],
    ids=lambda x: ",".join(x) if isinstance(x, dict) else "",
)
def test_refusals_of_padded_ones(options, says):
    with pytest.raises(LaunchError, match=f"(?s){says}"):
        flashgen.quantize(*(x.transpose(0, 1)[None] for x in ROWS), **options)


@pytest.mark.parametrize(("q_len", "kv_len"), [(3, 0), (0, 5), (0, 0)])
def test_tensors_without_rows_have_no_blocks_and_are_attended(q_len, kv_len):
    q, k = torch.randn(2, 4, q_len, 64).bfloat16(), torch.randn(2, 2, kv_len, 64).bfloat16()
    found = flashgen.quantize(q, k, k, block=128)
    o = flashgen.attention(found.q, found.k, found.v, load_spec("causal"), **found.descales)
    assert torch.equal(o, torch.zeros_like(o)) and o.shape == (2, 4, q_len, 64)
    with pytest.raises(LaunchError, match="it has no block"):
        some = flashgen.quantize(torch.randn(2, 4, 3, 64).bfloat16(), *(torch.randn(2, 2, 5, 64).bfloat16(),) * 2)
        none = some.descales | {"k_descale": torch.ones(2, 2, 0)}
        flashgen.attention(some.q, some.k, some.v, load_spec("causal"), **none)
