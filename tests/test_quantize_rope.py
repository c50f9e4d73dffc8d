"""quantize() of rows that turn by a rotary embedding first: against float64, and kernels beside the CPU's bits."""

import dataclasses

import numpy as np
import pytest
import test_quantize
import torch
from test_quantize import beside, bits, decoded, drawn, inputs, interpreted, rows_of, same

import flashgen
from flashgen.codegen.quantize import emit
from flashgen.errors import LaunchError
from flashgen.lang.load import load_spec
from flashgen.ops import quantize_eager as ops
from flashgen.ops.rope import Rope
from flashgen.planning import quantize as planning
from flashgen.planning.quantize import Angles, HalvesAcrossLanes, HalvesInLane
from flashgen.runtime import nvrtc


def angles(length, head_dim, *, first=0, wide=False, interleaved=False, dtype=torch.float32, batch=None):
    """cos and sin of positions from `first` on, as model code has them; of a batch each sequence has its own."""
    at = torch.arange(first, first + length, dtype=torch.float64)
    at = at if batch is None else at + 7 * torch.arange(batch, dtype=torch.float64)[:, None]
    turns = at[..., None] * 10000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    if wide:
        turns = turns.repeat_interleave(2, -1) if interleaved else torch.cat([turns, turns], -1)
    return turns.cos().to(dtype), turns.sin().to(dtype)


def turned(x, cos, sin, interleaved=False):
    """In float64, as Llama's rotate_half and as complex numbers do it."""
    x, half = x.double(), x.shape[-1] // 2
    if cos.shape[-1] != half:
        cos, sin = (of[..., ::2] if interleaved else of[..., :half] for of in (cos, sin))
    cos, sin = (of.double() if of.dim() == 2 else of.double().unsqueeze(1) for of in (cos, sin))
    if interleaved:
        return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * torch.complex(cos, sin)).flatten(-2)
    rotate_half = torch.cat([-x[..., half:], x[..., :half]], -1)
    return x * torch.cat([cos, cos], -1) + rotate_half * torch.cat([sin, sin], -1)


def near(codes, descale, right, block=None):
    """Whether codes are within half of an e4m3 of what is right."""
    found = decoded(codes, descale, block).double()
    scale = descale.max().item()
    return bool(((found - right).abs() <= right.abs() / 16 * 1.01 + scale * 2.0**-10 * 1.01).all())


# -- what they mean

FORMS = [
    {},
    {"wide": True, "dtype": torch.bfloat16},
    {"batch": 2, "dtype": torch.float16},
    {"interleaved": True},
    {"interleaved": True, "wide": True, "batch": 2, "dtype": torch.bfloat16},
]


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_rows_turn_before_they_are_quantised(head_dim, form):
    """Codes are those of float64's rows, each by its own angles; v does not turn, and rotated scores are the same."""
    q, k, v = inputs(150, head_dim)
    k, v = k[:, :, :150], v[:, :, :150]
    cos, sin = angles(150, head_dim, **form)
    option = {"interleaved": True} if form.get("interleaved") else {}
    right = [turned(x, cos, sin, **option) for x in (q, k)]
    for block in (None, 128):
        found = flashgen.quantize(q, k, v, block=block, hadamard=False, cos=cos, sin=sin, **option)
        assert near(found.q, found.q_descale, right[0], block) and near(found.k, found.k_descale, right[1], block)
        assert not near(found.q, found.q_descale, q.double(), block)
        assert torch.equal(bits(found.v), bits(flashgen.quantize(q, k, v, block=block).v))
    rotated = flashgen.quantize(q, k, v, cos=cos, sin=sin, **option)
    scores = decoded(rotated.q, rotated.q_descale).double()[:, ::2] @ decoded(rotated.k, rotated.k_descale).double().mT
    wanted = right[0][:, ::2] @ right[1].mT
    assert float((scores - wanted).norm() / wanted.norm()) < 0.06


