"""Threads of the CPU walk: NumPy's BLAS works on one while a walk runs."""

from __future__ import annotations

import functools
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
        with _controller().limit(limits=1, user_api="blas"):
            return walk(*operands, **options)

    return held


@functools.cache
def _controller() -> ThreadpoolController:
    """The thread pools of this process, looked up once: NumPy is loaded by then."""
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()
