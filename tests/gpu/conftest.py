"""GPU tests compile their own kernels, into a cache of their own that the processes of a run share."""

import os

import pytest


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory):
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # a worker's folder lies in that of the run
        folder = folder.parent
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLASHGEN_CACHE_DIR", str(folder / "cubins"))
        yield


@pytest.fixture(autouse=True)
def free_memory():
    """What one test leaves in torch's pool is not there for the next: addresses differ, and large tests fit."""
    yield
    import torch

    if torch.cuda.is_available():
        torch.cuda.empty_cache()
