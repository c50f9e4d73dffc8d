"""from_flex: functions as people write them for FlexAttention, beside what PyTorch makes of them."""

import copy
import re
from pathlib import Path

import pytest
import torch
from flex_inputs import BATCH, HEADS, LENGTH
from flex_masks import MASKS
from flex_scores import SCORES
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch.nn.attention.flex_attention import create_mask

import flashgen
from flashgen.frontends.operations import FUNCTIONS

DIM = 8


def inputs(*, grad=False, length=LENGTH, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (BATCH, HEADS, length, DIM)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_(grad) for _ in range(3)]


def scores_by_torch(score_mod, scores):
    """The score function on every pair, mapped as flex_attention maps it."""
    if hasattr(score_mod, "written_out"):
        return score_mod.written_out(scores)
    over = [(0, None, None, None, 0), (0, None, None, 0, None), (0, None, 0, None, None), (0, 0, None, None, None)]
    mapped = score_mod
    for dims in over:
        mapped = torch.vmap(mapped, in_dims=dims)
    positions = [torch.arange(n) for n in scores.shape]
    with TransformGetItemToIndex():
        return mapped(scores, *positions)


def attention_by_torch(q, k, v, mask_mod=None, score_mod=None):
    scores = q @ k.transpose(-1, -2) / DIM**0.5
    if score_mod is not None:
        scores = scores_by_torch(score_mod, scores)
    if mask_mod is not None:
        keep = create_mask(mask_mod, BATCH, HEADS, q.shape[2], k.shape[2], device="cpu")
        scores = scores.masked_fill(~keep, -torch.inf)
    visible = (scores > -torch.inf).any(-1, keepdim=True)
    return torch.where(visible, torch.softmax(scores.masked_fill(~visible, 0), -1), 0) @ v


def close(found, wanted, tolerance):
    torch.testing.assert_close(found, wanted.to(found.dtype), rtol=tolerance, atol=tolerance)


@pytest.mark.sampled("unlimited", "shifted_out", every=4)
@pytest.mark.slow
@pytest.mark.parametrize("name", MASKS)
def test_masks_are_those_of_torch(name):
    mod = MASKS[name]()
    q, k, v = inputs()
    close(flashgen.attention(q, k, v, flashgen.from_flex(mod)), attention_by_torch(q, k, v, mask_mod=mod), 1e-12)


@pytest.mark.sampled("ends_of_hardtanh", "float_powers", every=4)
@pytest.mark.slow
@pytest.mark.parametrize("name", SCORES)
def test_scores_and_gradients_are_those_of_torch(name):
    mod = SCORES[name]()
    variant = flashgen.from_flex(score_mod=mod)
    q, k, v = inputs(grad=True)
    learned = [x for x in variant.given.values() if torch.is_tensor(x) and x.requires_grad]
    found = flashgen.attention(q, k, v, variant)
    wanted = attention_by_torch(q, k, v, score_mod=mod)
    close(found, wanted, 2e-5)
    gradient = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(9), dtype=wanted.dtype)
    asked = [q, k, v, *learned]
    for ours, theirs in zip(
        torch.autograd.grad(found, asked, gradient),
        torch.autograd.grad(wanted, asked, gradient, allow_unused=True),
        strict=True,
    ):
        close(ours, torch.zeros_like(ours) if theirs is None else theirs, 1e-4)


def test_the_document_lists_what_is_traced():
    text = (Path(__file__).parents[1] / "docs" / "frontends.md").read_text()
    rows = text.partition("<!-- functions -->")[2].partition("##")[0]
    named = {name for name in re.findall(r"`(\w+)`", rows)} - {"rounding_mode", "None"}
    assert named == set(FUNCTIONS)


NARROW = [(torch.uint8, -1, 255), (torch.uint8, 300, 44), (torch.int8, 200, -56), (torch.int16, -40000, 25536)]


@pytest.mark.parametrize(("dtype", "number", "wrapped"), NARROW)
def test_numbers_that_narrow_integers_do_not_hold_are_refused(dtype, number, wrapped):
    """torch wraps them before it compares, chooses or clamps: what it takes them for is said, and how to compare."""
    ids = torch.arange(LENGTH).to(dtype)
    for mask in (
        lambda b, h, q, k: ids[k] != number,
        lambda b, h, q, k: torch.where(q > k, ids[k], number) == 3,
        lambda b, h, q, k: ids[k].clamp(max=number) == 3,
    ):
        with pytest.raises(flashgen.SpecError, match=f"{number} beside .* torch takes it for {wrapped}; write x.int"):
            flashgen.from_flex(mask)
    flashgen.from_flex(lambda b, h, q, k: ids[k].int() != number)
    flashgen.from_flex(lambda b, h, q, k: ids[k] != wrapped)


@pytest.mark.parametrize(("options", "at"), [({}, 20.0), ({"beta": 2.0, "threshold": 3.0}, 1.5)])
def test_softplus_has_torch_s_gradient_where_it_becomes_a_line(options, at):
    table, right = (torch.full((4,), at, requires_grad=True) for _ in range(2))
    q = torch.zeros(1, 1, 4, 16)
    score = flashgen.from_flex(None, lambda s, b, h, i, j: torch.nn.functional.softplus(table[i], **options))
    _, lse = flashgen.attention(q, q, q, score, return_lse=True)
    lse.sum().backward()
    torch.nn.functional.softplus(right, **options).sum().backward()
    torch.testing.assert_close(table.grad, right.grad)


def test_a_copied_module_has_its_own_parameters():
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Parameter(torch.randn(5))
            table, computed = self.table, 2 * self.table
            self.variant = flashgen.from_flex(None, lambda s, b, h, q, k: s + table[k % 5] + computed[q % 5])

        def forward(self, q):
            return flashgen.attention(q, q, q, self.variant)

    layer = Layer()
    copied = copy.deepcopy(layer)
    assert copied.variant == layer.variant
    copied(torch.randn(1, 1, 5, 8)).square().sum().backward()
    assert copied.table.grad is not None  # and what was computed from the first one's is still that
    assert torch.equal(copied.table, layer.table) and copied.table is not layer.table
