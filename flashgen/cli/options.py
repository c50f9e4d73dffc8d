"""The options that the verbs share, declared once, and what they come to for one spec."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_type_hints

import typer

from flashgen.cli.console import err, joined
from flashgen.errors import PlanError, SpecError

if TYPE_CHECKING:
    import numpy as np
    import torch

    from flashgen.analysis.facts import Facts
    from flashgen.analysis.tiles import Case
    from flashgen.lang.expr import Tensor
    from flashgen.lang.variant import Variant
    from flashgen.planning.plan import KernelPlan
    from flashgen.planning.planner import Menu
    from flashgen.planning.problem import Problem
    from flashgen.planning.traffic import Prediction

#: A spec argument; Python files run with the caller's rights.
Spec = Annotated[
    str,
    typer.Argument(
        metavar="SPEC",
        help="A spec file (Python: it runs with your rights), or the name of a shipped one, such as [b]causal[/b].",
        show_default=False,
    ),
]

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
    menu: Menu
    plan: KernelPlan

    def __str__(self) -> str:
        p = self.problem
        lengths = f"seqlen {p.q_len}" + (f", kv_seqlen {p.kv_len}" if p.kv_len != p.q_len else "")
        heads = f"heads {p.heads}" + (f", kv_heads {p.kv_heads}" if p.kv_heads != p.heads else "")
        values = "".join(f", {name} {value:g}" for name, value in self.case.params.items())
        return f"{self.variant.name}: batch {p.batch}, {heads}, {lengths}, head_dim {p.head_dim}, {p.dtype}{values}"

    def predict(self) -> Prediction:
        """The plan's cost on the problem, with the candidates that were rejected for it."""
        from flashgen.planning.traffic import predict

        return predict(self.plan, self.problem, self.case, rejected=self.menu.rejected, record=self.menu.record)


def resolve(
    spec: str | Variant, request: Request, *, device: str | None = None, seed: int = 0, dropout: bool = False
) -> Resolved:
    """Load a spec, settle what the request leaves open, make its data and plan it.

    `device` is where the problem runs ("cpu", "cuda"; None: not at all, planned for the GPU where there is one); `seed`
    is that of the captured tensors' examples; with `dropout` the kernels drop probabilities.  Raises SpecError and
    PlanError.
    """
    from flashgen.analysis.facts import analyse
    from flashgen.analysis.tiles import Case
    from flashgen.lang.load import load_spec
    from flashgen.ops.stages import default_arch, default_dtype, default_head_dim, multiprocessors
    from flashgen.planning.planner import choose, menu
    from flashgen.planning.problem import Problem

    variant, params = bound(load_spec(spec) if isinstance(spec, str) else spec, request.param or ())
    arch, tile, pipeline = request.arch or default_arch(variant), request.tile_shape(), request.pipeline
    if device is not None:
        # A call of attention takes these from the variant.  What needs no pin gets none: it is the kernel of any call.
        variant = _pinned(variant, tile=tile, pipeline=pipeline, arch=arch if device == "cpu" else request.arch)
    head_dim = default_head_dim(variant) if request.head_dim is None else request.head_dim
    q_len = SEQLEN[device or default_device()] if request.seqlen is None else request.seqlen
    dtype = request.dtype or default_dtype(variant)
    problem = Problem(
        batch=request.batch,
        heads=request.heads,
        kv_heads=request.heads if request.kv_heads is None else request.kv_heads,
        q_len=q_len,
        kv_len=q_len if request.kv_seqlen is None else request.kv_seqlen,
        head_dim=head_dim,
        v_head_dim=head_dim if request.v_head_dim is None else request.v_head_dim,
        dtype=dtype,
    )
    case = Case(sizes=problem.sizes(), params=params, tensors=_tensors(variant, problem, request.tensor or (), seed))
    # A CPU walks the plan of a 16-bit kernel in float32 and float64 too.
    of_kernel = default_dtype(variant) if device == "cpu" and dtype in ("float32", "float64") else dtype
    plans = menu(
        variant, arch, of_kernel, head_dim, problem.v_head_dim, pipeline=pipeline, tile=tile, dropout=dropout
    )
    return Resolved(
        variant=variant,
        problem=problem,
        case=case,
        facts=analyse(variant),
        menu=plans,
        plan=choose(plans, problem, multiprocessors(arch)),
    )


