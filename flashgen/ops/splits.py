"""The number of blocks that divide the keys of a call, where the call says it."""

from __future__ import annotations

from typing import Any

from flashgen.planning.division import check_splits

#: What it is called among named values, which no variant can.
SPLITS = "call.kv_splits"


def joined(named: dict[str, Any], kv_splits: object) -> dict[str, Any]:
    """A call's named values with its `kv_splits`.  Raises PlanError for what is no number of blocks."""
    check_splits(kv_splits)
    return {**named, SPLITS: kv_splits}
