"""Emitted CUDA: what stands in it, what does not, and that it compiles within its registers."""

import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from jinja2 import UndefinedError
from kept import KEPT
from random_masks import random_mask, seeded

import flashgen as fg
from flashgen.codegen import device, emit, fold, params
from flashgen.codegen.emit import environment
from flashgen.codegen.fold import WIDTH
from flashgen.codegen.golden import Golden
from flashgen.errors import CompileError
from flashgen.lang.load import load_spec, shipped
from flashgen.planning import planner
from flashgen.planning.problem import Problem
from flashgen.resources import folder
from flashgen.runtime import nvrtc

GOLDENS = {p.stem: p for p in KEPT if p.parent == Path("sm_80", "forward")}
every_golden = pytest.mark.parametrize("name", sorted(GOLDENS))


def plan_of(variant, *, arch="sm_80", dtype="bfloat16", head_dim=64, v_head_dim=None):
    menu = planner.menu(variant.bind(), arch, dtype, head_dim, v_head_dim or head_dim, pipeline="ampere")
    return menu.plans[0]


def code(text):
    """The text without comments and strings."""
    return re.sub(r'"(?:[^"\\]|\\.)*"', '""', re.sub(r"//.*", "", text))


def declared(text):
    """Every name that stands at the left margin of CUDA text as a function, type, constant or macro."""
    names = {name for groups in device._DECLARED.findall(text) for name in groups if name}
    return names | set(re.findall(r"[ ,](\w+) = ", "\n".join(re.findall(r"^constexpr.*", text, re.MULTILINE))))


def referenced_nowhere(golden):
    """Functions at file scope that NVRTC's front end finds no use of: overloads are told apart, templates left out."""
    text = re.sub(r"^DEVICE ", "static DEVICE ", golden.text, flags=re.MULTILINE)
    try:
        nvrtc.ptx(text, golden.plan.arch, options=["-fdevice-syntax-only", "--diag-error=177"])
    except CompileError as error:
        return re.findall(r'error: function "(.*)" was declared but never referenced', error.log)
    return []


@pytest.mark.sampled(every=4)
@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(KEPT), ids=str)
def test_nothing_is_emitted_that_is_not_used(path):
    text = code(KEPT[path].text)
    count = Counter(re.findall(r"\w+", text))
    kernels = set(re.findall(r'extern "" __global__ void [^(]*?(\w+)\(', text))
    assert kernels
    assert not {n for n in declared(text) if count[n] < 2} - kernels
    assert not referenced_nowhere(KEPT[path])


@pytest.mark.slow
def test_an_unused_overload_is_found():
    plan = next(iter(KEPT.values())).plan
    text = "#define DEVICE __device__\nDEVICE int f(int x) { return x; }\n\nDEVICE float f(float x) { return x; }\n"
    found = Golden(path=None, text=f"{text}\n__global__ void g(int* x) {{ *x = f(*x); }}\n", plan=plan)
    assert referenced_nowhere(found) == ["f(float)"]


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(KEPT), ids=str)
def test_a_kernel_template_declares_no_name_of_the_device_library(path):
    text = KEPT[path].text
    library = {name for d in device.definitions() for name in d.names}
    for definition in device.definitions():
        text = text.replace(definition.text, "")
    members = {name for groups in device._DECLARED.findall(re.sub(r"^ +", "", text, flags=re.M)) for name in groups}
    assert members and not library & members


@pytest.mark.slow
@every_golden
def test_the_struct_sizes_are_proven(name):
    plan, text = KEPT[GOLDENS[name]].plan, KEPT[GOLDENS[name]].text
    assert f"static_assert(sizeof(Params) == {params.sizeof(plan)}, " in text
    assert f"static_assert(sizeof(Shared) == {plan.smem_bytes}, " in text


