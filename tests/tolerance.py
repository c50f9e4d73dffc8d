"""The tolerance rule of every correctness test: one rule, the one that `flashgen run` applies."""

from flashgen.runtime.reference import POOL, Verdict, baseline, judge, judge_lse, reference

__all__ = ["ENOUGH", "POOL", "Verdict", "baseline", "judge", "judge_lse", "reference"]

#: Elements whose RMS says something: chance moves it by a few hundredths.
ENOUGH = 4096
