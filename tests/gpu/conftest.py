"""GPU tests compile their own kernels, into a cache of their own that the processes of a run share."""

import fcntl
import os

import pytest


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory):
    """A folder of this run, the same in all its processes."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder  # a worker's lies in that of the run


@pytest.fixture(scope="session", autouse=True)
def own_cache(run_folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLASHGEN_CACHE_DIR", str(run_folder / "cubins"))
        yield


@pytest.fixture(autouse=True)
def free_memory():
    """What one test leaves in torch's pool is not there for the next: addresses differ, and large tests fit."""
    yield
    import torch

    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@pytest.fixture
def most_of_the_memory(run_folder):
    """For tests that want 40 GB of the GPU: one at a time, in whichever process; skips where others hold too much."""
    import torch

    with open(run_folder / "most_of_the_memory", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if torch.cuda.mem_get_info()[0] < 40 << 30:
            pytest.skip("needs 40 GB of GPU memory")
        yield
        torch.cuda.empty_cache()
