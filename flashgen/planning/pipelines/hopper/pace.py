"""Pipeline hopper, forward: how long kernels take, which orders candidates and says which of a menu serves a call."""

from __future__ import annotations

import math
from collections.abc import Callable

from flashgen.planning.arch import Arch
from flashgen.planning.members import FoldedLeaves
from flashgen.planning.pipelines.protocol import Predictor
from flashgen.planning.pipelines.shared import DROPOUT_OPS, SOFTMAX_OPS
from flashgen.planning.plan import KernelPlan, Specialized
from flashgen.planning.problem import Problem
from flashgen.planning.profile import profile

#: Up to so many columns a product is short: the softmax of a warpgroup must run under the products of two others, which
#: take turns to issue them.  Wider ones need no turns.
SHORT_COLUMNS = 64

#: Three warpgroups with wider columns hold so few keys that two are faster (FlashAttention-3 divides its rows like that
#: too): what to multiply their time by.
THREE_WIDE = 1.15

#: Clocks of a step that nothing hides: the latency of the first wgmma, of barriers and shuffles.
STEP_CLOCKS = 180

#: How much of the second busiest unit's time adds to that of the busiest, with which it shares issue slots.
INTERFERENCE = 0.3

#: How long a softmax is for its warpgroup, by the clocks of the units that it uses.
SOFTMAX_STRETCH = 0.85

#: Clocks lost between two tiles of queries with one stage for Q, and with only two for K and V; the keys that a tile of
#: queries sees typically.
Q_LOAD_CLOCKS, KV_LOAD_CLOCKS, TYPICAL_KEYS = 2000, 1500, 2048

#: Clocks from the copy of a tile of keys until it has come from memory that is busy.
MEMORY_CLOCKS = 1500

#: Bytes of an element of O of the leaves so far, and those that shared memory moves in a clock.
FOLD_ITEM, SHARED_BYTES = 4, 128


def _layout(plan: KernelPlan) -> Specialized:
    """How warps divide work, of a plan of this pipeline."""
    assert plan.specialized is not None
    return plan.specialized


def clocks(plan: KernelPlan, arch: Arch) -> dict[str, float]:
    """Clocks an SM spends on one score (one query, one key), by the unit that spends them."""
    special, arithmetic = profile(plan.variant).score_ops
    sm_clocks = arch.sms * arch.clock_hz
    return {
        "tensor": 2 * (plan.padded_head_dim + plan.padded_v_head_dim) * sm_clocks / arch.tensor_flops[plan.pipeline],
        "special": (1 + special) / arch.special_per_clock,
        "arithmetic": (SOFTMAX_OPS + arithmetic + DROPOUT_OPS * plan.dropout) / arch.fp32_lanes,
    }


def seconds_per_score(plan: KernelPlan, arch: Arch) -> tuple[float, ...]:
    """Seconds an SM needs for one score, which rank the plan; one block shares it."""
    by_unit = clocks(plan, arch)
    softmax = by_unit["special"] + by_unit["arithmetic"]
    busiest, second = sorted(by_unit.values(), reverse=True)[:2]
    # The softmax of one warpgroup runs under the work of the others, as far as that lasts.
    warpgroups, tile = _layout(plan).warpgroups, plan.tile
    exposed = max(0.0, SOFTMAX_STRETCH * softmax - (warpgroups - 1) * busiest)
    step = STEP_CLOCKS / (tile.q * tile.kv)
    between = (plan.q_stages == 1) * Q_LOAD_CLOCKS + (plan.stages == 2) * KV_LOAD_CLOCKS
    if plan.keys.split:  # a block has one tile of queries, and waits for each of keys: less where more are on their way
        between, step = plan.q_stages == 1, step + MEMORY_CLOCKS / (plan.stages * tile.q * tile.kv)
    step += _fold_clocks(plan, arch)
    pace = busiest + INTERFERENCE * second + exposed + step + between / (tile.q * TYPICAL_KEYS)
    wide = warpgroups > 2 and max(plan.head_dim, plan.v_head_dim) > SHORT_COLUMNS
    tail = -(-TYPICAL_KEYS // tile.kv) * tile.kv / TYPICAL_KEYS
    return (pace * tail * (THREE_WIDE if wide else 1.0) / arch.clock_hz,)


def _fold_clocks(plan: KernelPlan, arch: Arch) -> float:
    """Clocks of a score in which O of the leaves so far is read and written, once a leaf."""
    if not isinstance(plan.keys, FoldedLeaves):
        return 0.0
    fold, l2_bytes = _layout(plan).fold, arch.l2_bytes_per_s / arch.sms / arch.clock_hz
    elsewhere = plan.padded_v_head_dim - fold.columns - 2 * fold.held
    clocks = fold.columns / SHARED_BYTES + elsewhere / l2_bytes
    return 2 * FOLD_ITEM * clocks / plan.keys.keys


def predictor(plan: KernelPlan, seconds_per_score: tuple[float, ...]) -> Predictor:
    """Seconds of the SM with most to do, where a mask hides what lies above a diagonal.

    From one tile of queries to the next a step's time passes.
    """
    q, kv, of_score = plan.tile.q, plan.tile.kv, seconds_per_score[0]
    jagged = kv - math.gcd(q, kv)

    def unmasked(problem: Problem, sms: int) -> float:
        tiles = -(-problem.q_len // q) * problem.heads * problem.batch
        return -(-tiles // sms) * q * (-(-problem.kv_len // kv) * kv + kv) * of_score

    def masked(problem: Problem, sms: int) -> float:
        q_tiles = -(-problem.q_len // q)
        # On average half of the keys, and half of what the tiles on the diagonal hold beyond it.
        seen = min(-(-problem.kv_len // kv) * kv, (q_tiles * q + q + jagged) / 2)
        return max(1.0, q_tiles * problem.heads * problem.batch / sms) * q * (seen + kv) * of_score

    return unmasked if plan.variant.mask is None else masked


def packing_gain(
    packed: KernelPlan,
    plan: KernelPlan,
    seconds_per_score: Callable[[KernelPlan], tuple[float, ...]],
    problem: Problem,
    sms: int,
) -> float:
    """How many times as long as on the tiles of a packed form the SM with most to do works on those of
    `plan`, where each sees the same keys; O(1).

    Of an H200 (32 heads over 8 and 4, 8,192 keys, 1 to 200 queries; head_dim 64 and 128, full and causal): 1.75 to 4.5
    where it says 2 to 6, 1.13 to 1.4 where it says 1.14 to 1.5, and 0.98 to 1.02 where it says 1.
    """

    group, heads = problem.group, problem.heads * problem.batch

    def rows(one: KernelPlan) -> float:
        pack = one.pack(group)
        tiles = -(-problem.q_len * pack // one.tile.q) * heads // pack
        if one.keys.split:  # among as many blocks as fill the SMs
            return one.tile.q * tiles / sms
        return one.tile.q * (-(-tiles // sms) if _layout(one).scheduler.foresees else max(1.0, tiles / sms))

    fewer = rows(plan) / rows(packed)
    if fewer <= 1:  # and no form is slower than it is believed to be
        return fewer
    return min(1.0, seconds_per_score(plan)[0] / seconds_per_score(packed)[0]) * fewer  # a packed tile has more rows
