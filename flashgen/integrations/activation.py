"""activate(): PyTorch's own calls of attention, served by flashgen in the whole process.

PyTorch lets a provider take the place of its flash backend.  flashgen's kernels lie over those that were there, which
get what flashgen lacks.  A forward marks what it keeps for its backward, so that a backward finds whoever ran it: the
kernel of backwards stays when the forward's goes.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn import attention as providers

from flashgen.errors import LaunchError, PlanError
from flashgen.integrations import sdpa
from flashgen.integrations.backends import note
from flashgen.locks import Lock
from flashgen.ops.backward import Given, run_backward
from flashgen.ops.call import GPU_DTYPES, Call
from flashgen.ops.dropout import drawn
from flashgen.ops.forward import run
from flashgen.ops.tracing import watched
from flashgen.ops.values import no_flag
from flashgen.runtime.philox import Dropout

#: What PyTorch's registry calls flashgen.
PROVIDER = "flashgen"

FORWARD = "_scaled_dot_product_flash_attention"
BACKWARD = "_scaled_dot_product_flash_attention_backward"

#: The tensors that the flash backend gets.
KEY = "CUDA"

#: What a forward of flashgen's keeps its seed and offset in, bit by bit: that of others is of integers.
MARK = torch.float64

_log = logging.getLogger("flashgen")
_lock = Lock(threading.RLock)

#: Reasons that were logged.
_told: set[str] = set()
MAX_TOLD = 256


class Activation:
    """What `activate` gives: a context, at whose end it is taken back; entered again, it holds again."""

    def __init__(self, patch: bool) -> None:
        self._patch = patch
        self._entered = 0

    def __enter__(self) -> Activation:
        with _lock:
            if self not in _active:
                _begin(self)
            self._entered += 1
        return self

    def __exit__(self, *_: object) -> None:
        with _lock:
            self._entered = max(self._entered - 1, 0)
            if not self._entered and self in _active:
                _end(self)


#: Those that hold, in the order they came.
_active: list[Activation] = []


def activate(patch: bool = False) -> Activation:
    """Have flashgen serve PyTorch's own calls of attention, in the whole process and all its threads.

    It takes the place of PyTorch's flash backend: calls of scaled_dot_product_attention on a GPU that PyTorch gives to
    that one, which has no attn_mask.  With `patch` it takes the place of torch.nn.functional's function instead, for
    masks too; names that other modules imported from there before stay PyTorch's.  What flashgen does not serve goes to
    whoever served it before, with the reason in `last_backend()` and, the first time, in the logger "flashgen".

    Use it as a context, or call `deactivate`; both may nest.  Raises LaunchError where PyTorch takes no provider.
    """
    if wrong := no_flag("patch", patch):
        raise LaunchError(wrong)
    activation = Activation(patch)
    with _lock:
        _begin(activation)
    return activation


def deactivate() -> None:
    """Take back the last `activate` that holds, if any; the provider that was active before it is active again.

    Backwards of calls that flashgen served stay flashgen's.
    """
    with _lock:
        if _active:
            _end(_active[-1])


def _begin(activation: Activation) -> None:
    if not any(other._patch == activation._patch for other in _active):
        (_patch if activation._patch else _provide)()
    _active.append(activation)


def _end(activation: Activation) -> None:
    _active.remove(activation)
    if not any(other._patch == activation._patch for other in _active):
        (_unpatch if activation._patch else _withdraw)()


def _elsewhere(reason: str) -> None:
    """Note, and log the first time, that flashgen does not serve a call."""
    note(sdpa.NAME, reason=reason)
    if reason not in _told and len(_told) < MAX_TOLD:
        _told.add(reason)
        _log.warning("scaled_dot_product_attention is not served by flashgen: %s", reason)


# ---------------------------------------------------------------------------------------------------------------------
# As a provider of PyTorch's flash backend


class _Kernel:
    """A Python kernel over the one that an operator had; `before` runs that one."""

    def __init__(self, operator: str, kernel: Callable[..., Any]) -> None:
        try:
            before = torch.library.get_kernel(f"aten::{operator}", KEY)
        except RuntimeError:
            before = None  # a build without CUDA has none
        self._library = torch.library.Library("aten", "IMPL")
        # Dynamo would trace it where a frame that it gave up calls the operator, and kernels read addresses.
        untraced = torch.compiler.disable(functools.partial(kernel, before))
        self._library.impl(operator, untraced, KEY, with_keyset=True, allow_override=True)

    def remove(self) -> None:
        self._library._destroy()


class _Provider:
    """The handle that PyTorch's registry keeps while flashgen is active."""

    def __init__(self) -> None:
        register = _registered(_previous) if _previous is not None else None
        self._beneath = register() if register is not None else None
        self._forward = _Kernel(FORWARD, _forward)
        _renew_backward()

    def remove(self) -> None:
        self._forward.remove()
        if self._beneath is not None:
            self._beneath.remove()
        _renew_backward()


