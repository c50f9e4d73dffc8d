"""How the parts of a mask are decided, for `plan` and `show`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flashgen.lang.variant import Variant

#: Longer conditions are named by their lines.
_MOST = 100


def decided(variant: Variant) -> list[tuple[str, str]]:
    """Each condition of a mask as a person writes it, and which way it is decided."""
    from flashgen.analysis import ways
    from flashgen.codegen.printer import Formula

    found = []
    for part in ways.parts(variant):
        text, where = Formula().inline(part.condition, _MOST), part.condition.where
        if text is None:
            text = f"{where.path}:{where.line}" if where else "a condition"
        found.append((text, str(part)))
    return found
