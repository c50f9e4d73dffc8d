"""Tensors that functions for FlexAttention capture, made from seeds."""

import torch

#: The problem that they are made for.
BATCH, HEADS, LENGTH = 2, 2, 150


def random(*shape, seed=0, grad=False, dtype=torch.float32):
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return x.to(dtype).requires_grad_(grad)


def integers(high, *shape, seed=0, dtype=torch.int64, low=0):
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def documents(*shape, seed=0):
    return torch.cumsum(integers(40, *shape, seed=seed) == 0, -1)
