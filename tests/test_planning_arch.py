"""The table of GPU facts and the errors about architectures."""

import pytest

from flashgen.errors import PlanError
from flashgen.planning import arch
from flashgen.planning.arch import ARCHS, KIB


def test_the_table_holds_the_five_architectures():
    assert list(ARCHS) == ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_120"]
    assert all("ampere" in a.pipelines for a in ARCHS.values())


@pytest.mark.parametrize("a", ARCHS.values(), ids=list(ARCHS))
def test_facts_agree_with_each_other(a):
    # A block leaves the kilobyte that the driver keeps for itself.
    assert a.smem_per_block + a.smem_reserved == a.smem_per_sm
    assert a.l2_bytes_per_s > a.hbm_bytes_per_s
    # Tensor cores do a power of two FLOPs per clock and SM (Hopper's mma.sync: 63% of wgmma's 4,096).
    per_clock = a.tensor_flops["ampere"] / a.sms / a.clock_hz
    expected = {"sm_80": 2048, "sm_86": 512, "sm_89": 512, "sm_90a": 0.63 * 4096, "sm_120": 512}[a.name]
    assert per_clock == pytest.approx(expected, rel=0.01)
    assert a.special_per_s == pytest.approx(16 * a.sms * a.clock_hz)
    assert a.on_chip_bytes == a.smem_per_sm + 256 * KIB


@pytest.mark.parametrize("a", ARCHS.values(), ids=list(ARCHS))
@pytest.mark.parametrize("forward", [True, False])
def test_heads_in_turns_stay_in_l2_and_leave_blocks_to_each(a, forward):
    blocks = arch.READERS[forward]
    for sms in (1, 3, a.sms, 4 * a.sms):
        for size in (1, 4 * KIB, 512 * KIB, a.l2_bytes // 4, a.l2_bytes, 8 * a.l2_bytes):
            heads = a.heads_in_turns(size, 1 << 20, sms, forward=forward)
            assert a.heads_in_turns(size, 3, sms, forward=forward) == min(3, heads)
            assert heads.bit_count() == 1
            assert heads == 1 or (heads * size <= a.l2_bytes and heads * blocks <= sms)
            # Twice as many do not fit: in the largest power of two of bytes that L2 has, or by what is left to each.
            assert 2 * heads * size > a.l2_bytes // 2 or 2 * heads * blocks > sms


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("sm_80", "sm_80"),
        ("86", "sm_86"),
        ("sm_90", "sm_90a"),
        ("sm_90a", "sm_90a"),
        ("90", "sm_90a"),
        ("sm_120", "sm_120"),
    ],
)
def test_find(asked, found):
    assert arch.find(asked).name == found


@pytest.mark.parametrize("asked", ["SM_90A", "sm90", "sm90a", "Sm_90", "90", "90a"])
def test_an_architecture_has_one_name_however_it_is_written(asked):
    assert arch.find(asked).name == "sm_90a"


@pytest.mark.parametrize(
    ("asked", "lines"),
    [
        ("sm_75", ["no plan for sm_75: it is below sm_80", "nearest: sm_80"]),
        ("sm_70", ["below sm_80", "nearest: sm_80"]),
        ("sm_87", ["sm_87 is not in the table", "nearest: sm_86, whose kernels run on it"]),
        ("sm_121", ["nearest: sm_120, whose kernels run on it"]),
        ("sm_100", ["sm_100 is not in the table of GPUs (sm_80, sm_86, sm_89, sm_90a, sm_120)", "nearest: sm_90a"]),
        ("hopper", ["'hopper' is not an architecture", "nearest: sm_90a"]),
        ("Ada", ["nearest: sm_89"]),
        ("H200", ["nearest: sm_90a"]),
        ("sm-90a", ["nearest: sm_90a"]),
        ("turing", ["nearest: sm_80"]),
        ("", ["'' is not an architecture"]),
        ("sm_8²", ["'sm_8²' is not an architecture"]),
        ("9" * 5000, ["is not an architecture"]),
    ],
)
def test_unknown_architectures_name_the_nearest(asked, lines):
    with pytest.raises(PlanError) as error:
        arch.find(asked)
    for line in lines:
        assert line in str(error.value)


@pytest.mark.parametrize(
    ("capability", "name"),
    [
        ((8, 0), "sm_80"),
        ((8, 6), "sm_86"),
        ((8, 7), "sm_86"),
        ((8, 9), "sm_89"),
        ((9, 0), "sm_90a"),
        ((12, 1), "sm_120"),
    ],
)
def test_of_device_runs_the_same_major(capability, name):
    assert arch.of_device(*capability).name == name


@pytest.mark.parametrize("capability", [(7, 5), (10, 0), (9, 1), (11, 0)])
def test_of_device_refuses_what_no_cubin_runs_on(capability):
    with pytest.raises(PlanError, match="nearest"):
        arch.of_device(*capability)


def test_pipeline_defaults_to_the_best_and_refuses_one_that_the_arch_lacks():
    assert arch.pipeline(ARCHS["sm_80"], None) == "ampere"
    assert arch.pipeline(ARCHS["sm_120"], "ampere") == "ampere"
    with pytest.raises(PlanError) as error:
        arch.pipeline(ARCHS["sm_80"], "hopper")
    assert "sm_80 has no pipeline 'hopper'" in str(error.value)
    assert "nearest: pipeline 'ampere'" in str(error.value)
