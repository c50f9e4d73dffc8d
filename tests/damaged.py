"""Damage to a JSON file that every reader of one must say, whatever the file holds; a reader adds its own."""

import re
from pathlib import Path

#: (change of a file's text, what is said of it)
ANY_JSON = [
    (lambda text: text[:-20], "it is not JSON: Expecting"),
    (lambda text: "", "it is not JSON: Expecting"),
    (lambda text: f'"{chr(0xDCFF)}"', "it is not text"),
    (lambda text: "[" * 200_000, "it is nested too deeply"),
    (lambda text: '{"a":' * 200_000, "it is nested too deeply"),
    (lambda text: "[]", "it is [], and must be an object"),
    (lambda text: "{}", "it lacks '"),
    (lambda text: text.replace("{", '{"twice": 1, "twice": 1, ', 1), "'twice' stands twice"),
    (lambda text: re.sub(r"\d+\.\d+", "NaN", text, count=1), "it holds NaN, which is no finite number"),
    (lambda text: re.sub(r"\d+\.\d+", "1e999", text, count=1), "it holds 1e999, which is no finite number"),
]


def change(path: Path, damage) -> None:
    """Damage a file in place."""
    whole = path.read_text()
    assert damage(whole) != whole
    path.write_text(damage(whole), errors="surrogateescape")
