"""activate(): who serves PyTorch's own calls, on an emulated GPU.

Its tensors lie on the CPU as PyTorch sees them, so the kernels are registered there; and PyTorch gives CPU tensors to
another operator, so those of the flash backend are called by name.
"""

import logging
import threading

import pytest
import torch
import torch.nn.functional as F
from emulated_gpu import OnGpu, install
from torch.nn import attention as providers
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import flashgen
from flashgen.errors import LaunchError
from flashgen.integrations import activation
from flashgen.ops.backward import Given, run_backward
from flashgen.ops.dropout import drawn

if not hasattr(providers, "restore_flash_attention_impl"):
    pytest.skip("this PyTorch takes no provider of its flash backend", allow_module_level=True)

SEED = 11

flash = torch.ops.aten._scaled_dot_product_flash_attention


@pytest.fixture
def gpu(monkeypatch):
    gpu = install(monkeypatch, (8, 0))
    monkeypatch.setattr(activation, "KEY", "CPU")
    monkeypatch.setattr(activation, "_told", set())
    monkeypatch.setattr(activation, "run_backward", lambda given, *others: run_backward(there(given), *others))
    # No CUDA generator is here to draw from.
    monkeypatch.setattr(activation, "drawn", lambda p, seed, like: drawn(p, SEED, like) if p else None)
    yield gpu
    while activation._active:
        flashgen.deactivate()
    if providers.current_flash_attention_impl() is not None:
        providers.restore_flash_attention_impl()


def there(given):
    """What autograd kept of a GPU's tensors, which says no longer where they lie."""
    return Given(*(x if x is None else x.as_subclass(OnGpu) for x in given))


