"""GPU tests compile their own kernels, into a cache of their own."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path_factory.mktemp("cubins")))
        yield


@pytest.fixture(autouse=True)
def free_memory():
    """What one test leaves in torch's pool is not there for the next: addresses differ, and large tests fit."""
    yield
    import torch

    if torch.cuda.is_available():
        torch.cuda.empty_cache()
