"""What templates write of rows of keys, of which the scores of pipeline hopper read two elements at a time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from flashgen.codegen.params import STORED
from flashgen.codegen.printer import Printer
from flashgen.codegen.readers import WIDENED, Reader
from flashgen.lang.expr import Node
from flashgen.planning.backward import lookup_names
from flashgen.planning.problem import STORED_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCode:
    """A captured element that a score is given by its `name`.

    `place` is the body of a function that says where it lies, of C++ type `ctype`; `words` of 32 bits hold two of them.
    In `dimension` the key is its index, which lies inside up to `end`.
    """

    name: str
    tensor: str
    ctype: str
    words: int
    dimension: int
    end: str
    place: tuple[str, ...]
    widened: str

    @property
    def form(self) -> str:
        """What ends the names of functions that read it: bits, or floats."""
        return "b16" if self.words == 1 else "f32"

    @property
    def element(self) -> str:
        """That of element i of S, as expressions see it."""
        return self.widened.format(f"element_of_{self.form}({self.name}[i / 2 % 2][i / 4], i % 2)")


def row_code(loads: tuple[Node, ...], reading: Iterable[Reader], *, wide: frozenset[Node]) -> dict[Node, RowCode]:
    """The code of each of the elements that lie in rows of keys."""
    readers = {reader.name: reader for reader in reading}
    names = lookup_names(loads)
    return {n: _row(n, name, readers[n.attr.name], Printer(wide=wide)) for n, name in zip(loads, names, strict=True)}


def _row(n: Node, name: str, reader: Reader, printer: Printer) -> RowCode:
    tensor, body = n.attr, printer.body(*n.operands)
    dimension = next(i for i, index in enumerate(n.operands) if index.op == "index" and index.attr == "k")
    typed = enumerate(zip(reader.indices, n.operands, strict=True))
    indices = (f"{ctype} i{i} = {body.known[o]};" for i, (ctype, o) in typed)
    return RowCode(
        name=name,
        tensor=tensor.name,
        ctype=STORED[tensor.dtype],
        words=STORED_BYTES[tensor.dtype] // 2,
        dimension=dimension,
        end=f"p.size{dimension}_{tensor.name}" if dimension in reader.clamped else "p.kv_len",
        place=(*body.declarations, *indices, *reader.lines, f"return &p.tensor_{tensor.name}[{reader.offset}];"),
        widened=WIDENED.get(tensor.dtype, "{}"),
    )
