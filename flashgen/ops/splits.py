"""The number of blocks that divide the keys of a call, or that these are cut into leaves, where the call says it."""

from __future__ import annotations

from typing import Any

import torch

from flashgen.errors import LaunchError
from flashgen.ops.values import no_flag, whole
from flashgen.planning.division import check_splits, check_together

#: What they are called among named values, which no variant can; the second is there where it is asked for.
SPLITS, INVARIANT = "call.kv_splits", "call.invariant"


def joined(named: dict[str, Any], kv_splits: object, invariant: object = False) -> dict[str, Any]:
    """A call's named values with its `kv_splits`, where it has any, and `invariant`.  Raises PlanError for what is no
    number of blocks or is given beside leaves, and LaunchError for what is no flag."""
    if kv_splits is None and invariant is False:  # as of most calls
        return named
    if wrong := no_flag("invariant", invariant):
        raise LaunchError(wrong)
    check_together(kv_splits, bool(invariant))
    if invariant:
        return {**named, INVARIANT: 1}
    if kv_splits is None:
        return named
    kv_splits = whole(kv_splits)
    if not isinstance(kv_splits, torch.SymInt):  # else when the graph runs
        check_splits(kv_splits)
    return {**named, SPLITS: kv_splits}
