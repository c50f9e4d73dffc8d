"""`flashgen show`: the drawing, the classes and the share that the analysis misjudges."""

import json

import pytest
from cli import flashgen

from flashgen.lang.load import shipped


def test_a_causal_mask_in_the_terminal():
    out = flashgen("show", "causal", "--seqlen", 256, "--arch", "sm_80", "--tile", "64x64").out
    assert "16 tiles: · 6 empty, ▒ 4 partial, █ 6 full; 0.0% misclassified" in out
    mask = [line for line in out.splitlines() if "█" in line or "▒" in line]
    assert mask[0].count("█") < mask[20].count("█")  # a triangle, widening downwards


def test_the_formula():
    out = flashgen("show", "alibi", "--seqlen", 64).out
    assert "mask  = k ≤ q\nscore = s - (q - k)⋅slopes[h]" in out


def test_the_share_that_is_visible():
    # Four triangles of 64, each 65 / 128 of its square.
    assert "12.7% of the mask is visible" in flashgen("show", "chunked", "--seqlen", 256, "--param", "chunk=64").out


def test_the_share_counts_pairs_and_not_cells(tmp_path):
    spec = tmp_path / "last.py"
    spec.write_text("import flashgen as fg\n\n\n@fg.variant\ndef last(b, h, q, k):\n    return q >= 384\n")
    # 385 queries are drawn in 384 cells, of which the last has two: the one that is visible is 0.26% of all.
    assert "0.3% of the mask is visible" in flashgen("show", spec, "--seqlen", 385, "--arch", "sm_80").out


@pytest.mark.slow
def test_the_batch_and_head_are_named_where_the_mask_reads_them(tmp_path):
    def said(mask, *options):
        spec = tmp_path / "spec.py"
        spec.write_text(f"import flashgen as fg\n\n\n@fg.variant\ndef spec(b, h, q, k):\n    return {mask}\n")
        return flashgen("show", spec, "--seqlen", 128, "--arch", "sm_80", *options).out

    assert "of the mask is visible" in said("k <= q", "--h", 3)
    assert "of the mask of head 3 (--h) is visible" in said("k <= q + h", "--h", 3)
    assert "of the mask of batch 0 (--b), head 1 (--h) is visible" in said("k <= q + h * b", "--h", 1)
    said("k <= q + h", "--h", 3, "--output", tmp_path / "drawn.svg")
    assert "head 3 (--h); 0.0% of the tiles misclassified" in (tmp_path / "drawn.svg").read_text()


IMAGES = """import flashgen as fg

image = fg.tensor("image", dims=("kv",), dtype="int32", {promise}
                  example=lambda p, rng: rng.integers(0, 5, p.kv_len).cumsum() // 200)


@fg.variant
def images(b, h, q, k):
    return image[q] == image[k]
"""


PAIRS = """
import numpy as np

import flashgen as fg

level = fg.tensor("level", dims=(None, None), dtype="int32", {promise}
                  example=lambda p, rng: np.zeros((256, 256), np.int32))


@fg.variant
def pairs(b, h, q, k):
    return (k <= q) & (level[q % 256, k % 256] < 1)
"""


@pytest.mark.slow
def test_a_promise_that_would_settle_tiles_is_named(tmp_path):
    asked = ("--seqlen", 1024, "--arch", "sm_80", "--tile", "64x64")
    for promise, hinted in (("", True), ("min=0, max=0,", False)):
        (tmp_path / "pairs.py").write_text(PAIRS.format(promise=promise))
        out = flashgen("show", tmp_path / "pairs.py", *asked).out
        assert ("0.0% misclassified" in out) != hinted
        assert ("fg.tensor('level', ..., min=0, max=0) would settle more tiles: these data keep it" in out) == hinted
        assert ("level[q % 256, k % 256] < 1: pair by pair: of a tile's elements of 'level'" in out) == hinted
        assert ("the tiles of a block mask visited" in out) == hinted


@pytest.mark.slow
def test_what_data_alone_tell_needs_no_promise(tmp_path):
    asked = ("--seqlen", 1024, "--arch", "sm_80", "--tile", "64x64")
    said = "; those of 'image' are found for each tile first, in the same call"
    for promise, found in (("", said), ("sorted=True,", "")):
        (tmp_path / "images.py").write_text(IMAGES.format(promise=promise))
        out = flashgen("show", tmp_path / "images.py", *asked).out
        assert "0.0% misclassified" in out and "would settle" not in out
        assert f"image[q] == image[k]: tile by tile, over ranges of values{found}\n" in out
        plan = flashgen("plan", tmp_path / "images.py", *asked).out
        assert ("summaries" in plan) == ("summary_image_q" in plan) == ("attention_summaries" in plan) == bool(found)