def spec_files(specs: list[str]) -> list[Path]:
    """What `load_spec` takes for SPEC arguments: the Python files of a folder in order, anything else as it is.

    Raises SpecError for a folder without any.
    """
    files: list[Path] = []
    for spec in specs:
        if Path(spec).is_dir():
            found = sorted(file for file in Path(spec).glob("*.py") if not file.name.startswith("_"))
            if not found:
                raise SpecError(f"the folder {spec} holds no spec (*.py)")
            files += found
        else:
            files.append(Path(spec))
    return files


def bound(variant: Variant, texts: Sequence[str]) -> tuple[Variant, dict[str, int | float]]:
    """The variant with its constants folded, and its parameters' values: `NAME=VALUE` texts, else the defaults."""
    given = _given(texts)
    constants = {symbol.name for symbol in variant.constants}
    values = variant.values({name: value for name, value in given.items() if name not in constants})
    return variant.bind(**{name: value for name, value in given.items() if name in constants}), values


def folded(variant: Variant, texts: Sequence[str]) -> Variant:
    """The variant with its constants folded; a kernel alone takes no value of a parameter, and PlanError says so."""
    given = _given(texts)
    if passed := [symbol.name for symbol in variant.params if symbol.name in given]:
        raise PlanError(
            f"--param {passed[0]}: {passed[0]!r} is a parameter of {variant.name!r}: it is passed at the call, and one"
            f" kernel serves every value\n  nearest: leave out --param {passed[0]}"
        )
    return variant.bind(**given)


def _given(texts: Sequence[str]) -> dict[str, int | float]:
    """The numbers of `NAME=VALUE` texts."""
    given: dict[str, int | float] = {}
    for name, value in (_split(text, "--param", "NAME=VALUE") for text in texts):
        if name in given:
            raise PlanError(f"--param {name} is given twice\n  nearest: --param {name}={value} alone")
        given[name] = _number(name, value)
    return given


def default_device() -> str:
    """Where a problem runs that names no place."""
    from flashgen.runtime import driver

    return "cuda" if driver.gpus() else "cpu"


def device(name: str | None) -> str:
    """The --device of `run`: checked, or the GPU where there is one that PyTorch can use."""
    if name not in (None, *SEQLEN):
        raise PlanError(f"--device {name!r} is neither cpu nor cuda")
    if name == "cpu":
        return name
    if default_device() == "cpu":
        lacks = "the driver shows no GPU"
    else:
        import torch

        if torch.cuda.is_available():
            return "cuda"
        lacks = f"the driver shows a GPU, and PyTorch {torch.__version__} cannot use it"
        if name is None:
            err.print(f"{lacks}: running on the CPU")
    if name == "cuda":
        raise PlanError(f"--device cuda: {lacks}\n  nearest: --device cpu")
    return "cpu"


def device_name(name: str) -> str:
    """A device as a person knows it."""
    if name == "cpu":
        return "the CPU"
    from flashgen.runtime import driver

    return driver.gpu(0).name


def captured(resolved: Resolved, device: str) -> dict[str, torch.Tensor]:
    """The captured tensors of a case as PyTorch tensors of their declared types."""
    import torch

    return {
        tensor.name: torch.as_tensor(resolved.case.tensors[tensor.name]).to(device, getattr(torch, tensor.dtype))
        for tensor in resolved.variant.tensors
    }


def _pinned(variant: Variant, **chosen: object) -> Variant:
    """The variant with what is chosen in place of its own pins."""
    pins = dataclasses.replace(variant.pins, **{name: value for name, value in chosen.items() if value is not None})
    return variant if pins == variant.pins else dataclasses.replace(variant, pins=pins)


