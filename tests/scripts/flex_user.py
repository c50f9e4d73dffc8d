"""Packed documents with a bias by distance, read batch by batch with FlexAttention."""

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

HEADS, LENGTH, DIM, REACH = 4, 100, 16, 8


def within_documents(documents):
    def mask_mod(b, h, q_idx, kv_idx):
        return (documents[b, q_idx] == documents[b, kv_idx]) & (q_idx >= kv_idx)

    return mask_mod


def by_distance(bias):
    def score_mod(score, b, h, q_idx, kv_idx):
        return score + bias[h, (q_idx - kv_idx).abs().clamp(max=REACH - 1)]

    return score_mod


@torch.no_grad()
def main():
    torch.manual_seed(0)
    project, bias = torch.nn.Linear(32, 3 * HEADS * DIM), torch.randn(HEADS, REACH)
    found = []
    for _ in range(3):
        x, ends = torch.randn(2, LENGTH, 32), torch.randint(1, LENGTH, (2, 3)).sort(-1).values
        documents = torch.searchsorted(ends, torch.arange(LENGTH).expand(2, -1).contiguous(), right=True)
        block_mask = create_block_mask(
            within_documents(documents), 2, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=32
        )
        q, k, v = (part.unflatten(-1, (HEADS, DIM)).transpose(1, 2) for part in project(x).chunk(3, -1))
        found.append(flex_attention(q, k, v, score_mod=by_distance(bias), block_mask=block_mask))
    return torch.stack(found)
