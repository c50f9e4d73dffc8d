"""What this PyTorch makes of numbers that change under torch.compile(dynamic=True)."""

import functools

import torch
from torch._dynamo.testing import CompileCounter


@functools.cache
def graphs_of_floats() -> int:
    """How many graphs it makes for several values of one float: to PyTorch 2.6 the first one is a constant."""
    counter = CompileCounter()
    scaled = torch.compile(lambda x, scale: x * scale, dynamic=True, fullgraph=True, backend=counter)
    for scale in (0.25, 0.5, 0.75):
        scaled(torch.ones(3), scale)
    return counter.frame_count
