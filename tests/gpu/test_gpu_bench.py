"""Suites of `flashgen bench` at small sizes on a GPU: what is captured, timed and checked there, before a long run."""

import functools

import pytest
import torch

from flashgen.bench import flex, joined, masks, serving, short, suite
from flashgen.bench.cells import cell
from flashgen.bench.functions import Functions, problem
from flashgen.bench.suite import Ground, Row
from flashgen.bench.timers import Cold, Eager, Graph, Host

pytestmark = pytest.mark.gpu

SMALL = serving.cache(2, 8, 2, 512)
LONG = serving.cache(2, 8, 2, 512, q_len=4)

ROWS = {
    "decode": (functools.partial(serving.decode, SMALL, (16,)), Cold()),
    "host": (functools.partial(serving.host_time, SMALL), Host(calls=10, warm=2)),
    "pages": (functools.partial(serving.pages, LONG, 16), Cold()),
    "queries": (functools.partial(serving.queries, LONG), Cold()),
    "tree": (functools.partial(serving.tree, serving.cache(2, 8, 2, 512, q_len=16)), Cold()),
    "varlen": (functools.partial(joined.forward, joined.Documents(lengths=(300, 64, 500)), "causal"), Eager()),
    "varlen backward": (functools.partial(joined.backward, joined.Documents(lengths=(300, 64)), "causal"), Eager()),
    "short": (functools.partial(short.of_forward, cell("causal", 64, 128, batch=1, heads=8)), Graph()),
    "short backward": (functools.partial(short.of_backward, cell("causal", 64, 512, batch=2)), Graph()),
    "masks": (
        functools.partial(masks.forward, Functions(name="flags", problem=problem(512), make=masks.flags)),
        Eager(),
    ),
    "masks backward": (
        functools.partial(masks.backward, Functions(name="flags", problem=problem(512), make=masks.flags)),
        Eager(),
    ),
    "flex": (functools.partial(flex.both, Functions(name="alibi", problem=problem(512), make=flex.alibi)), Eager()),
    "another length": (functools.partial(flex.another_length, problem(512, batch=1)), Host(calls=5, warm=1)),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_row_is_right_and_timed(name):
    make, timer = ROWS[name]
    row = Row(part="small", name=name, make=make, timer=timer)
    found = suite.measure(row, Ground(names=("fa2",) if name in ("decode", "host", "short") else ()), rounds=7)
    assert found.reasons == () and found.absent == {}, (found.reasons, found.absent)
    assert found.timings is not None and all(ms > 0 for each in found.timings.rounds.values() for ms in each)
    assert torch.cuda.is_available()
