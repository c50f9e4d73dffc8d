"""Tensors of 8 bits: which dtypes, what o is, and how exact P is.

An element times its descale is its value: `q_descale`, `k_descale` and `v_descale` of a call, one for a tensor, a head
or a block of rows.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace

from flashgen.errors import PlanError

#: By PyTorch's names: 4 and 5 bits of exponent.
E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
FLOAT8 = (E4M3, E5M2)

#: What PTX calls them, and the bits of their mantissas.
PTX_TYPES = {E4M3: "e4m3", E5M2: "e5m2"}

#: Their codes of 1.
ONE = {E4M3: 0x38, E5M2: 0x3C}

#: Dtypes of o, the first unless another is asked for.
OUT_DTYPES = ("bfloat16", "float16")

#: How P is made, the most exact first.
ACCURACIES = ("exact", "default", "fast")

#: How, unless a call says it.
DEFAULT = "default"

#: Of eight words of P those that hold codes made of the scores' bits, without exponentials.
WORDS_BY_BITS = {"exact": 0, "default": 4, "fast": 8}

#: How far a row's highest score may be above that whose P is 2^OFFSET before its maximum follows, as a power of two: 0
#: follows each.  Codes end at 126, of 2^8.87.
SLACK = {"exact": 0.0, "default": 0.0, "fast": 0.86}

#: How much lower P is in the first two tiles of a schedule, as a power of two, where maxima lag: most scores of N(0, 1)
#: grow by less in 16,384 keys.  Of 32 tiles a warp makes P of 1% twice then, after a look at maxima, and not of 34%.
HEADROOM = 2.0

#: Where the second tile's highest score is this much lower than the first's, P gets its headroom back: a key that
#: stands out is no sign of more, and keys far below it need the range.
FAR = 3.0

#: RMS error of o over that of the exact form, on scores of standard deviation 1, 4 and 8: found by emulation, which a
#: test repeats.
ERRORS = {"exact": (1.0, 1.0, 1.0), "default": (1.1, 1.1, 1.0), "fast": (1.28, 1.66, 1.26)}

#: What is added to the code of a number that is made of its logarithm, so that the mean of all is right.
CODE_BIAS = -0.458

#: The arguments of a call that hold descales, by the tensor that they are of.
DESCALES = {"q": "q_descale", "k": "k_descale", "v": "v_descale"}

#: A block of rows that share a descale is a power of two of them, from this on: whole tiles of every plan.
LEAST_BLOCK = 128

#: P is 2^OFFSET where the score is the row's highest: below the largest e4m3, 448, whatever is rounded, and with as
#: many binades below as there can be.
OFFSET = 8

#: Bits that 8-bit wgmma keeps of an addend, below the largest of its step.
ACCUMULATOR_BITS = 13


@dataclass(frozen=True, slots=True, kw_only=True)
class Float8:
    """Of a forward whose k and v have 8 bits: the dtypes of q, k, v and o, and how P is made.

    Where q has 16 bits, and where an architecture multiplies 16 bits alone, k and v are widened in the kernel: P then
    has 16 bits and is "exact".  Else q is float8_e4m3fn, and whatever the `accuracy`, partial sums of a tile are added
    in float32.  "exact" has exponentials, and lse of unrounded P; the others have codes made of the scores' bits for
    half of P ("default") or all of it ("fast"), and o and lse of rounded P.  The row's maximum is exact in each tile of
    keys, but for "fast": there it follows scores whose P would leave the range of e4m3.
    """

    q: str = E4M3
    k: str = E4M3
    v: str = E4M3
    out: str = OUT_DTYPES[0]
    accuracy: str = DEFAULT

    @property
    def scaled(self) -> tuple[str, ...]:
        """Which of q, k and v have descales: those of 8 bits."""
        return tuple(name for name in DESCALES if getattr(self, name) in FLOAT8)

    @property
    def exactly(self) -> Float8:
        """The same with exact P."""
        return replace(self, accuracy=ACCURACIES[0])

    @property
    def ptx_types(self) -> tuple[str, str]:
        """What PTX calls k and v."""
        return PTX_TYPES[self.k], PTX_TYPES[self.v]

    @property
    def four_ones_of_v(self) -> str:
        """A word of ones of v's dtype."""
        return f"0x{ONE[self.v] * 0x01010101:08x}"

    def options(self) -> tuple[tuple[str, str], ...]:
        """Those of a command that differ from what is taken unless it says so."""
        usual = Float8() if self.q in FLOAT8 else replace(self, k=self.q, v=self.q)
        named = (("k-dtype", "k"), ("v-dtype", "v"), ("out-dtype", "out"), ("accuracy", "accuracy"))
        return tuple((flag, getattr(self, name)) for flag, name in named if getattr(self, name) != getattr(usual, name))

    def __str__(self) -> str:
        kinds = "" if {self.q, self.k, self.v} == {E4M3} else f", k {self.k}, v {self.v}"
        normal, four, eight = ERRORS[self.accuracy]
        errors = (
            "" if self.accuracy == "exact" else f" (error of o {normal}x exact's; {four}x, {eight}x on peaked rows)"
        )
        return f"o {self.out}{kinds}, {self.accuracy} P{errors}"


