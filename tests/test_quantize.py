"""quantize(): what codes and scales mean, and the emitted kernels beside the CPU's bits in the interpreter."""

import ctypes
import math

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import flashgen
from flashgen import interpreter
from flashgen.codegen.quantize import emit, params_bytes
from flashgen.errors import LaunchError, PlanError
from flashgen.lang import float8
from flashgen.lang.load import load_spec
from flashgen.ops import quantize_eager as ops
from flashgen.planning import quantize as planning
from flashgen.planning.quantize import parts
from flashgen.runtime import nvrtc
from flashgen.runtime import quantize as runtime

E4M3 = torch.float8_e4m3fn


def drawn(*shape, seed=0, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def inputs(length=150, head_dim=64, **options):
    q = drawn(2, 4, length, head_dim, **options)
    k, v = (drawn(2, 2, length + 9, head_dim, seed=seed, **options) for seed in (1, 2))
    return q, k, v


def bits(x):
    return x.view(torch.uint8)


def decoded(codes, descale, block=None):
    """What codes stand for, [batch, heads, length, head_dim] in float32."""
    x = codes.float()
    if block is None:
        return x * descale[..., None, None]
    rows = descale.repeat_interleave(block, -1)[..., : x.shape[2]]
    return x * rows[..., None]


# -- what they mean


@pytest.mark.parametrize("block", [None, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_codes_and_scales_are_what_was_given(block, dtype):
    q, k, v = inputs(300, dtype=dtype)
    found = flashgen.quantize(q, k, v, block=block, hadamard=False)
    for x, codes, descale in zip((q, k, v), (found.q, found.k, found.v), found.descales.values(), strict=True):
        assert codes.shape == x.shape and codes.stride() == x.stride() and codes.dtype == E4M3
        scales = () if block is None else (-(-x.shape[2] // block),)
        assert descale.shape == (*x.shape[:2], *scales) and descale.dtype == torch.float32
        again = decoded(codes, descale, block)
        error = (again - x.float()).abs()
        assert (error <= x.float().abs() * 2.0**-4 + descale.max() * 2.0**-10).all()
        groups = [x] if block is None else x.split(block, 2)
        for i, group in enumerate(groups):
            of = descale if block is None else descale[..., i]
            torch.testing.assert_close(of, group.float().abs().amax((2, 3)) / 448, rtol=0, atol=0)
    assert found.k_mean is None and found.signs is None


@pytest.mark.parametrize(
    "head_dim, widths", [(16, (16,)), (64, (64,)), (80, (64, 16)), (96, (64, 32)), (240, (128, 64, 32, 16))]
)
def test_a_rotation_leaves_scores_as_they_are(head_dim, widths):
    assert parts(head_dim) == widths
    q, k, v = inputs(40, head_dim)
    found = flashgen.quantize(q, k, v, seed=3)
    matrix = torch.block_diag(*(hadamard(n) for n in widths))
    for x, codes, descale in ((q, found.q, found.q_descale), (k, found.k, found.k_descale)):
        turned = (x.double() * found.signs.double()) @ matrix
        again = decoded(codes, descale).double()
        assert float((again - turned).norm() / turned.norm()) < 0.03
    assert set(found.signs.tolist()) == {1.0, -1.0}
    plain = flashgen.quantize(q, k, v, hadamard=False)
    assert torch.equal(bits(found.v), bits(plain.v)) and not torch.equal(bits(found.q), bits(plain.q))


def hadamard(n):
    """Sylvester's matrix, orthogonal."""
    made = torch.ones(1, 1, dtype=torch.float64)
    while len(made) < n:
        made = torch.cat([torch.cat([made, made], 1), torch.cat([made, -made], 1)])
    return made / math.sqrt(n)


def test_a_rotation_spreads_outliers():
    q, k, v = inputs(128)
    q[:, :, ::16, 5] = 100
    plain, rotated = (flashgen.quantize(q, k, v, hadamard=hadamard) for hadamard in (False, True))
    assert (plain.q_descale == 100 / 448).all() and (rotated.q_descale < 0.2 * plain.q_descale).all()


def test_seeds_draw_signs_and_0_is_the_seed_unless_given():
    q, k, v = inputs(20)
    default, zero, other = (flashgen.quantize(q, k, v, **seed) for seed in ({}, {"seed": 0}, {"seed": 1}))
    assert torch.equal(default.signs, zero.signs) and not torch.equal(default.signs, other.signs)
    assert torch.equal(bits(default.k), bits(zero.k)) and not torch.equal(bits(default.k), bits(other.k))
    drawn_by_other = 1.0 - 2.0 * ops._signs(64, 1)
    assert other.signs.dtype == torch.float32 and np.array_equal(other.signs.numpy(), drawn_by_other)
    assert flashgen.quantize(*inputs(20, 240)).signs.shape == (240,)


@pytest.mark.parametrize("options", [{}, {"block": 128, "smooth_k": True}], ids=str)
def test_nothing_is_copied_from_the_host(options):
    """A CUDA graph takes no such copy: no tensor is made of the host's numbers, which on a GPU would be one."""

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function._schema.name)
            return function(*args, **(kwargs or {}))

    q, k, v = inputs(20)
    found, seen = flashgen.quantize(q, k, v, **options), []
    with Watch():
        signs = found.signs
        corrected = found.corrected_lse(torch.zeros(2, 4, 20), q)
    assert signs.shape == (64,) and corrected.shape == (2, 4, 20)
    assert seen and not {"aten::lift_fresh", "aten::_local_scalar_dense", "aten::item"} & set(seen), seen
    with Watch():
        torch.tensor([1.0])
    assert "aten::lift_fresh" in seen  # what a tensor of the host's numbers shows


def test_smooth_keys_and_their_lse():
    q, k, v = inputs(60)
    k = k + 8 * drawn(1, 2, 1, 64, seed=7)  # a mean that is no rounding
    smooth, plain = (flashgen.quantize(q, k, v, smooth_k=smooth) for smooth in (True, False))
    torch.testing.assert_close(smooth.k_mean, k.double().mean(2).float(), rtol=0, atol=0)
    scale, group = 64**-0.5, 2

    def attend(found):
        s = (
            scale
            * decoded(found.q, found.q_descale).double()
            @ decoded(found.k, found.k_descale).double().repeat_interleave(group, 1).mT
        )
        return s.logsumexp(-1), s.softmax(-1)

    s = scale * q.double() @ k.double().repeat_interleave(group, 1).mT
    lse, p = attend(smooth)
    corrected = smooth.corrected_lse(lse, q)
    assert float((corrected - s.logsumexp(-1)).abs().max()) < 0.3 < float((lse - s.logsumexp(-1)).abs().max())
    rough = float((attend(plain)[1] - s.softmax(-1)).norm())
    assert float((p - s.softmax(-1)).norm()) < rough
    again = flashgen.quantize(q, k[:, :, :30], v[:, :, :30], smooth_k=smooth.k_mean)
    assert torch.equal(again.k_mean, smooth.k_mean)
    # Two parts of the keys, merged by their corrected lse, are the whole.
    halves = [
        flashgen.quantize(q, x, y, smooth_k=True)
        for x, y in ((k[:, :, :30], v[:, :, :30]), (k[:, :, 30:], v[:, :, 30:]))
    ]
    os, lses = [], []
    for half in halves:
        lse, p = attend(half)
        os.append(p @ decoded(half.v, half.v_descale).double().repeat_interleave(group, 1))
        lses.append(half.corrected_lse(lse, q))
    merged, _ = flashgen.merge(os[0].float(), lses[0].float(), os[1].float(), lses[1].float())
    right = s.softmax(-1) @ v.double().repeat_interleave(group, 1)
    assert float((merged - right).norm() / right.norm()) < 0.1


def test_what_is_not_finite_is_kept():
    q, k, v = inputs(128)
    v[0, 0, 3, 4], v[0, 0, 5, 6], q[0, 0, 7, 8] = torch.nan, -torch.inf, torch.inf
    found = flashgen.quantize(q, k, v, block=128)
    lost = found.v.float().isnan()
    assert lost.sum() == 2 and lost[0, 0, 3, 4] and lost[0, 0, 5, 6]
    assert found.q.float().isnan()[0, 0, 7].all() and found.q.float().isnan().sum() == 64  # a rotated row
    assert found.v_descale[0, 0, 0] == v[0, 0, :128].float().nan_to_num(0, 0, 0).abs().max() / 448


@pytest.mark.parametrize("column, lost", [(3, range(64)), (70, range(64, 96))])
def test_what_is_not_finite_is_lost_with_its_block(column, lost):
    q, k, v = inputs(20, 96)
    q[0, 0, 7, column] = torch.inf
    found = flashgen.quantize(q, k, v).q.float().isnan()
    assert found.sum() == len(lost) and found[0, 0, 7, lost].all()


def test_zeros_and_no_rows():
    q, k, v = inputs(16)
    found = flashgen.quantize(q, torch.zeros_like(k), v)
    assert not (bits(found.k) & 0x7F).any() and (found.k_descale > 0).all()
    empty = flashgen.quantize(q[:, :, :0], k[:, :, :0], v[:, :, :0], block=128)
    assert empty.q.shape == (2, 4, 0, 64) and empty.q_descale.shape == (2, 4, 0)


def test_a_sink_beside_smooth_keys_joins_behind_the_corrected_lse():
    q, k, v = inputs(60)
    k, sink, full = k + 2 * drawn(1, 2, 1, 64, seed=7), torch.tensor([2.0, 3.0, 4.0, 1.0]), load_spec("full")
    x = flashgen.quantize(q, k, v, smooth_k=True)
    o, lse = flashgen.attention(x.q, x.k, x.v, full, return_lse=True, accuracy="exact", **x.descales)
    o = o.double() * torch.sigmoid(x.corrected_lse(lse, q) - sink[:, None]).unsqueeze(-1)
    right = flashgen.attention(*(y.double() for y in (q, k, v)), full, sink=sink)
    plain = flashgen.quantize(q, k, v)
    beside = flashgen.attention(plain.q, plain.k, plain.v, full, sink=sink, accuracy="exact", **plain.descales)
    assert float((o - right).norm()) < float((beside.double() - right).norm()) < 0.15 * float(right.norm())


@pytest.mark.parametrize(
    ("lse", "of_q", "scale", "says"),
    [
        ((2, 4, 20), lambda q, x: q[:, :, :9], None, r"lse is \[2, 4, 20\] beside q \[2, 4, 9, 64\]"),
        ((4, 20), lambda q, x: q[0], None, r"q is \[4, 20, 64\], and \[2, 4, 20, 64\] was quantised\n  nearest: q as"),
        ((2, 2, 20), lambda q, x: q[:, :2], None, r"q is \[2, 2, 20, 64\], and \[2, 4, 20, 64\] was quantised"),
        ((2, 4, 20), lambda q, x: x.q, None, "q is float8_e4m3fn: .*\n  nearest: q as quantize got it"),
        ((2, 4, 20), lambda q, x: None, None, "corrected_lse: q is a NoneType"),
        ((2, 4, 20), lambda q, x: q, "a", "corrected_lse: scale is a str and must be a number"),
    ],
)
@pytest.mark.parametrize("smooth", [False, True])
def test_lse_and_queries_that_do_not_belong_together(smooth, lse, of_q, scale, says):
    q, k, v = inputs(20)
    x = flashgen.quantize(q, k, v, smooth_k=smooth)
    with pytest.raises(LaunchError, match=says):
        x.corrected_lse(torch.zeros(lse), of_q(q, x), scale)


def test_lse_of_some_rows_and_of_no_heads():
    q, k, v = inputs(20)
    x = flashgen.quantize(q, k, v, smooth_k=True)
    lse = torch.zeros(2, 4, 20)
    assert torch.equal(x.corrected_lse(lse[..., 5:], q[:, :, 5:]), x.corrected_lse(lse, q)[..., 5:])
    none = flashgen.quantize(q[:, :0], k[:, :0], v[:, :0], smooth_k=True)
    assert none.corrected_lse(lse[:, :0], q[:, :0]).shape == (2, 0, 20)


@pytest.mark.parametrize("block", [None, 128])
def test_no_keys_and_no_sequences(block):
    """Descales are there for attention, and no mean of nothing spoils an lse."""
    q, k, v = inputs(16)
    scales = () if block is None else (0,)
    found = flashgen.quantize(q, k[:, :, :0], v[:, :, :0], block=block, smooth_k=True)
    assert found.k_descale.shape == (2, 2, *scales) and not found.k_mean.any()
    lse = torch.full((2, 4, 16), -torch.inf)
    assert torch.equal(found.corrected_lse(lse, q), lse)
    none = flashgen.quantize(q[:0], k[:0], v[:0], block=block)
    assert none.q_descale.shape == (0, 4, *(() if block is None else (1,)))
    if block is None:
        o, lse = flashgen.attention(found.q, found.k, found.v, load_spec("full"), **found.descales, return_lse=True)
        assert not o.any() and (lse == -torch.inf).all()


def test_whole_numbers_of_any_type():
    of_numpy, of_python = (
        flashgen.quantize(*inputs(64, 64), block=block, seed=seed)
        for block, seed in ((np.int32(128), np.int64(3)), (128, 3))
    )
    assert torch.equal(of_numpy.q.view(torch.uint8), of_python.q.view(torch.uint8)) and of_numpy.seed == 3


@pytest.mark.parametrize(
    "change, options, error, says",
    [
        ({}, {"block": 100}, PlanError, "block=100.*\n  nearest: block=128"),
        ({}, {"block": 384}, PlanError, "nearest: block=256"),
        ({}, {"block": True}, LaunchError, "block is True: it is an int"),
        ({}, {"seed": -1}, LaunchError, "nearest: seed=0"),
        ({}, {"hadamard": 1}, LaunchError, "hadamard is 1: it is True or False"),
        ({}, {"hadamard": None}, LaunchError, "hadamard is None: it is True or False"),
        ({}, {"hadamard": False, "seed": 5}, LaunchError, "seed is 5 and hadamard False.*\n  nearest: no seed"),
        ({}, {"smooth_k": torch.zeros(3)}, LaunchError, "nearest: smooth_k=True"),
        ({"q": torch.float32}, {}, LaunchError, "q is float32.*\n  nearest: q.bfloat16"),
        ({"head_dim": 72}, {}, PlanError, "head_dim 72 cannot be quantised.*\n  nearest: head_dim (64|80)"),
        (
            {"transposed": True},
            {},
            LaunchError,
            r"last dimension is not contiguous \(strides.*\n  nearest: q.contiguous",
        ),
        ({"rows": 3}, {}, LaunchError, "do not belong together"),
        ({"device": "meta"}, {}, LaunchError, "q is on meta.*\n  nearest: q.cpu"),
    ],
)
def test_refusals(change, options, error, says):
    q, k, v = inputs(64, change.get("head_dim", 64))
    q = q.to(change.get("q", q.dtype))
    q = q.mT if "transposed" in change else q.to(change.get("device", "cpu"))
    with pytest.raises(error, match=f"(?s){says}"):
        flashgen.quantize(q, k, v[:, :, change.get("rows", 0) :], **options)


@pytest.mark.parametrize(("heads", "kv_heads", "nearest"), [(3, 2, 2), (1, 2, 2), (5, 2, 4), (2, 0, None)])
def test_heads_that_share_no_keys_are_refused(heads, kv_heads, nearest):
    q, k = (torch.randn(1, n, 20, 64, dtype=torch.bfloat16) for n in (heads, kv_heads))
    cure = "$" if nearest is None else f"\n  nearest: {nearest} heads of q"
    says = f"{heads} heads of q cannot share {kv_heads} kv_heads: heads must be a multiple of kv_heads{cure}"
    with pytest.raises(LaunchError, match=says):
        flashgen.quantize(q, k, k)


@pytest.mark.filterwarnings("ignore")  # torch's, of prototypes
def test_nested_and_sparse_tensors_are_refused():
    q, k, v = inputs(20)
    starts = {"cu_seqlens_q": torch.tensor([0, 20], dtype=torch.int32), "max_seqlen_q": 20}
    nested = torch.nested.nested_tensor(list(q))
    for options in ({}, starts):
        with pytest.raises(LaunchError, match=r"q is nested: .*\n  nearest: layout=torch.jagged for all three"):
            flashgen.quantize(nested, nested, nested, **options)
        with pytest.raises(LaunchError, match=r"q is sparse_coo: .*\n  nearest: q.to_dense"):
            flashgen.quantize(q.float().to_sparse(), k, v, **options)


@pytest.mark.parametrize(
    "transform",
    [
        lambda f, q: torch.func.vmap(f)(q[None]),
        lambda f, q: torch.func.grad(lambda q: f(q).sum())(q),
        lambda f, q: torch.func.jvp(f, (q,), (q,)),
        lambda f, q: torch.func.functionalize(f)(q),
    ],
    ids=["vmap", "grad", "jvp", "functionalize"],
)
def test_transforms_of_torch_func_are_refused(transform):
    q, k, v = inputs(20)
    with pytest.raises(LaunchError, match=r"^transforms of torch.func \(.*\n  nearest: the call outside of them"):
        transform(lambda q: flashgen.quantize(q, k, v).q_descale, q)


# -- the emitted kernels


def interpreted(group, plan, blocks=3):
    """codes (uint8) and descales of each of these tensors, by the plan's kernel, and the report of its launch.

    Tensors lie side by side in the interpreter's memory as in the process: addresses are those of the interpreter.
    """
    memory, found, tensors = interpreter.Memory(), [], []
    for rows, letter in zip(group, "abc", strict=False):
        given = {"mean": rows.mean, **({} if rows.rope is None else {"cos": rows.rope.cos, "sin": rows.rope.sin})}
        given |= {} if rows.own is None else {"starts" if rows.own.joined else "lengths": rows.own.numbers}
        by_rows = not rows.x.is_contiguous()  # [batch, rows, heads, head_dim] in memory
        x = rows.x.transpose(1, 2) if by_rows else rows.x
        arrays = {
            "x": x.view(torch.int16).numpy().view(np.uint16),
            "codes": np.full(x.shape, 0xFF, np.uint8),
            "descales": np.full(rows.descales.shape, np.nan, np.float32),
            **{name: x.view(torch.uint8).numpy() for name, x in given.items() if x is not None},
        }
        at = {
            name: memory.add(f"{name} of {letter}", array, writable=name in ("codes", "descales"))
            for name, array in arrays.items()
        }
        found.append((arrays["codes"].swapaxes(1, 2) if by_rows else arrays["codes"], arrays["descales"]))
        tensors.append(ops.told(plan, rows, at))
    words = np.zeros(max(1, ops.words(plan, group)), np.uint32)
    packed = ops.packed(plan, group, tensors, memory.add("words", words, writable=True), blocks)
    module = interpreter.load(nvrtc.ptx(emit(plan), plan.arch), target=plan.arch)
    return found, module.launch("quantize", blocks, plan.threads, plan.smem_bytes, [packed], memory)


def rows_of(x, *, block=128, rotated=True, centred=False, rope=None):
    """A tensor to be quantised, and what is done to it."""
    signs = ops._signs(x.shape[-1], 5) if rotated else None
    mean = x.double().mean(2).float().contiguous() if centred else None
    return ops.Rows.of(x, block, signs=signs, mean=mean, rope=rope)


def both(group, block, arch="sm_90a", blocks=3):
    """Codes and descales of the kernel, and of the CPU, and the launch's report."""
    ((plan, _),) = ops.planned(group, block)
    for rows in group:
        ops._on_cpu(plan, rows)
    of = planning.plan(
        *(arch, plan.dtype, plan.head_dim),
        block=block,
        rotated=bool(plan.rotation),
        centred=plan.centred,
        angles=next((rows.angles for rows in group if rows.rope), None),
        layout=plan.layout,
    )
    found, report = interpreted(group, of, blocks)
    return found, [(rows.codes.view(torch.uint8).numpy(), rows.descales.numpy()) for rows in group], report


def beside(x, *, block=128, arch="sm_90a", **options):
    """Codes and descales of the kernel, and of the CPU, of one tensor."""
    (found,), (wanted,), _ = both([rows_of(x, block=block, **options)], block, arch)
    return found, wanted


def same(found, wanted):
    for mine, theirs in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(mine.reshape(theirs.shape), theirs)


@pytest.mark.slow
@pytest.mark.sampled("128-sm_90a", "None-sm_80")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("block", [128, 256, None])
def test_kernels_give_the_bits_of_the_cpu(arch, block):
    x = drawn(1, 2, 261, 64)
    x[0, 1, 3, 5], x[0, 1, 200, 7] = torch.nan, torch.inf
    same(*beside(x, block=block, arch=arch))


@pytest.mark.slow
def test_ties_round_as_in_the_kernel():
    """448 over the peak is rounded once: beside a peak of 3 mantissa bits 3/8 of it are a tie of e4m3."""
    peaks = torch.arange(1, 2, 2.0**-6).bfloat16()
    x = torch.zeros(1, len(peaks), 2, 16, dtype=torch.bfloat16)
    x[0, :, 0, 0], x[0, :, 1, :] = peaks, (3 * peaks)[:, None] * torch.logspace(-3, -10, 16, base=2).bfloat16()
    found, wanted = beside(x, rotated=False)
    same(found, wanted)
    quotients = torch.full((64,), 448.0) / peaks.float()
    assert (448 * peaks.float().reciprocal() != quotients).any()  # two roundings: the peaks can tell
    scaled = x.float() * (448 * peaks.float().reciprocal())[:, None, None]
    assert not np.array_equal(scaled.to(E4M3).view(torch.uint8).numpy(), wanted[0])


@pytest.mark.sampled("16", "96")
@pytest.mark.parametrize(
    "head_dim", [16, 96, 128, pytest.param(240, marks=pytest.mark.slow), pytest.param(256, marks=pytest.mark.slow)]
)
def test_kernels_of_other_head_dims(head_dim):
    same(*beside(drawn(1, 1, 70, head_dim, dtype=torch.float16), centred=head_dim == 96))


@pytest.mark.slow
def test_kernels_without_a_rotation_and_with_a_mean():
    same(*beside(drawn(1, 2, 70, 64) + 3, rotated=False, centred=True))


@pytest.mark.slow
@pytest.mark.sampled("2-128", "7-256")
@pytest.mark.parametrize("block", [128, 256, None])
@pytest.mark.parametrize("blocks", [2, 7])
def test_a_launch_has_tensors_of_other_lengths_heads_and_means(block, blocks):
    """Some rotated, one centred, and what is not finite in two: each keeps its own."""
    q, k, v = drawn(2, 3, 150, 16), drawn(2, 1, 401, 16, seed=1), drawn(2, 1, 401, 16, seed=2)
    q[1, 2, 3, 5], v[0, 0, 200, 7], v[1, 0, 400, 1] = torch.nan, torch.inf, -torch.inf
    group = [rows_of(q, block=block), rows_of(k, block=block, centred=True), rows_of(v, block=block, rotated=False)]
    found, wanted, _ = both(group, block, blocks=blocks)
    for pair in zip(found, wanted, strict=True):
        same(*pair)


@pytest.mark.slow
def test_heads_that_share_scales_come_in_groups(monkeypatch):
    """Groups of two of four heads, as where L2 holds three: codes are the same, each tile has its own."""
    monkeypatch.setattr(runtime, "GROUP_BYTES", 3 * 261 * 16 * 2)
    rows = rows_of(drawn(2, 4, 261, 16), block=256)
    ((plan, group),) = ops.planned([rows], 256)
    assert rows.sizes.group(plan) == 2 and runtime.in_turn(plan, [rows.sizes], 3) == {"tiles": 24, "lead": 7}
    ops._on_cpu(plan, rows)
    found, _ = interpreted(group, plan)
    same(found[0], (rows.codes.view(torch.uint8).numpy(), rows.descales.numpy()))


def test_tensors_that_differ_in_kind_have_kernels_of_their_own():
    q, k, v = drawn(1, 2, 40, 64), drawn(1, 2, 40, 64), drawn(1, 2, 40, 96)
    sizes = lambda *given: [len(group) for _, group in ops.planned([rows_of(x) for x in given], 128)]  # noqa: E731
    assert sizes(q, k, k) == [3] and sizes(q, k, v) == [2, 1] and sizes(q, k.half(), v) == [1, 1, 1]
    assert sizes(q[:, :, :0], k, v) == [1, 1]
    found = flashgen.quantize(q, k, v, block=128)
    alone = flashgen.quantize(q, k, k, block=128)
    assert torch.equal(bits(found.k), bits(alone.k)) and found.v.shape == v.shape


@pytest.mark.slow
def test_a_mutation_is_seen(monkeypatch):
    x = drawn(1, 1, 70, 64)
    x[0, 0, 3, 5] = torch.inf
    text = emit(planning.plan("sm_90a", "bfloat16", 64, block=128, rotated=True, centred=False))
    for old, new in (
        ("fmaf(x[i][j], signs[j], -b)", "fmaf(x[i][j], signs[j], b)"),
        ("x[i][j] = fmaf(x[i][j], 0.f, x[i][j]);", ";"),
        ("const bool there = row + i < t.length;", "const bool there = row + i < t.length - 1;"),
    ):
        assert text.count(old) == 1, old
        with monkeypatch.context() as patch:
            mutated = text.replace(old, new)
            patch.setitem(globals(), "emit", lambda plan, mutated=mutated: mutated)
            found, wanted = beside(x)
        assert any(not np.array_equal(a.reshape(b.shape), b) for a, b in zip(found, wanted, strict=True)), old


@pytest.mark.sampled("read while written", "not awaited", "peaks of many", "an infinity")
@pytest.mark.slow
@pytest.mark.parametrize(
    "old, new, error, tiles",
    [
        ("load_relaxed(peaks + lane)", "peaks[lane]", interpreter.errors.Race, 4),
        ("bool all = count <= 64 && seen.first != 0 && seen.second != 0;", "bool all = true;", AssertionError, 4),
        ("any |= peak;", ";", AssertionError, 66),
        ("known.peaks == peaks", "known.peaks != nullptr", AssertionError, 66),
        ("most = max(most, peak & ~INFINITE);", ";", AssertionError, 66),
        ("if (peak & INFINITE) lose_infinities(x);", "", AssertionError, 4),
        (
            "seen.second = load_relaxed(peaks + lane + 32)",
            "seen.second = load_relaxed(peaks + lane)",
            AssertionError,
            34,
        ),
    ],
    ids=[
        "read while written",
        "not awaited",
        "an infinity of many",
        "known of another head",
        "peaks of many",
        "an infinity",
        "behind 32",
    ],
)
def test_peaks_of_other_blocks_are_handed_over(monkeypatch, old, new, error, tiles):
    """What a GPU would show on some days: peaks that a block reads while they are written, or does not wait for."""
    x = drawn(1, 2, tiles * 128, 16)
    x[0, 0, -1, 0], x[0, 0, -2, 0] = 100, torch.inf
    rows = rows_of(x, block=None, rotated=False)
    ((plan, group),) = ops.planned([rows], None)
    ops._on_cpu(plan, rows)
    text = emit(plan)
    assert text.count(old) == 1
    monkeypatch.setitem(globals(), "emit", lambda plan: text.replace(old, new))
    with pytest.raises(error):
        same(interpreted(group, plan)[0][0], (rows.codes.view(torch.uint8).numpy(), rows.descales.numpy()))


@np.errstate(invalid="ignore")  # NaN is among them
def test_every_float_converts_to_nearest_even_by_bits():
    """The conversion of architectures without the instruction, of every 16-bit pattern and of ties."""
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    numbers = float8._values("float8_e4m3fn")
    ties = ((numbers[1:] + numbers[:-1]) / 2).astype(np.float32)
    halves = halves[~np.isinf(halves)]
    near = [np.nextafter(ties, np.float32(end)) for end in (0, 1e9)]
    x = np.concatenate([halves, ties, *near, -ties, np.float32([500.0, -1e9, np.nan])])
    bits = x.view(np.uint32)
    size = bits & 0x7FFFFFFF
    normal = (size + 0x7FFFF + (size >> 20 & 1)) >> 20
    tiny = (np.abs(x) + np.float32(16384)).view(np.uint32) & 0xFF
    code = np.minimum(np.where(size < 0x3C800000, tiny, normal - 960), 0x7E)
    found = np.where(size > 0x7F800000, 0x7F, code | bits >> 24 & 0x80)
    np.testing.assert_array_equal(found, float8.codes(x, "float8_e4m3fn"))
    finite = np.clip(x, -448, 448)
    by_torch = torch.from_numpy(finite).to(E4M3).view(torch.uint8).numpy()
    np.testing.assert_array_equal(found[~np.isnan(x)], by_torch[~np.isnan(x)])


@pytest.mark.sampled("sm_80-240-128", "sm_90a-128-None")
@pytest.mark.slow
@pytest.mark.parametrize(("head_dim", "block"), [(128, None), (240, 128)])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_kernels_spill_nothing(arch, head_dim, block):
    plan = planning.plan(arch, "bfloat16", head_dim, block=block, rotated=True, centred=True)
    compiled = nvrtc.compile(emit(plan), arch)
    assert compiled.resources.spills == 0 and compiled.performance_losses == ()


def test_python_counts_parameters_as_cuda_does():
    """Three tensors of addresses, strides and numbers, then signs; the compiler counts too."""
    plan = planning.plan("sm_90a", "bfloat16", 64, block=128, rotated=True, centred=False)
    rows = rows_of(drawn(1, 1, 20, 64))
    found = ops.packed(plan, [rows], [ops.told(plan, rows)], 0, 1)
    assert len(found) == params_bytes(plan) == ctypes.sizeof(ctypes.c_uint64) * 3 * (9 + 2 + 2) + 4 * 8
