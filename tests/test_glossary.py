"""docs/glossary.md holds the project's words: what it names is used, and what it replaces is not."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "glossary.md").read_text()
TABLES, REPLACED = TEXT.split("## Words that are not used")

#: Where each word must not stand; an attention sink is one, and `read_ratio` of old records is not rewritten.
UNUSED = (
    r"(?<!streaming )(?<!_)multiprocessor",
    r"registers a thread(?! (?:of|may))",
    r"\bseam\b",
    r"\busher",
    r"\bsweepers?\b",
)
UNUSED += (r"\bby_gradient\b", r"\broomy\b", r"\bpaces\b", r"transposed\.sinks|def sinks")


def sources() -> dict[Path, str]:
    folders = {"flashgen": "*.py", "templates": "*.cu*", "specs": "*.py"}
    files = [path for folder, kind in folders.items() for path in (ROOT / folder).rglob(kind)]
    return {path: path.read_text() for path in (*files, ROOT / "README.md")}


def documents() -> dict[Path, str]:
    """Those for people, but for the list of words that are not used."""
    paths = [ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    return {path: path.read_text() for path in paths} | {ROOT / "docs" / "glossary.md": TABLES}


def names() -> list[str]:
    rows = [line.split("|")[1] for line in TABLES.splitlines() if line.startswith("| ")]
    return sorted({name for row in rows for name in re.findall(r"`(\w+)`", row)})


def test_there_is_a_glossary():
    assert len(names()) > 30


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("name", names())
def test_a_name_of_the_glossary_is_used(name):
    aliases = {"tile_q": "TILE_Q", "tile_kv": "TILE_KV"}
    pattern = re.compile(rf"\b({name}|{aliases.get(name, name)})\b")
    assert any(pattern.search(text) for text in sources().values())


@pytest.mark.parametrize("pattern", UNUSED)
def test_a_word_that_another_replaces_is_gone(pattern):
    texts = sources() | documents()
    found = [path.relative_to(ROOT) for path, text in texts.items() if re.search(pattern, text, re.IGNORECASE)]
    assert found == []
