"""`flashgen emit`, `compile` and `build`: text, cubins and what is said of them; no GPU is needed."""

import itertools
import re
import warnings

import numpy as np
import pytest
from cli import flashgen

import flashgen as fg
from flashgen.cli import build
from flashgen.lang.load import load_spec
from flashgen.planning.planner import menu
from flashgen.runtime import kernel


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(folder))
    return folder


def seconds(out, name):
    number, unit = re.search(rf"^{name} +([\d.]+) (s|ms|us)", out, re.MULTILINE).groups()
    return float(number) * {"s": 1, "ms": 1e-3, "us": 1e-6}[unit]


def test_emit_prints_one_cuda_file(tmp_path):
    ran = flashgen("emit", "causal", "--arch", "sm_80", "--head-dim", 64)
    assert 'extern "C" __global__' in ran.out and "#include" not in ran.out
    file = tmp_path / "causal.cu"
    assert f"wrote {file}" in flashgen("emit", "causal", "--arch", "sm_80", "--head-dim", 64, "-o", file).err
    assert file.read_text() == ran.out


def test_emit_depends_on_no_length_and_no_parameter():
    fixed = ("emit", "sliding_window", "--arch", "sm_80", "--tile", "64x64")
    texts = {
        flashgen(*fixed, "--seqlen", n, "--param", f"window={w}").out for n, w in ((1024, 1024), (8192, 7), (1, 1))
    }
    assert len(texts) == 1


NEEDY = """import flashgen as fg

window = fg.param("window", dtype=int, min=1)
ids = fg.tensor("ids", dims=("kv",), dtype="int32")


@fg.variant
def needy(b, h, q, k):
    return (q - k < window) & (ids[k] == 0)
"""


@pytest.mark.slow
def test_no_kernel_asks_for_a_parameter_or_a_tensor(tmp_path):
    spec = tmp_path / "needy.py"
    spec.write_text(NEEDY)
    small = (spec, "--arch", "sm_80", "--head-dim", 32)
    text = flashgen("emit", *small).out
    assert "p.param_window" in text
    assert "0 bytes stored" in flashgen("compile", *small).out
    assert "compiled" in flashgen("build", spec, "--archs", "sm_80", "--head-dims", 32, "--tile", "64x64").out
    np.save(tmp_path / "ids.npy", np.zeros(1024, np.int32))
    given = ("--param", "window=7", "--tensor", f"ids={tmp_path / 'ids.npy'}", "--seqlen", 1024)
    assert flashgen("emit", *small, "--seqlen", 1024).out == flashgen("emit", *small, *given).out
    # What is given is checked all the same, and what runs a problem needs both.
    assert "the least it may be is 1" in flashgen("emit", *small, "--param", "window=0", code=2).err
    assert "ids" in flashgen("emit", *small, "--seqlen", 9, *given[:-2], code=2).err
    assert "needs the parameter 'window'" in flashgen("plan", *small, code=2).err
    assert "needs the captured tensor 'ids'" in flashgen("plan", *small, "--param", "window=7", code=2).err


BACKWARD = ("--arch", "sm_80", "--head-dim", 64, "--backward")


@pytest.mark.slow
def test_the_kernels_of_gradients():
    forward, backward = (flashgen("emit", "relative_bias", *BACKWARD[:n]).out for n in (4, 5))
    assert "attention_forward" in forward and "attention_backward(" in backward
    options = ("--deterministic", "--dropout", "--gradient", "table", "--tile", "64x64")
    text = flashgen("emit", "relative_bias", *BACKWARD, *options).out
    assert "attention_backward_dq" in text and "attention_backward_gradients" in text and "TILE_KV = 64" in text
    out = flashgen("compile", "causal", *BACKWARD).out
    assert re.search(r"^kernel +ampere backward, sm_80, tile", out, re.MULTILINE)


