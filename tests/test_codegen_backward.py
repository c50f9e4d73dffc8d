"""The emitted backward: what its text holds for a variant, and device functions of its own on the interpreter."""

import math

import numpy as np
import pytest

import flashgen as fg
from flashgen import interpreter
from flashgen.analysis.distances import Seen
from flashgen.analysis.facts import analyse
from flashgen.codegen import device, emit, params
from flashgen.codegen.backward import transposed
from flashgen.lang.load import load_spec
from flashgen.planning import backward, planner
from flashgen.planning.problem import Problem
from flashgen.runtime import nvrtc
from flashgen.runtime.launch import grids
from flashgen.runtime.philox import philox


def plan_of(spec, head_dim=64, arch="sm_80", *, v_head_dim=None, **options):
    return planner.backward_menu(load_spec(spec).bind(), arch, "bfloat16", head_dim, v_head_dim, **options).plans[0]


def problem_of(**given):
    sizes = {"batch": 2, "heads": 4, "kv_heads": 2, "q_len": 300, "kv_len": 200, "head_dim": 64, "v_head_dim": 64}
    return Problem(**{**sizes, **given})


def runs(spec, gradients=()):
    return transposed(analyse(load_spec(spec).bind()), gradients).runs


def test_a_tile_of_keys_is_seen_from_its_first_key_on_under_a_causal_mask():
    assert runs("full") is None
    assert runs("causal").conclusions == ("first_tile_of_run(tile, keys.k_first, p.q_len - 1, p)",)
    (window,) = runs("sliding_window").conclusions
    assert window.startswith("first_tile_of_run(tile, keys.k_first, keys.k_last + ")


@pytest.mark.slow
def test_an_additive_bias_has_no_slope_and_a_capped_score_has_one():
    assert transposed(analyse(load_spec("alibi").bind()), ()).slope is None
    assert transposed(analyse(load_spec("softcap").bind()), ()).slope is not None
    assert "DEVICE float slope(" not in emit(plan_of("alibi"))
    assert "DEVICE float slope(" in emit(plan_of("softcap"))


def test_a_score_that_does_not_look_at_s_has_slope_0():
    @fg.variant().score
    def flat(s, b, h, q, k):
        return fg.float32(q - k)

    assert str(transposed(analyse(flat.bind()), ()).slope.value) == "0.0f"


def test_what_selects_a_captured_element_decides_what_is_summed_first():
    (slopes,) = transposed(analyse(load_spec("alibi").bind()), ("slopes",)).captured_grads
    (table,) = transposed(analyse(load_spec("relative_bias").bind()), ("table",)).captured_grads
    assert (slopes.selected, table.selected) == (Seen.NOTHING, Seen.DISTANCE)
    assert (slopes.kept, table.kept) == (0, 0)


@pytest.mark.slow
def test_only_what_a_plan_asks_for_is_emitted():
    plain, sure = emit(plan_of("causal")), emit(plan_of("causal", deterministic=True))
    assert "red_add_f32" in plain and "attention_backward_finish" in plain and "previous_tile" not in plain
    assert "red_add_f32" not in sure and "attention_backward_dq" in sure and "previous_tile" in sure
    assert "philox" not in plain and "philox" in emit(plan_of("causal", dropout=True))
    assert "red.relaxed.gpu.global.add.v4.f32" in emit(plan_of("causal", arch="sm_90a"))
    assert "v4.f32" not in plain


@pytest.mark.parametrize("options", [{}, {"deterministic": True}, {"dropout": True}, {"gradients": ("slopes",)}])
def test_params_are_those_that_the_kernel_takes(options):
    plan = plan_of("alibi", **options)
    members = params.fields(plan)
    kinds = [0 if f.ctype.endswith("*") else 1 if f.format in "qQ" else 2 for f in members]
    assert kinds == sorted(kinds)
    names = {f.name for f in members}
    assert ("dq_sum" in names) is not plan.deterministic
    assert {"dropout_seed", "dropout_offset", "dropout_threshold", "dropout_scale"} <= names or not plan.dropout
    assert ("grad_slopes" in names) is bool(plan.gradients)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("spec", ["full", "document"])
def test_what_orders_additions_to_dq_is_in_a_deterministic_backward_alone(spec, head_dim):
    for deterministic in (False, True):
        text = emit(plan_of(spec, head_dim, "sm_90a", deterministic=deterministic))
        assert ("SEMAPHORE_STEPS = 8;" in text) is deterministic and ("dq semaphore" in text) is deterministic


def test_launches_and_workspaces():
    problem = problem_of()
    plan = plan_of("alibi", gradients=("slopes",))
    found = grids(plan, problem, sms=108)
    names = ["clear", "prepare", "", "finish"]
    assert [x.entry.removeprefix("attention_backward").removeprefix("_") for x in found] == names
    tiles = -(-300 // plan.tile.q)
    assert found[1].blocks == tiles * 8 and found[2].blocks == -(-200 // plan.tile.kv) * 4
    memory = {part.name: part.amount for part in backward.workspaces(plan, problem)}
    assert memory["delta"] == 4 * 8 * tiles * plan.tile.q and memory["dq_sum"] == 64 * memory["delta"]
    sure = plan_of("alibi", gradients=("slopes",), deterministic=True)
    memory = {p.name: p.amount for p in backward.workspaces(sure, problem, {"slopes": (4,)})}
    assert memory["exact_slopes"] == 4 * 64 and "dq_sum" not in memory
    assert not any(x.entry == "attention_backward" for x in grids(plan, problem_of(kv_len=0), sms=108))


@pytest.mark.sampled(
    "full-64-sm_90a-options0", "causal-64-sm_80-options1", "full-160-sm_120-options7", "causal-128-sm_86-options10"
)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "head_dim", "arch", "options"),
    [
        ("full", 64, "sm_90a", {}),
        ("causal", 64, "sm_80", {}),
        ("causal", 128, "sm_90a", {}),
        ("causal", 256, "sm_90a", {}),
        ("packed_softcap", 64, "sm_90a", {"dropout": True}),
        ("alibi", 128, "sm_86", {"deterministic": True, "gradients": ("slopes",)}),
        ("document", 80, "sm_120", {}),
        ("full", 160, "sm_120", {}),
        ("causal", 192, "sm_90a", {"v_head_dim": 128}),
        ("full", 160, "sm_90a", {"v_head_dim": 128}),
        ("causal", 128, "sm_86", {"v_head_dim": 96}),
        ("full", 96, "sm_120", {"v_head_dim": 192}),
    ],
)
def test_nothing_spills(spec, head_dim, arch, options):
    plan = plan_of(spec, head_dim, arch, **options)
    resources = nvrtc.compile(emit(plan), arch).resources
    assert (resources.spills, resources.stack_bytes) == (0, 0)


