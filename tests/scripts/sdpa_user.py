"""A model of characters with two layers, trained on its own source with PyTorch's scaled_dot_product_attention."""

import torch
from torch.nn import functional as F

WIDTH, HEADS, LENGTH, STEPS = 32, 4, 40, 12


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.mlp = torch.nn.Sequential(torch.nn.Linear(WIDTH, 64), torch.nn.GELU(), torch.nn.Linear(64, WIDTH))

    def forward(self, x):
        parts = self.qkv(F.layer_norm(x, (WIDTH,))).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(o.transpose(1, 2).flatten(2))
        return x + self.mlp(F.layer_norm(x, (WIDTH,)))


class Characters(torch.nn.Module):
    def __init__(self, count):
        super().__init__()
        self.characters, self.places = torch.nn.Embedding(count, WIDTH), torch.nn.Embedding(LENGTH, WIDTH)
        self.blocks = torch.nn.Sequential(Block(), Block())
        self.head = torch.nn.Linear(WIDTH, count)

    def forward(self, x):
        return self.head(self.blocks(self.characters(x) + self.places.weight[: x.shape[1]]))


def main():
    """The loss of each step."""
    torch.manual_seed(0)
    text = torch.tensor(list((__doc__ or "").encode()) * 4)
    model = Characters(128)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(STEPS):
        rows = torch.stack([text[i : i + LENGTH + 1] for i in torch.randint(0, len(text) - LENGTH - 1, (4,)).tolist()])
        loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses)
