"""Records: read, matched, refused when damaged, and what the planner makes of them; no GPU is needed."""

import dataclasses
import json
import re
from types import SimpleNamespace

import damaged
import pytest
import torch
from cli import flashgen
from full_disk import full_disk

import flashgen as fg
from flashgen.bench import tune
from flashgen.errors import PlanError
from flashgen.lang.load import load_spec
from flashgen.planning import planner, ranking, records
from flashgen.planning.problem import Problem

ARCH, PIPELINE, D = "sm_86", "ampere", 64


@pytest.fixture
def entry(monkeypatch):
    """An entry as `flashgen tune` makes it; of contenders with made-up times the first is best on long shapes."""
    monkeypatch.setattr(tune, "environment", lambda: {"gpu": {"name": "a GPU"}})
    variant = fg.variant()
    shapes = tune.problems(D, D, "bfloat16")
    found = tune.contenders(variant, ARCH, PIPELINE, "bfloat16", D, D)[:6]
    kept = {str(c): (c, SimpleNamespace(resources=SimpleNamespace(registers=99))) for c in found}
    times = {name: [(1.0 + (i if p.q_len > 1000 else -0.1 * i),) * 7 for p in shapes] for i, name in enumerate(kept)}
    return tune._entry(variant, (D, D), "bfloat16", shapes, kept, times)


@pytest.fixture
def folder(entry, tmp_path, monkeypatch):
    """A user's folder with one record."""
    monkeypatch.setenv(records.VARIABLE, str(tmp_path))
    planner.menu_of.cache_clear()
    tune.write(tmp_path, ARCH, PIPELINE, entry)
    yield tmp_path
    planner.menu_of.cache_clear()
    records.load.cache_clear()


def menu(variant=None, **options):
    return planner.menu(
        variant or fg.variant(), ARCH, "bfloat16", options.pop("head_dim", D), pipeline=PIPELINE, **options
    )


def problem(length, *, batch=8, heads=32):
    return Problem(batch=batch, heads=heads, kv_heads=heads, q_len=length, kv_len=length, head_dim=D, v_head_dim=D)


def test_the_planner_takes_the_order_of_a_record(folder, entry):
    found = menu()
    assert found.record == f"{ARCH}_{PIPELINE}_forward: d64, no mask"
    long, short = (planner.choose(found, problem(n), 84) for n in (16_384, 512))
    alike = [c for c in entry["candidates"] if c["form"]["tile"]["kv"] == found.plans[0].tile.kv]
    by_ms = {j: min(alike, key=lambda c: c["ms"][j]) for j in (0, 3)}
    for plan, best in ((long, by_ms[3]), (short, by_ms[0])):
        tile = best["form"]["tile"]
        assert (plan.tile.q, plan.tile.kv, plan.stages) == (tile["q"], tile["kv"], best["form"]["stages"])
        assert plan.blocks_per_sm == best["blocks_per_sm"]
    assert found.plans[0] == long
    assert all(r.reason.startswith("measured") for r in found.rejected)


@pytest.mark.parametrize(
    "asked",
    [
        {"head_dim": 128},
        {"variant": load_spec("causal").bind()},
        {"variant": load_spec("softcap").bind()},
        {"tile": (64, 32)},
        {"stages": 3},
        {"dropout": True},
    ],
)
def test_what_was_not_measured_is_predicted(folder, asked):
    assert menu(**asked).record is None


def test_head_dims_of_one_padding_and_both_types_share_an_entry(folder):
    assert menu(head_dim=56).record == menu().record
    assert planner.menu(fg.variant(), ARCH, "float16", D, pipeline=PIPELINE).record == menu().record
    assert menu(head_dim=56).plans[0].head_dim == 56


def test_a_record_changes_the_choice_not_the_plan(folder, monkeypatch):
    plan = menu().plans[0]
    monkeypatch.delenv(records.VARIABLE)
    planner.menu_of.cache_clear()
    fields = {f.name for f in dataclasses.fields(plan)}
    assert not fields & {"record", "measured"}
    assert menu(tile=(plan.tile.q, plan.tile.kv)).record is None


