"""Shared memory of other blocks of a cluster."""

from __future__ import annotations

import numpy as np

from flashgen.interpreter.block import Block
from flashgen.interpreter.errors import OutOfBounds
from flashgen.interpreter.registers import Mask
from flashgen.interpreter.shared import CLUSTER_SHIFT, SharedMemory

_OFFSET = (1 << CLUSTER_SHIFT) - 1


def remote_block(block: Block, address: int) -> tuple[Block, int]:
    """(block, its own shared address) of a shared::cluster address."""
    rank = address >> CLUSTER_SHIFT
    if rank == 0:
        return block, address
    if not 1 <= rank <= len(block.cluster.blocks):
        raise OutOfBounds(f"shared::cluster address {address:#x} names no block of the cluster")
    return block.cluster.blocks[rank - 1], address & _OFFSET


def remote_shared(block: Block, address: int) -> tuple[SharedMemory, int]:
    owner, own = remote_block(block, address)
    return owner.shared, own


def local_address(block: Block, where: np.ndarray, m: Mask) -> np.ndarray | None:
    """The addresses within the block's own shared memory, or None where some lane reaches another block."""
    active = where if m is True else where[m]
    mine = block.rank + 1
    rank = active >> CLUSTER_SHIFT
    if not ((rank == 0) | (rank == mine)).all():
        return None
    return where & _OFFSET