def test_attention_of_turned_rows():
    q, k, v = inputs(150, 64)
    k, v = k[:, :, :150], v[:, :, :150]
    cos, sin = angles(150, 64, wide=True, dtype=torch.bfloat16)
    x = flashgen.quantize(q, k, v, block=128, cos=cos, sin=sin)
    causal = load_spec("causal")
    o = flashgen.attention(x.q, x.k, x.v, causal, **x.descales)
    right = flashgen.attention(*(turned(of, cos, sin) for of in (q, k)), v.double(), causal)
    assert float((o - right).norm() / right.norm()) < 0.06


def test_queries_and_keys_of_other_positions():
    """A pair has those of q and of k; None stands for what has turned before, or does not."""
    q, k, v = inputs(150, 64)
    of_q, of_k = angles(150, 64, first=9), angles(159, 64)
    pair = {"cos": (of_q[0], of_k[0]), "sin": (of_q[1], of_k[1])}
    both = flashgen.quantize(q, k, v, hadamard=False, **pair)
    assert near(both.q, both.q_descale, turned(q, *of_q)) and near(both.k, both.k_descale, turned(k, *of_k))
    one = flashgen.quantize(q, k, v, hadamard=False, cos=(of_q[0], None), sin=(of_q[1], None))
    plain = flashgen.quantize(q, k, v, hadamard=False)
    assert torch.equal(bits(one.q), bits(both.q)) and torch.equal(bits(one.k), bits(plain.k))
    assert one.rope is not None and plain.rope is None


def test_keys_join_a_cache():
    """Blocks of keys that come later, without queries, have the bits of all at once."""
    q, k, v = inputs(300, 64)
    k, v = k[:, :, :300], v[:, :, :300]
    cos, sin = angles(300, 64)
    whole = flashgen.quantize(q, k, v, block=128, cos=cos, sin=sin)
    none = q[:, :, :0]
    later = flashgen.quantize(none, k[:, :, 128:], v[:, :, 128:], block=128, cos=cos[128:], sin=sin[128:])
    assert torch.equal(bits(later.k), bits(whole.k[:, :, 128:]))
    assert torch.equal(later.k_descale, whole.k_descale[:, :, 1:])
    assert later.q.shape == (2, 4, 0, 64)


def test_a_mean_is_that_of_turned_keys():
    q, k, v = inputs(60, 64)
    k, v = k[:, :, :60] + 8 * drawn(1, 2, 1, 64, seed=7), v[:, :, :60]
    cos, sin = angles(60, 64)
    found = flashgen.quantize(q, k, v, smooth_k=True, cos=cos, sin=sin)
    right_q, right_k = turned(q, cos, sin), turned(k, cos, sin)
    torch.testing.assert_close(found.k_mean.double(), right_k.mean(2), rtol=1e-5, atol=1e-5)
    s = 0.125 * right_q @ right_k.repeat_interleave(2, 1).mT
    of = [decoded(*pair).double() for pair in ((found.q, found.q_descale), (found.k, found.k_descale))]
    lse = (0.125 * of[0] @ of[1].repeat_interleave(2, 1).mT).logsumexp(-1)
    plain = dataclasses.replace(found, rope=None)
    off, unturned = (float((x.corrected_lse(lse, q) - s.logsumexp(-1)).abs().mean()) for x in (found, plain))
    assert off < 0.15 < 5 * off < unturned