def no_backward_in_8_bits(out: str) -> PlanError:
    """What is said where gradients are asked for beside 8-bit tensors, whose o is of dtype `out`."""
    return PlanError(
        "no backward in 8 bits: P and dS of e4m3 have too few bits for sums of gradients\n"
        f"  nearest: 16 bits throughout, of tensors dequantised to {out}"
    )


def float8_of(
    dtype: str, k_dtype: str | None, v_dtype: str | None, out_dtype: str | None, accuracy: str | None
) -> Float8 | None:
    """What a request of queries of `dtype` is in 8 bits; None: it has 16.  Raises PlanError for options of the other
    width, and for what no 8-bit kernel takes."""
    kinds = {"k": dtype if k_dtype is None else k_dtype, "v": dtype if v_dtype is None else v_dtype}
    if dtype not in FLOAT8:
        if not any(kind in FLOAT8 for kind in kinds.values()):
            for name, kind in kinds.items():
                if kind != dtype:
                    raise PlanError(f"q is {dtype} and {name} {kind}: they share a dtype\n  nearest: {name} in {dtype}")
            for name, value in (("out_dtype", out_dtype), ("accuracy", accuracy)):
                if value is not None:
                    raise PlanError(f"{name} is of 8-bit tensors, and q is {dtype}\n  nearest: {name}=None")
            return None
        return _of_wide_queries(dtype, kinds, out_dtype, accuracy)
    if dtype != E4M3:
        raise PlanError(
            f"q is {dtype}: queries of 8 bits are {E4M3}, whose three bits of mantissa scores need\n"
            f"  nearest: q in {E4M3} with its q_descale"
        )
    for name, kind in kinds.items():
        if kind not in FLOAT8:
            raise PlanError(
                f"q is {dtype} and {name} {kind}: tensor cores multiply 8 bits by 8 bits\n"
                f"  nearest: {name} in {E4M3} or {E5M2}"
            )
    out = OUT_DTYPES[0] if out_dtype is None else _one_of("out_dtype", out_dtype, OUT_DTYPES)
    how = DEFAULT if accuracy is None else _one_of("accuracy", accuracy, ACCURACIES)
    return Float8(k=kinds["k"], v=kinds["v"], out=out, accuracy=how)


def _of_wide_queries(dtype: str, kinds: dict[str, str], out_dtype: str | None, accuracy: str | None) -> Float8:
    """The same of queries of 16 bits beside k or v of 8."""
    if dtype not in OUT_DTYPES:
        name, kind = next((name, kind) for name, kind in kinds.items() if kind in FLOAT8)
        raise PlanError(
            f"q is {dtype} and {name} {kind}: beside 8-bit keys and values q has 8 or 16 bits\n  nearest: q in bfloat16"
        )
    for name, kind in kinds.items():
        if kind not in FLOAT8:
            other = next(other for other in kinds if other != name)
            raise PlanError(
                f"{name} is {kind} and {other} {kinds[other]}: keys and values have 8 bits together\n"
                f"  nearest: {name} in {E4M3}"
            )
    if out_dtype not in (None, dtype):
        raise PlanError(
            f"out_dtype is {out_dtype} and q {dtype}: o has the dtype of queries of 16 bits\n  nearest: out_dtype=None"
        )
    if accuracy is not None and _one_of("accuracy", accuracy, ACCURACIES) == ACCURACIES[-1]:
        raise PlanError(
            f"accuracy {accuracy!r} beside q in {dtype}: P has 16 bits there, and no form is faster\n"
            f"  nearest: accuracy={ACCURACIES[0]!r}"
        )
    return Float8(q=dtype, k=kinds["k"], v=kinds["v"], out=dtype, accuracy=ACCURACIES[0])


def _one_of(name: str, value: str, known: tuple[str, ...]) -> str:
    if value not in known:
        near = difflib.get_close_matches(value, known, n=1, cutoff=0.4) or known[:1]
        raise PlanError(f"{name} {value!r} is not one of {', '.join(known)}\n  nearest: {near[0]}")
    return value


def block_of(length: int, blocks: int) -> int | None:
    """Rows of a block of which `blocks` cover `length`: a power of two from LEAST_BLOCK on; None where none does."""
    block = LEAST_BLOCK
    while -(-length // block) > blocks:
        block *= 2
    return block if -(-length // block) == blocks else None
