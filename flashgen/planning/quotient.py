"""Quotients by numbers that a launch knows: kernels multiply and shift, where a division would take 150 clocks."""

from functools import lru_cache


@lru_cache(maxsize=1024)
def divisor(by: int) -> int:
    """What the emitted `quotient_by` divides by, in 64 bits: a factor, and above it how far the product shifts.

    n // by == n * factor >> shift for each n from 0 to 2**31 - 1 (Granlund and Montgomery 1994, theorem 4.2).
    """
    shift = 31 + (by - 1).bit_length()
    return -(-(1 << shift) // by) | shift << 32
