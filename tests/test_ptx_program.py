"""A kernel whose program is not what its barriers count deadlocks the interpreter: nobody arrives, or too few do."""

from __future__ import annotations

import dataclasses

import pytest
from ptx_attention import work

from flashgen.codegen import emit
from flashgen.interpreter import errors
from flashgen.planning.program import Party, Program


def without(program: Program, name: str) -> Program:
    """The warps of a role do nothing; barriers count them as before."""
    chains = (tuple(one for one in chain if one != name) for chain in program.dispatch)
    return dataclasses.replace(program, dispatch=tuple(chain for chain in chains if chain))


def with_more(program: Program, name: str) -> Program:
    """A ring counts one consumer more than arrives."""
    more = Party(role="storer", arrivals=1)
    rings = (
        dataclasses.replace(ring, consumers=(*ring.consumers, more)) if ring.name == name else ring
        for ring in program.rings
    )
    return dataclasses.replace(program, rings=tuple(rings))


@pytest.fixture(scope="module")
def subject():
    return work("causal_bottom_right", "hopper", q_len=300, kv_len=430, heads=2, q_stages=2)


def run(subject, program: Program):
    plan = dataclasses.replace(subject.plan, program=program)
    changed = dataclasses.replace(subject, plan=plan, source=emit(plan))
    return changed.run(step_limit=2_000_000, sms=1)


@pytest.mark.slow
@pytest.mark.sampled("loader")
@pytest.mark.parametrize("name", ["storer", "loader"])
def test_a_dropped_role_deadlocks(subject, name):
    with pytest.raises(errors.Deadlock):
        run(subject, without(subject.plan.program, name))


@pytest.mark.slow
@pytest.mark.sampled("k")
@pytest.mark.parametrize("name", ["k", "work"])
def test_a_consumer_too_many_deadlocks(subject, name):
    with pytest.raises(errors.Deadlock):
        run(subject, with_more(subject.plan.program, name))
