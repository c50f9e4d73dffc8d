"""A program is sound: warps are divided, registers fit, barriers count who arrives, ids differ; and so is its CUDA."""

from __future__ import annotations

import dataclasses
import re
from functools import cache, lru_cache

import pytest

from flashgen.analysis.derivative import differentiable
from flashgen.codegen import emit
from flashgen.errors import PlanError
from flashgen.lang.load import load_spec
from flashgen.planning.arch import find
from flashgen.planning.pipelines.hopper.programs import ALIGNMENT
from flashgen.planning.planner import menu_of
from flashgen.planning.program import IDLE, Party
from flashgen.planning.request import KernelRequest

ARCH = find("sm_90a")
NAMED_BARRIERS = 16  # of a block
text_of = cache(emit)
SPECS = ("full", "causal", "document", "relative_bias", "softcap", "blocks")
BACKWARD = {"backward": True}
OPTIONS = ({}, {"packed": True}, BACKWARD, BACKWARD | {"deterministic": True}, BACKWARD | {"dropout": True})


@lru_cache
def plans():
    """What the planner accepts of some masks, scores, head dims and options."""
    found = {}
    for spec in SPECS:
        variant = load_spec(spec).bind()
        captured = tuple(differentiable(variant.score_node))
        options = [*OPTIONS, *([BACKWARD | {"gradients": captured}] if captured else [])]
        for head_dim in (64, 128, 256):
            for given in options:
                try:
                    menu = menu_of(KernelRequest.of(variant, "sm_90a", "bfloat16", head_dim, head_dim, **given))
                except PlanError:
                    continue
                found |= {plan: None for plan in menu.forms if plan.pipeline == "hopper"}
    assert {plan.pass_name for plan in found} == {"forward", "backward"}
    return tuple(found)


def faults(program) -> list[str]:
    """What is wrong with a program, whatever it computes."""
    found = []
    owners = [role for role in program.roles for _ in range(role.warps)]
    names = [role.name for role in program.roles if role.name != IDLE]
    if len(set(names)) < len(names) or any(role.warps < 1 or role.threads > 32 * role.warps for role in program.roles):
        found.append("warps are no partition")
    groups = [{role.registers for role in owners[i : i + 4]} for i in range(0, len(owners), 4)]
    if len(owners) % 4 or any(len(group) > 1 for group in groups):
        found.append("the warps of a warpgroup differ in registers")
    if program.specialised and sum(32 * r.warps * r.registers for r in program.roles) > ARCH.registers_per_sm:
        found.append("more registers than an SM has")
    ids = [barrier.id for barrier in program.named_barriers]
    if len(set(ids)) < len(ids) or not all(0 <= one < NAMED_BARRIERS for one in ids):
        found.append(f"ids of named barriers {ids}")
    for barrier in program.named_barriers:
        if any(name not in (*names, IDLE) for name in barrier.roles):
            found.append(f"nobody meets at {barrier.name}")
        elif barrier.warps > sum(role.warps for role in program.roles if role.name in barrier.roles):
            found.append(f"more warps meet at {barrier.name} than there are")
    for ring in program.rings:
        for party in (*ring.producers, *ring.consumers):
            warps = next((role.warps for role in program.roles if role.name == party.role), 0)
            own = 4 if ring.each and warps > 4 else warps
            if not warps or party.arrivals not in (0, 1, own):
                found.append(f"{ring.name} counts {party.arrivals} arrivals of {party.role}")
        if ring.full < 1 or not ring.consumers or not (ring.empty or ring.freed):
            found.append(f"{ring.name} does not go round")
        if ring.empty and ring.full != 1:
            found.append(f"{ring.name}: `init` counts one arrival at `full`")
    if {name for chain in program.dispatch for name in chain} | {r.name for r in program.consumers} != set(names):
        found.append("not every role is dispatched")
    return found


@pytest.mark.slow
def test_every_program_is_sound():
    for plan in plans():
        assert faults(plan.program) == [], plan
        assert plan.threads == 32 * sum(role.warps for role in plan.program.roles)


