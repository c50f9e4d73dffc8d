"""Who watches a call: torch.func's transforms, modes, and kinds of tensors."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

# Looked up once: every eager call asks.
_transforms, _modes = torch._C._are_functorch_transforms_active, torch._C._len_torch_dispatch_stack
_Tensor = torch.Tensor

#: Whether a transform of torch.func is under way.
of_torch_func = _transforms

#: What calls are told inside of torch.jit.trace, to which sizes are tensors.
IN_JIT_TRACE = (
    "torch.jit.trace holds no call of flashgen, whose kernels are chosen by sizes\n"
    "  nearest: torch.export.export, which holds attention as one op"
)

#: Whether some torch.autocast is under way, on any kind of device.
any_autocast = torch._C._is_any_autocast_enabled


def _one_requires_grad(*values: object) -> bool:
    return any(isinstance(x, _Tensor) and x.requires_grad for x in values)


#: Whether one of these values is a tensor that requires a gradient.
any_requires_grad = getattr(torch._C, "_any_requires_grad", _one_requires_grad)


def transformed() -> bool:
    """Whether a torch.func transform or forward-mode AD is under way, which sees autograd.Functions alone."""
    return _transforms() or forward_ad._current_level >= 0


def functionalized() -> bool:
    """Whether a torch.func.functionalize is under way."""
    functorch = torch._C._functorch
    return _transforms() and any(
        level.key() == functorch.TransformType.Functionalize for level in functorch.get_interpreter_stack()
    )


def drawn_for_each() -> bool:
    """Whether a torch.func.vmap is under way that asks for random numbers of each element's own, or for none."""
    functorch = torch._C._functorch
    return _transforms() and any(
        functorch.CVmapInterpreterPtr(level).randomness() != functorch.RandomnessType.Same
        for level in functorch.get_interpreter_stack()
        if level.key() == functorch.TransformType.Vmap
    )


def vectorized(x: torch.Tensor | None) -> bool:
    """Whether a gradient stands for many, as torch.autograd.grad(is_grads_batched=True) and jacobian(vectorize=True)
    give them, by a vmap that is older than torch.func's."""
    return x is not None and torch._C._functorch.is_legacy_batchedtensor(x)


def traced(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether a mode or a kind of tensor sees what torch's ops do, as make_fx and FakeTensors: then a call is one."""
    if _modes():
        return True
    if type(q) is type(k) is type(v) is _Tensor:
        return False
    # No any() of a generator, which has twice the steps: every call of tensors of a kind of their own asks.
    return (watched(q) and not q.is_nested) or (watched(k) and not k.is_nested) or (watched(v) and not v.is_nested)


def watched(x: object) -> bool:
    """Whether a tensor's own class says what torch's ops do with it."""
    return isinstance(x, torch.Tensor) and torch._C._dispatch_keys(x).has(torch._C.DispatchKey.Python)


def sharded(*tensors: object) -> bool:
    """Whether one of these is a DTensor, which lies on several devices."""
    return any(type(x).__module__.startswith("torch.distributed.tensor") for x in tensors)


def autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Tensors as torch.autocast wants those of matrix products: of its dtype, but for those of float64."""
    first = tensors[0]
    if not isinstance(first, torch.Tensor) or not torch.is_autocast_enabled(first.device.type):
        return tensors
    dtype = torch.get_autocast_dtype(first.device.type)
    return tuple(
        x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() and x.dtype != torch.float64 else x
        for x in tensors
    )
