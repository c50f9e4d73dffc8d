"""A KernelPlan as one self-contained CUDA file."""

from __future__ import annotations

import math
import shlex
import textwrap
from functools import lru_cache
from typing import TYPE_CHECKING

from flashgen.analysis.facts import Facts, analyse
from flashgen.analysis.words import in_words
from flashgen.codegen import device, params
from flashgen.codegen.backward import sized, transposed
from flashgen.codegen.blocks import BlockCode
from flashgen.codegen.distances import DistanceCode
from flashgen.codegen.first_tile import ScoresCode
from flashgen.codegen.fold import folded
from flashgen.codegen.operands import PTX_TYPE, OperandCode
from flashgen.codegen.order import OrderCode
from flashgen.codegen.packs import PackCode
from flashgen.codegen.pages import PagesCode
from flashgen.codegen.reachable import reachable
from flashgen.codegen.scales import ScaleCode
from flashgen.codegen.sequences import SequenceCode
from flashgen.codegen.split_keys import KeyCode
from flashgen.codegen.variant_code import VariantCode, variant_code
from flashgen.planning import split_keys
from flashgen.planning.backward import lookups, word_lookups
from flashgen.planning.members import MANY_TILES, Launches
from flashgen.planning.pipelines.hopper import programs
from flashgen.planning.plan import KernelPlan, SpecializedBackward, Tile
from flashgen.planning.profile import profile
from flashgen.resources import folder

if TYPE_CHECKING:
    from jinja2 import Environment

    from flashgen.lang.expr import Node

#: What stands in the place of files of the device library until it is known which of it is used.
_PLACES = {"wrappers": ("// PTX wrappers", device.WRAPPERS), "library": ("// library", device.LIBRARY)}

_WIDTH = 116  # of a line, less a margin

#: Queries and keys that have the form of a backward for short sequences.
SHORT_SEQLEN = 1024

#: What stands before the command that gives a file again.
_MADE_BY = "made by"


def emit(plan: KernelPlan, facts: Facts | None = None) -> str:
    """The CUDA of a plan; `facts` are those of its variant where the caller has them.

    The text depends on the plan alone: never on a length, a batch, a number of heads or a parameter's value.
    """
    facts = facts or analyse(plan.variant)
    found = variant_code(
        *(facts, _tiles(plan), _given(plan), plan.layout, plan.summaries),
        judged_in_turn=plan.backward is not None and plan.backward.judged_in_turn,
        uniform=plan.masked_by_tile,
        within_bounds=plan.masked_within_bounds,
        rough_tanh=plan.rough_tanh,
        distances=plan.specialized is not None,
        rows=profile(plan.variant).score_rows if plan.reads_rows else (),
        powers=plan.one_score,
        words=in_words(plan.variant) if plan.masked_in_words else None,
        by_warpgroup=plan.takes_first_keys,
    )
    template = environment().get_template(f"{plan.pipeline}/{plan.pass_name}.cu.j2")
    ptx_type, seq = PTX_TYPE[plan.out_dtype], SequenceCode(plan.layout)
    packs = PackCode(plan.packed, seq)
    context = {
        "plan": plan,
        "code": found,
        "seq": seq,
        "keys": KeyCode(plan.keys, plan.tile.kv, _placed_anew(plan)),
        "of_block": BlockCode(plan.backward is not None and plan.backward.persistent),
        "order": OrderCode(plan),
        "scores": ScoresCode(plan.takes_first_keys, plan.packed),
        "many_tiles": MANY_TILES,
        "work_alignment": programs.work_layout(plan.layout, split=plan.keys.split)[1],
        "combine": split_keys.combining(plan),
        "pages": PagesCode(plan.layout, scaled=plan.float8 is not None, whole_rows=plan.whole_rows),
        "scales": ScaleCode(
            plan.float8 is not None, plan.packed, found.score is not None, _cap(plan, found), found.in_powers
        ),
        "operands": OperandCode(plan, found.score is not None, packs),
        "packs": packs,
        "distances": DistanceCode(found.distances, plan.packed),
        "banner": banner(plan, found),
        "enter": entered(plan.launches),
        "fields": params.fields(plan),
        "params_bytes": params.sizeof(plan),
        "element": params.ELEMENT[plan.out_dtype],
        "ptx_type": ptx_type,
        "from": f"from_{ptx_type}",
        "mma": f"mma_m16n8k16_{ptx_type}",
        "cvt": f"cvt_{ptx_type}x2",
    }
    if plan.backward is not None:
        context["transposed"] = transposed(facts, plan.gradients, plan.layout)
        context["gradients"] = sized(facts, plan)
    # The kernel's entries say which of its functions they use, and these which of the device library's.
    text = kernel = reachable(template.render(context, **{name: place for name, (place, _) in _PLACES.items()}))
    for place, files in _PLACES.values():
        text = text.replace(place, device.used_by(kernel, files), 1)
    return folded(text)


def _given(plan: KernelPlan) -> tuple[Node, ...]:
    """What the mask is given of captured tensors."""
    if plan.masked_in_words:
        return word_lookups(plan.variant)
    return lookups(plan.variant) if plan.looks_up else ()


def _placed_anew(plan: KernelPlan) -> bool:
    """Whether consumers that fold leaves ask in few tiles where they stand: at the ends of runs of keys, and where O is
    stored.  What asks in every tile holds it, and knows more of numbers that never change."""
    asked = profile(plan.variant)
    return plan.keys.folds and not (asked.judged or asked.scored or plan.dropout)


