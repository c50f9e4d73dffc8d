"""Forwards of 8 bits on the PTX interpreter: a plan, random input with descales, and what running it gave."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from ptx_attention import VALUES
from tolerance import judge, judge_lse, reference

from flashgen.analysis.tiles import Case
from flashgen.codegen import emit
from flashgen.interpreter.simulate import Simulated, simulate
from flashgen.lang.load import load_spec
from flashgen.lang.variant import Variant
from flashgen.planning import planner
from flashgen.planning.float8 import HEADROOM, SLACK, WORDS_BY_BITS
from flashgen.planning.plan import KernelPlan
from flashgen.planning.problem import Problem
from flashgen.planning.request import KernelRequest
from flashgen.runtime.reference_float8 import Quantised, accumulated, beside, quantised


@dataclass(frozen=True)
class Eight:
    """A kernel and the data to run it on; `descales` are those that the kernel is given, by tensor."""

    plan: KernelPlan
    variant: Variant
    problem: Problem
    case: Case
    qkv: tuple[Quantised, ...]
    descales: dict[str, np.ndarray]

    def run(self, edit: Callable[[str], str] | None = None, **options) -> Simulated:
        """The kernel, its CUDA text changed by `edit`."""
        source = emit(self.plan)
        arrays = [x.codes.float().numpy() for x in self.qkv]
        options = {"descales": self.descales, "scale": self.scale, **options}
        return simulate(self.plan, self.case, *arrays, source=(edit or str)(source), **options)

    @property
    def scale(self) -> float:
        return self.problem.head_dim**-0.5

    @property
    def exact(self) -> tuple[torch.Tensor, torch.Tensor]:
        """o and lse in float64 of what the 8 bits stand for."""
        return reference(self.variant, self.case, *(x.values for x in self.qkv), scale=self.scale)

    def wrong(self, found: Simulated) -> tuple[str, ...]:
        """What breaks the tolerance rule, against float64."""
        out = getattr(torch, self.plan.out_dtype)
        ref, ref_lse = self.exact
        base, base_lse = beside(self.plan, self.variant, self.case, self.qkv, scale=self.scale)
        verdict = judge(torch.from_numpy(found.o).to(out), base, ref, self.plan.out_dtype)
        return verdict.reasons + judge_lse(torch.from_numpy(found.lse), ref_lse, base_lse)


def eight(
    spec: str | Variant,
    *,
    tile: tuple[int, int] | None = None,
    mean: float = 0.0,
    std: float = 1.0,
    of_keys: tuple[str, str] = ("float8_e4m3fn", "float8_e4m3fn"),
    of_q: str = "float8_e4m3fn",
    arch: str = "sm_90a",
    seed: int = 0,
    options: dict[str, object] | None = None,
    **shape: int,
) -> Eight:
    """A spec's kernel on random normal input, whose V has this mean and whose scores this standard deviation; `of_q`
    is the dtype of q, `of_keys` those of k and v.  `shape` overrides 2 heads over 1, 70 queries, 200 keys, head_dim 64.
    """
    shape = {"batch": 1, "heads": 2, "kv_heads": 1, "q_len": 70, "kv_len": 200, "head_dim": 64, **shape}
    shape.setdefault("v_head_dim", shape["head_dim"])
    p = Problem(**shape, dtype=of_q, kv_dtype=of_keys[0])
    variant = load_spec(spec) if isinstance(spec, str) else spec
    values = VALUES.get(spec, {}) if isinstance(spec, str) else {}
    constants = {c.name: values[c.name] for c in variant.constants if c.name in values}
    variant = variant.bind(**constants)
    params = variant.values({name: value for name, value in values.items() if name not in constants})
    tensors = {t.name: np.asarray(t.example(p, np.random.default_rng(seed))) for t in variant.tensors}
    g = torch.Generator().manual_seed(seed)
    sizes = (p.heads, p.q_len, p.head_dim), (p.kv_heads, p.kv_len, p.head_dim), (p.kv_heads, p.kv_len, p.v_head_dim)
    q, k, v = (torch.randn((p.batch, *size), generator=g) for size in sizes)
    dtypes = (p.dtype, *of_keys)
    qkv = tuple(quantised(x, getattr(torch, dtype)) for x, dtype in zip((q * std, k, v + mean), dtypes, strict=True))
    given = {name: x.descale.numpy() for name, x in zip("qkv", qkv, strict=True)}
    request = KernelRequest.of(
        *(variant, arch, p.dtype, p.head_dim, p.v_head_dim),
        tile=tile,
        k_dtype=of_keys[0],
        v_dtype=of_keys[1],
        **(options or {}),
    )
    case = Case(sizes=p.sizes(), params=params, tensors=tensors)
    return Eight(planner.menu_of(request).plans[0], variant, p, case, qkv, given)


def errors_of_forms(keys: int = 2048, rows: int = 64) -> dict[str, tuple[float, ...]]:
    """RMS error of o over that of the exact form, by form, on scores of standard deviation 1, 4 and 8: emulated."""
    g = torch.Generator().manual_seed(0)
    scores, v = torch.randn(4, rows, keys, generator=g), torch.randn(4, keys, 16, generator=g)
    v = v.to(torch.float8_e4m3fn).float()
    found: dict[str, list[float]] = {name: [] for name in WORDS_BY_BITS}
    for deviation in (1.0, 4.0, 8.0):
        right = torch.softmax(scores.double() * deviation, -1) @ v.double()
        for name, words in WORDS_BY_BITS.items():
            q_rows = torch.arange(rows)[:, None]
            lag = {"slack": SLACK[name], "headroom": HEADROOM if SLACK[name] else 0.0}
            o, total, _ = accumulated(scores * deviation, v, words, q_rows, torch.float8_e4m3fn, **lag)
            found[name].append(float(((o / total).double() - right).square().mean().sqrt()))
    return {name: tuple(x / y for x, y in zip(of, found["exact"], strict=True)) for name, of in found.items()}
