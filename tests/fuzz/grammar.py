"""Random specs as the text of spec files, with a problem, parameters and captured data for each.

The grammar has every operation of the language, nested loads of mixed widths, negated and shifted operands, divisors of
either sign, the edges of the types, NaN and infinity in float data, promises that hold, and combinations of variants.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from .choices import Choices
from .evaluator import Spec

EDGES = {
    "int8": (-128, 127),
    "uint8": (0, 255),
    "int16": (-(1 << 15), (1 << 15) - 1),
    "int32": (-(1 << 31), (1 << 31) - 1, 1 << 24, -(1 << 24) - 1, 1 << 30),
    "int64": (-(1 << 63), (1 << 63) - 1, 1 << 61, -(1 << 61) - 3, (1 << 62) + 1, 1 << 31, -(1 << 32), 1 << 24),
}
INTEGERS = ("int32", "int64", "int8", "uint8", "int16")
FLOATS = ("float32", "float16", "bfloat16")
PRIMES = (1, 2, 3, 5, 7, 11, 13, 17, 19, 23)
DIMS = {"batch": "b", "heads": "h", "kv_heads": "h // (fg.heads // fg.kv_heads)", "q": "q", "kv": "k"}


@dataclass(frozen=True)
class Profile:
    """What a judge can take.

    longest  the longest length
    tame     scores stay moderate and smooth, so that a whole kernel is judged by the tolerance rule
    outside  indices may leave their dimension, which a kernel clamps and a CPU refuses
    score    whether there is a score function: never, always, or now and then
    batches  how many sequences there are
    """

    longest: int = 24
    tame: bool = True
    outside: bool = False
    score: bool | None = None
    tiles: tuple[tuple[int, int], ...] = ()
    head_dims: tuple[int, ...] = (16, 24, 32)
    dtypes: tuple[str, ...] = ("bfloat16", "float16")
    batches: tuple[int, ...] = (1, 1, 2)


@dataclass(frozen=True)
class Declared:
    """A param, constant or tensor of a spec: how it is written, and its value at the call."""

    name: str
    call: str
    value: object
    kind: str  # param, constant, tensor

    def line(self, *, with_data: bool = False) -> str:
        call = self.call
        if with_data and self.kind == "tensor":
            values = self.value.ravel().tolist()
            data = f"np.array({values}, np.{self.value.dtype}).reshape({self.value.shape})"
            for word in ("nan", "inf"):
                data = data.replace(word, f"np.{word}")
            call = f"{call[:-1]}, example=lambda problem, rng: {data})"
        return f"{self.name} = {call}"


@dataclass(frozen=True)
class Case:
    """A spec's text, what it is called with, and how its kernel is tiled."""

    declared: tuple[Declared, ...]
    body: str
    sizes: dict[str, int]
    head_dim: int
    v_head_dim: int
    dtype: str
    scale: float
    tile: tuple[int, int]
    data_seed: int
    options: dict[str, object] = field(default_factory=dict)

    @property
    def text(self) -> str:
        return self._text(with_data=False)

    def _text(self, *, with_data: bool) -> str:
        lines = "\n".join(d.line(with_data=with_data) for d in self.declared)
        numpy = "import numpy as np\n" if with_data else ""
        return f"import math\n\n{numpy}import flashgen as fg\n\n{lines}\n\n\n{self.body}"

    def values(self, kind: str) -> dict[str, object]:
        return {d.name: d.value for d in self.declared if d.kind == kind}

    @property
    def spec(self) -> Spec:
        return Spec(self.text, self.sizes, self.values("param") | self.values("constant"), self.values("tensor"))

    def report(self) -> str:
        """A spec file that a person can run, with its data, and the call."""
        call = {"scale": self.scale, **self.values("param"), **self.values("constant"), **self.options}
        shape = {**self.sizes, "head_dim": self.head_dim, "v_head_dim": self.v_head_dim, "dtype": self.dtype}
        comments = {"shape": shape, "call": call, "tile": self.tile, "data seed": self.data_seed}
        return self._text(with_data=True) + "".join(f"# {name}: {value}\n" for name, value in comments.items())


def draw(choices: Choices, profile: Profile) -> Case:
    """A random case."""
    return _Writer(choices, profile).case()


