"""quantize() on a GPU: the bits of the CPU, whatever the layout, and in a CUDA graph."""

import pytest
import torch

import flashgen

pytestmark = pytest.mark.gpu


def inputs(length, head_dim, dtype, layout="bshd"):
    generator = torch.Generator("cuda").manual_seed(length + head_dim)

    def drawn(heads, n):
        shape = (2, n, heads, head_dim) if layout == "bshd" else (2, heads, n, head_dim)
        x = torch.randn(shape, device="cuda", dtype=dtype, generator=generator)
        return x.transpose(1, 2) if layout == "bshd" else x

    return drawn(8, length), drawn(2, length + 65), drawn(2, length + 65)


def fields(found):
    of = found.q, found.k, found.v, found.q_descale, found.k_descale, found.v_descale
    return [x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x for x in of]


@pytest.mark.parametrize("options", [{}, {"hadamard": False}, {"smooth_k": True}], ids=str)
@pytest.mark.parametrize("block", [None, 128, 512])
@pytest.mark.parametrize("head_dim", [16, 64, 96, 128, 192, 240, 256])
def test_the_bits_are_those_of_the_cpu(head_dim, block, options):
    for length, dtype, layout in (
        (1, torch.bfloat16, "bhsd"),
        (1000, torch.bfloat16, "bshd"),
        (777, torch.float16, "bhsd"),
    ):
        q, k, v = inputs(length, head_dim, dtype, layout)
        v[0, 1, 0, 3], q[1, 2, 0, 5] = torch.nan, torch.inf
        options = {"seed": 7, **options} if options.get("hadamard", True) else options
        mine = flashgen.quantize(q, k, v, block=block, **options)
        # A mean that is given is no sum of the GPU's.
        given = {**options, "smooth_k": mine.k_mean.cpu()} if "smooth_k" in options else options
        right = flashgen.quantize(q.cpu(), k.cpu(), v.cpu(), block=block, **given)
        for ours, wanted in zip(fields(mine), fields(right), strict=True):
            assert torch.equal(ours.cpu(), wanted)
        assert mine.q.stride() == q.stride()


