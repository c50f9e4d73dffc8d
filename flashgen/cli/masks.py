"""How the parts of a mask are decided, for `plan` and `show`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flashgen.analysis.ways import Part
    from flashgen.lang.variant import Variant

#: Longer conditions are named by their lines.
_MOST = 100


def decided(variant: Variant) -> list[dict[str, str]]:
    """Each condition of a mask as a person writes it, and which way it is decided."""
    return [{"condition": _written(part), "way": str(part)} for part in _parts(variant)]


def told(variant: Variant) -> list[str]:
    """The same as lines of text, where not all is in closed form."""
    parts = _parts(variant)
    return [] if all(part.way == "bounds" for part in parts) else [f"{_written(part)}: {part}" for part in parts]


def _parts(variant: Variant) -> tuple[Part, ...]:
    from flashgen.analysis import ways

    return ways.parts(variant)


def _written(part: Part) -> str:
    from flashgen.codegen.printer import Formula

    text, where = Formula().inline(part.condition, _MOST), part.condition.where
    return text or (f"{where.path}:{where.line}" if where else "a condition")
