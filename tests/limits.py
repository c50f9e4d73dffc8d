"""The tables of docs/limits.md: which pipeline serves a feature at a head dim, as the planner answers it now."""

import re
from dataclasses import dataclass, field
from types import MappingProxyType

import flashgen
from flashgen.lang.variant import Variant
from flashgen.planning.arch import ARCHS

#: The architecture with a pipeline of its own; on the others there is no choice to be made.
ARCH = "sm_90a"

#: First and last head dim of a column; what serves both is said to serve all between them.
COLUMNS = ((16, 64), (72, 96), (104, 128), (136, 192), (200, 256))


@dataclass(frozen=True, slots=True)
class Feature:
    """A row: what a person reads, and the spec and options that stand for it."""

    name: str
    spec: str | Variant
    options: MappingProxyType = field(default_factory=lambda: MappingProxyType({}))


def feature(name: str, spec: str | Variant, **options: object) -> Feature:
    return Feature(name, spec, MappingProxyType(options))


bias = flashgen.tensor("bias", dims=("heads", "q", "kv"), dtype="float32")
factor = flashgen.tensor("factor", dims=("heads",), dtype="float32")


@flashgen.variant().score
def by_pair(s, b, h, q, k):
    return s + bias[h, q, k]


@flashgen.variant().score
def by_factor(s, b, h, q, k):
    return s * factor[h]


FORWARD = (
    feature("no mask, no score function (`full`)", "full"),
    feature("a mask of bands and prefixes (`causal`)", "causal"),
    feature("a mask that reads a captured tensor (`document`)", "document"),
    feature("a mask that is judged tile by tile (`blocks`)", "blocks"),
    feature("a score function (`softcap`)", "softcap"),
    feature("a score that reads a captured tensor (`relative_bias`)", "relative_bias"),
    feature("another head dim of v (`full`, `v_head_dim=64`)", "full", v_head_dim=64),
    feature("packed heads (`causal`, `packed=True`)", "causal", packed=True),
    feature("dropout (`causal`, `dropout=True`)", "causal", dropout=True),
)

BACKWARD = (
    *FORWARD[:7],
    feature("one order of sums (`causal`, `deterministic=True`)", "causal", deterministic=True),
    feature("dropout (`causal`, `dropout=True`)", "causal", dropout=True),
    feature("dropout beside a judged mask (`blocks`, `dropout=True`)", "blocks", dropout=True),
    feature(
        "gradient of a bias by distance (`relative_bias`, `gradients=['table']`)", "relative_bias", gradients=["table"]
    ),
    feature("gradient of a bias for each pair (`s + bias[h, q, k]`)", by_pair, gradients=["bias"]),
    feature("gradient of a factor (`s * factor[h]`)", by_factor, gradients=["factor"]),
)


def forward() -> str:
    return served(FORWARD, backward=False)


def backward() -> str:
    return served(BACKWARD, backward=True)


def served(features: tuple[Feature, ...], *, backward: bool) -> str:
    """A table of features x head dims; the last column says what keeps a feature from the architecture's pipeline."""
    best = ARCHS[ARCH].pipelines[0]
    lines = [
        f"| feature | {' | '.join(f'{first} to {last}' for first, last in COLUMNS)} | why not {best} everywhere |",
        f"|{'---|' * (len(COLUMNS) + 2)}",
    ]
    for one in features:
        cells = [tuple(pipeline(one, dim, backward) for dim in column) for column in COLUMNS]
        shown = [a if a == b else f"{a}; {last}: {b}" for (a, b), (_, last) in zip(cells, COLUMNS, strict=True)]
        flat = [
            (p, dim) for pair, column in zip(cells, COLUMNS, strict=True) for p, dim in zip(pair, column, strict=True)
        ]
        other = next((dim for p, dim in flat if p != best), None)
        why = "" if other is None else f"at {other}: {reason(one, other, backward, best)}"
        lines.append(f"| {one.name} | {' | '.join(shown)} | {why} |")
    return "\n".join(lines) + "\n"


def pipeline(one: Feature, head_dim: int, backward: bool, arch: str = ARCH) -> str:
    """What `flashgen plan` takes, or "none" where it refuses."""
    try:
        return flashgen.plan(one.spec, arch=arch, head_dim=head_dim, backward=backward, **one.options).pipeline
    except flashgen.PlanError:
        return "none"


def reason(one: Feature, head_dim: int, backward: bool, best: str) -> str:
    """The last line of the limit that the best pipeline gives."""
    options = {"arch": ARCH, "head_dim": head_dim, "backward": backward, "pipeline": best, **one.options}
    limit = flashgen.supports(one.spec, **options)[0].limit.splitlines()[-1].strip()
    return re.sub(rf"^pipeline '?{best}'?:? ", "", limit)


def architectures() -> str:
    """Each architecture: its pipelines, best first, and the head dims that its forward and its backward take."""
    lines = ["| arch | card that its figures are of | pipelines, best first | head dims |", "|---|---|---|---|"]
    for arch in ARCHS.values():
        named = ", ".join(arch.pipelines)
        lines.append(f"| {arch.name} | {arch.card} | {named} | {head_dims(arch.name)} |")
    return "\n".join(lines) + "\n"


def head_dims(arch: str) -> str:
    """The least and the largest head dim that both passes of `full` take, found from the ends."""

    def taken(dim: int) -> bool:
        return not any(flashgen.supports("full", arch=arch, head_dim=dim, backward=b) for b in (False, True))

    least = next(dim for dim in range(8, 65, 8) if taken(dim))
    largest = next(dim for dim in range(512, 127, -8) if taken(dim))
    return f"{least} to {largest} in steps of 8"
