"""Tensors that are nested, sparse or of oneDNN, as every argument of every entrance: refused by the argument's name."""

import re

import pytest
import torch

import flashgen as fg
from flashgen.compat import flash_attn, vllm
from flashgen.errors import LaunchError

causal = fg.variant(lambda b, h, q, k: k <= q, name="causal_of_layouts")


def ints(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


ROWS = torch.zeros(2, 4, 40, 16)
HALVES = torch.zeros(2, 4, 40, 64, dtype=torch.bfloat16)
LAST = torch.zeros(2, 40, 4, 16)
JOINED = torch.zeros(40, 4, 16)
CODES = torch.zeros(2, 4, 40, 64).to(torch.float8_e4m3fn)
CACHE = torch.zeros(8, 16, 4, 16)
TABLE = torch.tensor([[1, 2], [3, 4]], dtype=torch.int32)
STARTS, LENGTHS = ints(0, 10, 40), ints(4, 5)
ANGLES = torch.zeros(40, 32)
ONE = torch.ones(1)


def attend(**given):
    return fg.attention(ROWS, ROWS, ROWS, causal, **given)


def varlen(**given):
    starts = {"cu_seqlens_q": STARTS, "cu_seqlens_k": STARTS} | given
    return fg.attention_varlen(JOINED, JOINED, JOINED, causal, **starts, max_seqlen_q=30)


def in_pages(k=CACHE, page_table=TABLE):
    return fg.attention(ROWS, k, CACHE, causal, page_table=page_table, kv_lengths=LENGTHS)


def eight_bits(**given):
    descales = {"q_descale": ONE, "k_descale": ONE, "v_descale": ONE} | given
    return fg.attention(CODES, CODES, CODES, causal, **descales)


def quantize(**given):
    return fg.quantize(HALVES, HALVES, HALVES, **given)


#: What the argument is called in what is said, one that is right, and a call with it.
ARGUMENTS = {
    "kv_lengths": (LENGTHS, lambda x: attend(kv_lengths=x)),
    "q_lengths": (LENGTHS, lambda x: attend(q_lengths=x)),
    "q_offset": (LENGTHS, lambda x: attend(q_offset=x)),
    "cu_seqlens_q": (STARTS, lambda x: varlen(cu_seqlens_q=x)),
    "cu_seqlens_k": (STARTS, lambda x: varlen(cu_seqlens_k=x)),
    "page_table": (TABLE, lambda x: in_pages(page_table=x)),
    "k": (CACHE, lambda x: in_pages(k=x)),
    "q_descale": (ONE, lambda x: eight_bits(q_descale=x)),
    "k_descale": (ONE, lambda x: eight_bits(k_descale=x)),
    "cos": (ANGLES, lambda x: quantize(cos=x, sin=ANGLES)),
    "sin": (ANGLES, lambda x: quantize(cos=ANGLES, sin=x)),
    "smooth_k": (torch.zeros(2, 4, 64), lambda x: quantize(smooth_k=x)),
    "quantize's q_lengths": (LENGTHS, lambda x: quantize(q_lengths=x, kv_lengths=LENGTHS)),
    "flash_attn's cache_seqlens": (LENGTHS, lambda x: flash_attn.flash_attn_with_kvcache(*[LAST] * 3, cache_seqlens=x)),
    "flash_attn's block_table": (
        TABLE,
        lambda x: flash_attn.flash_attn_varlen_func(JOINED, CACHE, CACHE, STARTS, STARTS, 30, 30, block_table=x),
    ),
    "flash_attn's cu_seqlens_k": (
        STARTS,
        lambda x: flash_attn.flash_attn_varlen_func(JOINED, CACHE, CACHE, STARTS, x, 30, 30, block_table=TABLE),
    ),
    "vLLM's k": (
        CACHE,
        lambda x: vllm.flash_attn_varlen_func(JOINED, x, CACHE, 30, STARTS, 30, seqused_k=LENGTHS, block_table=TABLE),
    ),
}
LAYOUTS = {
    "nested": lambda x: torch.nested.nested_tensor([x, x]),
    "jagged": lambda x: torch.nested.nested_tensor([x, x], layout=torch.jagged),
    "sparse_coo": torch.Tensor.to_sparse,
    "sparse_csr": lambda x: x.reshape(1, -1).to_sparse_csr(),
    "_mkldnn": torch.Tensor.to_mkldnn,
}


@pytest.mark.filterwarnings("ignore")  # torch's, of prototypes
@pytest.mark.parametrize(
    ("argument", "layout"),
    [
        (argument, layout)
        for argument, (given, _) in ARGUMENTS.items()
        for layout in LAYOUTS
        if layout != "_mkldnn" or given.is_floating_point()  # oneDNN has floats alone
    ],
)
def test_an_argument_is_named_that_lies_otherwise(argument, layout):
    given, call = ARGUMENTS[argument]
    call(given)
    name = argument.rpartition(" ")[2]
    said = "nested" if layout == "jagged" else layout
    with pytest.raises(
        LaunchError, match=rf"^{re.escape(name)} is {said}: .* takes dense tensors\n  nearest: .*{name}"
    ):
        call(LAYOUTS[layout](given))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("said", "call"),
    [
        ("flash_attn_func: q", lambda x: flash_attn.flash_attn_func(x(LAST), LAST, LAST)),
        ("qkv", lambda x: flash_attn.flash_attn_qkvpacked_func(x(torch.zeros(2, 40, 3, 4, 16)))),
        ("k_cache", lambda x: flash_attn.flash_attn_with_kvcache(LAST, x(LAST), LAST, cache_seqlens=4)),
        ("flash_attn_with_kvcache: k", lambda x: flash_attn.flash_attn_with_kvcache(LAST, x(LAST), LAST)),
    ],
)
def test_nested_tensors_without_a_shape_are_refused_by_flash_attn(said, call):
    with pytest.raises(
        LaunchError, match=f"^{said} is nested: flash_attn takes dense tensors\n  nearest: flash_attn_va"
    ):
        call(LAYOUTS["nested"])


@pytest.mark.parametrize("dtype", [torch.complex64, torch.bool, torch.uint32, torch.int64])
def test_a_mean_has_real_floats(dtype):
    with pytest.raises(
        LaunchError, match=rf"^smooth_k is {str(dtype)[6:]}: a mean has real floats\n  nearest: smooth_k"
    ):
        quantize(smooth_k=torch.zeros(2, 4, 64).to(dtype))
    quantize(smooth_k=torch.zeros(2, 4, 64, dtype=torch.float64))