@pytest.mark.sampled("64-q", "128-qk")
@pytest.mark.slow
@pytest.mark.parametrize("selected", ["q", "k", "qk"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_masks_compile_whichever_side_selects_what_they_look_up(head_dim, selected):
    data = fg.tensor("data", dims=("batch", None), dtype="int32", example=None)
    reads = {"q": lambda b, q, k: data[b, q], "k": lambda b, q, k: data[b, k]}

    def mask(b, h, q, k):
        visible = q >= k
        for name in selected:
            visible &= reads[name](b, q, k) > 3
        return visible

    plan = planner.backward_menu(fg.variant(mask, name="looks_up").bind(), "sm_90a", "bfloat16", head_dim).plans[0]
    assert plan.pipeline == "hopper"
    assert nvrtc.compile(emit(plan), "sm_90a").resources.spills == 0


def run(kernel: str, *arrays: np.ndarray, threads: int = 32) -> None:
    """A kernel of one block that uses the device library, on the interpreter; every array may be written."""
    text = f"{device.used_by(kernel)}\n\n{kernel}"
    memory = interpreter.Memory()
    addresses = [memory.add(f"a{i}", array, writable=True) for i, array in enumerate(arrays)]
    packed = [address.to_bytes(8, "little") for address in addresses]
    interpreter.load(nvrtc.ptx(text, "sm_80"), target="sm_80").launch("probe", 1, threads, 0, packed, memory)


EXACT = """
extern "C" __global__ void probe(const float* x, i64* sums, float* out) {
  float* special = out + 1;
  for (int i = threadIdx.x; i < COUNT; i += 32) exact_add(sums, x[i], special);
  __syncthreads();
  if (threadIdx.x == 0) out[0] = exact_value(sums);
}
"""


def exact_sum(x: np.ndarray) -> np.ndarray:
    sums, out = np.zeros(8, np.int64), np.zeros(2, np.float32)
    run(EXACT.replace("COUNT", str(len(x))), x.astype(np.float32), sums, out)
    return out


@pytest.mark.parametrize("seed", range(3))
def test_exact_sums_are_the_true_sum_rounded_in_any_order(seed):
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal(200) * 10.0 ** rng.integers(-12, 12, 200)).astype(np.float32)
    x = np.concatenate([x, -x[:150], [1e-20, 3e30, -3e30]]).astype(np.float32)
    want = np.float32(math.fsum(x.astype(np.float64)))
    assert exact_sum(x)[0] == want == exact_sum(rng.permutation(x))[0]


def test_exact_sums_send_what_is_not_finite_elsewhere():
    assert exact_sum(np.array([1.5, np.inf, -4.0])).tolist() == [-2.5, np.inf]
    assert np.isnan(exact_sum(np.array([np.nan, 1.0]))[1])


def test_philox_is_that_of_the_walk():
    kernel = """
extern "C" __global__ void probe(u32* out) {
  const Words x = philox_4x32_10({threadIdx.x, 7u, 0xffffffffu, 3u}, 0x12345678u, 0x9abcdef0u);
  for (int i = 0; i < 4; i++) out[4 * threadIdx.x + i] = x.word[i];
}
"""
    out = np.zeros((32, 4), np.uint32)
    run(kernel, out)
    want = philox((np.arange(32), 7, 0xFFFFFFFF, 3), (0x12345678, 0x9ABCDEF0))
    assert np.array_equal(out, np.stack(want, axis=-1).astype(np.uint32))


@pytest.mark.sampled("at")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["dq", "to_captured", "of", "asm", "int", "at"])
def test_a_tensors_name_meets_no_function_of_the_kernel(name):
    tensor = fg.tensor(name, ("heads", "kv"), "float32")
    variant = fg.variant(lambda b, h, q, k: k <= q).score(lambda s, b, h, q, k: s + tensor[h, k])
    plan = planner.backward_menu(variant, "sm_90a", "bfloat16", 64, gradients=(name,)).plans[0]
    nvrtc.ptx(emit(plan), "sm_90a")


@pytest.mark.slow
def test_the_second_read_of_a_tensor_and_a_tensor_called_like_it_are_told_apart():
    a, a2 = (fg.tensor(name, ("kv",), "float32") for name in ("a", "a2"))
    variant = fg.variant().score(lambda s, b, h, q, k: s + a[k] + a[q] + a2[k])
    plan = planner.backward_menu(variant, "sm_80", "bfloat16", 64, gradients=("a", "a2")).plans[0]
    nvrtc.ptx(emit(plan), "sm_80")
