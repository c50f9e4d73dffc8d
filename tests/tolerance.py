"""The tolerance rule of every correctness test: one rule, the one that `flashgen run` applies."""

from flashgen.runtime.reference import POOL, Verdict, baseline, judge, judge_lse, reference

__all__ = ["POOL", "Verdict", "baseline", "judge", "judge_lse", "reference"]