@every_golden
def test_the_file_needs_no_header_and_has_no_loose_ends(name):
    text = KEPT[GOLDENS[name]].text
    assert "#include" not in text and "{{" not in text and "//%" not in text
    assert not re.search(r"[ \t]+$", text, re.MULTILINE) and "\n\n\n" not in text and text.endswith("}\n")
    assert max(map(len, text.splitlines())) <= WIDTH


@pytest.mark.sampled("3", "15", "18", "21", "24", "30", "33", "36", "39")
@pytest.mark.slow
@pytest.mark.parametrize("seed", [*range(40), 388])
def test_no_line_of_a_persons_variant_is_too_long_and_folding_moves_line_ends_only(seed, monkeypatch):
    mask = random_mask(seeded(seed), depth=5)
    with_score = mask.score(
        lambda s, b, h, q, k: s * fg.exp(fg.float32(q - k)) + fg.log2(abs(s) + 1.0) * fg.tanh(s / 30)
    )
    plan = planner.menu(with_score.bind(), "sm_90a", "bfloat16", 64, 64).plans[0]
    text = emit(plan)
    monkeypatch.setattr(fold, "WIDTH", 1 << 30)
    unfolded = emit(plan)
    assert max(map(len, text.splitlines())) <= WIDTH
    assert "".join(text.split()) == "".join(unfolded.split())


def test_device_headers_need_no_folding():
    for path in (folder("templates") / "device").glob("*.cuh"):
        assert max(map(len, path.read_text().splitlines())) <= WIDTH, path


def test_template_arguments_stay_with_their_function():
    call = f"load_tile<THREADS, HEAD_DIM / 2>(shared.k[stage], {'k' * 40}, p.k_row / 2, {'rows' * 8});"
    first, second = fold.folded(f"    {call}").splitlines()
    assert first.endswith("p.k_row / 2,") and first + " " + second.lstrip() == f"    {call}"


def test_a_line_breaks_between_conditions_first_and_then_where_parentheses_nest_least():
    a, b, c = (f"{name}(rows.q_first, rows.q_last + {'x' * 12})" for name in ("first", "second", "third"))
    assert fold.folded(f"  return {a} && {b} || {c};") == f"  return {a} && {b} ||\n      {c};"
    assert fold.folded(f"  const Truth t = range_and({a}, {b}, {c});").splitlines() == [
        f"  const Truth t = range_and({a},",
        f"      {b}, {c});",
    ]
    said = "a comment that was behind what it says something about"
    assert fold.folded(f"  const bool t = {a} && {b};  // {said}").splitlines()[0] == f"  // {said}"
    assert fold.folded("x" * 200) == "x" * 200
    text = "mma.sync, aligned  // (no comment), " * 2
    assert fold.folded(f'  asm("{text}" : "r"({a}), "r"({b}));').splitlines()[0] == f'  asm("{text}" :'
    macro = f"#define {a} {b} {c} \\"
    assert fold.folded(macro) == macro


def test_the_banner_says_what_how_and_how_again():
    lines = KEPT[GOLDENS["sliding_window"]].text.splitlines()
    assert lines[0] == "// sliding_window: attention forward"
    head = "\n".join(lines[:10])
    plan = KEPT[GOLDENS["sliding_window"]].plan
    assert "visible  k <= q && q - k < window" in head
    assert f"= {plan.smem_bytes} bytes" in head
    assert "flashgen emit sliding_window --arch sm_80 --pipeline ampere --dtype bfloat16 --head-dim 128" in head
    assert f"--tile {plan.tile}" in head


def test_every_length_that_picks_a_plan_gets_the_same_text():
    menu = planner.menu(load_spec(shipped()["causal"]).bind(), "sm_80", "float16", 64, 64, pipeline="ampere")
    texts = {}
    for length in (1, 100, 1000, 8192, 65536):
        problem = Problem(batch=2, heads=4, kv_heads=2, q_len=length, kv_len=length + 3, head_dim=64, v_head_dim=64)
        plan = planner.choose(menu, problem, sms=108)
        assert texts.setdefault(plan, emit(plan)) == emit(plan)
    assert set(texts) <= set(menu.plans)


