"""`python -m tests.fuzz JUDGE`: thousands of random specs, or one that failed."""

from __future__ import annotations

import argparse
import secrets
import sys

from .engine import search, try_one
from .judges import JUDGES


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("judge", choices=list(JUDGES))
    parser.add_argument("--count", type=int, default=1000, help="cases to try")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long")
    parser.add_argument("--seed", type=int, help="of all choices; a fresh one unless given")
    parser.add_argument("--case", type=int, help="this one alone, and make it smaller where it fails")
    parser.add_argument("--shrink", type=float, default=60.0, help="seconds to make a failure smaller")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--go-on", action="store_true", help="do not stop at a failure; one of each kind is shown")
    asked = parser.parse_args()
    judge = JUDGES[asked.judge]
    seed = secrets.randbelow(1 << 30) if asked.seed is None else asked.seed
    if asked.case is not None:
        tally = try_one(judge, seed, asked.case, shrink=asked.shrink)
    else:
        print(f"{judge.name}: seed {seed}", flush=True)
        shown, known = 0.0, set()

        def progress(so_far):
            nonlocal shown
            for kind, failure in so_far.failures.items():
                if kind not in known:
                    known.add(kind)
                    print(f"FAILED  {failure.repro}\n  {kind}", flush=True)
            if so_far.seconds - shown > 10:
                shown = so_far.seconds
                print(so_far, flush=True)

        tally = search(
            judge,
            seed,
            count=asked.count,
            seconds=asked.seconds,
            jobs=asked.jobs,
            on_progress=progress,
            go_on=asked.go_on,
        )
    print(tally)
    for reason, n in tally.reasons.most_common(8):
        print(f"  {n} x {reason}")
    for failure in tally.failures.values():
        if asked.case is None and asked.shrink:
            index = int(failure.repro.rsplit(" ", 1)[1])
            small = try_one(judge, seed, index, shrink=asked.shrink)
            failure = next(iter(small.failures.values()), failure)
        print(f"\nFAILED  {failure}", flush=True)
    return 1 if tally.failures else 0


if __name__ == "__main__":
    sys.exit(main())
