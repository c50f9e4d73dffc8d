"""The expression DAG: one node a meaning, frozen, and written down in an order that depends on structure alone."""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
import threading

import pytest

import flashgen as fg
from flashgen.lang import build, expr
from flashgen.lang import variant as variant_module
from flashgen.lang.bounds import bounds
from flashgen.lang.expr import DType, Tensor, const, digest, node, serialize, walk


def expression():
    q, k = node("index", DType.INT32, (), "q"), node("index", DType.INT32, (), "k")
    distance = build.apply("sub", q, k)
    return build.apply("logical_and", build.apply("ge", distance, 0), build.apply("lt", distance, 8))


def test_equal_structure_is_one_object_on_any_thread():
    found = []
    threads = [threading.Thread(target=lambda: found.append(expression())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(e) for e in found}) == 1


def test_the_users_line_is_not_part_of_the_meaning():
    assert (
        fg.variant(lambda b, h, q, k: k <= q).mask
        is fg.variant(
            lambda b, h, q, k: k <= q,
        ).mask
    )


def test_nodes_are_frozen_and_copies_are_themselves():
    root = expression()
    with pytest.raises(AttributeError, match="frozen"):
        root.op = "or"
    assert pickle.loads(pickle.dumps(root)) is root
    assert copy.deepcopy(root) is root


def test_walk_visits_shared_nodes_once_and_operands_first():
    root = expression()
    order = list(walk((root,)))
    assert len(order) == len(set(order)) == 8
    for n in order:
        assert all(order.index(operand) < order.index(n) for operand in n.operands)


@pytest.mark.slow
def test_a_deep_expression_does_not_recurse():
    root = node("index", DType.INT32, (), "q")
    for i in range(5000):
        root = build.apply("add", root, i)
    assert len(list(walk((root,)))) == 1 + 2 * 5000 and digest((root,)) and bounds(root).lo > 0
    assert build.rebuild(root, lambda n: const(0) if n.op == "index" else None).op == "const"


@pytest.mark.slow
def test_nodes_that_nothing_holds_are_forgotten(monkeypatch):
    monkeypatch.setattr(variant_module, "_by_token", {})
    monkeypatch.setattr(variant_module, "MAX_TOKENS", 4)
    gc.collect()
    before = len(expr._interned)
    for i in range(50):
        fg.variant(lambda b, h, q, k, i=i: q - k < 7_000_000 + i)
    gc.collect()
    assert len(expr._interned) <= before + 4 * 4 + 1 and len(variant_module._by_token) == 4
    deep = node("index", DType.INT32, (), "q")
    for i in range(5000):
        deep = build.apply("add", deep, 7_000_000 + i)
    assert len(expr._interned) > before + 5000
    del deep
    gc.collect()
    assert len(expr._interned) < before + 100


@pytest.mark.slow
def test_serialized_text_is_the_same_in_every_process():
    code = (
        "import flashgen as fg; t = fg.tensor('t', dims=('kv',), dtype='int32');"
        "v = fg.variant(lambda b, h, q, k: (t[k] == q) | (q - k < fg.param('w', default=3)));"
        "print(v.digest())"
    )
    digests = {
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    }
    assert len(digests) == 1


def test_the_digest_covers_meaning_only():
    def text(**changes):
        tensor = Tensor(**{"name": "t", "dims": ("kv",), "dtype": "int32", **changes})
        return serialize((node("load", DType.INT32, (node("index", DType.INT32, (), "k"),), tensor),))

    assert text() == text(example=print, doc="words")
    for change in ({"min": 0}, {"sorted": True}, {"dtype": "int16"}, {"dims": (None,)}, {"name": "u"}):
        assert text() != text(**change)

    def window(**declaration):
        w = fg.param("w", **declaration)
        return fg.variant(lambda b, h, q, k: q - k < w).digest()

    assert window(default=1, min=1) == window(default=9, min=1, doc="words")
    assert window(default=1, min=1) != window(default=1, min=0)


def test_mask_and_score_do_not_share_a_digest():
    hidden = fg.variant(lambda b, h, q, k: q < k)
    shown = fg.variant(lambda b, h, q, k: q < k, score=lambda s, b, h, q, k: s * 2)
    assert len({hidden.digest(), shown.digest(), fg.variant().digest()}) == 3