def _entry_twice(text):
    data = json.loads(text)
    return json.dumps({**data, "entries": data["entries"] * 2})


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        *damaged.ANY_JSON,
        (lambda text: text.replace('"format": 1', '"format": 9'), "its format is 9 and not 1"),
        (lambda text: text.replace('"format": 1', '"format": true'), "'format' is True, and must be a whole number"),
        (
            lambda text: re.sub(r'"entries": .*', '"entries": 7}', text, flags=re.S),
            "'entries' is 7, and must be a list",
        ),
        (
            lambda text: re.sub(r'"entries": .*', '"entries": [7]}', text, flags=re.S),
            "entry 1: it is 7, and must be an",
        ),
        (lambda text: text.replace('"mask"', '"musk"'), "entry 1: it lacks 'mask'"),
        (lambda text: text.replace('"mask": "none"', '"mask": "all"'), "'mask' is 'all', and must be one of 'none'"),
        (lambda text: text.replace('"score": false', '"score": 0'), "'score' is 0, and must be true or false"),
        (lambda text: text.replace('"head_dim": 64', '"head_dim": "64"'), "'head_dim' is '64', and must be a whole"),
        (lambda text: text.replace('"head_dim": 64', '"head_dim": 1' + "0" * 400), "'head_dim' is 2^1328 or more"),
        (lambda text: text.replace('"head_dim": 64', '"head_dim": 1' + "0" * 5000), "Exceeds the limit"),
        (lambda text: text.replace('"q_len": 512', '"q_len": -512'), "'q_len' is -512, and must lie between 1 and"),
        (lambda text: text.replace('"q": 64', '"q": 7'), "'q' is 7, and must lie between 16 and 1024 in steps of 16"),
        (lambda text: text.replace('"kv": 64', '"k": 64'), "the tile has 'q', 'k', and must have 'q' and 'kv'"),
        (lambda text: text.replace('"stages": 2', '"stages": [2]'), "'stages' is [2], and must be"),
        (lambda text: text.replace('"blocks_per_sm": ', '"blocks_per_sm": 99'), "'blocks_per_sm' is 99"),
        (lambda text: text.replace('"ms": [', '"ms": [0.5, '), "has no time for each of its"),
        (lambda text: text.replace('"ms": [1.0', '"ms": [-1.0'), "has no time for each of its"),
        (lambda text: text.replace('"ms": [1.0', '"ms": [1' + "0" * 4000), "has no time for each of its"),
        (lambda text: text.replace('"ms": [1.0', '"ms": ["fast"'), "a time is 'fast', and must be"),
        (lambda text: text.replace('"ms": [1.0', '"ms": [null'), "a time is None, and must be"),
        (_entry_twice, "entry 2: another one has its class"),
    ],
)
def test_a_damaged_record_is_refused(folder, damage, says):
    path = folder / records.file_name(ARCH, PIPELINE, "forward")
    damaged.change(path, damage)
    records.load.cache_clear()
    planner.menu_of.cache_clear()
    with pytest.raises(PlanError) as error:
        menu()
    assert str(path) in str(error.value) and says in str(error.value) and "flashgen tune" in str(error.value)


def test_a_measured_candidate_that_does_not_fit_is_passed_over(folder):
    path = folder / records.file_name(ARCH, PIPELINE, "forward")
    data = json.loads(path.read_text())
    for c in data["entries"][0]["candidates"][1:]:
        c["form"]["tile"] = {"q": 1024, "kv": 1024}
    path.write_text(json.dumps(data))
    records.load.cache_clear()
    planner.menu_of.cache_clear()
    (plan,) = menu().plans
    assert plan.tile.q < 1024 and menu().record is not None


def test_a_folder_of_records_that_is_not_there_is_said(monkeypatch, tmp_path):
    monkeypatch.setenv(records.VARIABLE, str(tmp_path / "nowhere"))
    planner.menu_of.cache_clear()
    with pytest.raises(PlanError, match=r"FLASHGEN_RECORDS is '.*nowhere', and there is no such folder"):
        menu()


def test_a_record_that_does_not_fit_on_the_disk_leaves_the_one_before(folder, entry, monkeypatch):
    path = folder / records.file_name(ARCH, PIPELINE, "forward")
    before = path.read_text()
    full_disk(monkeypatch)
    with pytest.raises(OSError, match="No space left"):
        tune.write(folder, ARCH, PIPELINE, {**entry, "spec": "another"})
    monkeypatch.undo()
    assert path.read_text() == before and [one.name for one in folder.iterdir()] == [path.name]


def test_entries_of_other_classes_stay(folder, entry):
    other = {**entry, "class": {**entry["class"], "mask": "band"}}
    path = tune.write(folder, ARCH, PIPELINE, other)
    assert len(json.loads(path.read_text())["entries"]) == len(records.load(path)) == 2
    tune.write(folder, ARCH, PIPELINE, other)
    assert len(records.load(path)) == 2


def test_contenders_fit_and_differ():
    found = tune.contenders(load_spec("causal").bind(), "sm_90a", "ampere", "bfloat16", 256, 256)
    assert len({c.plan for c in found}) == len(found) > 20
    assert all(c.plan.smem_bytes * c.plan.blocks_per_sm <= 228 * 1024 for c in found)
    assert {c.plan.tile.kv for c in found} >= {32, 48, 64}


@pytest.mark.parametrize("path", sorted(records._SHIPPED.glob("*.json")), ids=lambda path: path.stem)
def test_shipped_records_plan(path):
    arch, pipeline, pass_name = path.stem.rsplit("_", 2)
    assert pass_name == "forward"
    specs = {"none": fg.variant(), "band": load_spec("causal").bind(), "general": load_spec("document").bind()}
    for key in records.load(path):
        if not key.score:
            found = planner.menu(specs[key.mask], arch, "bfloat16", key.head_dim, key.v_head_dim, pipeline=pipeline)
            assert found.record == f"{path.stem}: {key}"
            assert len(found.plans) <= ranking.MAX_PLANS


def test_a_damaged_record_ends_tuning_before_anything_is_measured(folder, monkeypatch):
    """And the advice is one that helps: tuning does not overwrite it."""
    path = folder / records.file_name(ARCH, PIPELINE, "forward")
    path.write_text("{")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 6))
    measured = []
    monkeypatch.setattr(tune, "tune", lambda *given, **named: measured.append(given))
    err = flashgen("tune", "causal", "--head-dim", D, "--folder", folder, code=2).err
    assert not measured and f"the record {path} cannot be used" in err
    assert "nearest: remove it, or move it away" in err and path.read_text() == "{"
