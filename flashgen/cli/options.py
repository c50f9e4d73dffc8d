"""The options that the verbs share, declared once, and what they come to for one spec."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_type_hints

import typer

from flashgen.cli.console import joined
from flashgen.errors import FlashgenError, PlanError, SpecError
from flashgen.lang.expr import DType

if TYPE_CHECKING:
    import numpy as np

    from flashgen.analysis.facts import Facts
    from flashgen.analysis.tiles import Case
    from flashgen.lang.variant import Variant
    from flashgen.planning.plan import KernelPlan
    from flashgen.planning.planner import Menu
    from flashgen.planning.problem import Problem

#: A spec argument; Python files run with the caller's rights.
Spec = Annotated[
    str,
    typer.Argument(
        metavar="SPEC",
        help="A spec file (Python: it runs with your rights), or the name of a shipped one, such as [b]causal[/b].",
        show_default=False,
    ),
]

#: Head dim and dtype of a call that names none, where the spec allows them.
HEAD_DIM, DTYPE = 128, "bfloat16"

#: Query and key length of a call that names none.
SEQLEN = {"cpu": 1024, "cuda": 8192}

_PROBLEM, _KERNEL, _INPUTS = "Problem", "Kernel", "Inputs of the variant"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The shared options as typed; None and empty mean that the caller left the choice to flashgen."""

    batch: Annotated[int, typer.Option(help="Batch size.", rich_help_panel=_PROBLEM)] = 1
    heads: Annotated[int, typer.Option(help="Query heads.", rich_help_panel=_PROBLEM)] = 8
    kv_heads: Annotated[
        int | None,
        typer.Option(help="Key and value heads; they divide the query heads. [dim]default: --heads[/]",
                     rich_help_panel=_PROBLEM),
    ] = None  # fmt: skip
    seqlen: Annotated[
        int | None,
        typer.Option(help="Queries. [dim]default: 1024 on a CPU, 8192 on a GPU[/]", rich_help_panel=_PROBLEM),
    ] = None
    kv_seqlen: Annotated[
        int | None, typer.Option(help="Keys. [dim]default: --seqlen[/]", rich_help_panel=_PROBLEM)
    ] = None
    head_dim: Annotated[
        int | None,
        typer.Option(help="Columns of q and k. [dim]default: 128 if the spec names it, else its largest[/]",
                     rich_help_panel=_PROBLEM),
    ] = None  # fmt: skip
    v_head_dim: Annotated[
        int | None, typer.Option(help="Columns of v. [dim]default: --head-dim[/]", rich_help_panel=_PROBLEM)
    ] = None
    dtype: Annotated[
        str | None,
        typer.Option(help="float16, bfloat16; on a CPU float32 and float64 too. [dim]default: bfloat16 if the spec "
                     "names it[/]", rich_help_panel=_PROBLEM),
    ] = None  # fmt: skip
    arch: Annotated[
        str | None,
        typer.Option(help="sm_80, sm_86, sm_89, sm_90a or sm_120. [dim]default: the GPU's, or the spec's[/]",
                     rich_help_panel=_KERNEL),
    ] = None  # fmt: skip
    pipeline: Annotated[
        str | None, typer.Option(help="Kernel family. [dim]default: the best that --arch has[/]",
                                 rich_help_panel=_KERNEL)
    ] = None  # fmt: skip
    tile: Annotated[
        str | None,
        typer.Option(metavar="QxKV", help="Rows of queries and of keys a tile, such as 128x64: checked, never changed.",
                     rich_help_panel=_KERNEL),
    ] = None  # fmt: skip
    param: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="A parameter or constant of the spec (repeatable).",
                     rich_help_panel=_INPUTS),
    ] = None  # fmt: skip
    tensor: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=FILE", help="A captured tensor from a .npy file (repeatable). [dim]default: the "
                     "spec's example[/]", rich_help_panel=_INPUTS),
    ] = None  # fmt: skip

    def tile_shape(self) -> tuple[int, int] | None:
        if self.tile is None:
            return None
        match = re.fullmatch(r"(\d+)[xX](\d+)", self.tile)
        if match is None:
            raise PlanError(f"--tile {self.tile!r} is not of the form QxKV\n  nearest: --tile 128x64")
        return int(match[1]), int(match[2])


def shared(verb: Callable[..., None]) -> Callable[..., None]:
    """A command whose `request` parameter is spelled out as the options of `Request`."""
    hints = get_type_hints(verb, include_extras=True)
    of_request = get_type_hints(Request, include_extras=True)
    options = [
        inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=of_request[f.name])
        for f in dataclasses.fields(Request)
    ]
    own = [
        p.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
        for name, p in inspect.signature(verb).parameters.items()
        if name != "request"
    ]

    @functools.wraps(verb)
    def command(**given: object) -> None:
        request = Request(**{option.name: given.pop(option.name) for option in options})
        verb(request=request, **given)

    parameters = [*own, *options]
    command.__signature__ = inspect.Signature(parameters)
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    del command.__wrapped__
    return command


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """A spec and a request as values: what is planned, on which data, and by which kernel.

    `variant` has its constants bound; `menu` holds every plan for it and `plan` the one that serves `problem`.
    """

    variant: Variant
    problem: Problem
    case: Case
    facts: Facts
    arch: str
    menu: Menu
    plan: KernelPlan

    def __str__(self) -> str:
        p = self.problem
        lengths = f"seqlen {p.q_len}" + (f", kv_seqlen {p.kv_len}" if p.kv_len != p.q_len else "")
        heads = f"heads {p.heads}" + (f", kv_heads {p.kv_heads}" if p.kv_heads != p.heads else "")
        values = "".join(f", {name} {value:g}" for name, value in self.case.params.items())
        return f"{self.variant.name}: batch {p.batch}, {heads}, {lengths}, head_dim {p.head_dim}, {p.dtype}{values}"

    def predict(self):
        """The plan's cost on the problem, with the candidates that were rejected for it."""
        from flashgen.planning.traffic import predict

        others = self.menu.rejected
        return predict(self.plan, self.problem, self.case, rejected=others)

    def mask(self, b: int, h: int, rows: np.ndarray) -> np.ndarray:
        """The mask of batch b, head h and the queries `rows`, by brute force: bool [rows, keys]."""
        import numpy as np

        from flashgen.lang.evaluate import evaluate

        shape = (len(rows), self.problem.kv_len)
        if self.variant.mask is None:
            return np.ones(shape, bool)
        case = self.case
        keep = evaluate(
            self.variant.mask,
            b=np.int64(b),
            h=np.int64(h),
            q=rows[:, None],
            k=np.arange(self.problem.kv_len),
            sizes=case.sizes,
            params=case.params,
            tensors=case.tensors,
        )
        return np.broadcast_to(np.asarray(keep, bool), shape)
