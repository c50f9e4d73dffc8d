"""What a call costs, counted in place of timed: the same on every machine, however busy it is."""

import gc
import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import flashgen

PACKAGE = str(Path(flashgen.__file__).parent)


@dataclass(frozen=True, slots=True)
class Effort:
    """calls: of flashgen's functions and by them of C's, in this thread; peak_bytes: allocated at once, NumPy's arrays
    included.

    A loop over what grows shows in the first, an array over it in the second.
    """

    calls: int
    peak_bytes: int


def effort(function: Callable[[], object]) -> Effort:
    """What one call of `function` takes.  A cache that an earlier call filled is used: clear it to count without."""
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call") and frame.f_code.co_filename.startswith(PACKAGE)

    before = sys.getprofile()
    collecting = gc.isenabled()
    gc.disable()  # finalizers of what other tests left are no part of it
    tracemalloc.start()
    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(before)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        if collecting:
            gc.enable()
    return Effort(calls, peak)
