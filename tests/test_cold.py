"""Cold starts: fresh processes with a cache of their own, here on a CPU, and what is recorded of them."""

import json
import sys

import pytest
import torch
from cli import flashgen

from flashgen.bench import cold, record
from flashgen.bench.cold import Start, starts
from flashgen.errors import LaunchError
from flashgen.planning.problem import Problem

SMALL = Problem(batch=1, heads=2, kv_heads=2, q_len=40, kv_len=40, head_dim=16, v_head_dim=16)


@pytest.mark.slow
def test_a_round_is_a_process_with_an_empty_cache_and_one_with_a_warm_one():
    found = list(starts(["document"], SMALL, rounds=1, device="cpu"))
    assert [(start.spec, start.cache) for start in found] == [("document", "empty"), ("document", "warm")]
    assert all(start.inputs > 0 and start.result > 0 for start in found)


def test_each_round_has_a_folder_of_its_own(monkeypatch):
    folders = []

    def process(spec, problem, device, folder):
        folders.append((spec, folder, folder.exists()))
        return 0.1, 0.2

    monkeypatch.setattr(cold, "process", process)
    assert len(list(starts(["full", "causal"], SMALL, rounds=2))) == 8
    assert [spec for spec, _, _ in folders] == 2 * ["full", "full", "causal", "causal"]
    assert len({folder for _, folder, _ in folders}) == 4 and all(there for _, _, there in folders)
    assert not any(folder.exists() for _, folder, _ in folders)


@pytest.mark.slow
def test_bytecode_is_there_for_every_process(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path))
    assert cold.bytecode()
    assert any("autograd" in path.name for path in tmp_path.rglob("*.pyc"))


@pytest.mark.slow
def test_a_process_that_fails_says_why():
    with pytest.raises(LaunchError, match="ended with 1 on no_such_spec"):
        list(starts(["no_such_spec"], SMALL, rounds=1, device="cpu"))


def test_the_record(monkeypatch, tmp_path):
    def fake(specs, problem, *, rounds):
        assert (problem.q_len, problem.heads, problem.head_dim) == (100, 16, 128)
        for i in range(rounds):
            for cache, seconds in (("empty", 1.0), ("warm", 0.1)):
                yield Start(spec=specs[0], cache=cache, inputs=0.3, result=seconds + i)

    monkeypatch.setattr(cold, "starts", fake)
    monkeypatch.setattr(cold, "bytecode", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(record, "environment", lambda: {"gpu": "one"})
    ran = flashgen("cold", "causal", "--seqlen", 100, "--rounds", 3, "--folder", tmp_path)
    assert "first result: median [low, high]" in ran.out
    assert "2.00 s [1.00 s, 3.00 s]" in ran.out and "1.10 s [100 ms, 2.10 s]" in ran.out
    read = json.loads((tmp_path / "cold.json").read_text())
    assert [(row["cache"], row["result"]) for row in read["cells"]] == [
        ("empty", [1.0, 2.0, 3.0]),
        ("warm", [0.1, 1.1, 2.1]),
    ]
    assert read["protocol"]["bytecode"] == "compiled beforehand, as pip leaves it"
    assert read["command"].startswith("flashgen cold causal --seqlen 100")


def test_refusals(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "no_such_spec" in flashgen("cold", "no_such_spec", code=2).err
    assert "and there is none" in flashgen("cold", "causal", code=2).err