COS, SIN = angles(64, 64)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"cos": COS}, "sin of q is None, and cos is given"),
        ({"sin": SIN}, "cos of q is None, and sin is given"),
        ({"cos": COS.double(), "sin": SIN}, "cos is float64: it is float32.*\n  nearest: cos.float"),
        ({"cos": COS.to("meta"), "sin": SIN}, "cos is on meta and q on cpu.*\n  nearest: cos.to"),
        ({"cos": COS, "sin": SIN.bfloat16()}, r"sin \[1, 64, 32\] of bfloat16 beside q: they have one shape"),
        ({"cos": COS[:, :16], "sin": SIN[:, :16]}, "cos has 16 columns and q head_dim 64.*nearest.*turned before"),
        ({"cos": COS[:40], "sin": SIN[:40]}, r"cos has 40 rows and q 64: one for each\n  nearest: cos\[positions\]"),
        ({"cos": torch.cat([COS, COS]), "sin": SIN}, "cos has 128 rows and q 64.*positions of q alone"),
        ({"cos": COS.numpy(), "sin": SIN}, r"cos of q is .*, and sin is given: they are tensors \[64, 32\] or"),
        ({"cos": COS.expand(3, -1, -1), "sin": SIN}, r"cos is \[3, 64, 32\] beside q \[2, 4, 64, 64\]"),
        ({"cos": COS[0], "sin": SIN}, r"cos is \[32\] beside q"),
        ({"cos": COS.T.contiguous().T, "sin": SIN}, "last dimension has stride.*\n  nearest: cos.contiguous"),
        ({"cos": (COS,), "sin": SIN}, r"cos has 1 tensors.*nearest: cos=\(of q, of k\)"),
        ({"cos": (COS, None), "sin": SIN}, "cos of k is None, and sin is given"),
        ({"cos": 1.0, "sin": SIN}, "cos of q is 1.0, and sin is given"),
        ({"interleaved": True}, "there are no cos and sin"),
        ({"cos": COS, "sin": SIN, "interleaved": 1}, "interleaved is 1: it is True or False"),
    ],
    ids=str,
)
def test_refusals(options, says):
    q, k, v = inputs(64)
    with pytest.raises(LaunchError, match=f"(?s){says}"):
        flashgen.quantize(q, k[:, :, :64], v[:, :, :64], **options)


def test_keys_of_another_length_need_their_own():
    with pytest.raises(LaunchError, match=r"(?s)cos has 64 rows and k 73: one for each\n  nearest: cos\[positions\]"):
        flashgen.quantize(*inputs(64), cos=COS, sin=SIN)


# -- the emitted kernels


def rope_of(x, **form):
    cos, sin = angles(x.shape[2], x.shape[3], first=3, **form)
    cos, sin = (of if of.dim() == 3 else of[None] for of in (cos, sin))
    return Rope(cos=cos, sin=sin, interleaved=form.get("interleaved", False))


@pytest.mark.slow
@pytest.mark.sampled(
    "(1, 2, 70, 96)-{'wide': True, 'dtype': torch.bfloat16}-{}",
    "(1, 1, 70, 128)-{'dtype': torch.float16}-{'rotated': False}",
    "(1, 1, 33, 80)-{'interleaved': True, 'wide': True}-{}",
)
@pytest.mark.parametrize(
    ("shape", "form", "options"),
    [
        ((2, 3, 261, 64), {"batch": 2}, {"block": None}),
        ((2, 2, 131, 64), {"interleaved": True, "dtype": torch.bfloat16}, {"arch": "sm_80", "centred": True}),
        ((1, 2, 70, 96), {"wide": True, "dtype": torch.bfloat16}, {}),
        ((1, 1, 70, 128), {"dtype": torch.float16}, {"rotated": False}),
        ((1, 1, 33, 80), {"interleaved": True, "wide": True}, {}),
        ((1, 2, 150, 192), {"batch": 1}, {"block": 256}),
        ((1, 1, 70, 240), {"dtype": torch.bfloat16}, {}),
        ((1, 1, 70, 256), {"wide": True}, {}),
    ],
    ids=str,
)
def test_kernels_give_the_bits_of_the_cpu(shape, form, options):
    x = drawn(*shape)
    x[0, 0, 3, 5] = torch.inf
    same(*beside(x, rope=rope_of(x, **form), **options))


