"""Masks as people bring them: `specs/masks`, and more in `masks/`; none was written to be judged well."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from flashgen.analysis.tiles import Case
from flashgen.cli import captured
from flashgen.lang.load import gallery, load_spec
from flashgen.lang.variant import Variant
from flashgen.planning.problem import Problem

FILES = gallery() | {file.stem: file for file in sorted((Path(__file__).parent / "masks").glob("*.py"))}

#: Sizes that are not those of most.
SIZES = {"tree": {"q_len": 256, "kv_len": 1536}, "zigzag": {"q_len": 1024, "kv_len": 1024}}


@cache
def variant(name: str) -> Variant:
    """The mask of that file, with its constants bound."""
    return load_spec(str(FILES[name])).bind()


def case(name: str, seqlen: int = 2048, *, seed: int = 0, **sizes: int) -> Case:
    """Its parameters' defaults and its examples' data, for a problem of one batch and one head."""
    lengths = {"q_len": seqlen, "kv_len": seqlen} | (SIZES.get(name, {}) if seqlen == 2048 else {})
    dims = {"batch": 1, "heads": 1, "kv_heads": 1, "head_dim": 128, "v_head_dim": 128}
    problem = Problem(**dims | lengths | sizes)
    data = captured.arrays(variant(name), problem, (), seed=seed, examples=True)
    return Case(sizes=problem.sizes(), params=variant(name).values({}), tensors=data)
