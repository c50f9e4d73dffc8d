"""Where random choices come from: hypothesis, which also shrinks them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st


@dataclass(frozen=True)
class Choices:
    """Decisions by hypothesis; each shrinks towards the first option, the least number, and no."""

    data: Any

    def integer(self, low: int, high: int) -> int:
        return self.data.draw(st.integers(low, high)) if high > low else low

    def pick(self, options: Sequence) -> Any:
        return options[self.integer(0, len(options) - 1)]

    def one_in(self, n: int) -> bool:
        return self.integer(0, n - 1) == n - 1
