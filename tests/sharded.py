"""One call as a process of a mesh makes it, on its part of inputs that all processes know: for tests of DTensors.

`python sharded.py RANK SIZE STORE PLACEMENT` is one process of several that exchange by gloo.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

import flashgen as fg

BATCH, HEADS, KV_HEADS, LENGTH, DIM = 3, 4, 2, 20, 8

table = fg.tensor("table", ("heads", 9), "float32")
flags = fg.tensor("flags", ("batch", "kv"), "bool")
of_keys = fg.tensor("of_keys", ("kv_heads", None), "float32")
sinks = fg.sink("sinks", ("batch", "heads"))

#: Every way to read b and h: as positions, as indices of an own element and of another one, and through sizes.
anywhere = fg.variant(
    lambda b, h, q, k: ((q + k + 3 * b + h) % 5 != 0) & flags[(b + 1) % fg.batch, k],
    lambda s, b, h, q, k: (
        s * (1 + 0.1 * b) + table[(h + 1) % fg.heads, (q + b) % 9] + of_keys[h // (fg.heads // fg.kv_heads), k % 4]
    ),
    name="anywhere",
)
own = fg.variant(
    lambda b, h, q, k: flags[b, k] | (q == k),
    lambda s, b, h, q, k: s + table[h, (q + k) % 9] + 0.1 * fg.float32(fg.batch * h),
    sink=sinks,
    name="own",
)
VARIANTS = {
    "alibi": fg.load_spec("alibi"),
    "relative_bias": fg.load_spec("relative_bias"),
    "anywhere": anywhere,
    "own": own,
    "full": fg.variant(),
}

#: What drops: the same in each process.
DROPOUT = {"dropout": 0.3, "seed": 5}

#: How the captured tensors are made: shape, and whether they are floats, which have a gradient.
SHAPES = {
    "slopes": (HEADS,),
    "table": (HEADS, 9),
    "of_keys": (KV_HEADS, 4),
    "sinks": (BATCH, HEADS),
    "flags": (BATCH, LENGTH),
}


def inputs() -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    return [torch.randn(BATCH, heads, LENGTH, DIM, generator=random) for heads in (HEADS, KV_HEADS, KV_HEADS)]


def captured(names: tuple[str, ...]) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    made = {name: torch.randn(shape, generator=random) for name, shape in SHAPES.items()}
    made["flags"] = made["flags"] > -0.5
    return {name: made[name] for name in names}


def part(x: torch.Tensor, mesh: DeviceMesh, placements: list[Placement]) -> torch.Tensor:
    """What this process has of a tensor that all know, as torch cuts it."""
    for i, placement in enumerate(placements):
        if isinstance(placement, Shard):
            parts = x.chunk(mesh.size(i), placement.dim)
            at = mesh.get_coordinate()[i]
            x = parts[at] if at < len(parts) else x.narrow(placement.dim, 0, 0)
    return x


def placed(x: torch.Tensor, mesh: DeviceMesh, placements: list[Placement]) -> DTensor:
    """A tensor that all know as a DTensor, without a word between processes."""
    local = part(x, mesh, placements).contiguous()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=x.shape, stride=x.stride()).detach()


@dataclass
class Found:
    """Results and gradients by name, as this process has them."""

    own: dict[str, torch.Tensor]
    of_captured: dict[str, torch.Tensor]


def local(x: torch.Tensor) -> torch.Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def run(
    name: str,
    place: Callable[[str, torch.Tensor], torch.Tensor] = lambda name, x: x,
    **options: object,
) -> Found:
    """A call of one of VARIANTS, forth and back, on what `place` makes of each tensor."""
    variant = VARIANTS[name]
    qkv = {name: place(name, x).requires_grad_() for name, x in zip("qkv", inputs(), strict=True)}
    given = {name: place(name, x) for name, x in captured(tuple(t.name for t in variant.tensors)).items()}
    learned = {name: x.requires_grad_() for name, x in given.items() if x.is_floating_point() and name != "slopes"}
    o, lse = fg.attention(*qkv.values(), variant, return_lse=True, **given, **options)
    (local(o).square().sum() + local(lse).sum()).backward()
    # Older versions of PyTorch gather a leaf's gradient over a mesh of two dimensions, which a fake group cannot.
    lies = {name: x for name, x in qkv.items() if getattr(x.grad, "placements", 0) == getattr(x, "placements", 0)}
    gradients = {f"d{name}": local(x.grad) for name, x in lies.items()}
    return Found(
        {"o": local(o).detach(), "lse": local(lse).detach(), **gradients},
        {name: local(x.grad) for name, x in learned.items()},
    )


def one_of_many(rank: int, size: int, store: str, dim: int) -> None:
    """Compare what this process of `size` has with what one process computes, dropout and gradients too."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    mesh, placements = init_device_mesh("cpu", (size,)), [Shard(dim)]
    for name in VARIANTS:
        whole = run(name, **DROPOUT)
        found = run(name, lambda name, x: placed(x, mesh, placements) if name in "qkv" else x.clone(), **DROPOUT)
        for result, x in found.own.items():
            torch.testing.assert_close(x, part(whole.own[result], mesh, placements))
        torch.testing.assert_close(found.of_captured, whole.of_captured)
        replicated = run(
            name, lambda name, x: placed(x, mesh, placements if name in "qkv" else [Replicate()]), **DROPOUT
        )
        torch.testing.assert_close(replicated.of_captured, whole.of_captured)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    one_of_many(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
