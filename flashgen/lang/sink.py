"""Learned sinks: a logit per query head that joins each row's softmax, beside its keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from flashgen.errors import SourceLine
from flashgen.lang import source
from flashgen.lang.declare import tensor
from flashgen.lang.expr import TENSOR_DTYPES, DType, Node, Tensor, node
from flashgen.lang.proxies import refused

#: What may select a sink, by the name of the dimension.
POSITIONS = {"batch": "b", "heads": "h"}

#: The dimensions that a sink may have.
SHAPES = (("heads",), ("batch", "heads"))


@dataclass(frozen=True, slots=True, eq=False)
class Sink:
    """A declared sink, which a variant is given: no function of positions reads it."""

    tensor: Tensor
    where: SourceLine | None = None

    @property
    def node(self) -> Node:
        """The element of a row: its head's, or its batch's and its head's; without the example, as all nodes."""
        at = [node("index", DType.INT32, (), POSITIONS[str(dim)]) for dim in self.tensor.dims]
        held = replace(self.tensor, example=None)
        return node("load", TENSOR_DTYPES[held.dtype], at, held, self.where)

    def __getitem__(self, index: object) -> NoReturn:
        name = self.tensor.name
        raise refused(
            f"the sink {name!r} is no captured tensor of mask or score: a row has it beside its keys;"
            f" write @fg.variant(sink={name}) or variant.with_sink({name}), or declare an fg.tensor"
        )


def sink(
    name: str = "sink",
    dims: Sequence[str] = ("heads",),
    dtype: str = "float32",
    *,
    example: Callable | None = None,
    doc: str = "",
) -> Sink:
    """A learned sink: a logit that joins the softmax of each row of its query head, and has no value.

    A variant is given it (`fg.variant(sink=...)`, `variant.with_sink(...)`), and a call the tensor, by name.  The
    denominator of a row's softmax is then the sum of its exponentials and of exp(sink); o and lse are of that sum.
    Neither scale nor score function, mask or dropout touch it; -inf means that there is none.  `dims` are ("heads",)
    or ("batch", "heads"), and a dimension may have size 1 at the call; `dtype` is float32, float16 or bfloat16.
    `example(problem, rng)` makes a NumPy array for `run`, `plan` and `show`.  Source: gpt-oss (OpenAI 2025), as
    transformers' `eager_attention_forward` of that model.
    """
    declared = tensor(name, dims, dtype, example=example, doc=doc).tensor
    if declared.dims not in SHAPES:
        shapes = " or ".join(map(repr, SHAPES))
        raise refused(f"sink {name!r}: dims are {shapes}, a logit for each query head, and got {declared.dims!r}")
    if not TENSOR_DTYPES[declared.dtype].is_float:
        raise refused(f"sink {name!r}: a logit is float32, float16 or bfloat16, and dtype is {declared.dtype!r}")
    return Sink(declared, source.caller())


def declared_sink(given: Any) -> Sink:
    """A sink that a variant is given; SpecError for anything else."""
    if not isinstance(given, Sink):
        kind = type(given).__name__
        raise refused(f'a variant\'s sink is what fg.sink("sink", dims=("heads",)) declares, and got a {kind}')
    return given
