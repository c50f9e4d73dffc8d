"""The generated parts of the README: `python tests/readme_blocks.py` writes them, tests/test_readme.py compares."""

import re
import sys
from pathlib import Path

from cli import flashgen

from flashgen.bench import report
from flashgen.lang import language

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "generated" / "bench"
README = ROOT / "README.md"

#: A block of the README, from its marker to the end marker.
BLOCK = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)

PLAN = ("plan", "specs/sliding_window.py", "--seqlen", "8192", "--arch", "sm_80")
SHOW = ("show", *PLAN[1:2], "--param", "window=300", "--seqlen", "1024", "--arch", "sm_80", "--tile", "64x64")


def spec() -> str:
    return fenced("python", (ROOT / "specs" / "sliding_window.py").read_text())


def plan() -> str:
    return output(PLAN)


def show() -> str:
    return output(SHOW)


def cuda() -> str:
    """The mask, the schedule it gives a Q tile, its tile classes, and the main loop."""
    text = (ROOT / "generated" / "sm_80" / "forward" / "sliding_window.cu").read_text()
    variant = between(text, "DEVICE bool keep(", "// ----")
    loop = between(text, "#pragma unroll 1\n", "  store(shared,")
    return fenced("cuda", f"{variant.rstrip()}\n\n// ...\n\n{loop.rstrip()}\n")


def measured() -> str:
    return report.markdown(list(report.read(RECORDS)))


def counters() -> str:
    return report.counted(RECORDS) + "\n"


BLOCKS = {
    "spec": spec,
    "plan": plan,
    "show": show,
    "cuda": cuda,
    "language": language.markdown,
    "measured": measured,
    "counters": counters,
}


def written(readme: str) -> str:
    """The README with its generated parts made anew."""
    return BLOCK.sub(lambda match: f"{match[1]}{BLOCKS[match[2]]()}{match[3]}", readme)


def output(arguments: tuple[str, ...]) -> str:
    lines = [line.rstrip() for line in flashgen(*arguments).out.splitlines()]
    return fenced("text", "\n".join([f"$ flashgen {' '.join(arguments)}", *lines]) + "\n")


def fenced(language: str, text: str) -> str:
    return f"```{language}\n{text}```\n"


def between(text: str, first: str, last: str) -> str:
    """The part of the text that starts with `first` and ends before `last`."""
    start = text.index(first)
    return text[start : text.index(last, start)]


if __name__ == "__main__":
    README.write_text(written(README.read_text()))
    sys.exit()