@pytest.mark.slow
@pytest.mark.sampled("32-{'interleaved': True, 'dtype': torch.bfloat16}-128")
@pytest.mark.parametrize(
    ("head_dim", "form", "block"),
    [
        (64, {}, 128),
        (64, {}, None),
        (64, {"wide": True, "interleaved": True, "dtype": torch.bfloat16}, 128),
        (32, {"interleaved": True, "dtype": torch.bfloat16}, 128),
        (80, {"dtype": torch.float16}, 128),
    ],
    ids=str,
)
def test_bytes_are_predicted(head_dim, form, block):
    """Of rows exactly; angles of the last row stand for rows behind it, which tiles have."""
    x = drawn(2, 3, 150, head_dim)
    rows = rows_of(x, block=block, rope=rope_of(x, **form))
    ((plan, group),) = ops.planned([rows], block)
    _, report = interpreted(group, plan)
    predicted = planning.moved(plan, batch=2, heads=3, length=150, scales=2 if block else 1)
    of_rows = plan.scale.reads * x.numel() * x.itemsize
    across = isinstance(plan.rope, HalvesAcrossLanes)  # both lanes of a pair load its angles, which L1 has
    assert across == (head_dim == 80)
    assert sum(report.bytes(kind, buffer="x of a") for kind in ("ld", "cp.async")) == of_rows
    of_angles = sum(report.bytes("ld", buffer=f"{name} of a") for name in ("cos", "sin"))
    assert of_angles * 150 == (1 + across) * (predicted.read_bytes - of_rows) * 256
    written = [report.bytes("st", buffer=f"{name} of a") for name in ("codes", "descales")]
    assert sum(written) == predicted.write_bytes


@pytest.mark.slow
def test_a_mutation_is_seen(monkeypatch):
    x = drawn(2, 2, 70, 64)
    rope = rope_of(x, batch=2)
    text = emit(planning.plan("sm_90a", "bfloat16", 64, block=128, rotated=True, centred=False, angles=rope.angles(64)))
    for old, new in (
        ("__fsub_rn(__fmul_rn(a, cos)", "__fadd_rn(__fmul_rn(a, cos)"),
        ("t.cos + at.batch * t.cos_batch + row * t.cos_row", "t.cos + at.batch * t.cos_batch"),
        ("at.batch * t.sin_batch", "0 * t.sin_batch"),
        ("x[i + CHUNKS / 2][j]", "x[i + CHUNKS / 2][j ^ 1]"),
    ):
        assert text.count(old) == 1, old
        with monkeypatch.context() as patch:
            mutated = text.replace(old, new)
            patch.setattr(test_quantize, "emit", lambda plan, mutated=mutated: mutated)
            found, wanted = beside(x, rope=rope)
        assert any(not np.array_equal(a.reshape(b.shape), b) for a, b in zip(found, wanted, strict=True)), old


@pytest.mark.sampled("sm_80-240-128-halves", "sm_90a-256-None-interleaved")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("head_dim", "block", "of"),
    [
        (240, 128, Angles(dtype="float32")),
        (256, None, Angles(dtype="bfloat16", interleaved=True)),
        (112, None, Angles(dtype="float32")),
    ],
    ids=["240-128-halves", "256-None-interleaved", "112-None-halves"],
)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_kernels_spill_nothing(arch, head_dim, block, of):
    plan = planning.plan(arch, "bfloat16", head_dim, block=block, rotated=True, centred=True, angles=of)
    compiled = nvrtc.compile(emit(plan), arch)
    assert compiled.resources.spills == 0 and compiled.performance_losses == ()


def test_kernels_without_it_know_nothing_of_it():
    plan = planning.plan("sm_90a", "bfloat16", 128, block=128, rotated=True, centred=True)
    assert not any(word in emit(plan) for word in ("cos", "sin", "embed"))
    with_it = planning.plan(
        "sm_90a", "bfloat16", 128, block=128, rotated=True, centred=True, angles=Angles(dtype="float32")
    )
    assert isinstance(with_it.rope, HalvesInLane) and "embed(x, chunks, angles_of(at, t), sm);" in emit(with_it)