@pytest.mark.slow
def test_build_makes_both_passes():
    one = ("--archs", "sm_80", "--head-dims", 16, "--dtypes", "float16", "--tile", "64x64")
    out = flashgen("build", "causal", *one, "--backward").out
    assert {" ".join(line.split()[:5]) for line in out.splitlines() if "causal" in line} == {
        f"causal sm_80 float16 16 {name}" for name in ("forward", "backward")
    }


@pytest.mark.parametrize("layout", ["padded", "varlen"])
def test_both_passes_that_build_makes_are_of_the_layout(monkeypatch, layout):
    assert {(plan.pass_name, plan.layout.name) for plan in planned(monkeypatch, "--backward", "--layout", layout)} == {
        ("forward", layout),
        ("backward", layout),
    }


def test_build_takes_a_dtype_of_keys_and_values(monkeypatch):
    of_both = planned(monkeypatch, "--kv-dtype", "float8_e4m3fn")
    assert {(plan.dtype, plan.float8.k, plan.float8.v) for plan in of_both} == {
        ("float16", "float8_e4m3fn", "float8_e4m3fn")
    }
    apart = planned(monkeypatch, "--kv-dtype", "float8_e4m3fn", "--v-dtype", "float8_e5m2")
    assert {(plan.float8.k, plan.float8.v) for plan in apart} == {("float8_e4m3fn", "float8_e5m2")}


def planned(monkeypatch, *options):
    """The plans that a build compiles, none of which is compiled."""
    found = []
    monkeypatch.setattr(build, "compiled", lambda plans, jobs: found.extend(plans) or [])
    flashgen("build", "causal", "--archs", "sm_90a", "--head-dims", 64, "--dtypes", "float16", *options)
    assert found
    return found


@pytest.mark.slow
def test_build_of_one_tile_and_unequal_head_dims():
    arguments = ("build", "sliding_window", "--archs", "sm_80", "--head-dims", "16", "--v-head-dims", "16,32")
    out = flashgen(
        *arguments, "--dtypes", "bfloat16", "--tile", "64x32", "--stages", 3, columns=40
    ).out  # nothing is cut
    rows = [line.rstrip() for line in out.splitlines()[1:]]
    assert [row.split()[:5] for row in rows] == [
        ["sliding_window", "sm_80", "bfloat16", dims, "forward"] for dims in ("16", "16", "16,32", "16,32")
    ]  # that of single heads, and that of packed ones
    assert all(" 64 x 32 " in row and row.endswith("compiled") for row in rows)


@pytest.mark.slow
def test_compile_reports_resources_and_times(tmp_path):
    file = tmp_path / "causal.cubin"
    out = flashgen("compile", "causal", "--arch", "sm_80", "--head-dim", 128, "--output", file).out
    assert re.search(r"^registers +\d+ per thread \(the plan estimates \d+\)", out, re.MULTILINE)
    assert re.search(r"^spills +0 bytes stored, 0 loaded, stack 0", out, re.MULTILINE)
    for name in ("shared memory", "cubin", "imports", "context creation"):
        assert re.search(rf"^{name} ", out, re.MULTILINE)
    assert file.read_bytes().startswith(b"\x7fELF")
    assert seconds(out, r"emit \+ compile") > seconds(out, "index hit") > 0


@pytest.mark.slow
def test_a_second_compile_is_a_hit_and_fresh_is_none():
    assert "when it was compiled" not in flashgen("compile", "causal", "--arch", "sm_80", "--head-dim", 16).out
    assert "when it was compiled" in flashgen("compile", "causal", "--arch", "sm_80", "--head-dim", 16).out
    assert (
        "when it was compiled" not in flashgen("compile", "causal", "--arch", "sm_80", "--head-dim", 16, "--fresh").out
    )


