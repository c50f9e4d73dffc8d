"""The documents for people and their generated parts: `python tests/documents.py` writes these, tests compare them.

A generated part stands between `<!-- generated: NAME -->` and `<!-- end -->`; BLOCKS says what makes it.
"""

import re
import sys
from pathlib import Path
from textwrap import dedent, indent

import limits
from cli import flashgen

from flashgen.bench import report
from flashgen.lang import language
from flashgen.lang.load import load_spec, shipped

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

#: What code and tests say of one op: of each file the lines from one mark to another, or the one line with the mark.
SQRT = (
    ("flashgen/lang/ops.py", '_function("sqrt"'),
    ("templates/device/math.cuh", "DEVICE float sqrt_f32("),
    ("flashgen/lang/ranges.py", '@np.errstate(all="ignore")\ndef sqrt(', "low=0.0)"),
    ("templates/device/range.cuh", "DEVICE FloatRange range_sqrt_f32(", "\n}"),
    ("flashgen/lang/derivative_rules.py", '"sqrt": '),
    ("flashgen/lang/functions.py", "def sqrt(", "return"),
    ("flashgen/__init__.py", '*("exp", '),
    ("flashgen/analysis/formula.py", '"sqrt": '),
    ("flashgen/runtime/reference.py", '"sqrt": '),
    ("flashgen/planning/profile.py", "SPECIAL = {"),
    ("tests/test_lang_ops.py", '"sqrt_f32": '),
    ("tests/test_lang_ops.py", "positive = name in "),
    ("tests/test_lang_ranges.py", "FLOAT_UNARY = "),
    ("tests/test_codegen_ranges.py", "APPROXIMATE = "),
    ("tests/test_codegen_printer.py", "APPROXIMATE = "),
    ("tests/test_codegen_printer.py", 'if name in ("log", "log2", "sqrt"', "data ="),
    ("tests/test_reference.py", "fg.sqrt("),
    ("tests/test_analysis_derivative.py", "fg.sqrt("),
    ("tests/fuzz/grammar.py", "'sqrt'"),
    ("tests/fuzz/evaluator.py", "sqrt=function("),
)

#: The same of an op that works on integers too, where that is not said in the same way.
ABS = (
    ("flashgen/lang/ops.py", "def _op(", ") -> Op:"),
    ("flashgen/lang/ops.py", '_op(\n        "abs",', "\n    )"),
    ("flashgen/lang/ops.py", "def _text(", "return"),
    ("templates/device/range.cuh", "DEVICE Range<T> range_abs(", "\n}"),
    ("templates/device/range.cuh", "DEVICE Range<i64> range_abs_i64(", "\n}"),
    ("templates/device/range.cuh", "DEVICE FloatRange range_abs_f32(", "\n}"),
    ("flashgen/codegen/printer.py", "CHECKED: "),
    ("flashgen/codegen/printer.py", "_WRAPPING = {", "\n}"),
)

#: A test of a shipped spec that reads a captured tensor.
SPEC_TEST = (("tests/test_specs.py", "def test_prefix_and_padding(", "lengths[b]))"),)


def op_sqrt() -> str:
    return fenced("text", excerpts(SQRT))


def op_abs() -> str:
    return fenced("text", excerpts(ABS))


def spec_test() -> str:
    return fenced("text", excerpts(SPEC_TEST))


def specs() -> str:
    """A table of the shipped specs: name and docstring."""
    rows = [(name, load_spec(path).doc.replace("|", "\\|")) for name, path in sorted(shipped().items())]
    return (
        "\n".join(["| spec | what it says of itself |", "|---|---|", *(f"| `{n}` | {doc} |" for n, doc in rows)]) + "\n"
    )


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


def on_data() -> str:
    return report.on_data(RECORDS)


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
    "op_sqrt": op_sqrt,
    "op_abs": op_abs,
    "spec_test": spec_test,
    "specs": specs,
    "language": language.markdown,
    "measured": measured,
    "measured_forward": measured_forward,
    "on_data": on_data,
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


def excerpts(places: tuple[tuple[str, ...], ...]) -> str:
    """Whole lines of files under the files' names: from the line where the first mark begins to the end of the line
    where the last one ends."""
    found = []
    for path, first, *last in places:
        text = (ROOT / path).read_text()
        mark = text.index(first)
        end = mark + len(first)
        if last:
            end = text.index(last[0], end) + len(last[0])
        lines = text[text.rindex("\n", 0, mark) + 1 : text.index("\n", end)]
        heading = [path] if path not in found else []
        found += [*heading, indent(dedent(lines), "    ")]
    return "\n".join(found) + "\n"


if __name__ == "__main__":
    for document in DOCUMENTS.values():
        document.write_text(written(document.read_text()))
    sys.exit()
