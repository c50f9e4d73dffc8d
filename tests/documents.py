"""The documents for people and their generated parts: `python tests/documents.py` writes these, tests compare them.

A generated part stands between `<!-- generated: NAME -->` and `<!-- end -->`; BLOCKS says what makes it.
"""

import re
import sys
from pathlib import Path

import limits
from cli import flashgen

from flashgen.bench import report
from flashgen.lang import language

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "generated" / "bench"
README = ROOT / "README.md"

#: Every document by its path from the root; the changelog is history, which nothing keeps up to date.
DOCUMENTS = {
    path.relative_to(ROOT).as_posix(): path
    for path in (README, ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
}

#: A block of a document, from its marker to the end marker.
BLOCK = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)

PLAN = ("plan", "specs/sliding_window.py", "--seqlen", "8192", "--arch", "sm_80")
SHOW = ("show", *PLAN[1:2], "--param", "window=300", "--seqlen", "1024", "--arch", "sm_80", "--tile", "64x64")

PROGRAM = ("--program", "--seqlen", "8192", "--arch")
FORWARD_PROGRAM = ("show", "causal", *PROGRAM, "sm_90a")
BACKWARD_PROGRAM = ("show", "document", *PROGRAM, "sm_90a", "--backward")
AMPERE_PROGRAM = ("show", "causal", *PROGRAM, "sm_80")


def spec() -> str:
    return fenced("python", (ROOT / "specs" / "sliding_window.py").read_text())


def plan() -> str:
    return fenced("text", output(PLAN))


def predicted() -> str:
    """Of `plan` what a first reader wants: which kernel, its tiles, its traffic and its time."""
    head, *sections = output(PLAN).split("\n\n")
    wanted = [s for s in sections if s.startswith(("plan\n", "tiles\n", "HBM traffic\n", "time on "))]
    assert len(wanted) == 4
    return fenced("text", "\n\n".join([head, *wanted]).rstrip() + "\n")


def refusal() -> str:
    arguments = ("plan", "full", "--head-dim", "512", "--arch", "sm_80")
    said = flashgen(*arguments, code=2).err
    return fenced("text", "\n".join([f"$ flashgen {' '.join(arguments)}", said.rstrip()]) + "\n")


def show() -> str:
    return fenced("text", output(SHOW))


def program_forward() -> str:
    return fenced("text", output(FORWARD_PROGRAM))


def program_backward() -> str:
    return fenced("text", output(BACKWARD_PROGRAM))


def program_ampere() -> str:
    return fenced("text", output(AMPERE_PROGRAM))


def cuda() -> str:
    """The mask, the class of a tile, and the main loop."""
    text = (ROOT / "generated" / "sm_80" / "forward" / "sliding_window.cu").read_text()
    mask = between(text, "DEVICE bool keep(", "\n// ")
    tile_class = between(text, "DEVICE TileClass classify(", "\n// ")
    loop = between(text, "#pragma unroll 1\n", "  store(shared,")
    return fenced("cuda", "\n\n".join([mask.rstrip(), tile_class.rstrip(), "// ...", loop.rstrip()]) + "\n")


def measured() -> str:
    return report.markdown(list(report.read(RECORDS)))


def measured_forward() -> str:
    """The table of the README: the Hopper forward."""
    return report.markdown(
        [record for record in report.read(RECORDS) if (record.pass_name, record.pipeline) == ("forward", "hopper")]
    )


def counters() -> str:
    return report.counted(RECORDS) + "\n"


def slower() -> str:
    """Of the Hopper forward at 8,192 tokens: float16 beside bfloat16, and head_dim 96 beside 128, per FLOP."""
    [record] = [r for r in report.read(RECORDS) if (r.pass_name, r.pipeline) == ("forward", "hopper")]
    speed = {
        (c.problem.head_dim, c.specs, c.problem.dtype): row
        for c, row in record.cells
        if c.problem.q_len == c.problem.kv_len == 8192 and c.problem.group == 1 and not c.params
    }
    lines = ["| | full | causal |", "|---|---|---|"]
    for dim in (64, 128, 256):
        pair = [1 / speed[dim, specs, "float16"]["ratio"]["bfloat16"][0] for specs in report.MAIN]
        lines.append(f"| float16 over bfloat16, head_dim {dim} | {pair[0]:.2f} | {pair[1]:.2f} |")
    narrow, wide = ([speed[dim, specs, "bfloat16"]["tflops"]["flashgen"] for specs in report.MAIN] for dim in (96, 128))
    pair = [a / b for a, b in zip(narrow, wide, strict=True)]
    lines.append(f"| head_dim 96 over head_dim 128, per FLOP | {pair[0]:.2f} | {pair[1]:.2f} |")
    return "\n".join(lines) + "\n"


BLOCKS = {
    "spec": spec,
    "plan": plan,
    "predicted": predicted,
    "refusal": refusal,
    "show": show,
    "program_forward": program_forward,
    "program_backward": program_backward,
    "program_ampere": program_ampere,
    "cuda": cuda,
    "language": language.markdown,
    "measured": measured,
    "measured_forward": measured_forward,
    "counters": counters,
    "slower": slower,
    "architectures": limits.architectures,
    "served_forward": limits.forward,
    "served_backward": limits.backward,
}


def written(text: str) -> str:
    """A document with its generated parts made anew."""
    return BLOCK.sub(lambda match: f"{match[1]}{BLOCKS[match[2]]()}{match[3]}", text)


def blocks(text: str, marker: str) -> list[str]:
    """The fenced blocks of a document that follow a marker."""
    return re.findall(rf"<!-- {marker} -->\n```\w*\n(.*?)```", text, re.DOTALL)


def output(arguments: tuple[str, ...]) -> str:
    """A command and what it prints."""
    lines = [line.rstrip() for line in flashgen(*arguments).out.splitlines()]
    return "\n".join([f"$ flashgen {' '.join(arguments)}", *lines]) + "\n"


def fenced(language: str, text: str) -> str:
    return f"```{language}\n{text}```\n"


def between(text: str, first: str, last: str) -> str:
    """The part of the text that starts with `first` and ends before `last`."""
    start = text.index(first)
    return text[start : text.index(last, start)]


if __name__ == "__main__":
    for document in DOCUMENTS.values():
        document.write_text(written(document.read_text()))
    sys.exit()