@pytest.mark.slow
def test_build_compiles_every_combination_once(empty_cache):
    several = {"--dtypes": ("float16",), "--head-dims": ("16", "32"), "--archs": ("sm_80", "sm_86")}
    listed = [word for option, values in several.items() for word in (option, ",".join(values))]
    arguments = ("build", "full", "alibi", *listed, "--tile", "64x64", "--stages", 2)
    ran = flashgen(*arguments)
    rows = [line for line in ran.out.splitlines() if line.lstrip().startswith(("full sm_", "alibi sm_"))]
    assert {tuple(row.split()[:4]) for row in rows} == {
        (spec, arch, dtype, dim)
        for spec in ("full", "alibi")
        for dtype, dim, arch in itertools.product(*several.values())
    }
    assert all("compiled" in row for row in rows)
    assert len(list(empty_cache.glob("*.cubin"))) == len(rows)
    again = flashgen(*arguments).out
    assert "cached" in again and "compiled" not in again


@pytest.mark.sampled("40000-3", "1073741824-0")
@pytest.mark.slow
@pytest.mark.parametrize("limit, lost", [(0, 4), (40_000, 3), (1 << 30, 0)])
def test_build_says_what_the_cache_does_not_keep(limit, lost, tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("FLASHGEN_CACHE_BYTES", str(limit))
    asked = ("causal", "--archs", "sm_80", "--dtypes", "float16,bfloat16", "--head-dims", "16", "--tile", "64x64")
    ran = flashgen("build", *asked, "--stages", "2", "--jobs", "1")
    assert (f"{lost} of 4 kernels are not kept" in ran.err) == (lost > 0) and "4 kernels in" in ran.err
    assert lost or "not kept" not in ran.err
    assert len(list((tmp_path / "cache").glob("*.cubin"))) == 4 - lost


def test_build_takes_a_folder_and_what_the_spec_names(tmp_path):
    (tmp_path / "one.py").write_text(
        "import flashgen as fg\n\n\n@fg.variant(head_dims=(16, 32), dtypes=('float16',), arch='sm_80')\n"
        "def one(b, h, q, k):\n    return k <= q\n"
    )
    out = flashgen("build", tmp_path, "--tile", "64x64").out
    assert {" ".join(line.split()[:4]) for line in out.splitlines() if "one " in line} == {
        "one sm_80 float16 16",
        "one sm_80 float16 32",
    }


@pytest.mark.slow
def test_what_build_made_a_call_finds():
    flashgen("build", "causal", "--dtypes", "bfloat16", "--head-dims", "16", "--archs", "sm_80")
    plans = menu(load_spec("causal").bind(), "sm_80", "bfloat16", 16).plans
    assert len(plans) > 1
    assert [kernel.build(plan).hit for plan in plans] == [True] * len(plans)


def test_a_kernel_that_fails_to_compile_is_one_message(monkeypatch):
    import flashgen.codegen as codegen

    monkeypatch.setattr(codegen, "emit", lambda plan, facts=None: "extern int;\nnonsense here;\n")
    err = flashgen("compile", "causal", "--head-dim", 64, code=2).err
    assert "CompileError" in err and "nonsense here" in err


@pytest.mark.slow
def test_a_cache_that_cannot_be_used_is_one_message(tmp_path, monkeypatch):
    from flashgen.runtime import cache

    monkeypatch.setattr(cache, "_warned", set())
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        ran = flashgen("compile", "causal", "--head-dim", 64, "--arch", "sm_80")
    assert "CacheWarning: flashgen cannot write its kernel cache" in ran.err
    assert "cache.py" not in ran.err and "_warn" not in ran.err
    assert "index hit         none: there is no cache that can be written" in ran.out


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_emit_of_split_keys_in_pages(arch):
    """A kernel for any number of blocks, which the banner's command makes again."""
    kind = ("--arch", arch, "--layout", "paged_varlen", "--split-keys")
    text = flashgen("emit", "causal", *kind).out
    assert "attention_combine" in text and "page_table" in text
    assert text == fg.emit(fg.plan("causal", arch=arch, layout="paged_varlen", kv_splits=2))
    made_by = " ".join(re.search(r"^// made by +((?:.*\n)(?://          .*\n)*)", text, re.MULTILINE)[1].split())
    assert "--layout paged_varlen --split-keys" in made_by
    flashgen("plan", "causal", *kind, code=2)
