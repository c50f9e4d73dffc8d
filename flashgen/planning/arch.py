"""Facts about GPUs: what fits on an SM and how fast its parts are.

Sources, one for each column:
- shared memory, warps and blocks per SM: CUDA C++ Programming Guide, "Technical Specifications per Compute
  Capability"; special-function rate: the same guide, "Throughput of Native Arithmetic Instructions" (16 results a clock
  and SM for ex2 on every architecture here);
- cards: NVIDIA A100 datasheet and GA100 whitepaper, GA102 whitepaper (RTX 3090), Ada whitepaper (RTX 4090), H200
  datasheet and H100 whitepaper, RTX Blackwell whitepaper (RTX 5090): boost clock, dense 16-bit tensor-core rate with
  float32 accumulation, memory bandwidth, L2 size;
- mma.sync on Hopper reaches 63% of the wgmma rate: Luo et al., "Benchmarking and Dissecting the Nvidia Hopper GPU
  Architecture via Microbenchmarking" (2024), table of tensor-core throughput;
- L2 bandwidth is published for GA100 only (5,120 bytes per clock).  The other figures are leads from public
  microbenchmarks, good to a quarter or so.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from flashgen.errors import PlanError
from flashgen.planning.members import IN_TURN, Launches, Overlapping

KIB = 1024
MIB = 1024 * KIB


#: Blocks at a time for each head that blocks take in turns, of a backward and of a forward.  Fewer heads, with more
#: readers, took 1.0 to 1.03 of the time in a forward.
READERS = {False: 16, True: 8}


@dataclass(frozen=True, slots=True, kw_only=True)
class Arch:
    """One architecture, with the card that its rates are those of.

    Shared memory in bytes, rates of the whole card: FLOP/s, results/s, bytes/s.  `tensor_flops` maps a pipeline that
    the architecture has to the dense 16-bit tensor-core rate of the instructions that this pipeline uses.
    """

    name: str
    card: str
    sms: int
    clock_hz: float
    smem_per_block: int
    smem_per_sm: int
    max_warps: int
    fp32_lanes: int
    tensor_flops: Mapping[str, float] = field(hash=False)
    hbm_bytes_per_s: float
    l2_bytes_per_s: float
    l2_bytes: int
    registers_per_sm: int = 65_536
    registers_per_thread: int = 255
    max_blocks: int = 16
    special_per_clock: int = 16
    smem_per_clock: int = 128
    smem_reserved: int = KIB
    launches: Launches = IN_TURN
    converts_e4m3: bool = True  # to float16, by one instruction: PTX ISA, "cvt", from sm_89 on

    @property
    def pipelines(self) -> tuple[str, ...]:
        """The pipelines that plan for this architecture, best first."""
        return tuple(self.tensor_flops)

    @property
    def special_per_s(self) -> float:
        """Special-function results (ex2, tanh ...) a second of the whole card."""
        return self.special_per_clock * self.sms * self.clock_hz

    def heads_in_turns(self, size: int, heads: int, sms: int, *, forward: bool) -> int:
        """How many of `heads` key heads the blocks take in turns: those of which the largest power of two of bytes that
        L2 has holds the `size` bytes that blocks share, and no more than leave READERS blocks at a time to each; both
        as a power of two, at least 1.

        A block that comes back to a head then finds in L2 what others have just read of it.  On an H100 (16,384 tokens,
        causal) that took 0.85 and 0.93 of the time of all that L2 holds at 512 tokens, head_dim 128 and 64, and 0.96
        and 0.98 at 1,024; of a backward's 0.94, 0.89, 0.98 and 0.91.
        """
        room = 1 << self.l2_bytes.bit_length() - 1
        held = 1 << max(0, (room // (size or 1)).bit_length() - 1)
        return min(held, _most_in_turns(sms, forward), heads)

    @property
    def on_chip_bytes(self) -> int:
        """Shared memory and registers of one SM: the fast memory M of the IO bounds."""
        return self.smem_per_sm + 4 * self.registers_per_sm


@lru_cache
def _most_in_turns(sms: int, forward: bool) -> int:
    """Heads to which so many blocks leave READERS each, as a power of two: kept, as each call of a new length asks."""
    return 1 << max(0, (sms // READERS[forward]).bit_length() - 1)


def _arch(**facts: Any) -> Arch:
    facts["tensor_flops"] = MappingProxyType(facts["tensor_flops"])
    return Arch(**facts)


_TABLE = (
    _arch(
        name="sm_80",
        card="A100 SXM 80 GB",
        sms=108,
        clock_hz=1.410e9,
        smem_per_block=163 * KIB,
        smem_per_sm=164 * KIB,
        max_warps=64,
        max_blocks=32,
        fp32_lanes=64,
        tensor_flops={"ampere": 312e12},
        hbm_bytes_per_s=2.039e12,
        l2_bytes_per_s=7.2e12,  # 5,120 bytes x 1.41 GHz
        l2_bytes=40 * MIB,
        converts_e4m3=False,
    ),
    _arch(
        name="sm_86",
        card="GeForce RTX 3090",
        sms=82,
        clock_hz=1.695e9,
        smem_per_block=99 * KIB,
        smem_per_sm=100 * KIB,
        max_warps=48,
        fp32_lanes=128,
        tensor_flops={"ampere": 71e12},
        hbm_bytes_per_s=0.936e12,
        l2_bytes_per_s=2.4e12,
        l2_bytes=6 * MIB,
        converts_e4m3=False,
    ),
    _arch(
        name="sm_89",
        card="GeForce RTX 4090",
        sms=128,
        clock_hz=2.520e9,
        smem_per_block=99 * KIB,
        smem_per_sm=100 * KIB,
        max_warps=48,
        max_blocks=24,
        fp32_lanes=128,
        tensor_flops={"ampere": 165.2e12},
        hbm_bytes_per_s=1.008e12,
        l2_bytes_per_s=5.0e12,
        l2_bytes=72 * MIB,
    ),
    _arch(
        name="sm_90a",
        card="H200 SXM",
        sms=132,
        clock_hz=1.830e9,
        smem_per_block=227 * KIB,
        smem_per_sm=228 * KIB,
        max_warps=64,
        max_blocks=32,
        fp32_lanes=128,
        tensor_flops={"hopper": 989e12, "ampere": 0.63 * 989e12},
        hbm_bytes_per_s=4.8e12,
        l2_bytes_per_s=5.5e12,
        l2_bytes=60 * MIB,
        launches=Overlapping(),
    ),
    _arch(
        name="sm_120",
        card="GeForce RTX 5090",
        sms=170,
        clock_hz=2.407e9,
        smem_per_block=99 * KIB,
        smem_per_sm=100 * KIB,
        max_warps=48,
        max_blocks=24,
        fp32_lanes=128,
        tensor_flops={"ampere": 209.5e12},
        hbm_bytes_per_s=1.792e12,
        l2_bytes_per_s=7.0e12,
        l2_bytes=96 * MIB,
    ),
)

#: What people call architectures, of which the first is meant.
_GENERATIONS = {"ampere": "sm_80", "ada": "sm_89", "lovelace": "sm_89", "hopper": "sm_90a", "blackwell": "sm_120"}

#: Name -> Arch, oldest first.
ARCHS: Mapping[str, Arch] = MappingProxyType({arch.name: arch for arch in _TABLE})


def find(name: str) -> Arch:
    """The architecture a person names: "sm_80", "80", "sm80", "SM_90" (which means sm_90a) ...

    Raises PlanError for one that is too old, unknown or not a name of an architecture.
    """
    text = name.lower().removeprefix("sm").removeprefix("_")
    known = {arch.name.removeprefix("sm_"): arch for arch in ARCHS.values()}
    known["90"] = ARCHS["sm_90a"]
    if text in known:
        return known[text]
    digits = text.rstrip("af")
    names = ", ".join(ARCHS)
    if re.fullmatch(r"[1-9][0-9]{1,3}", digits) is None:
        raise PlanError(f"{name!r} is not an architecture\n  flashgen plans for: {names}\n  nearest: {_near(name)}")
    number = int(digits)
    if number < 80:
        raise PlanError(
            f"no plan for {name}: it is below sm_80 (compute capability 8.0)\n"
            "  mma.sync m16n8k16 on bfloat16 and cp.async start there\n  nearest: sm_80"
        )
    family = _capability_arch(*divmod(number, 10))
    if family is not None:
        raise PlanError(
            f"{name} is not in the table of GPUs ({names})\n  nearest: {family.name}, whose kernels run on it"
        )
    nearest = min(ARCHS.values(), key=lambda arch: abs(_number(arch) - number))
    raise PlanError(f"{name} is not in the table of GPUs ({names})\n  nearest: {nearest.name}")


def _near(name: str) -> str:
    """The architecture whose name, card or generation is most like what is none."""
    words = {word.lower(): arch.name for arch in reversed(_TABLE) for word in (arch.name, *arch.card.split())}
    words |= _GENERATIONS
    close = difflib.get_close_matches(name.lower(), words, n=1)
    return words[close[0]] if close else _TABLE[0].name


def newest() -> Arch:
    """The newest architecture that has a pipeline of its own, which no older one has."""
    known: set[str] = set()
    for arch in ARCHS.values():
        if not known.issuperset(arch.pipelines):
            found = arch
        known.update(arch.pipelines)
    return found


def of_device(major: int, minor: int) -> Arch:
    """The architecture whose kernels run on a device of this compute capability.

    Raises PlanError where there is none; cubins run on a device of the same major and no smaller minor capability, and
    those of sm_90a on 9.0 alone.
    """
    arch = _capability_arch(major, minor)
    return arch if arch is not None else find(f"sm_{major}{minor}")


def pipeline(arch: Arch, name: str | None) -> str:
    """The pipeline asked for, or the best one of `arch`; PlanError for one that it lacks."""
    if name is None:
        return arch.pipelines[0]
    if name not in arch.pipelines:
        raise PlanError(
            f"{arch.name} has no pipeline {name!r}\n  pipelines of {arch.name}: {', '.join(arch.pipelines)}\n"
            f"  nearest: pipeline {arch.pipelines[0]!r}"
        )
    return name


def _number(arch: Arch) -> int:
    return int(arch.name.removeprefix("sm_").rstrip("a"))


def _capability_arch(major: int, minor: int) -> Arch | None:
    number = 10 * major + minor
    if major == 9:
        return ARCHS["sm_90a"] if minor == 0 else None
    fits = [arch for arch in ARCHS.values() if _number(arch) // 10 == major and _number(arch) <= number]
    return max(fits, key=_number, default=None)
