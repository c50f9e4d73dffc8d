"""An emitted backward on random input, executed by the PTX interpreter and judged against float64."""

from __future__ import annotations

import dataclasses
import functools

import torch
from backward_checks import judge_captured
from ptx_attention import work
from tolerance import judge

from flashgen.analysis.derivative import differentiable_of
from flashgen.bench.inputs import draw
from flashgen.codegen import emit
from flashgen.interpreter import errors
from flashgen.interpreter.simulate import simulate_backward
from flashgen.lang.load import shipped
from flashgen.planning import planner
from flashgen.planning.pipelines.ampere import backward as ampere_backward
from flashgen.planning.plan import Tile
from flashgen.planning.request import Fixed, KernelRequest
from flashgen.runtime import tiles
from flashgen.runtime.gradients import baseline_gradients, reference_gradients
from flashgen.runtime.philox import Dropout
from flashgen.runtime.tiles_backward import count_backward

SPECS = sorted(shipped())

#: Instructions after which a block that waits in vain is given up.
STEPS = 20_000_000

#: Specs of many kinds, where all are too many.
SOME = ("full", "sliding_window", "document", "alibi", "softcap", "relative_bias", "blocks", "causal_bottom_right")

DROPOUT = Dropout(p=0.3, seed=1234567890123, offset=5)


class Backward:
    """A backward plan, or the form of it for `short` sequences, on random input, of which the `large_key` has 40 times
    the scores, or on one of `INPUTS`: the forward's results come from the CPU walk."""

    def __init__(
        self,
        spec,
        *,
        pipeline="ampere",
        tile=None,
        deterministic=False,
        dropout=None,
        gradients=(),
        short=False,
        seed=0,
        inputs=None,
        large_key=None,
        **shape,
    ):
        wide = max(shape.get("head_dim", 64), shape.get("v_head_dim", 0)) > 128
        self.forward = w = work(spec, "ampere", seed=seed, tile=(64, 32) if wide else None, **shape)
        p, self.dropout = w.problem, dropout
        dims = p.dtype, p.head_dim, p.v_head_dim
        if pipeline == "hopper":
            asked = {"pipeline": pipeline, "tile": tile, "deterministic": deterministic, "gradients": gradients}
            asked["dropout"] = dropout is not None
            menu = planner.backward_menu(w.variant, "sm_90a", *dims, **asked)
            self.plan = menu.small if short else menu.plans[0]
        else:
            request = KernelRequest.of(
                *(w.variant, "sm_80", *dims),
                backward=True,
                deterministic=deterministic,
                dropout=dropout is not None,
                gradients=differentiable_of(w.variant),
            )
            side_q, side_kv = tile or (64, 64)
            candidate = next(iter(ampere_backward.candidates(Fixed(tile=Tile(q=side_q, kv=side_kv)))))
            self.plan = ampere_backward.plan(candidate, request)
        self.source = emit(self.plan)
        g = torch.Generator().manual_seed(seed + 1)
        rows = p.batch, p.heads, p.q_len
        self.d_o = torch.randn((*rows, p.v_head_dim), generator=g).to(w.qkv[0].dtype)
        self.dlse = torch.randn(rows, generator=g)
        if inputs is not None:
            *qkv, self.d_o = (x.contiguous() for x in draw(p, seed, inputs, device="cpu"))
            self.forward = w = dataclasses.replace(w, qkv=tuple(qkv))
        if large_key is not None:
            q, k, v = w.qkv
            larger = torch.where(torch.arange(p.kv_len)[:, None] == large_key, 40, 1)
            self.forward = w = dataclasses.replace(w, qkv=(q, k * larger, v))
        arrays = [x.float().numpy() for x in w.qkv]
        o, self.lse, _ = tiles.walk(w.plan, w.facts, w.case, *arrays, scale=w.scale, dtype=p.dtype, dropout=dropout)
        self.o = torch.from_numpy(o).to(w.qkv[0].dtype).float().numpy()

    def run(self, edit=None, **options):
        w = self.forward
        return simulate_backward(
            self.plan,
            w.case,
            *(x.float().numpy() for x in w.qkv),
            self.o,
            self.lse,
            self.d_o.float().numpy(),
            scale=w.scale,
            dlse=self.dlse.numpy(),
            dropout=self.dropout,
            source=edit(self.source) if edit else self.source,
            **options,
        )

    @functools.cached_property
    def right(self):
        """Autograd's gradients in float64, and the baseline's."""
        w = self.forward
        given = {"scale": w.scale, "dlse": self.dlse, "dropout": self.dropout}
        return tuple(
            of(w.variant, w.case, *w.qkv, self.d_o, **given) for of in (reference_gradients, baseline_gradients)
        )

    def wrong(self, result) -> list[str]:
        """What breaks the tolerance rule, against autograd in float64."""
        w, (ref, base) = self.forward, self.right
        found = []
        for name in ("dq", "dk", "dv"):
            got = torch.from_numpy(getattr(result, name)).to(w.qkv[0].dtype)
            verdict = judge(got, getattr(base, name), getattr(ref, name), w.problem.dtype)
            found += [f"{name}: {reason}" for reason in verdict.reasons]
        for name, gradient in result.captured.items():
            reason = judge_captured(torch.from_numpy(gradient), base.captured[name], ref.captured[name])
            found += [f"{name}: {reason}"] if reason else []
        return found

    def fails(self, edit, **options) -> bool:
        """Whether the edited kernel traps or gives a wrong result."""
        try:
            return bool(self.wrong(self.run(edit, **options)))
        except errors.Trap:
            return True


def check(b, **options):
    """Right, no trap, no bank conflict, and the tiles of q, k, v and do that the walk counts."""
    result = b.run(**options)
    assert b.wrong(result) == []
    assert all(report.conflicts == [] for report in result.reports.values())
    w, p = b.forward, b.forward.problem
    counted = count_backward(
        b.plan, w.facts, w.case, head_dim=p.head_dim, v_head_dim=p.v_head_dim, dtype=p.dtype, dlse=True
    )
    assert list(counted.kernels) == [e for e in result.reports if e in counted.kernels]
    moved = counted.kernels["attention_backward"]
    report = result.reports["attention_backward"]
    for name, operand in {"q": "q", "k": "k", "v": "v", "d_o": "do"}.items():
        assert report.bytes(buffer=name) == moved.read[operand], name
    for name in ("dk", "dv"):
        assert report.bytes(buffer=name) == moved.written[name], name
    return result
