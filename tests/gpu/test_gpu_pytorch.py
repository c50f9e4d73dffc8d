"""PyTorch's own calls and those of other packages on a real GPU: dispatch, graphs, and models of transformers."""

import threading

import pytest
import torch
import torch.nn.functional as F
from gpu_checks import DEVICE
from torch.nn import attention as providers
from torch.nn.attention import SDPBackend, sdpa_kernel

import flashgen
from flashgen.compat.flash_attn import flash_attn_func, flash_attn_with_kvcache

pytestmark = pytest.mark.gpu

provided = pytest.mark.skipif(
    not hasattr(providers, "restore_flash_attention_impl"), reason="this PyTorch takes no provider of its flash backend"
)


@pytest.fixture(autouse=True)
def nothing_holds():
    yield
    flashgen.deactivate()


def tensors(q_len=300, kv_len=300, heads=4, kv_heads=4, dim=64, dtype=torch.bfloat16):
    torch.manual_seed(0)
    shapes = (2, heads, q_len, dim), (2, kv_heads, kv_len, dim), (2, kv_heads, kv_len, dim)
    return [torch.randn(shape, device=DEVICE, dtype=dtype, requires_grad=True) for shape in shapes]


def exact(call, inputs, do):
    """Result and gradients of a call in float32, by PyTorch's math backend."""
    inputs = [x.detach().float().requires_grad_() for x in inputs]
    with sdpa_kernel(SDPBackend.MATH):
        o = call(*inputs)
    return o.detach(), *torch.autograd.grad(o, inputs, do.float())


def close(found, right):
    for mine, want in zip(found, right, strict=True):
        torch.testing.assert_close(mine.detach().float(), want, rtol=0.03, atol=0.03)


def run(call, inputs):
    o = call(*inputs)
    do = torch.randn_like(o)
    return do, (o, *torch.autograd.grad(o, inputs, do))


def causal(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


@provided
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("compiled", [False, True])
def test_the_flash_backend(compiled, kv_heads):
    inputs = tensors(kv_heads=kv_heads)
    call = torch.compile(causal) if compiled else causal
    with flashgen.activate(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        do, found = run(call, inputs)
        assert flashgen.last_backend().name == "flashgen"
    close(found, exact(causal, inputs, do))


@provided
def test_a_backward_after_deactivate_and_dropout():
    inputs = tensors()
    full = flashgen.load_spec("full")
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        flashgen.activate()
        torch.manual_seed(5)
        o = F.scaled_dot_product_attention(*inputs, dropout_p=0.3)
        flashgen.deactivate()
        before = F.scaled_dot_product_attention(*inputs)
        do = torch.randn_like(o)
        found = torch.autograd.grad(o, inputs, do)
        with flashgen.activate():
            torch.autograd.grad(before, inputs, do)
    torch.manual_seed(5)
    mine = flashgen.attention(*inputs, full, dropout=0.3)
    torch.testing.assert_close(o, mine)
    torch.testing.assert_close(found, torch.autograd.grad(mine, inputs, do), rtol=0.02, atol=0.02)


@provided
def test_what_flashgen_lacks_goes_to_pytorch():
    inputs = tensors(dim=8)
    with flashgen.activate(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        do, found = run(causal, inputs)
        assert flashgen.last_backend().name == "torch" and "head_dim" in flashgen.last_backend().reason
    close(found, exact(causal, inputs, do))


@provided
def test_threads():
    inputs = tensors()
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        want = causal(*inputs)
    failed = []

    def work():
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            for _ in range(20):
                torch.testing.assert_close(causal(*inputs), want, rtol=0.02, atol=0.02)
        if flashgen.last_backend().name != "flashgen":
            failed.append(flashgen.last_backend())

    with flashgen.activate():
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failed == []


@pytest.mark.parametrize("kind", [torch.bool, torch.bfloat16])
@pytest.mark.parametrize("compiled", [False, True])
def test_the_patched_function_takes_masks(compiled, kind):
    inputs, mask = tensors(200, 300), (torch.randn(2, 1, 200, 300, device=DEVICE) + 0.5).to(kind)

    def masked(q, k, v):
        given = mask if kind is torch.bool else mask.to(q.dtype)
        return F.scaled_dot_product_attention(q, k, v, given)

    with flashgen.activate(patch=True):
        do, found = run(torch.compile(masked) if compiled else masked, inputs)
    close(found, exact(masked, inputs, do))


def test_flash_attn():
    inputs = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in tensors(200, 300)]

    def banded(q, k, v):
        if q.dtype != torch.float32:
            return flash_attn_func(q, k, v, causal=True, window_size=(50, 0))
        far = torch.arange(300, device=DEVICE) - torch.arange(200, device=DEVICE)[:, None] - 100
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, (far <= 0) & (far >= -50)).transpose(1, 2)

    do, found = run(banded, inputs)
    close(found, exact(banded, inputs, do))
    lengths = torch.tensor([300, 120], device=DEVICE, dtype=torch.int32)
    q, k, v = (x.detach() for x in inputs)
    o = flash_attn_with_kvcache(q[:, :1], k, v, cache_seqlens=lengths, causal=True)
    torch.testing.assert_close(o[1:], flash_attn_func(q[1:, :1], k[1:, :120], v[1:, :120]), rtol=0.02, atol=0.02)


def test_a_cuda_graph():
    q, k, v = (x.detach() for x in tensors())
    mask = torch.rand(300, 300, device=DEVICE) > 0.2
    call = flashgen.scaled_dot_product_attention
    call(q, k, v, mask)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = call(q, k, v, mask)
    mask.logical_not_()
    graph.replay()
    torch.testing.assert_close(o, call(q, k, v, mask), rtol=0, atol=0)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_a_model_of_transformers(cache):
    """A static cache is compiled, with its CUDA graphs."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    from flashgen.integrations.transformers import register

    sizes = {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    config = transformers.LlamaConfig(**sizes, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).to(DEVICE, torch.bfloat16).eval()
    ids = torch.randint(3, 64, (2, 100), device=DEVICE)
    seen = torch.ones_like(ids)
    seen[0, :30] = 0
    logits = []
    for name in ("eager", register()):
        model.set_attn_implementation(name)
        logits.append(model(ids, attention_mask=seen).logits[seen.bool()].float())
    torch.testing.assert_close(*logits, rtol=0.05, atol=0.02)
    options = {"cache_implementation": "static"} if cache == "static" else {}
    made = model.generate(ids, attention_mask=seen, max_new_tokens=20, do_sample=False, **options)
    assert made.shape[1] > ids.shape[1] and flashgen.last_backend().call == "fg_attention"