class _Writer:
    def __init__(self, choices: Choices, profile: Profile) -> None:
        self.choices, self.profile = choices, profile
        self.declared: list[Declared] = []
        self.tensors: dict[str, tuple[str, tuple, str]] = {}  # name: dtype, dims, what its values are like
        self.locals: dict[str, list[str]] = {}
        self.in_score = False
        self.indices: list[str] = []  # of the loops around

    # -- the problem

    def case(self) -> Case:
        c, p = self.choices, self.profile
        tile = c.pick(p.tiles) if p.tiles else (c.integer(1, 9), c.integer(1, 9))
        kv_heads = c.pick((1, 1, 2))
        self.sizes = {
            "batch": c.pick(p.batches),
            "heads": kv_heads * c.pick((1, 2, 3)),
            "kv_heads": kv_heads,
            "q_len": self.length(tile[0]),
            "kv_len": self.length(tile[1]),
        }
        self.data = np.random.default_rng(c.integer(0, 1 << 16))
        body = self.body()
        head_dim = c.pick(p.head_dims)
        scale = head_dim**-0.5 * c.pick((1.0, 1.0, 1.0, -1.0, 0.0, 2.0, -0.25))
        return Case(
            declared=tuple(self.declared),
            body=body,
            sizes=self.sizes,
            head_dim=head_dim,
            v_head_dim=c.pick((head_dim, head_dim, *p.head_dims)),
            dtype=c.pick(p.dtypes),
            scale=scale,
            tile=tile,
            data_seed=c.integer(0, 1 << 16),
        )

    def length(self, side: int) -> int:
        c = self.choices
        found = c.pick((c.pick(PRIMES), side - 1, side, side + 1, 2 * side + 1, self.profile.longest))
        return max(1, min(found, self.profile.longest))

    # -- variants

    def body(self) -> str:
        c, parts = self.choices, []
        masks = c.pick((1, 1, 1, 2, 2, 0)) if self.profile.score is not True else c.pick((1, 0, 2))
        scored = self.profile.score is True or (self.profile.score is None and (masks == 0 or c.one_in(2)))
        for i in range(masks):
            parts.append(f"@fg.variant\ndef mask{i}(b, h, q, k):\n{self.function(self.condition, 2)}")
        names = [f"mask{i}" for i in range(masks)] or ["everything"]
        if not masks:
            parts.append("everything = fg.variant()")
        names = [f"~{name}" if masks and c.one_in(6) else name for name in names]
        whole = names[0] if len(names) == 1 else f"{names[0]} {c.pick('&|')} {names[1]}"
        if not scored:
            return "\n\n".join([*parts, f"fuzzed = {whole}\n" if whole.startswith("~") or len(names) > 1 else ""])
        self.in_score = True
        parts.append(f"masked = {whole}")
        parts.append(f"@masked.score\ndef fuzzed(s, b, h, q, k):\n{self.function(self.score, 2)}")
        for i in range(c.pick((0, 0, 0, 1))):
            if c.one_in(2):
                parts.append(
                    f"def after{i}(s, b, h, q, k):\n{self.function(self.score, 1)}\n\nfuzzed{i} = fuzzed.then(after{i})"
                )
            else:
                self.in_score = False
                within = self.function(self.condition, 1)
                self.in_score = True
                parts.append(
                    f"@fg.variant\ndef within{i}(b, h, q, k):\n{within}\n\n"
                    f"@within{i}.score\ndef second{i}(s, b, h, q, k):\n{self.function(self.score, 1)}\n\n"
                    f"fuzzed{i} = fuzzed.then(second{i})"
                )
        return "\n\n".join(parts) + "\n"

    def function(self, root, depth: int) -> str:
        """Lines of a body: some named values, which what follows may read, then what is returned."""
        c, self.locals, lines = self.choices, {"int": [], "float": [], "bool": []}, []
        for i in range(c.pick((0, 0, 1, 2))):
            kind, write = c.pick((("int", self.integer), ("int", self.integer), ("bool", self.condition)))
            lines.append(f"    {kind}{i} = {write(1)}")
            self.locals[kind].append(f"{kind}{i}")
        lines.append(f"    return {root(depth)}")
        return "\n".join(lines) + "\n"

    # -- conditions

    def condition(self, depth: int) -> str:
        c = self.choices
        if depth <= 0 or c.one_in(3):
            return self.comparison()
        if self.locals["bool"] and c.one_in(4):
            return c.pick(self.locals["bool"])
        one, two = self.condition(depth - 1), self.condition(depth - 1)
        form = c.pick(
            (
                *("({x} & {y})", "({x} | {y})", "({x} & {y})", "~{x}", "({x} ^ {y})", "({x} == {y})", "({x} != {y})"),
                *("fg.where({z}, {x}, {y})", "((fg.int32({x}) + fg.int32({y})) >= 1)", "(fg.float32({x}) > 0.5)"),
            )
        )
        return form.format(x=one, y=two, z=self.comparison() if "{z}" in form else "")

    def comparison(self) -> str:
        c = self.choices
        sign = c.pick(("<=", "<", "==", "!=", ">", ">="))
        if c.one_in(10) and len(self.indices) < 2:
            return self.loop("any", self.condition)
        match c.integer(0, 8):
            case 0:
                return "(k <= q)"
            case 1:
                return f"(q - k {sign} {self.small()})"
            case 2:
                return f"(k {sign} {self.integer(0)})"
            case 3:
                divisor = self.divisor()
                return f"(q // {divisor} == k // {divisor})"
            case 4:
                return self.load("bool")
            case 5:
                return f"({self.floating(1)} {sign} {self.floating(1)})"
            case 6:
                name = self.tensor("int")
                return f"({self.read(name, 0)} {sign} {self.read(name, 0)})"
        return f"({self.integer(2)} {sign} {self.integer(1)})"

    # -- loops

    def loop(self, kind: str, write) -> str:
        """A loop of few rounds, also of none, whose body may read its index."""
        c = self.choices
        rounds = c.pick(("3", "2", "1", "0", "fg.clamp({x}, -1, 3)", "fg.clamp({x}, 0, 2)", "{p}"))
        x = self.integer(0) if "{x}" in rounds else ""
        p = self.number("param", "int32", c.integer(-1, 3), "max=3") if "{p}" in rounds else ""
        index = "ij"[len(self.indices)]
        self.indices.append(index)
        body = write(1)
        self.indices.pop()
        return f"fg.{kind}({rounds.format(x=x, p=p)}, lambda {index}: {body})"

    # -- integers

    def small(self) -> str:
        c = self.choices
        if c.one_in(3):
            return self.number("param", "int32", c.integer(-9, 30))
        return self.literal(c.integer(-3, 12))

    @staticmethod
    def literal(value: float) -> str:
        return f"({value!r})" if value < 0 else repr(value)

    def edge(self) -> str:
        """A number at an edge of its type, or a parameter that holds it."""
        c = self.choices
        dtype = c.pick(("int32", "int64"))
        value = c.pick(EDGES[dtype]) + c.pick((0, 0, 1, -1))
        low, high = min(EDGES[dtype]), max(EDGES[dtype])
        value = min(max(value, low), high)
        if c.one_in(3):
            return self.number(c.pick(("param", "constant")), dtype, value)
        return self.literal(value) if value != -(1 << 63) else "(-9223372036854775807 - 1)"

    def integer(self, depth: int) -> str:
        c = self.choices
        if self.indices and c.one_in(3):
            return c.pick(self.indices)
        if c.one_in(40) and len(self.indices) < 2:
            return self.loop("sum", self.integer)
        if depth <= 0 or c.one_in(3):
            match c.integer(0, 11):
                case 0 | 1:
                    return "q"
                case 2 | 3:
                    return "k"
                case 4:
                    return "(q - k)"
                case 5:
                    return self.small()
                case 6:
                    return c.pick(("h", "b", "fg.q_len", "fg.kv_len", "fg.heads", "fg.kv_heads", "fg.batch"))
                case 7 | 8:
                    return self.load("int")
                case 9:
                    return self.edge()
                case 10:
                    return c.pick(self.locals["int"]) if self.locals["int"] else f"fg.int32({self.comparison()})"
            name = c.pick(list(self.tensors)) if self.tensors else self.tensor("int")
            return f"{name}.size({c.integer(0, len(self.tensors[name][1]) - 1)})"
        x = self.integer(depth - 1)
        match c.integer(0, 18):
            case 0:
                return f"({x} + {self.integer(depth - 1)})"
            case 1 | 2:
                return f"({x} - {self.integer(depth - 1)})"
            case 3:
                return f"({x} * {self.small()})"
            case 4:
                return f"(-{x})"
            case 5:
                return f"(-(-{x}))"
            case 6:
                return f"({x} // {self.divisor()})"
            case 7:
                return f"({x} % {self.divisor()})"
            case 8:
                return f"({x} {c.pick('&|^')} {self.integer(depth - 1)})"
            case 9:
                return f"(~{x})"
            case 10:
                return f"({x} << {self.count()})"
            case 11:
                return f"({x} >> {self.count()})"
            case 12:
                return f"abs({x})"
            case 13:
                return f"fg.{c.pick(('minimum', 'maximum'))}({x}, {self.integer(depth - 1)})"
            case 14:
                low = c.integer(-4, 4)
                bounds = c.pick((f"{low}, {low + c.integer(0, 9)}", f"None, {low}", f"{low}, None"))
                return f"fg.clamp({x}, {bounds})"
            case 15:
                return f"fg.where({self.comparison()}, {x}, {self.integer(depth - 1)})"
            case 16:
                return f"fg.int{c.pick((64, 32))}({x})"
            case 17:
                return f"fg.int{c.pick((32, 64))}({self.floating(1)})"
        return f"({x} * {self.integer(depth - 1)})"

    def divisor(self) -> str:
        """A number that is known not to be 0, of either sign."""
        c = self.choices
        match c.integer(0, 7):
            case 0 | 1:
                return self.literal(c.pick((2, 3, 4, 1, 7, -1, -2, -4, -5)))
            case 2:
                return self.number(c.pick(("param", "constant")), "int32", c.pick((2, 3, 1, 5)), "min=1")
            case 3:
                value = c.pick((-2, -1, -4, -(1 << 31), -7))
                return self.number(c.pick(("param", "constant")), c.pick(("int32", "int64")), value, "max=-1")
            case 4:
                return self.load("int", "positive")
            case 5:
                return self.load("int", "negative")
            case 6:
                return f"fg.maximum({self.integer(0)}, {c.pick((1, 2))})"
        return f"fg.minimum({self.integer(0)}, {c.pick((-1, -3))})"

    def count(self) -> str:
        """A shift count known to lie in range."""
        c = self.choices
        match c.integer(0, 3):
            case 0 | 1:
                return str(c.pick((1, 2, 3, 0, 5, 31)))
            case 2:
                return self.number("param", "int32", c.integer(0, 5), "min=0, max=31")
        return f"fg.clamp({self.integer(0)}, 0, {c.pick((4, 31))})"

    # -- floats

    def fraction(self) -> str:
        """A literal that float32 holds exactly."""
        return self.literal(self.choices.integer(-24, 40) / 8)

    def floating(self, depth: int) -> str:
        c = self.choices
        if depth <= 0 or c.one_in(3):
            match c.integer(0, 5):
                case 0:
                    return self.fraction()
                case 1 | 2:
                    return self.load("float", "calm" if self.in_score and self.profile.tame else "any")
                case 3:
                    return self.number(c.pick(("param", "constant")), "float32", c.integer(-16, 24) / 8)
                case 4:
                    return "s" if self.in_score else "fg.float32(k)"
            return f"fg.float32({self.integer(0)})"
        x = self.floating(depth - 1)
        match c.integer(0, 13):
            case 0 | 1:
                return f"({x} {c.pick('+-*')} {self.floating(depth - 1)})"
            case 2:
                return f"({x} / {self.floating(depth - 1)})"
            case 3:
                return f"({x} * {self.integer(0)})"
            case 4:
                return f"(-{x})"
            case 5:
                return f"(-(-{x}))"
            case 6:
                return f"abs({x})"
            case 7:
                return f"fg.{c.pick(('minimum', 'maximum'))}({x}, {self.floating(depth - 1)})"
            case 8:
                return f"fg.where({self.comparison()}, {x}, {self.floating(depth - 1)})"
            case 9:
                return f"fg.clamp({x}, {c.pick(('-2.0, 1.5', 'None, 3.0', '0.25, None'))})"
            case 10:
                return f"fg.{c.pick(('floor', 'sqrt', 'rsqrt'))}({x})"
            case 11:
                return f"fg.{c.pick(('tanh', 'sigmoid', 'erf', 'sin', 'cos'))}({x})"
            case 12:
                return c.pick(("fg.log1p({x})", "fg.pow({x}, 3)", "({x} ** 2)", "fg.pow({x}, 0.75)")).format(x=x)
        return f"fg.{c.pick(('exp', 'exp2', 'log', 'log2'))}({x})"

    def moderate(self, depth: int) -> str:
        """A float between -4 and 4, or the sum of a few of them."""
        c = self.choices
        if c.one_in(8) and not self.indices:
            return self.loop("sum", self.moderate)
        match c.integer(0, 5):
            case 0:
                return self.fraction()
            case 1 | 2:
                return self.load("float", "calm")
            case 3:
                return f"fg.tanh({self.floating(depth)})"
            case 4:
                return f"fg.clamp({self.floating(depth)}, -2.0, 2.5)"
        return f"fg.sigmoid({self.floating(depth)})"

    def score(self, depth: int) -> str:
        c = self.choices
        if not self.profile.tame and c.one_in(2):
            return self.floating(depth + 1)
        s = "s" if depth <= 0 or c.one_in(3) else self.score(depth - 1)
        y = c.pick(("2.0", "0.5", "3.0", "1.25"))
        match c.integer(0, 15):
            case 0 | 1:
                return f"({s} + {self.moderate(1)})"
            case 2:
                return f"({s} - {self.moderate(1)})"
            case 3:
                return f"({self.moderate(1)} - {s})"
            case 4:
                return f"(-{s})"
            case 5:
                return f"({s} * {self.moderate(0)})"
            case 6:
                return f"({y} * fg.tanh({s} / {y}))"
            case 7:
                return f"fg.where({self.condition(0)}, {s}, {c.pick(('-math.inf', s + ' - ' + y))})"
            case 8:
                return f"fg.{c.pick(('maximum', 'minimum'))}({s}, {self.moderate(0)})"
            case 9:
                return f"fg.clamp({s}, {c.pick(('-1.5, 2.0', 'None, 1.0', '-0.5, None'))})"
            case 10:
                return f"({y} * fg.sigmoid(-{s}))"
            case 11:
                return f"({s} + {self.number('param', 'float32', c.integer(-6, 6) / 8)} * fg.float32(q - k))"
            case 12:
                return f"({s} + fg.log{c.pick(('(1.0 + ', '1p('))}abs({self.integer(0)}) * 0.125))"
            case 13:
                return f"({s} + {c.pick(('fg.exp(-abs(S))', 'fg.exp2(-abs(S))', 'fg.erf(S)', 'fg.cos(S)'))})".replace(
                    "S", s
                )
            case 14:
                return f"({s} + fg.{c.pick(('sqrt', 'rsqrt', 'log2'))}(abs({s}) + {y}))"
        return f"(abs({s}) / ({y} + fg.sigmoid({self.moderate(0)})))"

    # -- what is declared

    def number(self, kind: str, dtype: str, value: float, bounds: str = "") -> str:
        """A declared parameter or constant of that value: one there is already, or a new one."""
        name = f"{kind[0]}{len(self.declared)}"
        default = {"": value, "min=1": 3, "max=-1": -3}.get(bounds, 1)
        default = default if kind == "param" and dtype != "float32" else value
        parts = [repr(name), f"default={default}", f"dtype={dtype!r}", bounds]
        self.declared.append(Declared(name, f"fg.{kind}({', '.join(filter(None, parts))})", value, kind))
        return name

    def tensor(self, kind: str, like: str = "any") -> str:
        """A captured tensor of that kind: now and then one there is already."""
        c = self.choices
        of_kind = {"int": INTEGERS, "float": FLOATS, "bool": ("bool",)}[kind]
        known = [n for n, (dtype, _, values) in self.tensors.items() if dtype in of_kind and values == like]
        if known and c.one_in(2):
            return c.pick(known)
        dtype = c.pick(of_kind)
        if like == "negative" and dtype == "uint8":
            dtype = "int32"
        dims = c.pick(
            (
                *(("kv",), ("q",), ("batch", "kv"), (None,), ("heads",), ("batch",), ("kv_heads",), (5,)),
                *((None, None), ("batch", "q"), ("heads", None), ("batch", "heads"), ("q", "kv")),
            )
        )
        shape = tuple(self.extent(dim) for dim in dims)
        values, promises = self.values(dtype, shape, like)
        name = f"t{len(self.declared)}"
        call = f"fg.tensor({', '.join([repr(name), repr(dims), repr(dtype), *promises])})"
        self.declared.append(Declared(name, call, values, "tensor"))
        self.tensors[name] = dtype, dims, like
        return name

    def extent(self, dim) -> int:
        c = self.choices
        if isinstance(dim, int):
            return dim
        if dim is None:
            return c.integer(1, 9)
        size = self.sizes.get(dim, self.sizes.get(f"{dim}_len"))
        return 1 if c.one_in(6) else size

    def values(self, dtype: str, shape: tuple[int, ...], like: str) -> tuple[np.ndarray, list[str]]:
        """Data, and promises that hold of it."""
        c, rng = self.choices, self.data
        if dtype == "bool":
            return rng.random(shape) < 0.4, []
        if dtype in FLOATS:
            values = np.round(rng.normal(size=shape) * 8) / 8
            values = np.clip(values, -3, 3).astype(np.float32)
            if like != "calm":
                if c.one_in(3):
                    special = rng.choice(np.array([np.nan, np.inf, -np.inf, 0, -0.0, 1e30, 60000.0]), shape)
                    values = np.where(rng.random(shape) < 0.3, special, values).astype(np.float32)
                if dtype == "bfloat16":
                    values = (values.view(np.uint32) & 0xFFFF0000).view(np.float32)
            values = np.clip(values, -6e4, 6e4).astype(np.float16) if dtype == "float16" and like != "calm" else values
        else:
            low, high = {"positive": (1, 5), "negative": (-5, -1)}.get(like, (-3, 9))
            low = max(low, 0) if dtype == "uint8" else low
            values = rng.integers(low, high + 1, shape)
            if c.one_in(4):
                edges = np.array(EDGES[dtype], np.int64)
                edges = edges[edges > 0] if like == "positive" else edges[edges < 0] if like == "negative" else edges
                values = np.where(rng.random(shape) < 0.25, rng.choice(edges, shape), values)
            values = values.astype(dtype)
        return self.promised(values, like)

    def promised(self, values: np.ndarray, like: str) -> tuple[np.ndarray, list[str]]:
        c = self.choices
        promises = {"positive": ["min=1"], "negative": ["max=-1"]}.get(like, [])
        if not np.isnan(values).any() and np.isfinite(values).all():
            if c.one_in(3):
                values, promises = np.sort(values, axis=-1), [*promises, "sorted=True"]
            if not promises and c.one_in(3):
                slack = c.pick((0, 1))
                low, high = values.min().item(), values.max().item()
                if isinstance(low, int):
                    info = np.iinfo(values.dtype)
                    low, high = max(low - slack, info.min), min(high + slack, info.max)
                promises = c.pick(([f"min={low}"], [f"max={high}"], [f"min={low}", f"max={high}"]))
        return values, promises

    def load(self, kind: str, like: str = "any") -> str:
        return self.read(self.tensor(kind, like), 1)

    def read(self, name: str, depth: int) -> str:
        """An element: at the position that its dimension is of, or at any index."""
        index = [self.index(name, axis, dim, depth) for axis, dim in enumerate(self.tensors[name][1])]
        return name + (f"[{', '.join(index)}]" if self.choices.integer(0, 3) else "".join(f"[{i}]" for i in index))

    def index(self, name: str, axis: int, dim, depth: int) -> str:
        c = self.choices
        if isinstance(dim, str) and not c.one_in(3):
            other = dim in ("q", "kv") and self.profile.outside and c.one_in(2)
            return c.pick(("q", "k")) if other else DIMS[dim]
        inner = self.integer(depth - 1) if depth > 0 else c.pick(("q", "k", "(q - k)", "(q + 1)", "(k // 2)", "h"))
        if self.profile.outside and c.one_in(3):
            return inner
        if c.one_in(4):
            size = f"{name}.size({axis})"
            return f"{inner} % " + (size if isinstance(dim, int) else f"fg.maximum({size}, 1)")
        return f"fg.clamp({inner}, 0, {name}.size({axis}) - 1)"


def with_options(case: Case, **options: object) -> Case:
    return replace(case, options=case.options | options)