@every_golden
def test_a_full_tile_runs_no_mask_code(name):
    text = KEPT[GOLDENS[name]].text
    uses = re.findall(r".*\bapply_mask\(s.*", text)
    assert uses in ([], ["    if (step.partial) apply_mask(s, rows, first, p);"])
    assert len(re.findall(r"\bkeep\(rows", text)) == len(uses)


def test_an_unknown_name_in_a_template_is_an_error():
    with pytest.raises(UndefinedError, match="'plann' is undefined"):
        environment().from_string("{{ plann.tile }}").render(plan=None)


def test_kernel_templates_hold_no_assembly():
    root = folder("templates")
    templates = [*root.glob("*.j2"), *root.glob("ampere/*.j2"), *root.glob("hopper/*.j2")]
    assert len(templates) > 20
    for path in templates:
        assert "asm" not in code(path.read_text()), path


def test_library_definitions_declare_one_name_each_and_use_only_what_stands_above():
    seen = set()  # no name twice: what uses one of two overloads would get both
    every = {name for d in device.definitions() for name in d.names}
    for definition in device.definitions():
        assert len(definition.names) == 1 and not definition.names & seen, definition.text
        later = (definition.uses & every) - seen - definition.names
        assert not later, (definition.names, later)
        seen |= definition.names


@pytest.mark.parametrize("path", sorted(KEPT), ids=str)
def test_wrappers_of_ptx_stand_together_before_the_story(path):
    text = KEPT[path].text
    headings = re.findall(r"^// -{8,}.*", text, re.MULTILINE)
    of_wrappers = [d.heading for d in device.definitions() if d.file in device.WRAPPERS]
    places = [heading in of_wrappers for heading in headings]
    assert places == sorted(places, reverse=True) and places[0]
    story = next(heading for heading in headings if heading not in {d.heading for d in device.definitions()})
    assert text.rfind("asm") < text.index(story) and ("asm" in text or not KEPT[path].attends)
    assert story.endswith(
        "--- plan" if KEPT[path].attends else "--- tiles of rows, which thread blocks take one by one"
    )


def test_the_library_is_cut_to_what_is_used():
    text = device.used_by("float y = tanh_f32(x);")
    assert "DEVICE float ex2(" in text and "LOG2E" in text and "#define DEVICE" in text
    assert "lg2" not in text and "mma" not in text
    assert device.used_by("nothing here") == ""


def test_parameters_are_packed_as_the_struct_lies():
    bias = fg.tensor("bias", dims=("heads", None), dtype="float16", example=None)
    reach = fg.param("reach", default=4, min=0)
    slope = fg.param("slope", default=0.5)
    variant = fg.variant(lambda b, h, q, k: q - k < reach, lambda s, b, h, q, k: s * slope + bias[h, q - k])
    plan = plan_of(variant)
    fields = params.fields(plan)
    assert [f.name for f in fields][:6] == ["q", "k", "v", "o", "lse", "tensor_bias"]
    assert [f.name for f in fields][-4:] == ["param_reach", "param_slope", "size0_bias", "size1_bias"]
    sizes = [8 if f.format in "Qq" else 4 for f in fields]
    assert sizes == sorted(sizes, reverse=True)
    packed = params.pack(plan, {f.name: i for i, f in enumerate(fields)})
    assert len(packed) == params.sizeof(plan) and params.sizeof(plan) % 8 == 0
    wide = sizes.count(8)
    assert list(np.frombuffer(packed, np.int64, wide)) == list(range(wide))
    tail = np.frombuffer(packed[8 * wide :], np.int32)
    assert tail[0] == wide and tail[len(sizes) - wide - 1] == len(sizes) - 1
    with pytest.raises(KeyError, match="size1_bias"):
        params.pack(plan, {f.name: 0 for f in fields[:-1]})


