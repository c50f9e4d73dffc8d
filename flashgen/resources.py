"""Where the files that are not Python lie: templates and shipped specs."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path


@lru_cache
def folder(name: str) -> Path:
    """The folder "templates" or "specs": beside the package in a checkout, inside it in an installed wheel.

    Raises FileNotFoundError when it is in neither place.
    """
    package = Path(__file__).resolve().parent
    places = (package / "_resources" / name, package.parent / name)
    for place in places:
        if place.is_dir():
            return place
    raise FileNotFoundError(f"flashgen's {name} are in none of {', '.join(map(str, places))}: reinstall the package")