#: The provider that was active before flashgen.
_previous: str | None = None

#: Stays when flashgen is no longer active.
_backwards: _Kernel | None = None


def _renew_backward() -> None:
    """Lay flashgen's kernel of backwards over whichever is there now."""
    global _backwards
    if _backwards is not None:
        _backwards.remove()
    _backwards = _Kernel(BACKWARD, _backward)


def _registered(provider: str) -> Callable[[], Any] | None:
    """What activates a provider of PyTorch's registry, which it keeps to itself."""
    from torch.nn.attention import _registry

    found: Callable[[], Any] | None = _registry._FLASH_ATTENTION_IMPLS.get(provider)
    return found


def _provide() -> None:
    global _previous
    wanted = ("register", "activate", "current", "restore")
    if not all(hasattr(providers, f"{verb}_flash_attention_impl") for verb in wanted):
        raise LaunchError(
            f"PyTorch {torch.__version__} takes no other provider of its flash backend: 2.11 is the first that does\n"
            "  nearest: flashgen.activate(patch=True), or a call of flashgen.scaled_dot_product_attention"
        )
    _previous = providers.current_flash_attention_impl()
    providers.register_flash_attention_impl(PROVIDER, register_fn=_Provider)
    providers.activate_flash_attention_impl(PROVIDER)


def _withdraw() -> None:
    if providers.current_flash_attention_impl() != PROVIDER:
        return  # somebody has chosen another one meanwhile
    providers.restore_flash_attention_impl()
    if _previous is not None:
        providers.activate_flash_attention_impl(_previous)
        _renew_backward()


def _forward(
    before: Any,
    keys: torch._C.DispatchKeySet,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
    **others: Any,
) -> Any:
    """The flash backend's forward: as flashgen's, or as that of `before` with the reason."""
    asked = [name for name, value in others.items() if value is not None]
    reason = "a mask of what was dropped is asked for" if return_debug_mask else None
    if asked:
        reason = f"PyTorch gives its flash backend {', '.join(asked)}"
    if reason is None:
        try:
            found = _served(query, key, value, dropout_p, is_causal, scale)
        except (LaunchError, PlanError) as error:
            if before is None:
                raise
            reason = str(error)
        else:
            note(sdpa.NAME)
            return found
    if before is None:
        raise LaunchError(f"flashgen serves no such call, and nobody else is there: {reason}")
    _elsewhere(reason)
    given = dropout_p, is_causal, return_debug_mask
    return before.call_boxed(keys, query, key, value, *given, scale=scale, **others)


def _served(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float, causal: bool, scale: float | None
) -> tuple[Any, ...]:
    dropout = drawn(dropout_p, None, q)
    o, lse = run(q, k, v, _call(q, k, causal, scale, dropout))
    # A graph that was compiled for a GPU takes a state of this shape; nobody reads it where nothing is dropped.
    if dropout is None:
        state = q.new_empty(2, dtype=MARK)
    else:
        words = [word - (1 << 64) if word >= 1 << 63 else word for word in (dropout.seed, dropout.offset)]
        state = torch.tensor(words, dtype=torch.int64, device="cpu").view(MARK)
    return o, lse, None, None, q.shape[2], k.shape[2], state, q.new_empty((), dtype=MARK), q.new_empty(0)


