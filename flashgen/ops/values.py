"""What the plain values of a call may be: texts that eager calls raise, and traced ones when their graph runs.

A text is None where nothing is wrong.  torch.compile traces these functions, so they are plain Python.
"""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import torch

from flashgen.errors import shown

#: The largest seed.
WORD = (1 << 64) - 1


def no_variant(value: object) -> str:
    """What is wrong with something that is no variant."""
    cure = ""
    if isinstance(value, str):
        cure = f": load it with flashgen.load_spec({value!r})"
    elif callable(value):
        cure = "\n  nearest: flashgen.from_flex of a function that flex_attention takes, or fg.variant of a mask"
    return f"attention's fourth argument is a variant and got a {type(value).__name__}{cure}"


def no_tensor(name: str, value: object) -> str:
    """What is wrong with something that is no tensor."""
    return f"{name} is a {type(value).__name__}, not a torch.Tensor"


#: What stands for a number that a graph does not know when it is made, unless torch.compile hides it.
SYMBOLS = (torch.SymInt, torch.SymFloat)


def no_number(name: str, value: object) -> str | None:
    """What is wrong with a value of a name that wants a number."""
    if isinstance(value, (*SYMBOLS, int, float)) and not isinstance(value, bool):
        return None
    cure = f" ({name}.item() reads a tensor's value)" if isinstance(value, torch.Tensor) else ""
    return f"{name} is a {type(value).__name__} and must be a number{cure}"


def whole(value: object) -> Any:
    """A whole number as an int, NumPy's integers and whatever else has `__index__` too; another value as it is.  A bool
    is none, and neither is a tensor, for whose value a call would wait, or a size of a traced one."""
    if isinstance(value, (int, torch.SymInt, torch.Tensor)) or not hasattr(value, "__index__"):
        return value
    if isinstance(value, np.bool_):
        return value  # older NumPy's have one
    try:
        return operator.index(value)
    except TypeError:
        return value  # NumPy's arrays have one that raises


def of_numpy(value: Any) -> Any:
    """A number of NumPy's as Python has it; another value as it is."""
    return value.item() if isinstance(value, np.generic) else value


def no_seed(seed: object) -> str | None:
    """What is wrong with a seed; None is one, and stands for torch's generator."""
    if seed is None:
        return None
    if isinstance(seed, bool) or not isinstance(seed, int):
        return f"seed is a {type(seed).__name__} and must be an integer, or None for torch's generator"
    if not 0 <= seed <= WORD:
        return f"seed is {shown(seed)}: it is an unsigned 64-bit number\n  nearest: seed={seed & WORD}"
    return None


def too_long(name: str, value: object) -> str | None:
    """What is wrong with a number that no graph can hold."""
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        return f"{name} is {shown(value)} and does not fit into 64 bits"
    return None


def no_flag(name: str, value: object) -> str | None:
    """What is wrong with a value of a name that wants True or False."""
    if isinstance(value, bool):
        return None
    kind, cure = type(value).__name__, ""
    if isinstance(value, np.generic):  # whose own bool is called bool too
        kind, cure = f"numpy.{kind}", f"\n  nearest: bool({name})"
    return f"{name} is a {kind} and must be True or False{cure}"
