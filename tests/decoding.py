"""A model of two layers with rotary positions: its prefill, and its decoding of one token after another from pages.

Linear layers and norms run token by token, at one size, in both: so what differs would be attention's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

import flashgen as fg
from flashgen.lang.load import load_spec

LAYERS, HEADS, KV_HEADS, WORDS, PAGE = 2, 4, 2, 50, 16

Bits = list[torch.Tensor]


@dataclass(frozen=True)
class Model:
    """Weights: an embedding, and for each layer those of q, k, v, o and of the feed-forward."""

    embedding: torch.Tensor
    layers: list[dict[str, torch.Tensor]]
    head_dim: int

    @classmethod
    def drawn(cls, head_dim: int, dtype: torch.dtype, device: str) -> Model:
        random = torch.Generator().manual_seed(0)
        width = HEADS * head_dim

        def weight(rows: int, columns: int) -> torch.Tensor:
            return (torch.randn(rows, columns, generator=random) * columns**-0.5).to(device, dtype)

        heads = {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS}
        layers = [
            {name: weight(n * head_dim, width) for name, n in heads.items()}
            | {"o": weight(width, width), "up": weight(2 * width, width), "down": weight(width, 2 * width)}
            for _ in range(LAYERS)
        ]
        return cls(weight(WORDS, width), layers, head_dim)

    def rotated(self, x: torch.Tensor, position: int) -> torch.Tensor:
        """[heads, head_dim] with pairs of columns turned by the position."""
        half = self.head_dim // 2
        angles = position * 10000.0 ** -(torch.arange(half, device=x.device) / half)
        cos, sin, (a, b) = angles.cos(), angles.sin(), x.float().chunk(2, -1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1).to(x.dtype)

    def project(self, layer: dict[str, torch.Tensor], x: torch.Tensor, position: int) -> tuple[torch.Tensor, ...]:
        """q, k and v of one token, [heads, head_dim]."""
        x = torch.nn.functional.rms_norm(x, x.shape)
        q, k, v = ((layer[name] @ x).view(-1, self.head_dim) for name in "qkv")
        return self.rotated(q, position), self.rotated(k, position), v

    def after(self, layer: dict[str, torch.Tensor], x: torch.Tensor, o: torch.Tensor) -> torch.Tensor:
        """What leaves a layer for one token, of its attention's output [heads, head_dim]."""
        x = x + layer["o"] @ o.reshape(-1)
        return x + layer["down"] @ torch.relu(layer["up"] @ torch.nn.functional.rms_norm(x, x.shape))

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return self.embedding @ torch.nn.functional.rms_norm(x, x.shape)


def prefill(model: Model, words: list[int]) -> tuple[Bits, Bits]:
    """The outputs of attention, [tokens, heads, head_dim] of each layer, and the logits of each token."""
    causal, outputs = load_spec("causal"), []
    states = [model.embedding[word] for word in words]
    for layer in model.layers:
        made = [model.project(layer, x, i) for i, x in enumerate(states)]
        q, k, v = (torch.stack(of, dim=1)[None] for of in zip(*made, strict=True))
        o = fg.attention(q, k, v, causal)[0].transpose(0, 1)
        outputs.append(o)
        states = [model.after(layer, x, of) for x, of in zip(states, o, strict=True)]
    return outputs, [model.logits(x) for x in states]


def decode(model: Model, words: list[int], seed: int = 0) -> tuple[Bits, Bits]:
    """The same, one token at a time, each over a cache of pages that lie in another order than positions."""
    causal, device, dtype = load_spec("causal"), model.embedding.device, model.embedding.dtype
    pages = -(-len(words) // PAGE)
    order = torch.randperm(2 * pages, generator=torch.Generator().manual_seed(seed))[:pages]
    table = order.to(device, torch.int32)[None]
    shape = (2 * pages, PAGE, KV_HEADS, model.head_dim)
    caches = [[torch.full(shape, torch.nan, dtype=dtype, device=device) for _ in "kv"] for _ in model.layers]
    outputs: list[Bits] = [[] for _ in model.layers]
    logits = []
    for position, word in enumerate(words):
        x = model.embedding[word]
        length = torch.tensor([position + 1], dtype=torch.int32, device=device)
        page, row = table[0, position // PAGE], position % PAGE
        for layer, (k_cache, v_cache), found in zip(model.layers, caches, outputs, strict=True):
            q, k, v = model.project(layer, x, position)
            k_cache[page, row], v_cache[page, row] = k, v
            of_call = {"page_table": table, "kv_lengths": length, "q_offset": "end"}
            o = fg.attention(q[None, :, None], k_cache, v_cache, causal, **of_call)[0, :, 0]
            found.append(o)
            x = model.after(layer, x, o)
        logits.append(model.logits(x))
    return [torch.stack(found) for found in outputs], logits


def differing(model: Model, tokens: int) -> int:
    """Numbers that differ, of all outputs of attention and logits, between prefill and decoding."""
    words = torch.randint(WORDS, (tokens,), generator=torch.Generator().manual_seed(1)).tolist()
    found = zip(*map(sum_of, (prefill(model, words), decode(model, words))), strict=True)
    return sum(int((one != other).sum()) for one, other in found)


def sum_of(results: tuple[Bits, Bits]) -> Bits:
    """All of them in one list."""
    return [*results[0], *results[1]]