@pytest.mark.sampled("load_tile", "score_")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["int", "float", "min", "load_tile", "score_", "t", "doc_q", "rows", "kv_tile"])
def test_any_name_a_person_chooses_compiles(name):
    ids = fg.tensor(name, dims=("batch", "kv"), dtype="int32", sorted=True, example=None)
    reach = fg.param(f"{name}_q", default=3, min=1)
    variant = fg.variant(
        lambda b, h, q, k: (ids[b, q] == ids[b, k]) & (q - k < reach),
        lambda s, b, h, q, k: s * ids[b, q - k],
        name="named",
    )
    nvrtc.compile(emit(plan_of(variant, head_dim=16)), "sm_80")


@pytest.mark.sampled("int16", "int64")
@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype", ["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32"]
)
def test_captured_tensors_of_every_type_compile_in_masks_and_scores(dtype):
    data = fg.tensor("data", dims=("batch", "heads", None), dtype=dtype, example=None)
    chosen = (lambda b, h, i: data[b, h, i]) if dtype == "bool" else (lambda b, h, i: data[b, h, i] >= 1)
    variant = fg.variant(
        lambda b, h, q, k: chosen(b, h, q // 64) | chosen(b, h, k // 64),
        lambda s, b, h, q, k: s + fg.float32(data[b, h, k]),
        name="typed",
    )
    compiled = nvrtc.compile(emit(plan_of(variant, head_dim=32)), "sm_80")
    assert compiled.resources.spills == 0


@pytest.mark.sampled("float16-head_dims2", "bfloat16-head_dims0")
@pytest.mark.slow
@pytest.mark.parametrize("head_dims", [(16, 16), (40, 72), (72, 40), (248, 256)])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_head_dims_in_steps_of_eight_compile(head_dims, dtype):
    variant = load_spec(shipped()["causal"])
    text = emit(plan_of(variant, dtype=dtype, head_dim=head_dims[0], v_head_dim=head_dims[1]))
    assert f"HEAD_DIM = {head_dims[0]}, V_HEAD_DIM = {head_dims[1]};" in text
    assert nvrtc.compile(text, "sm_80").resources.spills == 0


def test_resources_are_found_or_the_error_says_where_they_were_sought():
    assert (folder("templates") / "ampere" / "forward.cu.j2").is_file()
    with pytest.raises(FileNotFoundError, match=r"flashgen's nothing are in none of .*nothing"):
        folder("nothing")


HOSTILE = (
    "two\nlines",
    "ends */ here /* begins",
    "a backslash \\",
    "\\\n#error",
    "what??/",
    "bell\a null\0 line\u2028sep \ud800",
    "größer, ∞",
    "x" * 500,
    "word \\ " * 60,
)


@pytest.mark.slow
@pytest.mark.parametrize("text", HOSTILE)
def test_names_and_docstrings_stay_in_the_comment(text):
    for described in ({"name": text}, {"doc": text}):
        variant = fg.variant(lambda b, h, q, k: k <= q, **{"name": "plain", **described})
        source = emit(planner.menu(variant, "sm_80", "bfloat16", 64).plans[0])
        plain = emit(planner.menu(fg.variant(lambda b, h, q, k: k <= q), "sm_80", "bfloat16", 64).plans[0])
        banner, code = (re.split(r"\n(?=#define DEVICE)", s, maxsplit=1)[i] for i, s in ((0, source), (1, source)))
        assert code == re.split(r"\n(?=#define DEVICE)", plain, maxsplit=1)[1]
        assert all(not line or line.startswith("//") for line in banner.splitlines())
        assert not any(line.endswith("\\") or len(line) > 120 for line in banner.splitlines())
        nvrtc.ptx(banner + '\nextern "C" __global__ void after() {}\n', "sm_80")  # what follows is as without it
