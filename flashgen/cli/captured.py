"""Captured tensors for the verbs, which have no caller to bring them: .npy files, else the spec's examples."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from flashgen.cli import options
from flashgen.cli.console import joined
from flashgen.errors import PlanError, SpecError
from flashgen.lang import source
from flashgen.lang.stored import broken_promise, rounded

if TYPE_CHECKING:
    import torch

    from flashgen.lang.expr import Tensor
    from flashgen.lang.variant import Variant
    from flashgen.planning.problem import Problem


def arrays(
    variant: Variant, problem: Problem, texts: Sequence[str], *, seed: int, examples: bool
) -> Mapping[str, np.ndarray]:
    """Each captured tensor from its file (NAME=FILE texts), else what the variant itself gives or the spec's example
    makes, where `examples` are wanted.

    Raises SpecError and PlanError for a tensor that cannot be had or is not as it is declared.
    """
    files: dict[str, str] = {}
    for name, file in (options.pair(text, "--tensor", "NAME=FILE") for text in texts):
        if name in files:
            raise PlanError(
                f"--tensor {name} is given twice\n  nearest: --tensor {shlex.quote(f'{name}={file}')} alone"
            )
        files[name] = file
    names = [tensor.name for tensor in variant.tensors]
    if unknown := [name for name in files if name not in names]:
        asked = f"{variant.name!r} captures no tensor {unknown[0]!r}{source.nearest(unknown[0], names)}"
        raise SpecError(f"{asked}\n  its captured tensors: {joined(names)}")
    made = {}
    for tensor in variant.tensors:
        title = f"captured tensor {tensor.name!r} of {variant.name!r}"
        if tensor.name in files:
            file = files[tensor.name]
            made[tensor.name] = _stored(f"{title} ({file})", tensor, _loaded(file), problem)
        elif examples and tensor.name in variant.given:
            made[tensor.name] = _stored(title, tensor, _given(variant.given[tensor.name]), problem)
        elif examples and tensor.example is not None:
            made[tensor.name] = _stored(title, tensor, _example(title, tensor, problem, seed), problem)
        elif examples:
            raise SpecError(variant.missing(tensor))
    return made


def _given(tensor: torch.Tensor) -> np.ndarray:
    """A tensor that a traced function reads, as NumPy holds it; one of no dimension as one element."""
    held = tensor.detach().cpu().reshape(tensor.shape or (1,))
    return np.asarray(held if str(held.dtype) != "torch.bfloat16" else held.float())


def _example(title: str, tensor: Tensor, problem: Problem, seed: int) -> np.ndarray:
    """What a spec's `example` makes; SpecError at the spec's own line where that raises."""
    from flashgen.lang import source

    try:
        return np.asarray(tensor.example(problem, np.random.default_rng(seed)))
    except (Exception, SystemExit) as error:
        fields = ""
        if isinstance(error, AttributeError) and error.obj is problem:
            fields = f"\n  a problem has {', '.join(problem._fields)}"
        told = source.as_spec_error(error)
        message = str(told).partition("\n  at ")[0]
        raise SpecError(f"the example of {title} failed: {message}{fields}", where=told.where) from None


def _stored(title: str, tensor: Tensor, array: np.ndarray, problem: Problem) -> np.ndarray:
    """An array as the declared type holds it (bfloat16: rounded float32), of a shape that the declaration allows and
    with the values that it promises."""
    sizes = problem.sizes()
    lengths = {**sizes, "q": sizes["q_len"], "kv": sizes["kv_len"]}
    wanted = [lengths.get(dim, dim) for dim in tensor.dims]
    named = ", ".join(
        "any" if dim is None else f"{dim} = {lengths[dim]}" if dim in lengths else str(dim) for dim in tensor.dims
    )
    fits = len(wanted) == array.ndim and all(
        want is None or size == want or (size == 1 and isinstance(dim, str))
        for want, size, dim in zip(wanted, array.shape, tensor.dims, strict=True)
    )
    if not fits:
        shape = tuple("any" if want is None else want for want in wanted)
        raise PlanError(
            f"{title} has shape {array.shape}, and its dimensions are ({named})\n  nearest: an array of shape {shape}"
        )
    kind = "f" if "float" in tensor.dtype else "b" if tensor.dtype == "bool" else "iu"
    if array.dtype.kind not in kind and not (kind == "f" and array.dtype.kind in "iu"):
        cure = f"\n  nearest: .astype({tensor.dtype!r})" if tensor.dtype != "bfloat16" else ""
        raise PlanError(f"{title} holds {array.dtype} and is declared {tensor.dtype}{cure}")
    held = array.astype("float32" if tensor.dtype == "bfloat16" else tensor.dtype)
    stored = rounded(held, tensor.dtype) if tensor.dtype == "bfloat16" else held
    if kind == "iu" and not np.array_equal(stored, array):
        raise PlanError(f"{title} holds values that {tensor.dtype} cannot")
    if broken := broken_promise(tensor, stored):
        raise PlanError(f"{title} {broken}")
    return stored


def _loaded(file: str) -> np.ndarray:
    """The array of a .npy file, whatever its name ends with."""
    path = Path(file)
    if path.is_dir():
        raise SpecError(f"--tensor: {file} is a folder, not a .npy file")
    if not path.exists():
        beside = ", ".join(sorted(f.name for f in path.parent.glob("*.npy"))) if path.parent.is_dir() else ""
        raise SpecError(f"--tensor: there is no file {file}" + (f"\n  beside it: {beside}" if beside else ""))
    with path.open("rb") as opened:
        if opened.read(6) != b"\x93NUMPY":
            raise SpecError(f"--tensor: {file} is no .npy file\n  nearest: numpy.save({path.stem + '.npy'!r}, array)")
    try:
        return np.load(file, allow_pickle=False)
    except OSError:
        raise
    except Exception as error:  # cut short, an array of objects, or a header that NumPy trips over in any way
        said = (str(error) or type(error).__name__).splitlines()[0]
        raise SpecError(
            f"--tensor: the .npy file {file} cannot be read: {said}\n  nearest: write it again with numpy.save"
        ) from None
