"""The documents for people and their generated parts: `python tests/documents.py` writes these, tests compare them.

A generated part stands between `<!-- generated: NAME -->` and `<!-- end -->`; BLOCKS says what makes it.  Numbers that
the machine decides (times, errors, registers) stay as they were written where nothing else differs: see `shape`.
"""

import json
import re
import sys
from pathlib import Path
from textwrap import dedent, indent
from unittest import mock

import limits
from cli import flashgen

from flashgen.bench import report
from flashgen.bench.inputs import NORMAL
from flashgen.cli.suite import SUITES
from flashgen.lang import language
from flashgen.lang.load import gallery, load_spec, shipped
from flashgen.runtime import driver

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "generated" / "bench"
README = ROOT / "README.md"

#: Every document by its path from the root; the changelog is history, which nothing keeps up to date.
DOCUMENTS = {
    path.relative_to(ROOT).as_posix(): path
    for path in (README, ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
}

#: A block of a document, from its marker to the end marker.
BLOCK = re.compile(r"(<!-- generated: (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)

PLAN = ("plan", "specs/sliding_window.py", "--seqlen", "8192", "--arch", "sm_80")
SHOW = ("show", *PLAN[1:2], "--param", "window=300", "--seqlen", "1024", "--arch", "sm_80", "--tile", "64x64")

CAPTURED_PLAN = ("plan", "specs/document.py", "--batch", "2", "--seqlen", "1024", "--arch", "sm_80", "--tile", "64x64")

#: Masks of the gallery that the README shows: those that most people know and that a line says.
SIX = ("natten", "top_blocks", "strided", "striped", "rotated", "restarts")

#: Lives of the rows of a prompt, as records and as the README name them.
LIVES = {
    "batch 1": "alone in the batch (8,388,608 elements)",
    "chunks of 512": "in chunks of 512 (16,777,216)",
    "decoded": "the last 16, one by one (131,072)",
    "pages of 16": "these from pages of 16 (131,072)",
}

#: How the masks of the gallery are drawn.
GALLERY = ("--seqlen", "1024", "--heads", "1", "--arch", "sm_80", "--tile", "64x64")

#: Commands whose output holds numbers that the machine decides.
RUN = ("run", *PLAN[1:2], "--seqlen", "300", "--head-dim", "64", "--backward", "--device", "cpu", "--arch", "sm_80")
SIMULATE = ("simulate", "causal", "--seqlen", "100", "--heads", "1", "--head-dim", "64", "--arch", "sm_80")
COMPILE = ("compile", *PLAN[1:2], "--head-dim", "64", "--arch", "sm_80", "--fresh")

PROGRAM = ("--program", "--seqlen", "8192", "--arch")
FORWARD_PROGRAM = ("show", "causal", *PROGRAM, "sm_90a")
BACKWARD_PROGRAM = ("show", "document", *PROGRAM, "sm_90a", "--backward")
AMPERE_PROGRAM = ("show", "causal", *PROGRAM, "sm_80")

#: What code and tests say of one op: of each file the lines from one mark to another, or the one line with the mark.
SQRT = (
    ("flashgen/lang/ops.py", "    sqrt_f32(x)  rsqrt_f32(x) "),
    ("flashgen/lang/ops.py", '_function("sqrt"'),
    ("flashgen/lang/ops.py", "def _function(", "cuda=cuda,\n    )"),
    ("templates/device/math.cuh", "DEVICE float sqrt_f32("),
    ("flashgen/lang/ranges.py", '@np.errstate(all="ignore")\ndef sqrt(', "low=0.0)"),
    ("flashgen/lang/ranges.py", "def _approximate(", ") -> Range:"),
    ("templates/device/range.cuh", "DEVICE FloatRange range_sqrt_f32(", "\n}"),
    ("templates/device/range.cuh", "DEVICE FloatRange approximate(", "{"),
    ("flashgen/lang/derivative_rules.py", '"sqrt": '),
    ("flashgen/lang/functions.py", "def sqrt(", "return"),
    ("flashgen/__init__.py", '*("exp", '),
    ("flashgen/analysis/formula.py", '"sqrt": '),
    ("flashgen/runtime/reference.py", '"sqrt": '),
    ("flashgen/planning/profile.py", "SPECIAL = {", "\n}"),
    ("tests/test_lang_ops.py", '"sqrt_f32": '),
    ("tests/test_lang_ops.py", "positive = name in "),
    ("tests/test_lang_ranges.py", "FLOAT_UNARY = "),
    ("tests/test_codegen_ranges.py", "APPROXIMATE = "),
    ("tests/test_codegen_printer.py", "APPROXIMATE = "),
    ("tests/test_codegen_printer.py", 'if name in ("log", "log2"', "data ="),
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

#: The same of a function that other ops make.
CLAMP = (
    ("flashgen/lang/functions.py", "def clamp(", "return x if"),
    ("flashgen/lang/language.py", "def language_table(", "return"),
    ("flashgen/lang/spellings.py", "'clamp', 'where'"),
    ("flashgen/__init__.py", '*("where", "minimum"'),
    ("tests/test_lang_evaluate.py", "fg.clamp(s, 0.5, 1)"),
    ("tests/fuzz/grammar.py", "fg.clamp({x}"),
    ("tests/fuzz/evaluator.py", "def clamp(", "return x if"),
    ("tests/fuzz/evaluator.py", "clamp=clamp,"),
)

#: A test of a shipped spec that reads a captured tensor.
SPEC_TEST = (
    ("tests/test_specs.py", "PROBLEM = Problem("),
    ("tests/test_specs.py", "def test_prefix_and_padding(", "lengths[b]))"),
)


def op_sqrt() -> str:
    return fenced("text", excerpts(SQRT))


def op_abs() -> str:
    return fenced("text", excerpts(ABS))


def op_clamp() -> str:
    return fenced("text", excerpts(CLAMP))


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
    """Of `plan` what a first reader wants: which kernel, its tiles and its traffic."""
    head, *sections = output(PLAN).split("\n\n")
    wanted = [s for s in sections if s.startswith(("plan\n", "tiles\n", "HBM traffic\n"))]
    assert len(wanted) == 3
    more = ("warps ", "blocks per SM ", "chosen by ", "other sizes ")
    wanted[0] = "\n".join(line for line in wanted[0].splitlines() if not line.startswith(more))
    return fenced("text", "\n\n".join([head, *wanted]).rstrip() + "\n")


def plan_captured() -> str:
    """The tiles of a mask that reads a captured tensor."""
    head, *sections = output(CAPTURED_PLAN).split("\n\n")
    [tiles] = [section for section in sections if section.startswith("tiles\n")]
    return fenced("text", f"{head}\n\n{tiles}\n")


def run() -> str:
    return fenced("text", sample(RUN))


def simulate() -> str:
    """Without most of the instructions."""
    lines = sample(SIMULATE).splitlines(keepends=True)
    first = next(i for i, line in enumerate(lines) if line.startswith("instructions of warps")) + 1
    last = next(i for i, line in enumerate(lines) if i > first and line.startswith("all "))
    return fenced("text", "".join([*lines[: first + 4], "...\n", *lines[last:]]))


def compile_() -> str:
    return fenced("text", sample(COMPILE))


def sample(arguments: tuple[str, ...]) -> str:
    """The output of a command as a machine without a GPU gives it."""
    with mock.patch.object(driver, "gpus", lambda: 0):
        return output(arguments)


def refusal() -> str:
    arguments = ("plan", "full", "--head-dim", "512", "--arch", "sm_80")
    said = flashgen(*arguments, code=2).err
    return fenced("text", "\n".join([f"$ flashgen {' '.join(arguments)}", said.rstrip()]) + "\n")


def show() -> str:
    return fenced("text", output(SHOW))


def six() -> str:
    """Masks of real models in a line each."""
    rows = ["| mask | the spec returns |", "|---|---|"]
    for name in SIX:
        file = gallery()[name]
        line = file.read_text().splitlines()[-1].strip().removeprefix("return ").replace("|", "\\|")
        doc = load_spec(file).doc.partition("\n")[0].rstrip(".").replace("|", "\\|")
        rows.append(f"| [{name}]({file.relative_to(ROOT).as_posix()}): {doc} | `{line}` |")
    return "\n".join(rows) + "\n"


def masks() -> str:
    """Of each shipped mask what it says of itself, its code, its picture and how its tiles are judged."""
    found = []
    for name, file in sorted({**shipped(), **gallery()}.items()):
        doc, code = load_spec(file).doc, file.read_text()
        if load_spec(file).bind().mask is None:  # of a score alone every tile is full
            continue
        shown = output(("show", name, *GALLERY)).splitlines(keepends=True)
        first = next(i for i, line in enumerate(shown) if line.startswith("╭"))
        picture = "".join([shown[0], *shown[first:]]).replace(f"{ROOT}/", "")
        # The declarations of what is captured and how an example is made are in the file.
        mask = code[code.index("@fg.variant") :] if "@fg.variant" in code else code[code.index("import") :]
        found.append(f"## {file.stem}\n\n{doc}\n\n{fenced('python', mask)}\n{fenced('text', picture)}")
    return "\n".join(found)


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
    """The table of the README: the Hopper forward on an H200, and at 8,192 tokens over inputs that make peaked rows."""
    lines = [report.markdown([_of_h200()]).rstrip("\n")]
    for mask in ("full", "causal"):
        cells = [c for c in _cells("data", f"d128 {mask} ") if c["dtype"] == "bfloat16" and c["input"] != NORMAL]
        ratios = (report.summary([c["ratio"][peer][0] for c in cells]) for peer in report.BEST)
        lines.append(f"| 128 | {mask}, peaked inputs | {' | '.join(ratios)} |")
    return "\n".join(lines) + "\n"


def eight_bits() -> str:
    """Of each accuracy, full and causal at head_dim 128 and 8,192 tokens: its error and its speed."""
    heads = "RMS error over FlashAttention-3's", "times faster than bfloat16", "than FlashAttention-3"
    lines = [f"| `accuracy` (full, causal) | {' | '.join(heads)} |", "|---|---|---|---|"]
    for part in ("exact", "default", "fast"):
        pair = [c for mask in ("full", "causal") for c in _cells("fp8", f"{part} d128 {mask} s8192 ")]
        errors = [c["about"]["errors"] for c in pair]
        told = [", ".join(f"{e['flashgen']['rms'] / e['fa3']['rms']:.2f}" for e in errors)]
        told += [", ".join(f"{c['ratio'][peer][0]:.2f}" for c in pair) for peer in ("bfloat16", "fa3")]
        lines.append(f'| `"{part}"` | {" | ".join(told)} |')
    return "\n".join(lines) + "\n"


def _cells(record: str, prefix: str) -> list[dict]:
    """The cells of a record of an H200 whose name begins so."""
    cells = json.loads((RECORDS / f"{record}.json").read_text())["cells"]
    return [cell for cell in cells if cell["cell"].startswith(prefix)]


def _of_h200() -> report.Record:
    [found] = [r for r in report.read(RECORDS) if (r.pass_name, r.pipeline, r.card) == ("forward", "hopper", "")]
    return found


def on_data() -> str:
    return report.on_data(RECORDS)


def suites() -> str:
    return report.of_suites(RECORDS, SUITES)


def bits() -> str:
    """How many elements of o have other bits than those of a prompt at once, by the life of their rows."""
    default, invariant = (cell["about"] for cell in _cells("serving", "") if cell["part"] == "bits")
    shown = {"`invariant=True`": (invariant, ""), "default": (default, ""), "FlashAttention-3": (default, "fa3 ")}
    shown = {name: (of, peer) for name, (of, peer) in shown.items() if f"{peer}decoded" in of["other bits"]}
    lines = [f"| | {' | '.join(shown)} |", "|---|" + "---|" * len(shown)]
    for life, told in LIVES.items():
        counts = (of["other bits"][f"{peer}{life}"] for of, peer in shown.values())
        lines.append(f"| {told} | {' | '.join(f'{count:,}' for count in counts)} |")
    return "\n".join(lines) + "\n"


def counters() -> str:
    return report.counted(RECORDS) + "\n"


def slower() -> str:
    """Of the Hopper forward at 8,192 tokens: float16 beside bfloat16, and head_dim 96 beside 128, per FLOP."""
    speed = {
        (c.problem.head_dim, c.specs, c.problem.dtype): row
        for c, row in _of_h200().cells
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
    "plan_captured": plan_captured,
    "run": run,
    "simulate": simulate,
    "compile": compile_,
    "refusal": refusal,
    "show": show,
    "masks": masks,
    "six": six,
    "program_forward": program_forward,
    "program_backward": program_backward,
    "program_ampere": program_ampere,
    "cuda": cuda,
    "op_sqrt": op_sqrt,
    "op_abs": op_abs,
    "op_clamp": op_clamp,
    "spec_test": spec_test,
    "specs": specs,
    "language": language.markdown,
    "measured": measured,
    "measured_forward": measured_forward,
    "on_data": on_data,
    "suites": suites,
    "counters": counters,
    "bits": bits,
    "eight_bits": eight_bits,
    "slower": slower,
    "architectures": limits.architectures,
    "served_forward": limits.forward,
    "served_backward": limits.backward,
}

#: Those of whose numbers the machine decides some, and what it does not decide: tiles, bytes and what copies move.
SAMPLES = ("run", "simulate", "compile")
FACTS = re.compile(
    r"tiles? (?:of )?\d+ x \d+|\d+ (?:stages|threads)|[\d.]+ MB|[\d.]+x standard|\b(?:cp\.async|st|predicted) +[\d,]+"
)


def written(text: str) -> str:
    """A document with its generated parts made anew."""
    return BLOCK.sub(_written, text)


def _written(match: re.Match) -> str:
    start, name, before, end = match.groups()
    made = BLOCKS[name]()
    same = name in SAMPLES and shape(made) == shape(before) and FACTS.findall(made) == FACTS.findall(before)
    return f"{start}{before if same else made}{end}"


def shape(text: str) -> str:
    """A text without its numbers, their units, the widths of its columns and the names of PTX instructions."""
    text = re.sub(r"^[a-z]\w*(\.[\w:]+)+ ", "instruction ", text, flags=re.MULTILINE)
    return re.sub(r"[ ]+", " ", re.sub(r"\b\d[\d,.]*( (ns|us|ms|s|k|M|B|KiB|MiB)\b)?", "number", text))


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