@pytest.mark.slow
def test_a_block_gives_no_more_registers_than_it_starts_with():
    alone = [plan for plan in plans() if not plan.program.specialised]  # one warpgroup: any thread may have the most
    assert alone and all(plan.threads * ARCH.registers_per_thread <= ARCH.registers_per_sm for plan in alone)
    for plan in plans():
        if plan in alone:
            continue
        started = ARCH.registers_per_sm // plan.threads // 8 * 8
        taken = sum(32 * role.warps * role.registers for role in plan.program.roles)
        assert taken <= started * plan.threads
        assert plan.program.producer_registers < started < plan.program.consumer_registers


@pytest.mark.slow
def test_the_sum_of_shared_memory_is_that_of_the_members():
    for plan in plans():
        assert plan.program.shared_bytes(ALIGNMENT) == plan.smem_bytes
        held = [member.name for line in plan.program.shared for member in line.members]
        assert len(set(held)) == len(held)
        assert {ring.barrier for ring in plan.program.rings} <= set(held)


@pytest.mark.parametrize(
    "change, fault",
    [
        (lambda p: {"roles": p.roles[1:]}, "differ in registers"),
        (lambda p: {"roles": (*p.roles[:-1], dataclasses.replace(p.roles[-1], registers=248))}, "more registers"),
        (lambda p: {"roles": tuple(r for r in p.roles if r.name != "storer")}, "arrivals of storer"),
        (lambda p: {"named_barriers": p.named_barriers[:1] * 2}, "ids of named barriers"),
        (
            lambda p: {"named_barriers": (dataclasses.replace(p.named_barriers[-1], id=16),)},
            "ids of named barriers [16]",
        ),
        (
            lambda p: {"rings": (dataclasses.replace(p.ring("k"), consumers=(Party(role="consumer", arrivals=7),)),)},
            "k counts 7 arrivals of consumer",
        ),
        (lambda p: {"dispatch": p.dispatch[:1]}, "not every role is dispatched"),
    ],
)
def test_an_unsound_program_is_seen(change, fault):
    program = next(plan.program for plan in plans() if any(role.name == "storer" for role in plan.program.roles))
    assert any(fault in one for one in faults(dataclasses.replace(program, **change(program))))


# ---------------------------------------------------------------------------------------------------------------------
# What is emitted of it


def counted(text: str) -> dict[str, int]:
    """Arrivals that the emitted text initialises each array of barriers with."""
    names = dict(re.findall(r"\b(WARPGROUPS|WARPS) = (\d+)", text))
    found = {}
    for member, arrivals in re.findall(r"\b(?:mbarrier_init|init)\(shared\.(\w+)[^,]*, ([^)]*)\);", text):
        assert member not in found
        found[member] = int(eval(re.sub("[A-Z]+", lambda m: names[m[0]], arrivals)))
    return found


@pytest.mark.slow
def test_barriers_count_those_who_arrive():
    for plan in plans():
        wanted = {ring.barrier: ring.empty or ring.full for ring in plan.program.rings}
        assert counted(text_of(plan)) == wanted


@pytest.mark.slow
def test_each_thread_of_the_producer_warpgroup_finds_its_role():
    struct = {}  # by role
    for plan in plans():
        program = plan.program
        _, _, dispatch = text_of(plan).partition("  if (warpgroup == 0) {\n")
        chosen = re.findall(r"if \(threadIdx\.x (<|==|>=) (\d+)\) (\w+)\{", dispatch.partition("} else {")[0])
        owners = [role for role in program.roles for _ in range(32 * role.warps)][:128]
        for thread, role in enumerate(owners):
            found = [name for sign, bound, name in chosen if eval(f"{thread} {sign} {bound}")]
            runs = role.name != IDLE and thread - program.first_thread(role.name) < role.threads
            assert len(found) == runs
            assert not runs or struct.setdefault(role.name, found[0]) == found[0]
    assert len(set(struct.values())) == len(struct) == 5
