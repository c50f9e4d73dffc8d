"""DTensors sharded over batch or heads: what each process computes is its part of what one process would.

Processes are played one after the other on torch's fake process group, whose collectives leave what they are given: a
gradient that processes share is then the sum of what each has.  At night two processes exchange it by gloo.
"""

import dataclasses
import math
import subprocess
import sys
from contextlib import contextmanager

import pytest
import sharded
import torch
from ptx_attention import work
from sharded import DROPOUT, VARIANTS, captured, inputs, part, placed, run
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, debug
from torch.testing._internal.distributed.fake_pg import FakeStore

import flashgen as fg
from flashgen.codegen import emit
from flashgen.errors import LaunchError
from flashgen.ops import shards
from flashgen.ops.call import Call
from flashgen.runtime.philox import Dropout

BATCHES, HEADS = [Shard(0)], [Shard(1)]


def forget():
    """Clear what torch keeps of operations on DTensors: it has the mesh of the process before, equal to this one's."""
    if hasattr(debug, "_clear_sharding_prop_cache"):
        debug._clear_sharding_prop_cache()
    else:
        DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()


@contextmanager
def process(rank, *sizes):
    """The mesh of such sizes, as its process of that rank has it."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=math.prod(sizes))
    forget()
    try:
        yield init_device_mesh("cpu", sizes)
    finally:
        torch.distributed.destroy_process_group()


def compare(name, placements, of_captured=None, **options):
    """The parts of all processes with the whole; captured tensors are plain, or lie as `of_captured` says of each."""
    whole, summed = run(name, **options), {}
    sizes = (2,) * len(placements)
    for rank in range(math.prod(sizes)):
        with process(rank, *sizes) as mesh:

            def place(name, x, mesh=mesh):
                if name in "qkv":
                    return placed(x, mesh, placements)
                return placed(x, mesh, of_captured[name]) if of_captured else x.clone()

            found = run(name, place, **options)
            for result, x in found.own.items():
                torch.testing.assert_close(x, part(whole.own[result], mesh, placements))
            for tensor, gradient in found.of_captured.items():
                if of_captured and any(isinstance(at, Shard) for at in of_captured[tensor]):
                    torch.testing.assert_close(gradient, part(whole.of_captured[tensor], mesh, of_captured[tensor]))
                else:
                    summed[tensor] = summed.get(tensor, 0) + gradient
    replicas = 2 ** placements.count(Replicate())
    for tensor, gradient in summed.items():
        torch.testing.assert_close(gradient / replicas, whole.of_captured[tensor])
    assert of_captured or summed.keys() == whole.of_captured.keys()


@pytest.mark.sampled(
    "alibi-[Shard(dim=1)]",
    "relative_bias-[Shard(dim=1)]",
    "relative_bias-[Shard(dim=1), Replicate()]",
    "anywhere-[Shard(dim=1), Replicate()]",
    "own-[Shard(dim=1)]",
    "full-[Shard(dim=0)]",
    "full-[Shard(dim=1)]",
)
@pytest.mark.parametrize("placements", [BATCHES, HEADS, [Shard(1), Replicate()]], ids=str)
@pytest.mark.parametrize("name", VARIANTS)
def test_parts_are_those_of_the_whole(name, placements):
    """b and h are those of all, and so are sizes, what dropout counts and what indices select; 3 batches are cut as 2
    and 1."""
    compare(name, placements, **DROPOUT)


@pytest.mark.slow
def test_a_mesh_of_batches_and_heads():
    compare("anywhere", [Shard(0), Shard(1)], **DROPOUT)


@pytest.mark.slow
def test_captured_dtensors():
    """Those that the own head selects are sharded as heads are: a gradient is then that of the part."""
    compare("own", HEADS, {"table": [Shard(0)], "sinks": [Shard(1)], "flags": [Replicate()]})
    compare("own", BATCHES, {"table": [Replicate()], "sinks": [Shard(0)], "flags": [Shard(0)]})
    compare("anywhere", HEADS, {"table": [Replicate()], "of_keys": [Shard(0)], "flags": [Replicate()]})


def test_one_kernel_serves_every_part():
    """What moves b and h are parameters, where a variant reads them; else it stays as it is."""
    tensors = captured(("table", "of_keys", "flags"))
    found = {"alibi": set(), "anywhere": set()}
    for rank in range(2):
        with process(rank, 2) as mesh:
            part = shards._part(*(placed(x, mesh, HEADS) for x in inputs()))
            moved = shards._moved(part, Call(VARIANTS["anywhere"], None, tensors))
            found["anywhere"].add(moved.variant)
            assert moved.named["first_heads"] == 2 * rank and moved.named["all_heads"] == 4
            assert moved.named["table"].shape == (4, 9) and moved.named["of_keys"].shape == (1, 4)
            moved = shards._moved(part, Call(VARIANTS["alibi"], None, {"slopes": torch.ones(4)}))
            found["alibi"].add(moved.variant)
            assert not moved.variant.params and moved.named["slopes"].shape == (2,)
    assert [len(variants) for variants in found.values()] == [1, 1]


def test_functions_of_flexattention():
    """Tensors of a closure are those of all processes."""
    q, k, v = inputs()
    ids, bias = torch.randint(0, 2, (3, 20)), torch.randn(4)

    def mask_mod(b, h, q_idx, kv_idx):
        return ids[b, q_idx] == ids[b, kv_idx]

    variant = fg.from_flex(mask_mod, lambda score, b, h, q_idx, kv_idx: score + bias[h] * kv_idx)
    whole = fg.attention(q, k, v, variant)
    for placements in (BATCHES, HEADS):
        with process(1, 2) as mesh:
            o = fg.attention(*(placed(x, mesh, placements) for x in (q, k, v)), variant)
            torch.testing.assert_close(o.to_local(), part(whole, mesh, placements))
            assert o.placements == tuple(placements) and o.shape == whole.shape


def test_lengths_and_positions_of_sequences():
    q, k, v = inputs()
    own = {"q_lengths": torch.tensor([3, 20, 9]), "kv_lengths": torch.tensor([20, 11, 15])}
    own = {name: x.int() for name, x in own.items()} | {"q_offset": torch.tensor([0, 7, 2], dtype=torch.int32)}
    given = {"slopes": torch.rand(4)}
    whole = fg.attention(q, k, v, VARIANTS["alibi"], **given, **own)
    for placements, of_own in ((BATCHES, [Shard(0)]), (BATCHES, None), (HEADS, None)):
        with process(1, 2) as mesh:
            lie = own if of_own is None else {name: placed(x, mesh, of_own) for name, x in own.items()}
            o = fg.attention(*(placed(x, mesh, placements) for x in (q, k, v)), VARIANTS["alibi"], **given, **lie)
            torch.testing.assert_close(o.to_local(), part(whole, mesh, placements))


def test_sequences_behind_each_other_over_heads():
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in inputs())
    ends = torch.tensor([0, 25, 60], dtype=torch.int32)
    options = {"max_seqlen_q": 35, "slopes": torch.rand(4), "return_lse": True}
    whole = fg.attention_varlen(q, k, v, VARIANTS["alibi"], ends, **options)
    with process(1, 2) as mesh:
        own = (placed(x, mesh, [Shard(1)]) for x in (q, k, v))
        o, lse = fg.attention_varlen(*own, VARIANTS["alibi"], ends, **options)
        torch.testing.assert_close(o.to_local(), whole[0].chunk(2, 1)[1])
        torch.testing.assert_close(lse.to_local(), whole[1].chunk(2, 0)[1])


@pytest.mark.sampled("hopper")
@pytest.mark.slow
@pytest.mark.parametrize("pipeline", ["ampere", "hopper"])
def test_kernels_count_heads_over_all(pipeline):
    """A kernel that has batch 1 and heads 2 and 3 of a batch of two with four heads drops what one of all drops."""
    shape = {"q_len": 20, "kv_len": 70}
    w = work("full", pipeline, batch=2, heads=4, kv_heads=4, **shape)
    own = dataclasses.replace(
        work("full", pipeline, batch=1, heads=2, kv_heads=2, **shape), qkv=tuple(x[1:, 2:] for x in w.qkv)
    )

    def o(w, dropout):
        plan = dataclasses.replace(w.plan, dropout=True)
        return torch.from_numpy(dataclasses.replace(w, plan=plan, source=emit(plan)).run(dropout=dropout).o)

    whole = o(w, Dropout(p=0.5, seed=3))[1:, 2:]
    torch.testing.assert_close(o(own, Dropout(p=0.5, seed=3, first=6, heads=4)), whole, atol=1e-2, rtol=0)
    assert (o(own, Dropout(p=0.5, seed=3)) - whole).abs().max() > 0.1


@pytest.mark.nightly(sibling="test_parts_are_those_of_the_whole")
@pytest.mark.parametrize("dim", [0, 1])
def test_two_processes_equal_one(tmp_path, dim):
    command = [sys.executable, sharded.__file__]
    each = [subprocess.Popen([*command, str(rank), "2", str(tmp_path / "store"), str(dim)]) for rank in range(2)]
    assert [one.wait(timeout=300) for one in each] == [0, 0]


def refused(placements, *words, variant="full", of=lambda place: {}, q=None, sizes=(2,), **named):
    shapes = q or [x.shape for x in inputs()]
    with process(0, *sizes) as mesh:
        tensors = [placed(torch.zeros(shape), mesh, at) for shape, at in zip(shapes, placements, strict=True)]
        with pytest.raises(LaunchError) as caught:
            fg.attention(*tensors, VARIANTS[variant], **of(lambda x, at: placed(x, mesh, at)), **named)
    said = str(caught.value)
    assert all(word in said for word in (*words, "nearest: ")), said


def test_what_is_refused():
    refused([[Shard(2)]] * 3, "a row needs all of its keys", "Shard(dim=2)")
    refused([[Partial()]] * 3, "Partial", "Shard(0), over batches")
    refused([HEADS, BATCHES, BATCHES], "q, k and v are sharded alike", "k.redistribute(")
    refused([HEADS] * 3, "no seed", "seed=...", dropout=0.1)
    for at in (HEADS, BATCHES):
        refused([at] * 3, "page_table is a tensor beside DTensors", page_table=torch.zeros(3, 2, dtype=torch.int32))
    one = (1, 4, 8, 8), (1, 1, 8, 8), (1, 1, 8, 8)
    refused([HEADS] * 3, "4 heads over 1 key heads", "heads stay with the key head that they share", q=one)
    groups = (1, 6, 8, 8), (1, 3, 8, 8), (1, 3, 8, 8)
    refused([HEADS] * 3, "6 heads over 3 key heads", q=groups)
    rows = torch.zeros(4, 9)
    tables = {"of_keys": torch.zeros(2, 4), "flags": torch.ones(3, 20, dtype=torch.bool)}
    # (h + 1) % heads selects another process's row
    tables_of = {"of": lambda at: {"table": at(rows, [Shard(0)])}}
    refused([HEADS] * 3, "own b or h alone", variant="anywhere", **tables_of, **tables)
    refused([BATCHES] * 3, "table is [Shard(dim=0)]", variant="own", **tables_of)
    refused(
        [[Shard(1), Shard(1)]] * 3,
        "cut over other dimensions of the mesh",
        variant="own",
        of=lambda at: {"table": at(rows, [Shard(0), Replicate()])},
        q=[(3, 4, 8, 8)] * 3,
        sizes=(2, 2),
    )


def test_plain_tensors_beside_dtensors_are_refused():
    q, k, v = inputs()
    with process(0, 2) as mesh, pytest.raises(LaunchError, match=r"^k is no DTensor(?s:.*)distribute_tensor\(k"):
        fg.attention(placed(q, mesh, HEADS), k, v, VARIANTS["full"])


def test_a_transform_of_dtensors_is_refused():
    with process(0, 2) as mesh:
        q, k, v = (placed(x, mesh, HEADS) for x in inputs())
        with pytest.raises(LaunchError, match="attention of DTensors under"):
            torch.func.vjp(lambda q: fg.attention(q, k, v, VARIANTS["full"]), q)
