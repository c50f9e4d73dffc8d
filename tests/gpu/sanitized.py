"""What runs under compute-sanitizer: each kernel of a small set once, forward and backward.  See test_gpu_sanitizer."""

import dataclasses
import sys

import torch
from backward_gpu import problem_of
from gpu_checks import compile_together, example_tensors, random_inputs

import flashgen as fg
from flashgen.analysis.derivative import differentiable
from flashgen.lang.load import load_spec
from flashgen.ops.stages import plan

#: spec, deterministic, dropout, and a shape: odd lengths, lengths that differ, groups of heads, dims of every kind.
SET = (
    ("full", False, 0.0, dict(q_len=131, kv_len=197, kv_heads=2)),
    ("causal", True, 0.0, dict(q_len=131, kv_len=197, kv_heads=2, head_dim=128, dtype="float16")),
    ("sliding_window", False, 0.1, dict(q_len=67, kv_len=259, kv_heads=1)),
    ("document", False, 0.0, dict(q_len=300, kv_len=300, head_dim=96)),
    ("relative_bias", True, 0.0, dict(q_len=1, kv_len=65, head_dim=40, v_head_dim=72)),
    ("packed_softcap", False, 0.0, dict(q_len=129, kv_len=129, kv_heads=2, head_dim=128)),
    ("causal", False, 0.0, dict(q_len=65, kv_len=65, heads=2, head_dim=256)),
)


def main(pipeline: str) -> None:
    calls, plans = [], []
    for name, deterministic, dropout, shape in SET:
        variant = load_spec(name)
        variant = dataclasses.replace(variant, pins=dataclasses.replace(variant.pins, pipeline=pipeline))
        p, wanted = problem_of(**{"batch": 1, **shape}), differentiable(variant.score_node)
        asked = {**p.sizes(), "head_dim": p.head_dim, "v_head_dim": p.v_head_dim, "dtype": p.dtype}
        asked |= {"seqlen": asked.pop("q_len"), "kv_seqlen": asked.pop("kv_len"), "dropout": bool(dropout)}
        plans.append(plan(variant, **asked))
        plans.append(plan(variant, **asked, backward=True, deterministic=deterministic, gradients=wanted))
        calls.append((variant, p, wanted, {"deterministic": deterministic, "dropout": dropout}))
    compile_together(plans)
    for variant, p, wanted, options in calls:
        leaves = [t.requires_grad_() for t in random_inputs(p, 0)]
        named = example_tensors(variant, p, 0)
        for name in wanted:
            named[name].requires_grad_()
        o, lse = fg.attention(*leaves, variant, return_lse=True, **options, **named)
        gradients = torch.autograd.grad([o, lse], [*leaves, *map(named.get, wanted)], [o.detach(), lse.detach()])
        torch.cuda.synchronize()
        assert all(x.isfinite().all() for x in (o, lse, *gradients)), variant.name
        print(f"ran {variant.name} {p}")


if __name__ == "__main__":
    main(sys.argv[1])