def _call(q: torch.Tensor, k: torch.Tensor, causal: bool, scale: float | None, dropout: Dropout | None) -> Call:
    rule = sdpa.FULL
    if causal:
        # The kernels' mask where the lengths differ: SDPA, whose own is another, then asks other backends.
        rule = sdpa.CAUSAL if q.shape[2] == k.shape[2] else sdpa.BOTTOM_RIGHT
    return Call(rule, scale, {}, dropout)


def _backward(
    before: Any,
    keys: torch._C.DispatchKeySet,
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: torch.Tensor,
    philox_offset: torch.Tensor,
    *,
    scale: float | None = None,
    **others: Any,
) -> Any:
    """The flash backend's backward, of whoever ran the forward."""
    if philox_seed.dtype != MARK:
        if before is None:
            raise LaunchError("this backward's forward was not flashgen's, and nobody else is there")
        given = grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal
        return before.call_boxed(keys, *given, philox_seed, philox_offset, scale=scale, **others)
    dropout = None
    if dropout_p:
        seed, offset = (word & (1 << 64) - 1 for word in philox_seed.view(torch.int64).tolist())
        dropout = Dropout(p=dropout_p, seed=seed, offset=offset)
    call = _call(query, key, is_causal, scale, dropout)
    dq, dk, dv, _ = run_backward(Given(grad_out, None, query, key, value, out, logsumexp), call, ())
    return dq, dk, dv


# ---------------------------------------------------------------------------------------------------------------------
# In place of torch.nn.functional's function


#: PyTorch's function, where flashgen's stands for it.
_original: Callable[..., torch.Tensor] = F.scaled_dot_product_attention


def _patch() -> None:
    global _original
    if F.scaled_dot_product_attention is not _patched:
        _original = F.scaled_dot_product_attention
        F.scaled_dot_product_attention = _patched
        # torch.jit.script calls PyTorch's op, where it can be told to: it compiles no Python like this.
        if (register := getattr(torch.jit._builtins, "_register_builtin", None)) is not None:
            register(_patched, f"aten::{sdpa.NAME}")
    _log.warning("torch.nn.functional.scaled_dot_product_attention is flashgen's in this process until deactivate()")


def _unpatch() -> None:
    if F.scaled_dot_product_attention is _patched:
        F.scaled_dot_product_attention = _original


def _patched(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """torch.nn.functional.scaled_dot_product_attention, by flashgen where it serves the call."""
    options = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    reason = _reason(query, key, value)
    if reason is None:
        if torch.compiler.is_compiling():
            return sdpa.scaled_dot_product_attention(query, key, value, attn_mask, **options)  # type: ignore[arg-type]
        try:
            return sdpa.scaled_dot_product_attention(query, key, value, attn_mask, **options)  # type: ignore[arg-type]
        except (LaunchError, PlanError) as error:
            reason = str(error)
    if not torch.compiler.is_compiling():
        _elsewhere(reason)
    if sdpa.is_causal_bias(attn_mask):
        # It asks whether a function is torch.nn.functional's, which PyTorch's own is not while this one stands there,
        # and would have its memory read, where nothing lies.
        found: torch.Tensor = attn_mask._dispatch(query, key, value, attn_mask, **options)
        return found
    return _original(query, key, value, attn_mask, **options)


def _reason(*tensors: torch.Tensor) -> str | None:
    """Why flashgen does not serve these, as far as a graph knows when it is made."""
    if torch.jit.is_tracing():
        return "torch.jit.trace holds no call of flashgen"
    for x in tensors:
        if not isinstance(x, torch.Tensor) or not x.is_cuda:
            return "tensors are not on a GPU"
        if x.is_nested or watched(x):
            return f"a tensor is a {type(x).__name__}, and not dense or plain"
        if x.dtype not in GPU_DTYPES:
            return f"tensors are {str(x.dtype).removeprefix('torch.')}, not float16 or bfloat16"
        if x.shape[-1] % 8 or not 16 <= x.shape[-1] <= 256:
            return f"a head dim is {x.shape[-1]}, not 16 to 256 in steps of 8"
        if x.stride(-1) != 1:
            return "elements of a row do not lie side by side"
    return None
