"""Sequences behind each other in 8 bits: each has the bits that it has alone, whatever its neighbours hold; emitted
kernels executed, their bytes predicted, and calls of attention_varlen and of nested tensors."""

import json
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from cli import flashgen
from eight_bits import Eight, eight
from emulated_gpu import install
from ptx_attention import replace as changed
from test_float8_decode import in_pages, pages_of

import flashgen as fg
from flashgen.errors import FlashgenError
from flashgen.interpreter.errors import Trap
from flashgen.interpreter.simulate import simulate
from flashgen.lang.load import load_spec
from flashgen.ops.float8 import dequantised
from flashgen.planning.float8 import E4M3, E5M2
from flashgen.planning.layout import AT_END, Paged, Varlen
from flashgen.planning.members import SplitKeys
from flashgen.planning.traffic import predict
from flashgen.planning.traffic_sequences import OwnLengths

AT_NIGHT = pytest.mark.nightly(sibling="test_each_has_the_bits_that_it_has_alone")
PACKED = {"keys": SplitKeys(), "packed": True}

#: A sequence has no query, one no key, one ends with a tile; keys and values of the third are no numbers.
QUERIES, KEYS, POISONED = (70, 33, 0, 3, 64), (150, 33, 20, 0, 128), 2


@dataclass(frozen=True)
class Joined:
    """A kernel, codes of each sequence [1, heads, rows, columns] by tensor, and descales of all."""

    w: Eight
    alone: Eight
    codes: tuple[tuple[torch.Tensor, ...], ...]
    descales: dict[str, np.ndarray]
    page_size: int | None

    def tensors(self):
        """q, k and v as the kernel has them, and what it is told of sequences."""
        q, k, v = (torch.cat([x.view(torch.uint8) for x in of], 2).view(of[0].dtype) for of in self.codes)
        told = {"cu_seqlens_q": np.cumsum([0, *self.lengths[0]], dtype=np.int32)}
        if self.page_size is None:
            told["cu_seqlens_k"] = np.cumsum([0, *self.lengths[1]], dtype=np.int32)
            return (q, k, v), told
        most = max(self.lengths[1])
        padded = [
            torch.full((len(self.codes[0]), *x[0].shape[1:2], most, x[0].shape[3]), torch.nan) for x in self.codes[1:]
        ]
        for room, of in zip(padded, self.codes[1:], strict=True):
            for b, x in enumerate(of):
                room[b, :, : x.shape[2]] = x[0].float()
        k, v = (in_pages(room.to(k.dtype), self.page_size) for room in padded)
        told |= {"kv_lengths": np.array(self.lengths[1], np.int32)}
        told["page_table"] = pages_of(len(self.codes[0]), most, self.page_size)
        return (q, k, v), told

    @property
    def lengths(self):
        return tuple(tuple(x.shape[2] for x in of) for of in self.codes[:2])

    def run(self, edit=None, **options):
        (q, k, v), told = self.tensors()
        w, (rows, keys) = self.w, self.lengths
        kv_len = told["page_table"].shape[1] * self.page_size if self.page_size else max(keys)
        sizes = {**w.case.sizes, "batch": len(rows), "q_len": max(rows), "kv_len": kv_len}
        w = replace(w, case=replace(w.case, sizes=sizes))
        w = replace(w, qkv=tuple(of._replace(codes=x) for of, x in zip(w.qkv, (q, k, v), strict=True)))
        return w.run(edit, sequences=told, descales=self.descales, **options)

    def wrong(self, found, **options):
        """Where a result differs from each sequence alone, bit by bit."""
        wrong, start = [], 0
        for b, (rows, keys) in enumerate(zip(*self.lengths, strict=True)):
            here, start = slice(start, start + rows), start + rows
            if not rows:
                continue
            o, lse = found.o[0][:, here], found.lse[0][:, here]
            if not keys:  # lse is the sink, of each head, where there is one
                alone = np.reshape(self.w.case.tensors.get("sink", -np.inf), (-1, 1))
                wrong += [f"{b} without keys"] * bool(o.any() or not (lse == alone).all())
                continue
            sizes = {**self.alone.case.sizes, "batch": 1, "q_len": rows, "kv_len": keys}
            case = replace(self.alone.case, sizes=sizes)
            arrays = [of[b].float().numpy() for of in self.codes]
            descales = {name: self.of_one(name, b, n) for name, n in zip("qkv", (rows, keys, keys), strict=True)}
            one = simulate(self.alone.plan, case, *arrays, scale=self.w.scale, descales=descales, **options)
            wrong += [f"o of {b}"] * (not np.array_equal(o, one.o[0], equal_nan=True))
            wrong += [f"lse of {b}"] * (not np.array_equal(lse, one.lse[0], equal_nan=True))
        return wrong

    def of_one(self, name, b, rows):
        x = self.descales[name]
        x = x[b : b + 1] if x.shape[0] > 1 else x
        return x[:, :, : -(-rows // 128)] if x.ndim == 3 else x


def joined(
    spec="causal",
    options=None,
    *,
    queries=QUERIES,
    keys=KEYS,
    poisoned=POISONED,
    blocks=False,
    page_size=None,
    value=np.nan,
    of_keys=(E4M3, E4M3),
    **shape,
):
    """Random codes; the keys and values of one sequence hold `value`."""
    shape = {"heads": 2, "kv_heads": 1, "head_dim": 64, **shape}
    layout = Varlen() if page_size is None else Paged(queries=Varlen())
    w, alone = (
        eight(of, options={**(options or {}), **given}, of_keys=of_keys, q_len=max(queries), kv_len=max(keys), **shape)
        for of, given in ((spec, {"layout": layout}), (spec, {}))
    )
    g, count = torch.Generator().manual_seed(3), len(queries)
    codes, descales, columns = [], {}, shape["head_dim"]
    for name, lengths in (("q", queries), ("k", keys), ("v", keys)):
        heads = shape["heads" if name == "q" else "kv_heads"]
        dtype = getattr(torch, {"k": of_keys[0], "v": of_keys[1]}.get(name, E4M3))
        of = [(torch.randn((1, heads, n, columns), generator=g) * 100).to(dtype) for n in lengths]
        if name != "q" and poisoned is not None:
            of[poisoned] = torch.full(of[poisoned].shape, value).to(dtype)
        codes.append(tuple(of))
        size = (count, heads, -(-max(lengths) // 128)) if blocks else (count, heads)
        descales[name] = (torch.rand(size, generator=g) * 0.01 + 0.005).numpy()
    return Joined(w, alone, tuple(codes), descales, page_size)


@pytest.mark.sampled(
    "full-{'accuracy': 'exact'}-1-{'blocks': True, 'queries': (70, 140, 1), 'keys': (60, 200, 33)}",
    "causal-{}-1-{'page_size': 16, 'queries': (70, 33, 2), 'keys': (150, 33, 0), 'poisoned': None}",
)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "options", "splits", "shape"),
    [
        ("causal", {}, 1, {}),
        pytest.param(
            *("full", {"accuracy": "exact"}, 1, {"blocks": True, "queries": (70, 140, 1), "keys": (60, 200, 33)}),
            marks=pytest.mark.slow,
        ),
        ("full", PACKED, 3, {"heads": 4, "queries": (5, 1, 0, 2), "keys": (350, 131, 0, 20), "poisoned": 3}),
        ("causal", {}, 1, {"page_size": 16, "queries": (70, 33, 2), "keys": (150, 33, 0), "poisoned": None}),
        pytest.param("causal", {"accuracy": "fast"}, 1, {"head_dim": 128}, marks=pytest.mark.slow),
        pytest.param(
            "full",
            {"packed": True},
            1,
            {"heads": 4, "blocks": True, "queries": (140, 70, 3), "keys": (150, 200, 33)},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "full",
            PACKED,
            2,
            {
                "page_size": 32,
                "heads": 4,
                "blocks": True,
                "queries": (3, 1, 2),
                "keys": (350, 140, 129),
                "poisoned": None,
            },
            marks=AT_NIGHT,
        ),
        pytest.param(
            *("causal", {"accuracy": "exact"}, 1, {"head_dim": 128, "value": np.inf, "of_keys": (E5M2, E5M2)}),
            marks=pytest.mark.slow,
        ),
        pytest.param("causal", {"accuracy": "exact"}, 1, {"head_dim": 192}, marks=AT_NIGHT),
        pytest.param("softcap", {"accuracy": "exact"}, 1, {"head_dim": 96}, marks=AT_NIGHT),
        pytest.param("gpt_oss", {"accuracy": "exact"}, 1, {"heads": 4, "kv_heads": 2}, marks=AT_NIGHT),
    ],
    ids=str,
)
def test_each_has_the_bits_that_it_has_alone(spec, options, splits, shape):
    w = joined(spec, options, **shape)
    found = w.run(kv_splits=splits)
    assert w.wrong(found, kv_splits=splits) == []
    assert all(report.conflicts == [] for report in found.reports.values())


@pytest.mark.slow
def test_queries_at_the_end_of_their_keys():
    """The mask sees positions: what causal_bottom_right sees of a sequence alone."""
    lengths = {"queries": (5, 33, 1), "keys": (150, 40, 1), "poisoned": None}
    w, alone = joined("causal", **lengths), joined("causal_bottom_right", **lengths)
    assert replace(w, alone=alone.alone).wrong(w.run(q_offset=AT_END)) == []


#: Mutations of the emitted text: rows of V behind a sequence are the next one's, and here no numbers.
WRONG = {
    "rows of the next V are not cleared": ("clear(shared.v[stage], keys);", ";"),
    "keys of the first sequence": ("work.k_start + tile * TILE_KV", "tile * TILE_KV"),
    "the descale of the first sequence": ("p.k_descale[b * p.k_descale_batch", "p.k_descale[0 * p.k_descale_batch"),
    "every row counts as a key": ("min(work.kv_len - tile * TILE_KV, TILE_KV)", "TILE_KV"),
    "q's descale of the first sequence": ("p.q_descale[work.b * p.q_d", "p.q_descale[0 * p.q_d"),
    "v's descale of the first sequence": ("p.v_descale[b * p.v_descale_batch", "p.v_descale[0 * p.v_descale_batch"),
}


@pytest.mark.sampled("v's descale of the first sequence")
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [*list(WRONG)[:3], *(pytest.param(name, marks=pytest.mark.slow) for name in list(WRONG)[3:])]
)
def test_what_is_wrong_is_seen(name):
    w = joined("full", {"accuracy": "exact"}, queries=(40, 3), keys=(40, 20), poisoned=1 if "row" in name else None)
    try:
        wrong = w.wrong(w.run(changed(*WRONG[name])))
    except Trap as trap:
        wrong = [str(trap)]
    assert wrong


# ---------------------------------------------------------------- bytes
def moved(w):
    """Bytes that are predicted, and those that the kernel reads of q, of k and v, and writes."""
    own = [OwnLengths(q_rows=rows, kv_len=keys) for rows, keys in zip(*w.lengths, strict=True)]
    problem = w.w.problem._replace(batch=len(own))
    predicted = predict(w.w.plan, problem, replace(w.w.case, sizes=problem.sizes()), sequences=own).hbm
    report = w.run().report
    counted = [sum(report.bytes(buffer=name) for name in names) for names in ("q", "kv", ("o", "lse"))]
    return predicted, counted


@pytest.mark.slow
def test_bytes_are_predicted():
    """A sequence that ends with a tile, and the last, which ends with the tensor."""
    w = joined("causal", queries=(192, 33), keys=(256, 150), poisoned=None)
    predicted, (of_q, of_keys, written) = moved(w)
    assert (predicted.read_bytes, predicted.write_bytes) == (of_q + of_keys, written)


@pytest.mark.slow
def test_rows_of_the_next_sequence_that_a_box_holds():
    """TMA copies boxes: beside a sequence's own rows, which are predicted, those behind it in the same box."""
    w = joined("full")
    predicted, (of_q, of_keys, written) = moved(w)
    (queries, keys), tile, own, boxes = w.lengths, w.w.plan.tile, [0, 0], [0, 0]
    for b, (rows, kv_len) in enumerate(zip(queries, keys, strict=True)):
        first, first_key = sum(queries[:b]), sum(keys[:b])
        for at in range(0, rows if kv_len else 0, tile.q):
            own[0] += min(tile.q, rows - at)
            boxes[0] += max(0, min(tile.q, sum(queries) - first - at))
            for key in range(0, kv_len, tile.kv):
                own[1] += min(tile.kv, kv_len - key)
                boxes[1] += min(tile.kv, sum(keys) - first_key - key)
    row = w.w.problem.heads * w.w.problem.head_dim  # bytes
    assert predicted.read_bytes == own[0] * row + 2 * own[1] * row and predicted.write_bytes == written
    assert (of_q, of_keys) == (boxes[0] * row, 2 * boxes[1] * row)


def test_a_plan_says_what_they_move():
    w = joined("causal", queries=(192, 33), keys=(256, 150), poisoned=None)
    lengths = ["--q-lengths", "192,33", "--kv-lengths", "256,150", "--tile", str(w.w.plan.tile).replace(" ", "")]
    sizes = ["--heads", "2", "--kv-heads", "1", "--head-dim", "64", "--arch", "sm_90a", "--dtype", E4M3]
    found = json.loads(flashgen("plan", "causal", "--layout", "varlen", *lengths, *sizes, "--json").out)
    own = [OwnLengths(q_rows=rows, kv_len=keys) for rows, keys in zip(*w.lengths, strict=True)]
    right = predict(w.w.plan, w.w.problem._replace(batch=2), replace(w.w.case, sizes=found["shape"]), sequences=own)
    assert (found["pipeline"], found["layout"], found["dtype"]) == ("hopper", "varlen", E4M3)
    assert (found["hbm"], found["tile"]) == (right.hbm.as_json(), {"q": w.w.plan.tile.q, "kv": w.w.plan.tile.kv})


# ---------------------------------------------------------------- calls
CAUSAL = load_spec("causal")


class Call:
    """Rows [rows, heads, head_dim] of q, k and v, their descales, and the arguments of attention_varlen."""

    def __init__(self, *, blocks=False, queries=(140, 3, 0), keys=(150, 33, 20), poisoned=2):
        self.w = joined(queries=queries, keys=keys, poisoned=poisoned, blocks=blocks)
        (q, k, v), told = self.w.tensors()
        self.rows = [x[0].transpose(0, 1) for x in (q, k, v)]
        self.descales = {f"{name}_descale": torch.from_numpy(x) for name, x in self.w.descales.items()}
        self.starts = [torch.from_numpy(told[f"cu_seqlens_{name}"]) for name in "qk"]
        self.given = {"max_seqlen_q": max(queries), "max_seqlen_k": max(keys), **self.descales}

    def __call__(self, move=lambda x: x, **options):
        given = {name: move(x) if isinstance(x, torch.Tensor) else x for name, x in {**self.given, **options}.items()}
        return fg.attention_varlen(*map(move, self.rows), CAUSAL, *map(move, self.starts), **given)

    def right(self):
        """o of each sequence that has queries, alone, in float64 of what codes stand for."""
        for b, (rows, keys) in enumerate(zip(*self.w.lengths, strict=True)):
            if rows:
                codes = [of[b] for of in self.w.codes]
                of = [
                    torch.from_numpy(self.w.of_one(name, b, n))
                    for name, n in zip("qkv", (rows, keys, keys), strict=True)
                ]
                wide = [dequantised(x, scale, torch.float64) for x, scale in zip(codes, of, strict=True)]
                yield fg.attention(*wide, CAUSAL)[0].transpose(0, 1)


def off(found, right):
    return float((found.double() - right).norm() / right.norm())


@pytest.mark.parametrize("blocks", [False, True])
def test_the_walk_on_a_cpu(blocks):
    call = Call(blocks=blocks)
    o, lse = call(accuracy="exact", return_lse=True, out_dtype=torch.float16)
    assert (o.shape, o.dtype, lse.shape) == ((143, 2, 64), torch.float16, (2, 143))
    assert off(o, torch.cat([*call.right()])) < 0.03


def test_one_descale_for_all_and_pages():
    call, one = Call(poisoned=None), torch.tensor([0.01])
    ones = dict.fromkeys(call.descales, one)
    per_head = {name: x.new_full((1, x.shape[1]), 0.01) for name, x in call.descales.items()}
    assert torch.equal(call(**ones), call(**per_head))
    w = joined(queries=(5, 3), keys=(150, 33), page_size=16, poisoned=None)
    (q, k, v), told = w.tensors()
    own = {name: torch.from_numpy(told[name]) for name in ("kv_lengths", "page_table")}
    descales = {f"{name}_descale": torch.from_numpy(x) for name, x in w.descales.items()}
    starts = torch.from_numpy(told["cu_seqlens_q"])
    paged = fg.attention_varlen(
        q[0].transpose(0, 1), k, v, CAUSAL, starts, max_seqlen_q=5, page_layout="hpd", **own, **descales
    )
    flat = Call(queries=(5, 3), keys=(150, 33), poisoned=None)
    assert off(paged, flat().double()) < 1e-6


@pytest.mark.sampled("False")
@pytest.mark.slow
@pytest.mark.parametrize("blocks", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_on_an_emulated_gpu(monkeypatch, blocks):
    gpu = install(monkeypatch, (9, 0))
    call = Call(blocks=blocks)
    o = call(gpu.put)
    ((plan, *_), *_) = gpu.launches
    assert plan.layout == Varlen() and plan.float8
    assert off(o, torch.cat([*call.right()])) < 0.04


def test_nested_tensors():
    call = Call(queries=(40, 3, 0, 20), keys=(40, 3, 0, 20), poisoned=None)
    starts = call.starts[0].long()
    nested = [torch.nested.nested_tensor_from_jagged(x, starts).transpose(1, 2) for x in call.rows]
    o = fg.attention(*nested, CAUSAL, **call.descales, accuracy="exact")
    assert o.is_nested and o.dtype == torch.bfloat16
    assert torch.equal(o.values().transpose(0, 1), call(accuracy="exact"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"q_descale": None}, "q_descale is missing"),
        (
            {"k_descale": torch.ones(2, 1)},
            r"k_descale is \[2, 1\] and must broadcast from \[1\], \[batch, heads\] = \[3",
        ),
        ({"k_descale": torch.ones(1, 1, 2)}, r"blocks are of 3 sequences.*\n  nearest: \[sequences, heads, blocks\]"),
        ({"v_descale": torch.ones(3, 1, 5)}, "v_descale has 5 blocks for 150 rows"),
        ({"v_descale": torch.zeros(3, 1)}, "descales are positive"),
        ({"accuracy": "best"}, "accuracy is 'best'"),
        ({"dropout": 0.1}, "dropout is not there in 8 bits"),
        ({"invariant": True}, "cuts no rows into leaves in 8 bits"),
        ({"out": torch.empty(143, 2, 64).bfloat16()}, "out= is not there in 8 bits"),
        ({"q_descale": torch.ones(1).requires_grad_()}, "a gradient is wanted"),
    ],
    ids=lambda x: ",".join(x) if isinstance(x, dict) else "",
)
def test_refused(options, said):
    with pytest.raises(FlashgenError, match=f"(?s){said}"):
        Call(poisoned=None)(**options)
