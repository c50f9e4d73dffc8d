"""The options that the verbs share, declared once; `resolve` says what they come to for one spec."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import os
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_type_hints

import typer

from flashgen.cli.console import err, json_alone
from flashgen.errors import PlanError, SpecError
from flashgen.lang.variant import Pins
from flashgen.planning.float8 import ACCURACIES, DEFAULT
from flashgen.planning.integers import INTEGERS

if TYPE_CHECKING:
    from flashgen.planning.plan import KernelPlan
    from flashgen.planning.problem import Problem
    from flashgen.runtime.philox import Dropout

#: A spec argument; Python files run with the caller's rights.
Spec = Annotated[
    str,
    typer.Argument(
        metavar="SPEC",
        help="A spec file (Python: it runs with your rights), or the name of a shipped one, such as [b]causal[/b].",
        show_default=False,
    ),
]


def output(help_text: str) -> object:
    """The type of a verb's --output: a file in a folder that is there, as is checked before the verb does anything."""
    return Annotated[Path | None, typer.Option("--output", "-o", help=help_text, callback=_writable)]


def _writable(path: Path | None) -> Path | None:
    if path is None:
        return None
    folder = path.parent
    if not folder.is_dir():
        raise PlanError(f"--output {path}: there is no folder {folder}\n  nearest: mkdir -p {shlex.quote(str(folder))}")
    if path.is_dir():
        raise PlanError(f"--output {path} is a folder\n  nearest: --output {shlex.quote(str(path / 'NAME'))}")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise PlanError(f"--output {path} cannot be written by this user\n  nearest: a folder of your own")
    return path


def results(path: Path | None) -> Path | None:
    """A --folder that results go to, which is made when there are any: it must not be something else already."""
    if path is not None and path.exists() and not path.is_dir():
        raise PlanError(f"--folder {path} is a file\n  nearest: --folder {shlex.quote(str(path.parent))}")
    return path


def as_json(keys: str) -> object:
    """The type of a verb's --json: the result as one object on stdout, of these keys."""
    return Annotated[bool, typer.Option("--json", help=f"One JSON object in place of text: {keys}.")]


def described(plan: KernelPlan) -> dict[str, object]:
    """A kernel in a verb's JSON."""
    return {
        "variant": plan.variant.name,
        "pass": plan.pass_name,
        "pipeline": plan.pipeline,
        "arch": plan.arch,
        "dtype": plan.dtype,
        "head_dim": plan.head_dim,
        "v_head_dim": plan.v_head_dim,
        "tile": {"q": plan.tile.q, "kv": plan.tile.kv},
        "stages": plan.stages,
        "threads": plan.threads,
        "smem_bytes": plan.smem_bytes,
    }


def posed(problem: Problem) -> dict[str, object]:
    """A problem in a verb's JSON."""
    shape = problem._asdict()
    of_keys = shape.pop("kv_dtype")
    return {"dtype": shape.pop("dtype"), **({} if of_keys is None else {"kv_dtype": of_keys}), "shape": shape}


#: A --seed, as NumPy and PyTorch both take one.
Seed = Annotated[int, typer.Option(min=0, max=1 << 62, help="Seed of the random input.")]

#: A --dropout of what runs; a kernel alone, whose --dropout is a flag, serves every chance.
Chance = Annotated[
    float, typer.Option(metavar="P", help="Drop each probability with this chance, below 1; --seed says which.")
]


#: A --kv-splits of what runs or is planned for a problem; a kernel alone (--split-keys) serves any number.
Splits = Annotated[
    int | None,
    typer.Option(
        metavar="N", help="Blocks that divide the keys of a tile of queries. [dim]default: flashgen chooses[/]"
    ),
]


def drops(chance: float, seed: int) -> Dropout | None:
    """What a --dropout drops; None where nothing.  Raises LaunchError for what is no chance in [0, 1)."""
    from flashgen.ops.dropout import check
    from flashgen.runtime.philox import Dropout

    check(chance)
    return Dropout(p=chance, seed=seed) if chance else None


#: Query and key length of a call that names none.
SEQLEN = {"cpu": 1024, "cuda": 8192}