def angles(length, head_dim, form):
    """cos and sin of positions, [length, columns] or [2, length, columns]."""
    at = torch.arange(length, device="cuda", dtype=torch.float32)
    at = torch.stack([at, at + 1000]) if form.get("batch") else at
    turns = at[..., None] * 1e4 ** (-torch.arange(head_dim // 2, device="cuda") / (head_dim / 2))
    if form.get("wide"):
        turns = turns.repeat_interleave(2, -1) if form.get("interleaved") else torch.cat([turns, turns], -1)
    dtype = form.get("dtype", torch.float32)
    return turns.cos().to(dtype), turns.sin().to(dtype)


@pytest.mark.parametrize(
    "form",
    [
        {},
        {"wide": True, "dtype": torch.bfloat16, "batch": True},
        {"interleaved": True},
        {"interleaved": True, "wide": True, "dtype": torch.float16, "batch": True},
        {"interleaved": True, "dtype": torch.bfloat16},
    ],
    ids=str,
)
@pytest.mark.parametrize("block", [None, 128, 512])
@pytest.mark.parametrize("head_dim", [16, 32, 64, 80, 96, 128, 160, 192, 224, 240, 256])
def test_rows_that_turn_have_the_bits_of_the_cpu(head_dim, block, form):
    interleaved = form.get("interleaved", False)
    for length, dtype, layout in ((1, torch.bfloat16, "bhsd"), (777, torch.float16, "bshd")):
        q, k, v = inputs(length, head_dim, dtype, layout)
        q[1, 2, 0, 5] = torch.inf
        of_q, of_k = (angles(x.shape[2], head_dim, form) for x in (q, k))
        mine, right = (
            flashgen.quantize(
                *(x.to(device) for x in (q, k, v)),
                cos=tuple(x[0].to(device) for x in (of_q, of_k)),
                sin=tuple(x[1].to(device) for x in (of_q, of_k)),
                block=block,
                interleaved=interleaved,
            )
            for device in ("cuda", "cpu")
        )
        for ours, wanted in zip(fields(mine), fields(right), strict=True):
            assert torch.equal(ours.cpu(), wanted)


def test_turned_rows_against_float64():
    q, k, v = inputs(1000, 128, torch.bfloat16)
    q, half = torch.randn(2, 8, 1065, 128, device="cuda").bfloat16(), 64
    cos, sin = angles(1065, 128, {"wide": True})
    x = flashgen.quantize(q, k, v, block=128, cos=cos, sin=sin, hadamard=False)
    for of, codes, descale in ((q, x.q, x.q_descale), (k, x.k, x.k_descale)):
        wide = of.double()
        right = wide * cos + torch.cat([-wide[..., half:], wide[..., :half]], -1) * sin
        found = codes.double() * descale.repeat_interleave(128, -1)[..., :1065, None]
        assert float((found - right).norm() / right.norm()) < 0.04


def test_a_cuda_graph_turns_by_what_angles_hold_then():
    q, k, v = inputs(500, 128, torch.bfloat16)
    q = torch.randn(2, 8, 565, 128, device="cuda").bfloat16()
    cos, sin = angles(565, 128, {"dtype": torch.bfloat16})
    given = {"cos": cos, "sin": sin, "block": 128, "smooth_k": True}
    flashgen.quantize(q, k, v, **given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = flashgen.quantize(q, k, v, **given)
    cos.copy_(-sin), q.mul_(3)
    graph.replay()
    for ours, wanted in zip(fields(found), fields(flashgen.quantize(q, k, v, **given)), strict=True):
        assert torch.equal(ours, wanted)


def test_a_cuda_graph_quantises_what_tensors_hold_then():
    q, k, v = inputs(500, 128, torch.bfloat16)
    lse = torch.zeros(q.shape[:3], device="cuda")
    for block in (None, 128):
        flashgen.quantize(q, k, v, block=block, smooth_k=True).corrected_lse(lse, q)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = flashgen.quantize(q, k, v, block=block, smooth_k=True)
            signs, corrected = found.signs, found.corrected_lse(lse, q)
        q.mul_(3)
        graph.replay()
        right = flashgen.quantize(q, k, v, block=block, smooth_k=True)
        for ours, wanted in zip(fields(found), fields(right), strict=True):
            assert torch.equal(ours, wanted)
        assert torch.equal(signs, right.signs) and torch.equal(corrected, right.corrected_lse(lse, q))


def behind_each_other(lengths, kv_lengths, head_dim):
    """Rows of q, k and v, with five of no sequence at either end, and where sequences begin."""
    generator = torch.Generator("cuda").manual_seed(head_dim)
    rows = []
    for heads, of in ((8, lengths), (2, kv_lengths), (2, kv_lengths)):
        x = torch.randn(sum(of) + 10, heads, head_dim, device="cuda", generator=generator).bfloat16()
        x[:5], x[-5:] = torch.nan, torch.inf
        rows.append(x)
    starts = [
        torch.tensor([0, *of], dtype=torch.int32, device="cuda").cumsum(0).to(torch.int32) + 5
        for of in (lengths, kv_lengths)
    ]
    return rows, dict(zip(("cu_seqlens_q", "cu_seqlens_k"), starts, strict=True))


@pytest.mark.parametrize("block", [None, 128, 512])
@pytest.mark.parametrize("head_dim", [16, 64, 128, 256])
def test_sequences_behind_each_other_have_the_bits_of_the_cpu(head_dim, block):
    """Many short ones beside long ones, bounds that are loose, and angles."""
    lengths = [1000, 0, 1, 300] + [3] * 70
    (q, k, v), starts = behind_each_other(lengths, lengths[::-1], head_dim)
    cos, sin = angles(2000, head_dim, {})
    given = {**starts, "max_seqlen_q": 1500, "cos": cos, "sin": sin, "block": block, "smooth_k": True}
    mine = flashgen.quantize(q, k, v, **given)
    given |= {"smooth_k": mine.k_mean}
    there = {name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in given.items()}
    right = flashgen.quantize(q.cpu(), k.cpu(), v.cpu(), **there)
    for ours, wanted in zip(fields(mine), fields(right), strict=True):
        inside = slice(5, -5) if ours.dtype == torch.uint8 else slice(None)  # other codes are not written
        assert torch.equal(ours[inside].cpu(), wanted[inside])
    found = flashgen.quantize(q.cpu(), k.cpu(), v.cpu(), **{**there, "smooth_k": True})
    torch.testing.assert_close(mine.k_mean.cpu(), found.k_mean, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("block", [None, 128])
def test_padded_sequences_have_the_bits_of_the_cpu(block):
    q, k, v = inputs(700, 128, torch.bfloat16)
    given = {"q_lengths": torch.tensor([0, 333]), "kv_lengths": torch.tensor([765, 130])}
    given = {name: x.to("cuda", torch.int32) for name, x in given.items()}
    mine = flashgen.quantize(q, k, v, block=block, smooth_k=True, **given)
    there = {name: x.cpu() for name, x in given.items()}
    right = flashgen.quantize(q.cpu(), k.cpu(), v.cpu(), block=block, smooth_k=mine.k_mean.cpu(), **there)
    for b, lengths in enumerate(zip(*(x.tolist() for x in there.values()), strict=True)):
        for ours, wanted, n in zip(fields(mine)[:3], fields(right)[:3], (*lengths, lengths[1]), strict=True):
            assert torch.equal(ours[b, :, :n].cpu(), wanted[b, :, :n])
    for ours, wanted in zip(fields(mine)[3:], fields(right)[3:], strict=True):
        assert torch.equal(ours.cpu(), wanted)


@pytest.mark.parametrize("block", [None, 128])
def test_a_cuda_graph_reads_lengths_as_they_are_then(block):
    """Nothing is waited for, or the capture would fail."""
    (q, k, v), starts = behind_each_other([500, 20, 300], [500, 20, 300], 128)
    given = {**starts, "max_seqlen_q": 600, "block": block, "smooth_k": True}
    flashgen.quantize(q, k, v, **given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = flashgen.quantize(q, k, v, **given)
    for x in starts.values():
        x.copy_(torch.tensor([5, 5, 605, 825]))
    graph.replay()
    right = flashgen.quantize(q, k, v, **{**given, "smooth_k": found.k_mean.clone()})
    for ours, wanted in zip(fields(found), fields(right), strict=True):
        inside = slice(5, -5) if ours.dtype == torch.uint8 else slice(None)
        assert torch.equal(ours[inside], wanted[inside])
