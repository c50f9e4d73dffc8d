"""What people read of measurements: the table and curves of benchmark records, and of what the counters saw."""

import json
from xml.etree import ElementTree

import damaged
import pytest
from cli import flashgen

from flashgen.bench import counters, report
from flashgen.bench.cells import cell
from flashgen.errors import FlashgenError, LaunchError
from flashgen.planning.prediction import Bytes


def write(folder, rows, name="forward_hopper"):
    record = {"gpu": {"name": "A GPU"}, "versions": {}, "cells": rows}
    (folder / f"{name}.json").write_text(json.dumps(record))


def row(which, cudnn, tflops=100.0):
    return {"cell": str(which), "ratio": {"cudnn": [cudnn, cudnn, cudnn]}, "tflops": {"flashgen": tflops, "cudnn": 50}}


ROWS = [
    row(cell("full", 64, 512), 2.0),
    row(cell("full", 64, 8192), 0.5),
    row(cell("causal", 64, 512), 1.5),
    row(cell("causal", 64, 8192), 1.5),
    row(cell("full", 64, 8192, dtype="float16"), 9.0),  # not of the main table
    row(cell("causal", 128, 8192, batch=2, heads=32, kv_heads=8), 9.0),
    row(cell("full", 96, 8192), 1.25),
    {
        "cell": str(cell("sliding_window", 128, 8192, batch=2, heads=16, window=1024)),
        "ratio": {"cudnn": [9.0, 9.0, 9.0], "fa3": [3.0, 3.0, 3.0]},  # cudnn: of another mask
        "tflops": {},
    },
    {"cell": "a cell of another version", "ratio": {}, "tflops": {}},
]


def test_the_table_gives_geometric_mean_and_extremes(tmp_path):
    write(tmp_path, ROWS)
    (record,) = report.read(tmp_path)
    lines = report.markdown([record]).splitlines()
    assert lines[0] == "Pipeline hopper, forward, A GPU:"
    assert lines[2:] == [
        "| head_dim | mask | cuDNN | FlashAttention-3 |",
        "|---|---|---|---|",
        "| 64 | full | 1.00 (0.50 to 2.00) | - |",
        "| 64 | causal | 1.50 (1.50 to 1.50) | - |",
        "| 96 | full | 1.25 | - |",
        "| 128 | sliding_window, window 1024 | - | 3.00 |",
    ]


def test_records_of_two_cards_lie_side_by_side(tmp_path):
    write(tmp_path, ROWS)
    whole = json.loads((tmp_path / "forward_hopper.json").read_text())
    for name in ("forward_hopper_h100", "forward_hopper_window"):  # the latter is a part of a run
        of_card = whole | {"gpu": whole["gpu"] | {"name": "NVIDIA H100 80GB HBM3"}}
        (tmp_path / f"{name}.json").write_text(json.dumps(of_card))
    assert [(record.pipeline, record.card) for record in report.read(tmp_path)] == [("hopper", ""), ("hopper", "h100")]


@pytest.mark.slow
def test_the_curves_name_what_they_show(tmp_path):
    write(tmp_path, ROWS)
    done = flashgen("report", tmp_path, "--draw")
    assert done.code == 0, done.err
    text = " ".join("".join(e.itertext()) for e in ElementTree.parse(tmp_path / "forward_hopper.svg").iter())
    assert "full, head_dim 64" in text
    assert "cuDNN" in text
    assert "head_dim 96" not in text  # one length is no curve
    assert "1.50 (1.50 to 1.50)" in done.out


def test_a_folder_without_records_or_with_a_damaged_one_is_said(tmp_path):
    assert "no record of flashgen bench\n  nearest: flashgen bench hopper" in flashgen("report", tmp_path, code=2).err
    (tmp_path / "forward_ampere.json").write_text('{"cells": [')
    assert "forward_ampere.json is no record" in flashgen("report", tmp_path, code=2).err


@pytest.mark.parametrize(
    "damage, says",
    [
        *damaged.ANY_JSON,
        (lambda text: '{"gpu": {"name": "x"}}', "it lacks 'cells'"),
        (lambda text: text.replace('"A GPU"', "5"), "'name' is 5, and must be text"),
        (lambda text: text.replace('"ratio"', '"rates"'), "it lacks 'ratio'"),
        (lambda text: text.replace("[2.0, 2.0, 2.0]", "2.0"), "the ratio of 'cudnn' is 2.0, and must be a list"),
        (lambda text: text.replace("[2.0, 2.0, 2.0]", "[]"), "the ratio of 'cudnn' is [], and must be numbers above 0"),
        (lambda text: text.replace("[2.0, ", "[-2.0, "), "the ratio of 'cudnn' is [-2.0"),
        (lambda text: text.replace("[2.0, ", '["2", '), "a number is '2', and must be"),
        (lambda text: text.replace('"cudnn": 50', '"cudnn": null'), "a number is None, and must be"),
    ],
)
def test_what_is_wrong_with_a_record_is_said(tmp_path, damage, says):
    write(tmp_path, ROWS)
    path = tmp_path / "forward_hopper.json"
    damaged.change(path, damage)
    told = flashgen("report", tmp_path, code=2).err
    assert f"{path} is no record of flashgen bench: " in told and says in told and "nearest: measure it again" in told