@pytest.mark.sampled(
    "alibi", "full", "log_distance", "padding", "prefix_lm", "relative_bias", "sink_window", "sliding_window", "softcap"
)
@pytest.mark.parametrize("name", sorted(shipped()))
def test_every_shipped_spec_is_drawn(name):
    out = flashgen("show", name, "--seqlen", 300, "--head-dim", 64, "--arch", "sm_80").out
    assert f"{name}: batch 1" in out and "misclassified" in out


@pytest.mark.slow
@pytest.mark.parametrize("suffix, start", [(".png", b"\x89PNG"), (".svg", b"<?xml")])
def test_pictures(tmp_path, suffix, start):
    file = tmp_path / f"mask{suffix}"
    ran = flashgen("show", "sliding_window", "--seqlen", 200, "--param", "window=50", "--output", file)
    assert file.read_bytes().startswith(start)
    assert f"wrote {file}" in ran.err


def test_heads_differ():
    spec_of = {h: flashgen("show", "padding", "--seqlen", 128, "--b", h, "--batch", 2).out for h in (0, 1)}
    assert spec_of[0] != spec_of[1]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--output", "mask.jpg"], "show cannot draw to mask.jpg: it writes .png and .svg\n  nearest: mask.png"),
        (["--batch", "0"], "there is nothing to show: batch is 0\n  nearest: --batch 1"),
        (["--heads", "0"], "there is nothing to show: heads is 0\n  nearest: --heads 1"),
        (["--h", "8"], "--h 8 is not one of the 8 of this problem\n  nearest: --h 0"),
        (["--seqlen", "100000"], "100000 x 100000 are too many\n  nearest: --seqlen 16384"),
        (["--seqlen", "0"], "there is nothing to show: 0 queries and 0 keys"),
    ],
)
def test_refusals(arguments, message):
    assert message in flashgen("show", "causal", *arguments, code=2).err


def line(out, name):
    """The words of a ring's or a role's line, its lane a word for each role."""
    return next(line for line in out.splitlines() if line.startswith(f"{name} "))


def test_the_program_of_a_forward():
    out = flashgen("show", "causal", "--program", "--arch", "sm_90a", "--seqlen", 8192).out
    assert "hopper forward on sm_90a: 12 warps, 384 threads" in out
    assert line(out, "0").split() == ["0", "scheduler", "32", "40"]
    assert line(out, "4-11").split() == ["4-11", "consumer", "256", "232"]
    names = line(out, "ring")
    at = {name: names.index(name) + len(name) // 2 for name in ("scheduler", "loader", "consumer")}
    work, k = line(out, "work"), line(out, "k")
    assert (work[at["scheduler"]], work[at["loader"]], work[at["consumer"]]) == ("●", "▶", "▶")
    assert (k[at["scheduler"]], k[at["loader"]], k[at["consumer"]]) == (" ", "●", "▶")
    stages = line(out[out.index("\nstages") :], "k")
    assert " ".join(stages.split()) == "k 2 when 8 consumer warps arrive"
    assert "when 8 consumer warps, 1 loader warp and 1 storer warp arrive" in out
    assert "when 1 storer warp arrives" in out


@pytest.mark.parametrize(
    "options, found",
    [
        (
            ("--arch", "sm_90a", "--backward", "--seqlen", "4096"),
            ("dq accumulation", "with q", "a warpgroup computes P and dS"),
        ),
        (("--arch", "sm_90a", "--backward", "--deterministic"), ("dq semaphore", "before", "order")),
        (("--arch", "sm_90a", "--backward", "--head-dim", 256), ("dv consumer", "dk consumer", "leave to write dS")),
        (("--arch", "sm_90a", "--tile", "128x64", "--packed"), ("storer", "64 rows of O in the shared memory of Q")),
        (("--arch", "sm_80"), ("compute", "a tile of V", "by barrier 0")),
        (("--arch", "sm_80", "--backward"), ("compute", "a tile of dO and its delta", "by barrier 0")),
    ],
)
def test_programs_of_both_pipelines_and_passes(tmp_path, options, found):
    spec = "causal" if "256" not in map(str, options) else "full"
    out = flashgen("show", spec, "--program", *options, "--output", tmp_path / "program.svg").out
    drawn = (tmp_path / "program.svg").read_text()
    for text in found:
        assert text in out and text in drawn


def test_a_program_as_json():
    asked = ("show", "document", "--program", "--arch", "sm_90a", "--backward", "--json")
    found = json.loads(flashgen(*asked).out)
    assert [role["name"] for role in found["roles"]] == ["scheduler", "loader", "idle", "consumer"]
    assert sum(role["warps"] for role in found["roles"]) * 32 == found["threads"]
    q = next(ring for ring in found["rings"] if ring["name"] == "q")
    assert q["consumers"] == [{"role": "consumer", "arrivals": 8}] and q["stages"] == 2
    assert found["named_barriers"][0]["id"] == 0


def test_a_program_draws_no_mask():
    out = flashgen("show", "causal", "--program", "--h", 1, "--arch", "sm_90a", code=2).err
    assert "--b and --h choose a mask, and --program draws none\n  nearest: leave them out" in out
