"""A small GPT learns with flashgen's attention what it learns with SDPA's, step by step."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from gpu_checks import DEVICE, PIPELINES, on
from torch import nn
from torch.nn import functional

import flashgen as fg
from flashgen.lang.load import load_spec, shipped

pytestmark = pytest.mark.gpu

LAYERS, HEADS, WIDTH, CONTEXT, BATCH, STEPS = 4, 4, 256, 256, 16, 200

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Block(nn.Module):
    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.attend = attend
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.first(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.second(x))


class GPT(nn.Module):
    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block(attend) for _ in range(LAYERS)))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256))

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.token(text) + self.place.weight[: text.shape[1]]
        return self.head(self.blocks(x))


def train(attend: Attend) -> torch.Tensor:
    """The loss of every step on the shipped specs' own text, from the same weights and batches each time."""
    torch.manual_seed(0)
    model = GPT(attend).to(DEVICE)
    text = torch.tensor(list("".join(path.read_text() for path in sorted(shipped().values())).encode()), device=DEVICE)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(STEPS):
        starts = torch.randint(len(text) - CONTEXT, (BATCH, 1), device="cpu").to(DEVICE)
        window = text[starts + torch.arange(CONTEXT + 1, device=DEVICE)]
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = functional.cross_entropy(model(window[:, :-1]).flatten(0, 1).float(), window[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.detach())
    return torch.stack(losses).cpu()


@pytest.fixture(scope="module")
def by_sdpa() -> torch.Tensor:
    return train(lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, is_causal=True))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_loss_curves_agree(pipeline, deterministic, by_sdpa):
    causal = on(load_spec("causal"), pipeline)
    losses = train(lambda q, k, v: fg.attention(q, k, v, causal, deterministic=deterministic))
    print("step: SDPA, flashgen", *(f"{i}: {by_sdpa[i]:.4f}, {losses[i]:.4f}" for i in range(0, STEPS, 20)), sep="\n")
    assert by_sdpa[-20:].mean() < 0.6 * by_sdpa[:5].mean(), "there is nothing to agree on where nothing is learnt"
    assert abs(losses[0] - by_sdpa[0]) < 1e-3 * by_sdpa[0]
    for first, last in pairwise(range(0, STEPS + 1, 20)):
        ours, theirs = losses[first:last].mean(), by_sdpa[first:last].mean()
        assert abs(ours - theirs) < 0.01 * theirs, f"steps {first} to {last}: {ours:.4f} and {theirs:.4f}"
