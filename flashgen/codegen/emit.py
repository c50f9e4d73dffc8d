"""A KernelPlan as one self-contained CUDA file."""

from __future__ import annotations

import re
import textwrap
from functools import lru_cache

from flashgen.analysis.facts import Facts, analyse
from flashgen.codegen import device, params
from flashgen.codegen.backward import sized, transposed
from flashgen.codegen.seam import Seam, seam
from flashgen.planning.plan import KernelPlan
from flashgen.resources import folder

#: What the names of mma and cvt wrappers call the element type.
_PTX_TYPE = {"float16": "f16", "bfloat16": "bf16"}

_WIDTH = 116  # of a line, less a margin

_AFTER_OPERATOR = re.compile(r"(?<=\|\| )|(?<=&& )|(?<= & )|(?<= \| )")
_LEFT_OF_CONDITION, _CONTINUED = len("  const bool visible = "), " " * 6


def emit(plan: KernelPlan, facts: Facts | None = None) -> str:
    """The CUDA of a plan; `facts` are those of its variant where the caller has them.

    The text depends on the plan alone: never on a length, a batch, a number of heads or a parameter's value.
    """
    facts = facts or analyse(plan.variant)
    found = seam(facts)
    template = environment().get_template(f"{plan.pipeline}/{plan.pass_name}.cu.j2")
    ptx_type = _PTX_TYPE[plan.dtype]
    context = {
        "plan": plan,
        "seam": found,
        "banner": banner(plan, found),
        "fields": params.fields(plan),
        "params_bytes": params.sizeof(plan),
        "element": params.ELEMENT[plan.dtype],
        "ptx_type": ptx_type,
        "from": f"from_{ptx_type}",
        "walks_keys": plan.backward is None or plan.deterministic,
        "mma": f"mma_m16n8k16_{ptx_type}",
        "cvt": f"cvt_{ptx_type}x2",
    }
    if plan.backward is not None:
        context["transposed"] = transposed(facts, plan.gradients)
        context["gradients"] = [sized(t) for t in plan.variant.tensors if t.name in plan.gradients]
    # The kernel says which device functions it uses; then it is put together with them.
    return template.render(context, device=device.used_by(template.render(context, device="")))


def banner(plan: KernelPlan, found: Seam) -> str:
    """The comment at the head of a file: variant, plan, shared memory, and the command that reproduces it."""
    roles = ", ".join(f"{role.warps} {role.name} warps" for role in plan.roles)
    q_home = "" if plan.backward else f", q in {'registers' if plan.q_in_registers else 'shared memory'}"
    dims = f"head_dim {plan.head_dim}"

    options = f"--arch {plan.arch} --pipeline {plan.pipeline} --dtype {plan.dtype} --head-dim {plan.head_dim}"
    if plan.v_head_dim != plan.head_dim:
        dims += f", v_head_dim {plan.v_head_dim}"
        options += f" --v-head-dim {plan.v_head_dim}"
    made_by = f"flashgen emit {plan.variant.name} {options} --tile {plan.tile}"
    if plan.backward is not None:
        made_by = _backward_call(plan)
    entries = [
        *found.formula,
        ("plan", f"{plan.pipeline} on {plan.arch}, {plan.dtype}, {dims}"),
        ("tile", f"{plan.tile.q} queries x {plan.tile.kv} keys, {plan.stages} stages, {roles}{q_home}"),
        ("shared", " + ".join(f"{part.name} {part.amount}" for part in plan.smem) + f" = {plan.smem_bytes} bytes"),
        ("made by", made_by),
    ]
    width = max(len(kind) for kind, _ in entries)
    doc = textwrap.wrap(plan.variant.doc.partition("\n\n")[0], _WIDTH)
    lines = [f"{plan.variant.name}: attention {plan.pass_name}", *doc, ""]
    for kind, text in entries:
        first, *rest = textwrap.wrap(text, _WIDTH - width - 2)
        lines.append(f"{kind:{width}}  {first}")
        lines += [f"{'':{width}}  {line}" for line in rest]
    return "\n".join(f"// {line}".rstrip() for line in lines)


def _backward_call(plan: KernelPlan) -> str:
    """What gives a backward's text in Python."""
    given = {"arch": plan.arch, "dtype": plan.dtype, "head_dim": plan.head_dim}
    if plan.v_head_dim != plan.head_dim:
        given["v_head_dim"] = plan.v_head_dim
    given |= {"tile": (plan.tile.q, plan.tile.kv), "backward": True}
    given |= {name: True for name in ("deterministic", "dropout") if getattr(plan, name)}
    if plan.gradients:
        given["gradients"] = plan.gradients
    options = "".join(f", {name}={value!r}" for name, value in given.items())
    return f"flashgen.emit(flashgen.plan({plan.variant.name!r}{options}))"


@lru_cache(maxsize=1)
def environment():
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
    made.filters["wrapped"] = wrapped
    return made


def wrapped(expression: object) -> str:
    """A condition on as many lines as it needs, each ending with an operator between conditions."""
    lines, room = [""], _WIDTH - _LEFT_OF_CONDITION
    for part in _AFTER_OPERATOR.split(str(expression)):
        if lines[-1] and len(lines[-1]) + len(part) > room:
            lines.append("")
            room = _WIDTH - len(_CONTINUED)
        lines[-1] += part
    return ("\n" + _CONTINUED).join(line.rstrip() for line in lines)