@pytest.mark.parametrize(
    "cells, says",
    [
        (
            [{"cell": "a", "read_ratio": 1.0, "write_ratio": 1.25}],
            "| hopper forward | 1 | 1.000 to 1.000 | 1.250 to 1.250 |",
        ),
        ([], "| hopper forward | 0 | 0.000 to 0.000 | 0.000 to 0.000 |"),
    ],
)
def test_counters_of_few_cells(tmp_path, cells, says):
    (tmp_path / "counters_forward_hopper.json").write_text(json.dumps({"cells": cells}))
    assert report.counted(tmp_path).splitlines()[-1] == says


def test_damaged_counters_are_said(tmp_path):
    (tmp_path / "counters_forward_hopper.json").write_text(json.dumps({"cells": [{"cell": "a", "read_ratio": "1"}]}))
    with pytest.raises(FlashgenError, match="is no record of flashgen bench: 'read_ratio' is '1', and must be"):
        report.counted(tmp_path)


def profile(*launches):
    """What ncu --csv prints for launches of (kernel, value of every metric)."""
    lines = ["==PROF== Connected to process 1", '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"']
    for index, (kernel, value) in enumerate(launches):
        lines += [f'"{index}","{kernel}","{metric}","byte","{value:,}"' for metric in counters.METRICS]
    return "\n".join(lines)


def test_a_call_is_its_forward_or_the_sum_of_its_backward():
    text = profile(
        ("attention_forward", 1000),
        *(("attention_backward_prepare", 1), ("attention_backward", 20), ("attention_backward_finish", 300)),
        ("attention_forward", 5),
        ("attention_backward", 7),
    )
    assert [set(call.values()) for call in counters.passes(text, backward=True)] == [{321}, {7}]
    alone = profile(("attention_forward", 1234567), ("attention_forward", 8))
    assert [set(call.values()) for call in counters.passes(alone, backward=False)] == [{1234567}, {8}]


def test_a_ratio_is_counted_over_predicted():
    one = counters.Counted(
        cell=counters.CELLS[0],
        tile="128x64",
        predicted=Bytes(read_bytes=100, write_bytes=10),
        compulsory=Bytes(read_bytes=50, write_bytes=10),
        l2=Bytes(read_bytes=150, write_bytes=10),
        dram=Bytes(read_bytes=60, write_bytes=9),
    )
    assert (one.read_ratio, one.write_ratio) == (1.5, 1.0)
    assert one.as_json()["l2"] == {"read_bytes": 150, "write_bytes": 10}


def test_counters_without_a_gpu_or_ncu_are_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "there is none that PyTorch can use" in flashgen("counters", "hopper", code=2).err
    assert "nearest: ampere, hopper" in flashgen("counters", "volta", code=2).err
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(LaunchError, match="read by ncu of Nsight Compute"):
        counters.count(counters.CELLS[:1], "hopper")


def data_row(cell_name, input_name, errors, ratios):
    """A cell of `flashgen bench data`: RMS errors as times each peer's, the others twice and half of them."""
    times = {name: {"rms": x, "largest": 2 * x, "tail": x / 2} for name, x in errors.items()}
    return {
        "cell": f"{cell_name} {input_name}",
        "dtype": "float16" if "float16" in cell_name.split() else "bfloat16",
        "input": input_name,
        "times_error": {"o": times, "lse": {"fa3": {"rms": 99.0, "largest": 99.0, "tail": 99.0}}},
        "ratio": {name: [x, x, x] for name, x in ratios.items()},
        "tflops": {},
    }


DATA_ROWS = [
    data_row("d64 full s8192 b2 h16", "sink", {"exact": 9.0, "cudnn": 1.25, "fa3": 1.5}, {"cudnn": 2.0, "fa3": 1.0}),
    data_row("d64 causal s8192 b2 h16", "sink", {"cudnn": 1.0, "fa2": 9.0}, {"cudnn": 0.5}),
    data_row("d64 full s8192 b2 h16 float16", "sink", {"exact": 1.0}, {"fa2": 3.0}),
]


