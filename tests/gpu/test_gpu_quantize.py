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
        mine = flashgen.quantize(q, k, v, block=block, seed=7, **options)
        # A mean that is given is no sum of the GPU's.
        given = {**options, "smooth_k": mine.k_mean.cpu()} if "smooth_k" in options else options
        right = flashgen.quantize(q.cpu(), k.cpu(), v.cpu(), block=block, seed=7, **given)
        for ours, wanted in zip(fields(mine), fields(right), strict=True):
            assert torch.equal(ours.cpu(), wanted)
        assert mine.q.stride() == q.stride()


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
