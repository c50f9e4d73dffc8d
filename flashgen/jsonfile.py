"""JSON that people and other programs may have written: read as data, or refused with the reason."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, TypeVar

from flashgen.errors import shown

T = TypeVar("T")


def read(path: Path) -> object:
    """What a JSON file holds, in which every number is finite and no name stands twice in one object.

    Raises ValueError with what is wrong with it, and OSError where it cannot be read.
    """
    try:
        return json.loads(path.read_bytes(), parse_float=_finite, parse_constant=_finite, object_pairs_hook=_object)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except UnicodeDecodeError:
        raise ValueError("it is not text") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON: {error}") from None


def checked(value: object, kind: type[T] | tuple[type[T], ...], what: str) -> T:
    """A value of the data if it is of a kind, else ValueError; True and False are no numbers."""
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise ValueError(f"{what} is {shown(value)}, and must be {' or '.join(_WORDS[one] for one in kinds)}")
    return value


def member(data: dict[str, Any], name: str, kind: type[T] | tuple[type[T], ...]) -> T:
    """A member of an object of the data if it is there and of a kind, else ValueError."""
    if name not in data:
        raise ValueError(f"it lacks {name!r}")
    return checked(data[name], kind, repr(name))


_WORDS = {
    dict: "an object",
    list: "a list",
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
}


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"it holds {text[:40]}, which is no finite number")
    return value


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice!r} stands twice in one object")
    return found