def test_the_table_of_other_inputs_has_the_worst_errors(tmp_path):
    assert report.on_data(tmp_path) == "There is no record of it yet.\n"
    write(tmp_path, DATA_ROWS, "data_backward")
    lines = report.on_data(tmp_path).splitlines()
    assert lines[0] == "data backward, A GPU:"
    assert lines[2].startswith("| dtype | input | RMS error | largest error | 99.99th percentile | faster than cuDNN |")
    assert lines[4:6] == [
        "| bfloat16 | sink | 1.50 | 3.00 | 0.75 | 1.00 (0.50 to 2.00) | 1.00 |",
        "| float16 | sink | - | - | - | - | - |",
    ]
    assert list(report.read(tmp_path)) == []
    write(tmp_path, ROWS)
    assert "faster than cuDNN" in " ".join(flashgen("report", tmp_path, columns=300).out.split())


@pytest.mark.parametrize(
    "damage",
    [('"times_error"', '"errors"'), ('"rms": 1.25', '"rms": "x"'), ('"input"', '"output"'), ('"dtype"', '"type"')],
)
def test_a_damaged_record_of_other_inputs_is_said(tmp_path, damage):
    write(tmp_path, DATA_ROWS, "data")
    path = tmp_path / "data.json"
    path.write_text(path.read_text().replace(*damage))
    with pytest.raises(FlashgenError, match="is no record of flashgen bench"):
        report.on_data(tmp_path)


def suite_row(part, name, ratios, bars=(), absent=()):
    """A row of a suite: ratios by contender, its bars, and who is absent."""
    shown = {name: [x, x, x] for name, x in ratios.items()}
    return {
        "part": part,
        "cell": name,
        "ratio": shown,
        "bars": dict(bars),
        "absent": dict(absent),
        "subject": "flashgen",
    }


SUITE_ROWS = [
    suite_row("decode", "b1", {"cudnn": 0.5, "fa2": 3.0}, {"cudnn": 1.0}),
    suite_row("decode", "b8", {"cudnn": 2.0}, {"cudnn": 1.0}),
    suite_row("pages", "b1 16", {"dense": 0.98}, {"dense": 0.97}),
    suite_row("pages", "b1 64", {}, absent={"flashgen": "LaunchError: it has no pages"}),
]


def test_the_table_of_suites_has_bars_and_refusals(tmp_path):
    assert report.of_suites(tmp_path, ["serving"]) == "There is no record of it yet.\n"
    write(tmp_path, SUITE_ROWS, "serving_decode_pages")
    lines = report.of_suites(tmp_path, ["masks", "serving"]).splitlines()
    assert lines[0] == "serving decode pages, A GPU:"
    assert lines[4:] == [
        "| decode | cudnn | 2 | 1.00 (0.50 to 2.00) | 1 | 1 |",
        "| decode | fa2 | 1 | 3.00 | - | - |",
        "| pages | dense | 1 | 0.98 | 0.97 | 0 |",
        "| pages | refused | 1 | - | - | - |",
    ]
    assert "1.00 (0.50 to 2.00)" in flashgen("report", tmp_path).out


@pytest.mark.parametrize("damage", [('"part"', '"parts"'), ("[0.5, 0.5, 0.5]", "[0.5, -1, 0.5]"), ('"bars"', '"bar"')])
def test_a_damaged_record_of_a_suite_is_said(tmp_path, damage):
    write(tmp_path, SUITE_ROWS, "serving")
    path = tmp_path / "serving.json"
    path.write_text(path.read_text().replace(*damage))
    with pytest.raises(FlashgenError, match="is no record of flashgen bench"):
        report.of_suites(tmp_path, ["serving"])


@pytest.mark.parametrize(
    ("stem", "gpu", "title"),
    [
        ("serving", "NVIDIA H200", "serving, NVIDIA H200"),
        ("serving_h100", "NVIDIA H100 80GB HBM3", "serving, NVIDIA H100 80GB HBM3"),
        ("fp8_masks_h100", "NVIDIA H200", "fp8 masks h100, NVIDIA H200"),
    ],
)
def test_a_card_in_the_name_of_a_record_is_said_once(tmp_path, stem, gpu, title):
    (tmp_path / f"{stem}.json").write_text(json.dumps({"gpu": {"name": gpu}, "versions": {}, "cells": SUITE_ROWS}))
    assert report.of_suites(tmp_path, ["serving", "fp8"]).startswith(f"{title}:\n")
