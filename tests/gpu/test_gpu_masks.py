"""The shipped masks of real models on a GPU: forward and backward beside float64, by the verb that a user has."""

import pytest
from cli import flashgen
from gpu_checks import PIPELINES

from flashgen.lang.load import gallery

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", sorted(gallery()))
def test_masks_of_models_are_right(name, head_dim, pipeline):
    """A result that is not near enough is an exit code of its own."""
    sizes = ("--batch", 2, "--heads", 4, "--kv-heads", 2, "--seqlen", 1000, "--head-dim", head_dim)
    ran = flashgen("run", name, *sizes, "--backward", "--pipeline", pipeline, "--device", "cuda")
    assert "checked against float64" in ran.out
