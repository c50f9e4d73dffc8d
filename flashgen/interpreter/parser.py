"""PTX text to instructions: the directives and operand forms that NVRTC writes, and inline assembly in their midst."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NamedTuple

from flashgen.interpreter.errors import PtxSyntaxError


@dataclass(frozen=True, slots=True)
class Reg:
    """A virtual or special register; `type` is the declared PTX type ("" for special registers)."""

    name: str
    type: str


@dataclass(frozen=True, slots=True)
class Imm:
    """An immediate: kind "int" holds a value, "f32" and "f64" a bit pattern."""

    value: int
    kind: str = "int"


@dataclass(frozen=True, slots=True)
class Sym:
    """The address of a declared variable or parameter, or a label."""

    name: str
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Mem:
    """A bracketed address, `coords` for the tensor form `[map, {c0, c1}]`."""

    base: Reg | Sym | Imm
    offset: int = 0
    coords: tuple[Operand, ...] = ()


@dataclass(frozen=True, slots=True)
class Vec:
    """A braced list of operands."""

    items: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """Two destinations written `a|b`."""

    first: Operand
    second: Operand


@dataclass(frozen=True, slots=True)
class Not:
    """A negated predicate operand."""

    reg: Reg


@dataclass(frozen=True, slots=True)
class Sink:
    """The operand `_`."""


Operand = Reg | Imm | Sym | Mem | Vec | Pair | Not | Sink


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction: `parts` is the opcode split at its dots."""

    line: int
    text: str
    parts: tuple[str, ...]
    operands: tuple[Operand, ...]
    guard: Reg | None = None
    guard_negated: bool = False

    @property
    def opcode(self) -> str:
        return ".".join(self.parts)


@dataclass(frozen=True, slots=True)
class Label:
    name: str


@dataclass(frozen=True, slots=True)
class Probe:
    """A comment `// probe: name %r1 %r2` that inline assembly put into the text: recorded, never executed on a GPU."""

    line: int
    name: str
    operands: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Variable:
    """A declared variable of some state space; `data` holds the initialiser of a module-scope one."""

    name: str
    space: str
    size: int
    align: int
    data: bytes = b""


@dataclass(slots=True)
class Entry:
    """A kernel: parameters in order, its instructions and labels, its registers and variables."""

    name: str
    params: list[Variable]
    body: list[Instruction | Label | Probe] = field(default_factory=list)
    registers: dict[str, str] = field(default_factory=dict)
    variables: list[Variable] = field(default_factory=list)
    limits: dict[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(slots=True)
class Source:
    """A parsed module."""

    target: str
    variables: list[Variable]
    entries: dict[str, Entry]


_TOKEN = re.compile(
    r"""(?P<string>"[^"]*")
      | (?P<number>0[fF][0-9a-fA-F]{8}\b|0[dD][0-9a-fA-F]{16}\b|0[xX][0-9a-fA-F]+U?|\d+\.\d+(?:[eE][-+]?\d+)?|\d+U?)
      | (?P<word>[%$._A-Za-z][\w$.%]*(?:::[\w.]+)*)
      | (?P<mark>[{}\[\](),;:+\-|!@<>=])
      | (?P<other>\S)""",
    re.X,
)
_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.S)
_PROBE = re.compile(r"//\s*probe:\s*(.*)")
_SPACES = (".global", ".const", ".shared", ".local", ".param")
_SIZES = {"8": 1, "16": 2, "32": 4, "64": 8, "128": 16}
_LIMITS = (
    ".maxntid",
    ".reqntid",
    ".minnctapersm",
    ".maxnreg",
    ".reqnctapercluster",
    ".maxclusterrank",
    ".explicitcluster",
)


def _strip(match: re.Match[str]) -> str:
    """Blank a comment, keeping its lines; a probe becomes a statement of its own."""
    probe = _PROBE.match(match[0])
    return f".probe {probe[1]};" if probe else "\n" * match[0].count("\n") or " "


class _Token(NamedTuple):
    kind: str | None
    text: str
    line: int