def _split(text: str, option: str, form: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise SpecError(f"{option} {text!r} is not of the form {form}")
    return name, value


def _number(name: str, text: str) -> int | float:
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    raise PlanError(f"--param {name}={text}: {text!r} is not a number")


def _tensors(variant: Variant, problem: Problem, texts: Sequence[str], seed: int) -> Mapping[str, np.ndarray]:
    """Each captured tensor from its file, else from the spec's example."""
    files = dict(_split(text, "--tensor", "NAME=FILE") for text in texts)
    names = [tensor.name for tensor in variant.tensors]
    if unknown := [name for name in files if name not in names]:
        raise SpecError(f"{variant.name!r} captures no tensor {unknown[0]!r}\n  its captured tensors: {joined(names)}")
    made = {}
    for tensor in variant.tensors:
        if tensor.name in files:
            made[tensor.name] = _stored(variant, tensor, _loaded(files[tensor.name]), problem)
        elif tensor.example is not None:
            made[tensor.name] = _stored(variant, tensor, _example(variant, tensor, problem, seed), problem)
        else:
            raise SpecError(
                f"captured tensor {tensor.name!r} of {variant.name!r} has no example: --tensor {tensor.name}=FILE.npy"
            )
    return made


def _example(variant: Variant, tensor: Tensor, problem: Problem, seed: int) -> np.ndarray:
    """What a spec's `example` makes; SpecError at the spec's own line where that raises."""
    import numpy as np

    from flashgen.lang import source

    try:
        return np.asarray(tensor.example(problem, np.random.default_rng(seed)))
    except Exception as error:
        of = f"the example of captured tensor {tensor.name!r} of {variant.name!r}"
        fields = ""
        if isinstance(error, AttributeError) and error.obj is problem:
            fields = f"\n  a problem has {', '.join(field.name for field in dataclasses.fields(problem))}"
        told = source.as_spec_error(error)
        message = str(told).partition("\n  at ")[0]
        raise SpecError(f"{of} failed: {message}{fields}", where=told.where) from None


def _stored(variant: Variant, tensor: Tensor, array: np.ndarray, problem: Problem) -> np.ndarray:
    """An array as the declared type holds it (bfloat16: rounded float32), of a shape that the declaration allows."""
    import numpy as np

    from flashgen.runtime.tiles import rounded

    what = f"captured tensor {tensor.name!r} of {variant.name!r}"
    sizes = problem.sizes()
    lengths = {**sizes, "q": sizes["q_len"], "kv": sizes["kv_len"]}
    wanted = [lengths.get(dim, dim) for dim in tensor.dims]
    named = ", ".join("any" if dim is None else f"{dim} = {lengths[dim]}" if dim in lengths else str(dim)
                      for dim in tensor.dims)  # fmt: skip
    fits = len(wanted) == array.ndim and all(
        want is None or size == want or (size == 1 and isinstance(dim, str))
        for want, size, dim in zip(wanted, array.shape, tensor.dims, strict=True)
    )
    if not fits:
        raise PlanError(f"{what} has shape {array.shape}, and its dimensions are ({named})")
    kind = "f" if "float" in tensor.dtype else "b" if tensor.dtype == "bool" else "iu"
    if array.dtype.kind not in kind and not (kind == "f" and array.dtype.kind in "iu"):
        raise PlanError(f"{what} holds {array.dtype} and is declared {tensor.dtype}")
    if tensor.dtype == "bfloat16":
        return rounded(array.astype(np.float32), "bfloat16")
    stored = array.astype(tensor.dtype)
    if kind == "iu" and not np.array_equal(stored, array):
        raise PlanError(f"{what} holds values that {tensor.dtype} cannot")
    return stored


def _loaded(file: str) -> np.ndarray:
    import numpy as np

    try:
        return np.load(file, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise SpecError(f"--tensor: {file} is no .npy file ({error})") from None
