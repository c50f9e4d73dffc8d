"""Locks that a forked child finds free."""

import os
import threading

import pytest

from flashgen.lang import expr
from flashgen.lang.expr import DType, const
from flashgen.locks import Lock


def child_says(work) -> str:
    """What `work` returns in a forked child, which is given up after 20 seconds."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        threading.Timer(20, lambda: os._exit(1)).start()
        os.write(writes, work().encode())
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as said:
        found = said.read()
    assert os.waitpid(child, 0)[1] == 0
    return found


class Holder(threading.Thread):
    """A thread that holds a lock until it is told to let go."""

    def __init__(self, lock):
        super().__init__()
        self.lock, self.has, self.may_end = lock, threading.Event(), threading.Event()

    def run(self):
        with self.lock:
            self.has.set()
            self.may_end.wait(20)

    def __enter__(self):
        self.start()
        self.has.wait(20)

    def __exit__(self, *_):
        self.may_end.set()
        self.join()


@pytest.mark.parametrize("make", [threading.Lock, threading.RLock])
def test_a_child_finds_a_lock_free_that_another_thread_held(make):
    lock = Lock(make)

    def take():
        with lock:
            return "taken"

    with Holder(lock):
        assert child_says(take) == "taken"
    with lock:  # and the parent's is as it was
        pass


def test_the_holder_of_a_lock_frees_it_in_its_child():
    lock = Lock(threading.RLock)

    def fork():
        with lock:
            return "again"

    with lock:
        assert child_says(fork) == "again"
    with Holder(lock):
        assert not lock._lock.acquire(blocking=False)


def test_one_thread_has_a_lock_at_a_time():
    lock, found = Lock(), []

    def work(name):
        for _ in range(200):
            with lock:
                found.append(name)
                found.append(name)

    threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[::2] == found[1::2] and len(found) == 1600


def test_a_child_traces_while_another_thread_of_its_parent_did():
    with Holder(expr._interning):
        assert child_says(lambda: str(const(0.125, DType.FLOAT32).attr)) == "0.125"