def _tokens(text: str) -> list[_Token]:
    out = []
    for number, line in enumerate(_COMMENT.sub(_strip, text).split("\n"), 1):
        for match in _TOKEN.finditer(line):
            if match.lastgroup == "other":
                at = match.start()
                raise PtxSyntaxError(f"cannot read {line[at : at + 20]!r}", line=number, text=line.strip())
            out.append(_Token(match.lastgroup, match[0], number))
    return out


class _Parser:
    def __init__(self, text: str) -> None:
        self.lines = text.split("\n")
        self.tokens = _tokens(text)
        self.texts = [*(token.text for token in self.tokens), "", ""]  # `peek` looks one ahead
        self.at = 0
        self.source = Source("", [], {})
        self.scopes: list[dict[str, Reg]] = []
        self.scope_count = 0
        self.label_scopes: list[tuple[int, set[str]]] = []

    # ------------------------------------------------------------------ tokens
    def peek(self, ahead: int = 0) -> str:
        return self.texts[self.at + ahead]

    @property
    def line(self) -> int:
        return self.tokens[min(self.at, len(self.tokens) - 1)].line if self.tokens else 0

    def fail(self, message: str) -> PtxSyntaxError:
        line = self.line
        return PtxSyntaxError(message, line=line, text=self.lines[line - 1].strip() if line else "")

    @property
    def token(self) -> _Token:
        if self.at >= len(self.tokens):
            raise self.fail("the text ends within a statement")
        return self.tokens[self.at]

    def next(self) -> _Token:
        token = self.token
        self.at += 1
        return token

    def accept(self, *texts: str) -> str:
        text = self.texts[self.at]
        if text not in texts:
            return ""
        self.at += 1
        return text

    def expect(self, text: str) -> None:
        if not self.accept(text):
            raise self.fail(f"expected {text!r}, found {self.peek()!r}")

    def integer(self) -> int:
        sign = -1 if self.accept("-") else 1
        token = self.next()
        if token.kind != "number":
            raise self.fail(f"expected a number, found {token.text!r}")
        return sign * int(token.text.rstrip("U"), 0)

    # ------------------------------------------------------------------ module
    def module(self) -> Source:
        while self.at < len(self.tokens):
            word = self.peek()
            if word == ".version":
                self.rest_of_line()
            elif word == ".target":
                self.next()
                self.source.target = self.next().text
                while self.accept(","):
                    self.next()
            elif word == ".address_size":
                self.next()
                if self.integer() != 64:
                    raise self.fail("only 64-bit addresses are modelled")
            elif word in (".visible", ".extern", ".weak", ".entry", *_SPACES):
                self.declaration()
            elif word == ".file":
                self.rest_of_line()
            elif word == ".section":
                self.section()
            elif word == ".pragma":
                self.statement_end()
            else:
                raise self.fail(f"{word!r} is not modelled at module scope")
        return self.source

    def rest_of_line(self) -> None:
        line = self.line
        while self.at < len(self.tokens) and self.line == line:
            self.next()

    def statement_end(self) -> None:
        while self.next().text != ";":
            pass

    def section(self) -> None:
        while self.next().text != "{":
            pass
        while self.next().text != "}":
            pass

    def declaration(self) -> None:
        while self.accept(".visible", ".extern", ".weak"):
            pass
        if self.peek() == ".entry":
            self.entry()
        elif self.peek() in _SPACES:
            self.source.variables.append(self.variable())
            self.expect(";")
        else:
            raise self.fail(f"{self.peek()!r} is not modelled at module scope")

    def variable(self) -> Variable:
        """`.space .align n .type name[size] = {...}` up to, not including, what follows."""
        space = self.next().text[1:]
        align, kind = 0, ""
        while self.peek().startswith("."):
            word = self.next().text
            if word == ".align":
                align = self.integer()
            elif word == ".ptr":
                while self.accept(".global", ".shared", ".const", ".local", ".align"):
                    if self.token.kind == "number":
                        self.integer()
            else:
                kind = word[1:]
        if kind[1:] not in _SIZES and kind[1:] != "":
            raise self.fail(f"a variable of type {kind!r} is not modelled")
        element = _SIZES[kind[1:]]
        name = self.next().text
        count = 1
        while self.accept("["):
            count *= 0 if self.peek() == "]" else self.integer()
            self.expect("]")
        data = b""
        if self.accept("="):
            data = self.initialiser(element)
        return Variable(name, space, count * element, align or element, data)

    def initialiser(self, element: int) -> bytes:
        def one() -> bytes:
            token = self.peek()
            if token[:2].lower() in ("0f", "0d") and self.token.kind == "number":
                self.next()
                return int(token[2:], 16).to_bytes(element, "little")
            value = self.integer()
            return (value & (1 << 8 * element) - 1).to_bytes(element, "little")

        if not self.accept("{"):
            return one()
        out = b"" if self.peek() == "}" else one()
        while self.accept(","):
            out += one()
        self.expect("}")
        return out

    def entry(self) -> None:
        self.expect(".entry")
        entry = Entry(self.next().text, [])
        if self.accept("("):
            while not self.accept(")"):
                entry.params.append(self.variable())
                self.accept(",")
        while (word := self.peek()) != "{":
            if word not in _LIMITS:
                raise self.fail(f"{word!r} is not modelled on an entry")
            self.next()
            values = []
            if word != ".explicitcluster":
                values.append(self.integer())
                while self.accept(","):
                    values.append(self.integer())
            entry.limits[word[1:]] = tuple(values)
        self.next()
        self.body(entry)
        self.source.entries[entry.name] = entry

    # ------------------------------------------------------------------ bodies
    def body(self, entry: Entry) -> None:
        depth = 1
        self.scopes = [{}]
        self.label_scopes = [(self.new_scope(), self.labels_ahead())]
        while depth:
            word = self.peek()
            if word == "{":
                self.next()
                depth += 1
                self.scopes.append({})
                self.label_scopes.append((self.new_scope(), self.labels_ahead()))
            elif word == "}":
                self.next()
                depth -= 1
                self.scopes.pop()
                self.label_scopes.pop()
            elif word == ";":
                self.next()
            elif word == ".reg":
                self.registers(entry)
            elif word in (".shared", ".local", ".param"):
                entry.variables.append(self.variable())
                self.expect(";")
            elif word == ".pragma":
                self.statement_end()
            elif word in (".loc", ".file"):
                self.rest_of_line()
            elif word == ".probe":
                line = self.next().line
                name = self.next().text
                operands = []
                while not self.accept(";"):
                    operands.append(self.operand())
                    self.accept(",")
                entry.body.append(Probe(line, name, tuple(operands)))
            elif self.peek(1) == ":":
                entry.body.append(Label(self.label(self.next().text)))
                self.next()
            else:
                entry.body.append(self.instruction())

    def new_scope(self) -> int:
        self.scope_count += 1
        return self.scope_count

    def labels_ahead(self) -> set[str]:
        """Labels of the scope that starts here (not those of scopes within it)."""
        depth, found, at = 0, set(), self.at
        while depth >= 0 and at < len(self.tokens):
            text = self.texts[at]
            if text == "{":
                depth += 1
            elif text == "}":
                depth -= 1
            elif text == ":" and depth == 0 and self.tokens[at - 1].kind == "word":
                found.add(self.tokens[at - 1].text)
            at += 1
        return found

    def label(self, name: str) -> str:
        for scope, names in reversed(self.label_scopes):
            if name in names:
                return f"{name}@{scope}"
        raise self.fail(f"no label {name}")

    def registers(self, entry: Entry) -> None:
        self.expect(".reg")
        kind = self.next().text[1:]
        while True:
            name = self.next().text
            if self.accept("<"):
                for i in range(self.integer()):
                    self.declare(entry, f"{name}{i}", kind)
                self.expect(">")
            else:
                self.declare(entry, name, kind)
            if not self.accept(","):
                break
        self.expect(";")

    def declare(self, entry: Entry, name: str, kind: str) -> None:
        unique = name
        if len(self.scopes) > 1:
            unique = f"{name}@{self.label_scopes[-1][0]}"
        self.scopes[-1][name] = Reg(unique, kind)
        entry.registers[unique] = kind

    def instruction(self) -> Instruction:
        line, guard, negated = self.line, None, False
        if self.accept("@"):
            negated = bool(self.accept("!"))
            operand = self.operand()
            if not isinstance(operand, Reg):
                raise self.fail("a guard must be a predicate register")
            guard = operand
        start = self.at
        token = self.next()
        if token.kind != "word" or token.text.startswith((".", "%")):
            raise self.fail(f"{token.text!r} is no instruction")
        operands: list[Operand] = []
        branch = token.text.split(".")[0] in ("bra", "call", "brx")
        while not self.accept(";"):
            if branch and self.token.kind == "word" and not self.peek().startswith("%"):
                name = self.next().text
                operands.append(Sym(self.label(name)))
            else:
                operands.append(self.operand())
            if not self.accept(",") and self.token.text != ";":
                raise self.fail(f"expected ',' or ';', found {self.peek()!r}")
        text = self.lines[line - 1].strip() if self.tokens[start].line == line else token.text
        return Instruction(line, text, tuple(token.text.split(".")), tuple(operands), guard, negated)

    def operand(self) -> Operand:
        first = self.single()
        if self.accept("|"):
            return Pair(first, self.single())
        return first

    def single(self) -> Operand:
        token = self.token
        if token.kind == "number" or token.text == "-":
            return self.immediate()
        if token.kind != "word":
            return self.marked()
        self.at += 1
        if token.text == "_":
            return Sink()
        for scope in reversed(self.scopes):
            if token.text in scope:
                return scope[token.text]
        if token.text.startswith("%"):
            return Reg(token.text, "")
        offset = 0
        if self.peek() in ("+", "-"):
            offset = self.integer() if self.peek() == "-" else (self.next(), self.integer())[1]
        return Sym(token.text, offset)

    def marked(self) -> Operand:
        """An operand that begins with a mark."""
        if self.accept("!"):
            reg = self.single()
            if not isinstance(reg, Reg):
                raise self.fail("'!' needs a predicate register")
            return Not(reg)
        if self.accept("{"):
            items = []
            while not self.accept("}"):
                items.append(self.operand())
                self.accept(",")
            return Vec(tuple(items))
        if self.accept("["):
            return self.memory()
        raise self.fail(f"{self.peek()!r} is no operand")

    def immediate(self) -> Imm:
        sign = -1 if self.accept("-") else 1
        text = self.next().text
        if text[:2] in ("0f", "0F"):
            return Imm(int(text[2:], 16), "f32")
        if text[:2] in ("0d", "0D"):
            return Imm(int(text[2:], 16), "f64")
        if "." in text:
            raise self.fail("a decimal floating-point immediate is not modelled")
        return Imm(sign * int(text.rstrip("U"), 0))

    def memory(self) -> Mem:
        base = self.single()
        offset, coords = 0, ()
        if isinstance(base, Sym):
            base, offset = Sym(base.name), base.offset
        if self.peek() in ("+", "-"):
            offset = self.integer() if self.peek() == "-" else (self.next(), self.integer())[1]
        if self.accept(","):
            vector = self.single()
            if not isinstance(vector, Vec):
                raise self.fail("tensor coordinates must stand in braces")
            coords = vector.items
        self.expect("]")
        if not isinstance(base, Reg | Sym | Imm):
            raise self.fail("an address must be a register, a variable or a number")
        return Mem(base, offset, coords)


def parse(text: str) -> Source:
    """Parse a PTX module.  Raises PtxSyntaxError with the line."""
    parser = _Parser(text)
    source = parser.module()
    if not source.target:
        raise PtxSyntaxError("the text has no .target: this is not PTX")
    return source
