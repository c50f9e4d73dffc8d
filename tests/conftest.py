"""Tests marked `gpu` skip, with the reason, where there is no GPU."""

import pytest


def pytest_collection_modifyitems(items):
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    from flashgen.runtime import driver

    if driver.gpus() == 0:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU"))
