"""What one call asks for: the shape of an attention problem, and nothing about how it is computed."""

from __future__ import annotations

import difflib
from typing import Any, NamedTuple

from flashgen.errors import PlanError
from flashgen.lang.ranges import MAX_LENGTH
from flashgen.planning.float8 import FLOAT8
from flashgen.tuples import new

#: What a caller knows the lengths as.
LENGTHS = {"q_len": "seqlen (q_len)", "kv_len": "kv_seqlen (kv_len)"}

#: Bytes of one element of q, k and v, and of o where it has their dtype.
ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, **dict.fromkeys(FLOAT8, 1)}

#: Bytes of one element of a captured tensor, by its declared dtype.
STORED_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
}


def check_dtype(name: str) -> None:
    """Raise PlanError for what is no dtype of q, k, v and o: "fp16" is nearest to float16."""
    if name not in ITEMSIZE:
        begun = [known for known in ITEMSIZE if known.startswith(name)]
        near = begun or difflib.get_close_matches(name, ITEMSIZE, n=1, cutoff=0.5) or ["bfloat16"]
        raise PlanError(f"dtype {name!r} is not one of {', '.join(ITEMSIZE)}\n  nearest: {near[0]}")


class _Shapes(NamedTuple):
    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    v_head_dim: int
    dtype: str
    kv_dtype: str | None


class Problem(_Shapes):
    """Shapes of q [batch, heads, q_len, head_dim], k [batch, kv_heads, kv_len, head_dim], v [..., v_head_dim].

    `dtype` is that of q; k and v have as many bits unless theirs, `kv_dtype`, is given.  A tuple, as each new length
    makes one.  Raises PlanError for numbers that no problem has.
    """

    __slots__ = ()

    def __new__(
        cls,
        *,
        batch: int,
        heads: int,
        kv_heads: int,
        q_len: int,
        kv_len: int,
        head_dim: int,
        v_head_dim: int,
        dtype: str = "bfloat16",
        kv_dtype: str | None = None,
    ) -> Problem:
        given = batch, heads, kv_heads, q_len, kv_len, head_dim, v_head_dim, dtype, kv_dtype
        made: Problem = new(cls, given)
        made._check()
        return made

    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, Any]]:
        return (), self._asdict()

    def _replace(self, **changes: Any) -> Problem:
        """The same with other numbers, which are checked too."""
        return Problem(**{**self._asdict(), **changes})

    __replace__ = _replace  # of copy.replace, which Python 3.13 has

    def _check(self) -> None:
        if (
            0 <= self.q_len < MAX_LENGTH
            and 0 <= self.kv_len < MAX_LENGTH
            and 0 <= self.batch < MAX_LENGTH
            and 0 < self.kv_heads <= (heads := self.heads) < MAX_LENGTH
            and heads % self.kv_heads == 0
            and 0 < self.head_dim < MAX_LENGTH
            and 0 < self.v_head_dim < MAX_LENGTH
            and self.dtype in ITEMSIZE
            and (self.kv_dtype is None or self.kv_dtype in ITEMSIZE)
        ):
            return
        for name, said in (*((name, name) for name in ("batch", "heads", "kv_heads")), *LENGTHS.items()):
            value = getattr(self, name)
            if value < 0:
                raise PlanError(f"{said} is {value}: it cannot be negative\n  nearest: 0")
            if value >= MAX_LENGTH:
                what = "lengths" if name in LENGTHS else "numbers of batches and heads"
                raise PlanError(f"{said} is {value}: {what} stay below 2^24\n  nearest: {MAX_LENGTH - 1}")
        for name in ("head_dim", "v_head_dim"):
            if (value := getattr(self, name)) <= 0:
                raise PlanError(f"{name} is {value}: it must be positive\n  nearest: 16")
            if value >= MAX_LENGTH:
                raise PlanError(f"{name} is {value}: head dims stay below 2^24\n  nearest: 128")
        check_dtype(self.dtype)
        check_dtype(self.dtype if self.kv_dtype is None else self.kv_dtype)
        if self.heads and (self.kv_heads == 0 or self.heads % self.kv_heads):
            divisors = [n for n in range(1, self.heads + 1) if self.heads % n == 0]
            raise PlanError(
                f"{self.heads} heads cannot share {self.kv_heads} kv_heads: heads must be a multiple of kv_heads"
                f" (kv_heads that work: {', '.join(map(str, divisors))})"
            )

    def of_lengths(self, q_len: int, kv_len: int, *, batch: int | None = None) -> Problem:
        """The same with other lengths, and of another batch where that is given."""
        before, heads, kv_heads, _, _, head_dim, v_head_dim, dtype, kv_dtype = self
        batch = before if batch is None else batch
        made: Problem = new(Problem, (batch, heads, kv_heads, q_len, kv_len, head_dim, v_head_dim, dtype, kv_dtype))
        if not 0 <= batch | q_len | kv_len < MAX_LENGTH:  # a power of two; what stays the same was checked
            made._check()  # says what is wrong
        return made

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.heads // self.kv_heads if self.kv_heads else 1

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    @property
    def kv_itemsize(self) -> int:
        """Bytes of an element of k, and of v."""
        return self.itemsize if self.kv_dtype is None else ITEMSIZE[self.kv_dtype]

    @property
    def wide_queries(self) -> bool:
        """Whether q has more bits than k and v."""
        return self.kv_itemsize < self.itemsize

    @property
    def o_itemsize(self) -> int:
        """Bytes of an element of o: in 8 bits it has 16."""
        return max(self.itemsize, ITEMSIZE["bfloat16"])

    def read_bytes(self, q_rows: int, kv_rows: int) -> int:
        """Bytes of so many rows of q, and of k and v."""
        return q_rows * self.head_dim * self.itemsize + kv_rows * (self.head_dim + self.v_head_dim) * self.kv_itemsize

    @property
    def empty(self) -> bool:
        """True where there is no output element at all."""
        return 0 in (self.batch, self.heads, self.q_len)

    def sizes(self) -> dict[str, int]:
        """The values of the language's problem symbols."""
        return {
            "batch": self.batch,
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "q_len": self.q_len,
            "kv_len": self.kv_len,
        }