def _cap(plan: KernelPlan, found: VariantCode) -> str | None:
    """The cap of scores that factors hold."""
    if not plan.caps_scores:
        return None
    assert found.soft_cap is not None  # the planner asked the same question
    return str(found.soft_cap)


def entered(launches: Launches) -> str:
    """What stands behind the first line of a kernel."""
    return "".join(f"\n  {call}();" for call in launches.calls)


def _tiles(plan: KernelPlan) -> Tile:
    """A tile that all tiles of the kernel's entries divide."""
    alone = None if plan.backward is None else plan.backward.by_query
    return plan.tile if alone is None else Tile(q=math.lcm(plan.tile.q, alone.tile_q), kv=plan.tile.kv)


def banner(plan: KernelPlan, found: VariantCode) -> str:
    """The comment at the head of a file: variant, plan, shared memory, and the command that reproduces it."""
    q_home = "" if plan.backward else f", q in {'registers' if plan.q_in_registers else 'shared memory'}"
    rows = "rows (queries of all heads that share keys)" if plan.packed else "queries"
    dims = f"head_dim {plan.head_dim}"
    if plan.v_head_dim != plan.head_dim:
        dims += f", v_head_dim {plan.v_head_dim}"
    eight = plan.said_of_8_bits
    entries = [
        *found.formula,
        ("plan", f"{plan.pipeline} on {plan.arch}, {plan.dtype}, {dims}" + (f"; {eight}" if eight else "")),
        ("tile", f"{plan.tile.q} {rows} x {plan.tile.kv} keys, {plan.stages} stages{q_home}"),
        ("roles", plan.program.text()),
        *([("launch", str(plan.launches))] if plan.launches.early else []),
        *([("summaries", "; ".join(map(str, plan.summaries)))] if plan.summaries else []),
        *([("order", "tiles of queries that see most first, in small calls the last ones")] if plan.ordered else []),
        ("shared", " + ".join(f"{part.name} {part.amount}" for part in plan.smem) + f" = {plan.smem_bytes} bytes"),
    ]
    width = max(len(kind) for kind in (*dict(entries), _MADE_BY))
    paragraphs = [(kind, textwrap.wrap(text, _WIDTH - width - 2)) for kind, text in entries]
    spec = plan.variant.spec
    if spec is not None and spec == _comment(spec):  # else no command that names it would be true
        paragraphs.append((_MADE_BY, _command(plan, spec, _WIDTH - width - 2)))
    title = f"{_comment(plan.variant.name)}: attention {plan.pass_name}"
    doc = textwrap.wrap(_comment(plan.variant.doc.partition("\n\n")[0]), _WIDTH)
    lines = [*textwrap.wrap(title, _WIDTH), *doc, ""]
    for kind, (first, *rest) in paragraphs:
        lines.append(f"{kind:{width}}  {first}")
        lines += [f"{'':{width}}  {line}" for line in rest]
    return "\n".join(f"// {line}".rstrip() for line in lines)


def _comment(text: str) -> str:
    """The text on one line that C++ reads as nothing but a comment: a backslash at its end would go on with the next.

    White space becomes a space, what does not print a question mark.
    """
    return "".join(c if c.isprintable() else "?" for c in " ".join(text.split())).replace("\\", "/")


def _command(plan: KernelPlan, spec: str, width: int) -> list[str]:
    """The command that gives this text, on as many lines as it needs; no option is parted from its value.

    It names a shipped spec, or the file's own name, so that it holds in any folder that the file lies in.
    """
    variant = plan.variant
    options = [("arch", plan.arch), ("pipeline", plan.pipeline), ("dtype", plan.dtype), ("head-dim", plan.head_dim)]
    if plan.v_head_dim != plan.head_dim:
        options.append(("v-head-dim", plan.v_head_dim))
    if isinstance(plan.backward, SpecializedBackward) and plan.backward.short:
        options.append(("seqlen", SHORT_SEQLEN))  # a tile that is fixed has one form
    else:
        options.append(("tile", plan.tile))
        options += [(name.replace("_", "-"), value) for name, value in plan.integers().items()]
    if plan.float8 is not None:
        options += plan.float8.options()
    if plan.layout.own:
        options.append(("layout", plan.layout.name))
    options += [("param", f"{name}={value}") for name, value in variant.bound]
    flags = {"backward": plan.backward is not None, "deterministic": plan.deterministic, "dropout": plan.dropout}
    flags |= {"packed": plan.packed, "split-keys": plan.keys.split, "invariant": plan.keys.invariant}
    words = [f"--{name} {shlex.quote(str(value))}" for name, value in options]
    words += [f"--{name}" for name, given in flags.items() if given]
    words += [f"--gradient {name}" for name in plan.gradients]
    lines = [f"flashgen emit {shlex.quote(spec)}"]
    for word in words:
        if len(lines[-1]) + 1 + len(word) > width:
            lines.append(word)
        else:
            lines[-1] += f" {word}"
    return lines


@lru_cache(maxsize=1)
def environment() -> Environment:
    """The one Jinja environment: strict, and control lines look like comments so that templates look like CUDA."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    made = Environment(
        loader=FileSystemLoader(folder("templates")),
        undefined=StrictUndefined,
        line_statement_prefix="//%",
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return made
