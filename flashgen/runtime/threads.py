"""Threads of the CPU walk: NumPy's BLAS works on one while any walk runs."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, ParamSpec, TypeVar

if TYPE_CHECKING:
    from threadpoolctl import ThreadpoolController

_Arguments, _Result = ParamSpec("_Arguments"), TypeVar("_Result")


def one_blas_thread(walk: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """A function whose matrix products run on one thread each; what NumPy's BLAS was set to before comes back after.

    Products of tiles are too small to share out: on cores that others use too, threads that wait for each other take
    many times as long.
    """

    @functools.wraps(walk)
    def held(*operands: _Arguments.args, **options: _Arguments.kwargs) -> _Result:
        with _libraries(own=True).limit(limits=1), _one_thread:
            return walk(*operands, **options)

    return held


class _OneThread:
    """BLAS at one thread from the first walk that enters to the last that leaves, in whatever order they do.

    The setting is of the whole process: a walk that saved it for itself would save, and put back, another walk's one.
    """

    def __init__(self) -> None:
        self._lock, self._walks, self._limit = threading.Lock(), 0, None

    def __enter__(self) -> None:
        with self._lock:
            if self._walks == 0:
                self._limit = _libraries(own=False).limit(limits=1)
                _let_go()
            self._walks += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._walks -= 1
            if self._walks == 0:
                self._limit.restore_original_limits()
                _let_go()


_one_thread = _OneThread()


def _let_go() -> None:
    """Let other threads set limits: threadpoolctl 3.8 ignores them until a block of the thread that did last ends."""
    with _libraries(own=False).limit(limits=None):
        pass


@functools.cache
def _libraries(own: bool) -> ThreadpoolController:
    """The BLAS libraries of this process, looked up once as NumPy is loaded by then: those whose setting is of the
    whole process, or a thread's own, as OpenMP's are."""
    from threadpoolctl import ThreadpoolController

    blas = ThreadpoolController().select(user_api="blas")
    wanted = [lib["filepath"] for lib in blas.info() if (lib.get("threading_layer") == "openmp") is own]
    return blas.select(filepath=wanted)
