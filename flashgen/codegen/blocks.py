"""What the templates of pipeline hopper's backward write where blocks take one tile of keys after another."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockCode:
    """Fragments of CUDA by whether a block is `persistent`: then it has the tile of keys that is worked on in turn, and
    what it has once is had once for each of them."""

    persistent: bool

    @property
    def keys(self) -> str:
        """The tile of keys that is worked on."""
        return "shared.keys[taken % 2]" if self.persistent else "shared.keys"

    @property
    def number(self) -> str:
        """The place of that tile in the order in which they are taken."""
        return "number" if self.persistent else "blockIdx.x"

    @property
    def numbered(self) -> str:
        """The same as a parameter."""
        return "int number, " if self.persistent else ""

    @property
    def k_full(self) -> str:
        """The barrier of its K."""
        return "shared.k_pipe.full[0]" if self.persistent else "shared.k_full"

    @property
    def first_load(self) -> str:
        """Whether a loader's tile of queries is the first for these keys."""
        return "first" if self.persistent else "ring.passed == 0"

    @property
    def first_step(self) -> str:
        """Whether a consumer's tile of queries is the first for these keys."""
        return "dq_tile < 0" if self.persistent else "ring.passed == 0"

    @property
    def later_step(self) -> str:
        """Whether it is not."""
        return "dq_tile >= 0" if self.persistent else "ring.passed > 0"

    @property
    def round(self) -> str:
        """The parity of a barrier that goes round once for each tile of keys."""
        return "taken % 2" if self.persistent else "0"
