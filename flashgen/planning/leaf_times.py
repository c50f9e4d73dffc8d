"""How long the kernels of a call whose keys are cut into leaves take: what chooses between their two forms."""

from __future__ import annotations

from flashgen.planning import planner, split_keys
from flashgen.planning.arch import ARCHS
from flashgen.planning.plan import KernelPlan
from flashgen.planning.problem import Problem


def seconds(plan: KernelPlan, problem: Problem, visible: int, leaves: int, sms: int) -> float:
    """Seconds where tiles of queries see so many tiles of keys each, in so many leaves.

    Blocks go on from one tile of queries, or one leaf of it, to the next without a pause.  A tile of keys takes as long
    as its block computes, or loads: at its share of L2, or of HBM, from which blocks that share keys have them once.
    Parts are written and read; those that L2 does not hold, in HBM.
    """
    arch, room = ARCHS[plan.arch], sms * plan.blocks_per_sm
    tiles = split_keys.tiles(plan, problem)
    blocks, each = (tiles * leaves, -(-visible // leaves)) if plan.keys.split else (tiles, visible)
    active = max(1, min(blocks, room))
    sharing = max(1, tiles // max(1, problem.batch * problem.kv_heads))
    moved = problem.read_bytes(0, plan.tile.kv)
    load = moved / min(arch.l2_bytes_per_s / max(active, sms), arch.hbm_bytes_per_s * sharing / active)
    compute = planner.pipeline_of(plan).seconds_per_score(plan, arch)[-1] * plan.tile.q * plan.tile.kv
    found = -(-blocks // room) * each * max(load, compute)
    if not plan.keys.split:
        return found
    parts = split_keys.rows(plan, problem) * leaves * problem.v_head_dim * split_keys.PART_ITEM
    speed = arch.l2_bytes_per_s if parts <= arch.l2_bytes else arch.hbm_bytes_per_s
    return found + split_keys.COMBINE + 2 * parts / speed