class Other:
    """Another provider, in PyTorch's registry as "other": its results are 1, and its gradients 2."""

    def __init__(self):
        self.calls = []
        providers.register_flash_attention_impl("other", register_fn=self.register)

    def register(self):
        library = torch.library.Library("aten", "IMPL")
        library.impl("_scaled_dot_product_flash_attention", self.forward, "CPU")
        library.impl("_scaled_dot_product_flash_attention_backward", self.backward, "CPU")

        class Handle:
            def remove(self):
                library._destroy()

        return Handle()

    def forward(self, q, k, v, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
        self.calls.append("forward")
        state = torch.zeros(2, dtype=torch.uint64)
        lse = torch.ones(q.shape[:3])
        return torch.ones_like(q), lse, None, None, q.shape[2], k.shape[2], state, state[0], torch.empty(0)

    def backward(self, do, q, k, v, *others, scale=None):
        self.calls.append("backward")
        return tuple(torch.full_like(x, 2) for x in (q, k, v))


def inputs(gpu, *, q_len=33, kv_len=33, dim=32, heads=2, seed=0):
    random = torch.Generator().manual_seed(seed)
    shapes = (1, heads, q_len, dim), (1, heads, kv_len, dim), (1, heads, kv_len, dim)
    return [gpu.put(torch.randn(shape, generator=random).bfloat16()) for shape in shapes]


def plain(*tensors):
    return [x.as_subclass(torch.Tensor).float() for x in tensors]


def close(mine, right):
    torch.testing.assert_close(*plain(mine, right), rtol=0.03, atol=0.03)


def differentiated(gpu, result, tensors):
    do = torch.randn(result.shape, generator=torch.Generator().manual_seed(9)).bfloat16()
    return do, torch.autograd.grad(result, tensors, gpu.put(do))


def reference(tensors, do, **options):
    inputs = [x.detach().requires_grad_() for x in plain(*tensors)]
    with sdpa_kernel(SDPBackend.MATH):
        return torch.autograd.grad(F.scaled_dot_product_attention(*inputs, **options), inputs, do.float())


@pytest.mark.slow
def test_the_flash_backend_is_flashgen_s(gpu):
    q, k, v = inputs(gpu)
    with flashgen.activate():
        assert providers.current_flash_attention_impl() == "flashgen"
        o, lse, *_ = flash(q, k, v, is_causal=True, scale=0.3)
        assert flashgen.last_backend().name == "flashgen"
    close(o, F.scaled_dot_product_attention(*plain(q, k, v), is_causal=True, scale=0.3))
    assert lse.shape == (1, 2, 33) and len(gpu.launches) == 1
    assert providers.current_flash_attention_impl() is None


@pytest.mark.slow
def test_a_backward_is_of_whoever_ran_the_forward(gpu):
    other = Other()
    providers.activate_flash_attention_impl("other")
    tensors = [x.requires_grad_() for x in inputs(gpu)]
    with flashgen.activate():
        mine = flash(*tensors, is_causal=True)[0]
        do, first = differentiated(gpu, mine, tensors)
        again = flash(*tensors, is_causal=True)[0]
    theirs = flash(*tensors)[0]
    assert other.calls == ["forward"] and providers.current_flash_attention_impl() == "other"
    _, second = differentiated(gpu, again, tensors)
    for found in (first, second):
        for x, right in zip(found, reference(tensors, do, is_causal=True), strict=True):
            close(x, right)
    assert other.calls == ["forward"]
    with flashgen.activate():
        _, found = differentiated(gpu, theirs, tensors)
    assert other.calls == ["forward", "backward"] and all((x == 2).all() for x in found)


@pytest.mark.slow
def test_no_kernel_is_traced(gpu, monkeypatch):
    """A frame that dynamo gives up calls the operator at run time, and dynamo looks at all that it calls."""
    traced = []
    for name in ("run", "run_backward"):
        served = getattr(activation, name)
        watched = lambda *given, served=served: traced.append(torch.compiler.is_compiling()) or served(*given)  # noqa: E731
        monkeypatch.setattr(activation, name, watched)
    tensors, do = [x.requires_grad_() for x in inputs(gpu)], inputs(gpu, seed=1)[0]

    @torch.compiler.disable(recursive=False)
    def given_up():
        o, *_ = flash(*tensors)
        return o, *torch.autograd.grad(o, tensors, do)

    with flashgen.activate():
        right = given_up()
        found = torch.compile(lambda: given_up(), backend="eager")()
    assert traced == [False] * 4
    for mine, x in zip(found, right, strict=True):
        close(mine, x)


@pytest.mark.slow
def test_dropout_is_that_of_the_forward(gpu):
    tensors = [x.requires_grad_() for x in inputs(gpu)]
    with flashgen.activate():
        o, *_ = flash(*tensors, dropout_p=0.5)
    copies = [x.detach().requires_grad_() for x in plain(*tensors)]
    right = flashgen.attention(*copies, flashgen.load_spec("full"), dropout=0.5, seed=SEED)
    close(o, right.detach())
    do, found = differentiated(gpu, o, tensors)
    for x, want in zip(found, torch.autograd.grad(right, copies, do.float()), strict=True):
        close(x, want)


@pytest.mark.slow
def test_what_flashgen_lacks_goes_to_who_was_there(gpu, caplog):
    other = Other()
    providers.activate_flash_attention_impl("other")
    with flashgen.activate():
        for _ in range(2):
            assert (flash(*inputs(gpu, dim=12))[0] == 1).all()
        last = flashgen.last_backend()
        assert last.name == "torch" and "head_dim" in last.reason
        assert (flash(*inputs(gpu), 0.0, False, True)[0] == 1).all()
        assert flashgen.last_backend().reason == "a mask of what was dropped is asked for"
        flash(*inputs(gpu))
        assert flashgen.last_backend().name == "flashgen"
    assert other.calls == ["forward"] * 3
    told = [record.getMessage() for record in caplog.records if "not served by flashgen" in record.getMessage()]
    assert len(told) == 2 and last.reason in told[0]


def test_without_anybody_else_it_is_an_error(gpu):
    with flashgen.activate(), pytest.raises(flashgen.FlashgenError, match="head_dim"):
        flash(*inputs(gpu, dim=12))
    with flashgen.activate(), pytest.raises(LaunchError, match="nobody else is there: a mask of what was dropped"):
        flash(*inputs(gpu), 0.0, False, True)


def test_contexts_nest_and_bring_back_who_was_there(gpu):
    Other()
    providers.activate_flash_attention_impl("other")
    with flashgen.activate():
        with flashgen.activate(), flashgen.activate(patch=True):
            assert providers.current_flash_attention_impl() == "flashgen"
        assert providers.current_flash_attention_impl() == "flashgen"
        flashgen.activate()
        flashgen.deactivate()
        assert providers.current_flash_attention_impl() == "flashgen"
    assert providers.current_flash_attention_impl() == "other"
    flashgen.deactivate()  # nothing holds
    flashgen.activate()
    with flashgen.activate():
        flashgen.deactivate()
        flashgen.deactivate()
        assert providers.current_flash_attention_impl() == "other"
    assert providers.current_flash_attention_impl() == "other" and activation._active == []


@pytest.mark.parametrize("patch", [False, True])
def test_a_context_holds_each_time_that_it_is_entered(gpu, patch):
    before = F.scaled_dot_product_attention

    def active():
        if patch:
            return F.scaled_dot_product_attention is not before
        return providers.current_flash_attention_impl() == activation.PROVIDER

    context = flashgen.activate(patch=patch)
    for _ in range(2):
        with context:
            assert active()
            with context:
                assert active()
            assert active()
        assert not active() and activation._active == []
    with context:
        flashgen.deactivate()
        assert not active()
    assert not active()


def test_a_provider_that_is_chosen_meanwhile_stays(gpu):
    other = Other()
    with flashgen.activate():
        providers.activate_flash_attention_impl("other")
        flash(*inputs(gpu))
    assert other.calls == ["forward"] and providers.current_flash_attention_impl() == "other"


@pytest.mark.slow
def test_threads_and_what_each_of_them_ran(gpu):
    """The kernels are the process's, the note of what ran is the thread's."""
    Other()
    providers.activate_flash_attention_impl("other")
    seen = {}

    def call(dim):
        flash(*inputs(gpu, dim=dim, seed=dim))
        seen[dim] = flashgen.last_backend().name

    with flashgen.activate():
        flash(*inputs(gpu, dim=12))
        for dim in (32, 20):
            thread = threading.Thread(target=call, args=(dim,))
            thread.start()
            thread.join()
        assert seen == {32: "flashgen", 20: "torch"} and flashgen.last_backend().name == "torch"


@pytest.mark.sampled("33-20")
@pytest.mark.slow
@pytest.mark.parametrize(("q_len", "kv_len"), [(20, 33), (33, 20)])
def test_causal_where_lengths_differ(gpu, q_len, kv_len):
    """The function counts from the first positions, the flash backend's operator from the last."""
    q, k, v = inputs(gpu, q_len=q_len, kv_len=kv_len)
    with flashgen.activate():
        o, *_ = flash(q, k, v, is_causal=True)
    rows, columns = torch.arange(q_len)[:, None], torch.arange(kv_len)
    close(o, F.scaled_dot_product_attention(*plain(q, k, v), columns <= rows + kv_len - q_len))
    with flashgen.activate(patch=True):
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    close(o, F.scaled_dot_product_attention(*plain(q, k, v), columns <= rows))


@pytest.mark.slow
def test_the_patched_function(gpu, caplog):
    q, k, v = inputs(gpu)
    mask = gpu.put(torch.randn(33, 33).bfloat16() > 0)
    before = F.scaled_dot_product_attention
    with flashgen.activate(patch=True):
        assert F.scaled_dot_product_attention is not before
        close(F.scaled_dot_product_attention(q, k, v, mask), before(*plain(q, k, v), mask.as_subclass(torch.Tensor)))
        assert flashgen.last_backend().name == "flashgen" and len(gpu.launches) == 2  # extremes of the mask first
        torch.testing.assert_close(F.scaled_dot_product_attention(*plain(q, k, v)), before(*plain(q, k, v)))
        assert flashgen.last_backend().reason == "tensors are not on a GPU"
        narrow = inputs(gpu, dim=12)
        close(F.scaled_dot_product_attention(*narrow), before(*plain(*narrow)))
        assert flashgen.last_backend().reason == "a head dim is 12, not 16 to 256 in steps of 8"
        assert not F.scaled_dot_product_attention(q, k, v, dropout_p=1.0).any()
        assert flashgen.last_backend().reason.startswith("dropout is 1.0: the probability of dropping lies in [0, 1)")
        with flashgen.activate(patch=True):
            pass
        assert F.scaled_dot_product_attention is not before
    assert F.scaled_dot_product_attention is before
    said = "torch.nn.functional.scaled_dot_product_attention is flashgen's in this process until deactivate()"
    assert [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING].count(said) == 1


@pytest.mark.sampled(q_len=(17,))
@pytest.mark.parametrize(("q_len", "kv_len"), [(33, 33), (17, 33)])
@pytest.mark.parametrize("make", [causal_upper_left, causal_lower_right])
def test_causal_biases_under_the_patch(gpu, make, q_len, kv_len):
    """They ask whether a function is torch.nn.functional's: of PyTorch's own, their memory was read."""
    q, k, v = inputs(gpu, q_len=q_len, kv_len=kv_len)
    bias = make(q_len, kv_len)
    right = F.scaled_dot_product_attention(*plain(q, k, v), bias)
    with flashgen.activate(patch=True):
        found = F.scaled_dot_product_attention(*plain(q, k, v), bias)
        assert type(found) is torch.Tensor and not gpu.launches
        torch.testing.assert_close(found, right)
        close(F.scaled_dot_product_attention(q, k, v, bias), right)
        assert len(gpu.launches) == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_graphs_of_torch_jit_hold_pytorch_s_function(gpu):
    tensors = inputs(gpu)
    right = F.scaled_dot_product_attention(*plain(*tensors), is_causal=True)
    with flashgen.activate(patch=True):
        traced, scripted = torch.jit.trace(causal, tensors, check_trace=False), torch.jit.script(causal)
        assert flashgen.last_backend().reason == "torch.jit.trace holds no call of flashgen"
        for graph in (traced, scripted):
            assert "aten::scaled_dot_product_attention" in str(graph.graph)
            torch.testing.assert_close(graph(*plain(*tensors)), right)
    assert not gpu.launches


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def test_a_patch_of_somebody_else_s_stays(gpu, monkeypatch):
    before = F.scaled_dot_product_attention
    q, k, v = plain(*inputs(gpu))
    with flashgen.activate(patch=True):
        patched = F.scaled_dot_product_attention
        monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *x: patched(*x) + 1)
    torch.testing.assert_close(F.scaled_dot_product_attention(q, k, v), before(q, k, v) + 1)


def test_an_older_pytorch_is_told_what_it_lacks(gpu, monkeypatch):
    monkeypatch.delattr(providers, "restore_flash_attention_impl")
    with pytest.raises(LaunchError, match=r"2.11 is the first that does\n  nearest: flashgen.activate\(patch=True\)"):
        flashgen.activate()
    assert activation._active == []
    with pytest.raises(LaunchError, match="patch is a int"):
        flashgen.activate(patch=1)