_problem, _kernel, _inputs, _pass = (
    functools.partial(typer.Option, rich_help_panel=panel)
    for panel in ("Problem", "Kernel", "Inputs of the variant", "Pass")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The shared options as typed; None and empty mean that the caller left the choice to flashgen."""

    batch: Annotated[
        int | None, _problem(help="Batch size. [dim]default: 1, or as many as there are lengths of sequences[/]")
    ] = None
    heads: Annotated[int, _problem(help="Query heads.")] = 8
    kv_heads: Annotated[
        int | None,
        _problem(help="Key and value heads; they divide the query heads. [dim]default: --heads[/]"),
    ] = None
    seqlen: Annotated[
        int | None,
        _problem(help="Queries. [dim]default: 1024 on a CPU, 8192 on a GPU; of simulate 200[/]"),
    ] = None
    kv_seqlen: Annotated[int | None, _problem(help="Keys. [dim]default: --seqlen[/]")] = None
    head_dim: Annotated[
        int | None,
        _problem(help="Columns of q and k. [dim]default: 128 if the spec names it, else its largest[/]"),
    ] = None
    v_head_dim: Annotated[int | None, _problem(help="Columns of v. [dim]default: --head-dim[/]")] = None
    dtype: Annotated[
        str | None,
        _problem(
            help="float16, bfloat16, float8_e4m3fn; on a CPU float32 and float64 too."
            " [dim]default: bfloat16 if the spec names it[/]"
        ),
    ] = None
    kv_dtype: Annotated[
        str | None,
        _problem(help="Of k and v: float8_e4m3fn or float8_e5m2 beside q of 8 or 16 bits. [dim]default: --dtype[/]"),
    ] = None
    arch: Annotated[
        str | None,
        _kernel(help="sm_80, sm_86, sm_89, sm_90a or sm_120. [dim]default: the GPU's, or the spec's[/]"),
    ] = None
    pipeline: Annotated[
        str | None,
        _kernel(help="Kernel family. [dim]default: the best that --arch has[/]"),
    ] = None
    tile: Annotated[
        str | None,
        _kernel(metavar="QxKV", help="Rows of queries and of keys per tile, such as 128x64: checked, never changed."),
    ] = None
    stages: Annotated[int | None, _kernel(help=INTEGERS["stages"].help)] = None
    param: Annotated[
        list[str] | None,
        _inputs(metavar="NAME=VALUE", help="A parameter or constant of the spec (repeatable)."),
    ] = None
    tensor: Annotated[
        list[str] | None,
        _inputs(
            metavar="NAME=FILE",
            help="A captured tensor from a .npy file (repeatable). [dim]default: the spec's example[/]",
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """Which kernels are meant: those of a forward, or with `backward` those of its gradients, which --tile, --stages
    and --pipeline then speak of; `integers` are those that a call cannot fix.  Raises PlanError for an option of the
    backward without it."""

    backward: Annotated[
        bool,
        _pass("--backward", help="The kernels of the gradients; plan and build: beside the forward's."),
    ] = False
    deterministic: Annotated[
        bool,
        _pass("--deterministic", help="With --backward: gradients whose reruns give the same bits."),
    ] = False
    dropout: Annotated[
        bool, _pass("--dropout", help="Kernels that drop probabilities, with any chance; run takes --dropout P.")
    ] = False
    packed: Annotated[
        bool,
        _pass("--packed", help="Forward tiles that hold all heads which share keys, as few queries get them."),
    ] = False
    split_keys: Annotated[
        bool,
        _pass("--split-keys", help="A forward kernel whose keys are divided among blocks, by any number."),
    ] = False
    invariant: Annotated[
        bool,
        _pass("--invariant", help="A forward whose keys are cut into leaves: one set of bits in every kind of call."),
    ] = False
    layout: Annotated[
        str,
        _pass(
            metavar="NAME",
            help="How sequences lie: dense, padded (lengths or positions of their own), varlen, paged, paged_varlen.",
        ),
    ] = "dense"
    k_dtype: Annotated[
        str | None,
        _pass(metavar="NAME", help="Of k, of 8 bits. [dim]default: --kv-dtype[/]"),
    ] = None
    v_dtype: Annotated[
        str | None,
        _pass(metavar="NAME", help="Of v, of 8 bits. [dim]default: --kv-dtype[/]"),
    ] = None
    out_dtype: Annotated[
        str | None,
        _pass(metavar="NAME", help="Of o, where q has 8 bits: bfloat16, float16. [dim]default: bfloat16[/]"),
    ] = None
    accuracy: Annotated[
        str | None,
        _pass(metavar="NAME", help=f"How P is made in 8 bits: {', '.join(ACCURACIES)}. [dim]default: {DEFAULT}[/]"),
    ] = None
    integers: Mapping[str, int | None] = field(default_factory=dict)
    gradient: Annotated[
        list[str] | None,
        _pass(metavar="NAME", help="With --backward: the gradient of a captured tensor too (repeatable)."),
    ] = None

    def __post_init__(self) -> None:
        for option, given in (("--deterministic", self.deterministic), ("--gradient", self.gradient)):
            if given and not self.backward:
                raise PlanError(f"{option} is of the backward\n  nearest: {option} with --backward")
        fixed = {_flag(name): value is not None for name, value in self.integers.items() if of_forward(name)}
        flags = {"--packed": self.packed, "--split-keys": self.split_keys, "--invariant": self.invariant}
        for option, given in {**flags, **fixed}.items():
            if given and self.backward:
                raise PlanError(f"{option} is of the forward\n  nearest: {option} without --backward")

    def of_keys(self, kv_dtype: str | None) -> dict[str, str | None]:
        """The dtypes of k and of v, each that of both unless it has its own; None: that of q."""
        return {"k_dtype": self.k_dtype or kv_dtype, "v_dtype": self.v_dtype or kv_dtype}

    def asked(self, kv_dtype: str | None = None) -> dict[str, object]:
        """As a request takes it, beside a dtype of k and v."""
        from flashgen.ops.options import option
        from flashgen.planning.members import keys_of

        keys = keys_of(invariant=self.invariant, split=self.split_keys)
        backward = {"deterministic": self.deterministic, "gradients": tuple(self.gradient or ())}
        return {
            **{"backward": self.backward, "dropout": self.dropout, "packed": self.packed},
            "layout": option("layout", self.layout),
            "keys": keys,
            **self.of_keys(kv_dtype),
            **{"out_dtype": self.out_dtype, "accuracy": self.accuracy},
            **backward,
            **self.integers,
        }


#: The options of integers that no spec can pin, so that they are of a pass and not of a call.
_INTEGERS = {
    name: (Annotated[int | None, _pass(help=row.help)], None)
    for name, row in INTEGERS.items()
    if name not in Pins.__dataclass_fields__
}


def _flag(name: str) -> str:
    """What the command line calls an integer."""
    return f"--{name.replace('_', '-')}"


def of_forward(name: str) -> bool:
    """Whether an integer is of forwards alone."""
    return "backward" not in INTEGERS[name].passes


def tile_shape(text: str | None) -> tuple[int, int] | None:
    """The tile that --tile names."""
    if text is None:
        return None
    match = re.fullmatch(r"([0-9]{1,9})[xX]([0-9]{1,9})", text)
    if match is None:
        raise PlanError(f"--tile {text!r} is not of the form QxKV\n  nearest: --tile 128x64")
    return int(match[1]), int(match[2])


def shared(verb: Callable[..., None]) -> Callable[..., None]:
    """A command whose parameters of type `Request` and `Pass` are spelled out as the options of those, and their field
    `integers` as the integers of a kernel that no other field is for.  With --json stdout has the object alone."""
    hints = get_type_hints(verb, include_extras=True)
    own, options, groups = [], [], {}
    for name, parameter in inspect.signature(verb).parameters.items():
        if (group := hints[name]) not in (Request, Pass):
            own.append(parameter.replace(annotation=group, kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        types = get_type_hints(group, include_extras=True)
        groups[name] = group, [f.name for f in dataclasses.fields(group)]
        for f in dataclasses.fields(group):
            shown = _INTEGERS if f.name == "integers" else {f.name: (types[f.name], f.default)}
            options += [
                inspect.Parameter(one, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
                for one, (annotation, default) in shown.items()
            ]

    @functools.wraps(verb)
    def command(**given: object) -> None:
        for name, (group, fields) in groups.items():
            integers = {"integers": {one: given.pop(one) for one in _INTEGERS}} if "integers" in fields else {}
            given[name] = group(**{one: given.pop(one) for one in fields if one != "integers"}, **integers)
        with json_alone() if given.get("as_json") else contextlib.nullcontext():
            verb(**given)

    parameters = [*own, *options]
    command.__signature__ = inspect.Signature(parameters)
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    del command.__wrapped__
    return command


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


def pair(text: str, option: str, form: str) -> tuple[str, str]:
    """Name and value of a repeatable NAME=VALUE option."""
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise SpecError(f"{option} {text!r} is not of the form {form}")
    return name, value
