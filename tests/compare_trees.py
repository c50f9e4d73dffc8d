"""Whether two trees of this repository make the same kernels: `python tests/compare_trees.py REVISION`, without a GPU.

Each tree dumps, with its own copy of this file, every kernel of a grid: shipped specs x head dims x dtypes x archs x
passes x options, all entries of each menu, and every golden.  Texts that differ by comments and white space alone are
equal; of others NVRTC makes PTX, and where that differs cubins, which have to be equal to the byte.  `--menus`
compares menus, predicted times, rejections and messages instead.  A tree older than this file is dumped with the newer
copy.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import io
import itertools
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]

HEAD_DIMS = (64, 96, 128, 192, 256)
DTYPES = ("bfloat16", "float16")
ARCHS = ("sm_80", "sm_86", "sm_90a")


# ---------------------------------------------------------------------------------------------------------------------
# What a tree makes


def requests(specs: list[str], every: bool) -> Iterator[tuple[str, dict]]:
    """(spec, options of `flashgen.plan`) of the grid; not `every`: of head dims 64 and 128 in bfloat16."""
    from flashgen.analysis.derivative import differentiable
    from flashgen.lang.load import load_spec

    dims, dtypes = (HEAD_DIMS, DTYPES) if every else ((64, 128), DTYPES[:1])
    for spec in specs:
        gradients = differentiable(load_spec(spec).score_node)
        options = [{}, {"dropout": True}, {"packed": True}, {"backward": True}]
        options += [{"backward": True, "deterministic": True}, {"backward": True, "dropout": True}]
        options += [{"backward": True, "gradients": list(gradients)}] if gradients else []
        for arch, head_dim, dtype, chosen in itertools.product(ARCHS, dims, dtypes, options):
            yield spec, {"arch": arch, "head_dim": head_dim, "dtype": dtype, **chosen}


def menu_text(menu) -> str:
    """A menu as text: its plans without their variant, their seconds per score, what was rejected and why."""
    plans = [re.sub(r"variant=Variant\(.*?\), (?=arch=)", "", repr(plan)) for plan in menu.forms]
    return "\n".join([*plans, *map(repr, menu.seconds_per_score), *map(str, menu.rejected), repr(menu.passed_over)])


def dump(specs: list[str], every: bool) -> dict[str, dict]:
    """What this process' flashgen makes of each request: its menu, or the message of its refusal, and its kernels."""
    from flashgen.codegen import emit
    from flashgen.codegen.golden import goldens
    from flashgen.errors import FlashgenError
    from flashgen.lang.load import load_spec
    from flashgen.ops.stages import menu_of

    found, seen = {}, set()
    for golden in goldens():
        found[f"golden {golden.path}"] = {"kernels": [[golden.plan.arch, golden.text]]}
    for spec, options in requests(specs, every):
        key = f"{spec} {json.dumps(options)}"
        variant = load_spec(spec).bind()
        given = dict(options)
        try:
            menu = menu_of(variant, given.pop("arch"), given.pop("dtype"), given.pop("head_dim"), **given)
        except FlashgenError as error:
            found[key] = {"refused": f"{type(error).__name__}: {error}", "kernels": []}
            continue
        fresh = [plan for plan in menu.forms if plan not in seen]
        seen.update(fresh)
        found[key] = {"menu": menu_text(menu), "kernels": [[plan.arch, emit(plan)] for plan in fresh]}
    return found


def dumped(tree: Path, specs: list[str], every: bool) -> dict[str, dict]:
    """The dump of another tree, by a process that imports it alone."""
    script = tree / "tests" / Path(__file__).name
    script = script if script.is_file() else Path(__file__)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "dump.json")
        command = [sys.executable, str(script), "--dump", str(out), *(["--every"] if every else [])]
        subprocess.run(
            [*command, "--specs", ",".join(specs)], check=True, cwd=tree, env={**os.environ, "PYTHONPATH": str(tree)}
        )
        return json.loads(out.read_text())


# ---------------------------------------------------------------------------------------------------------------------
# Two trees


def essence(text: str) -> str:
    """CUDA text without comments and white space, but for what separates words."""
    strings = r'"(?:[^"\\]|\\.)*"'
    bare = re.sub(rf"({strings})|//[^\n]*", lambda found: found[1] or "", text)
    return re.sub(r"\s*(\W)\s*", r"\1", " ".join(bare.split()))


def ptx_digest(kernel: tuple[str, str]) -> str:
    """sha256 of the PTX that NVRTC makes of (arch, text), without the names of global constants."""
    from flashgen.runtime import nvrtc

    arch, text = kernel
    return hashlib.sha256(re.sub(r"(?m)^(\.global .*) \w+ =", r"\1 =", nvrtc.ptx(text, arch)).encode()).hexdigest()


def cubin_digest(kernel: tuple[str, str]) -> str:
    """sha256 of the cubin that NVRTC makes of (arch, text)."""
    from flashgen.runtime import nvrtc

    arch, text = kernel
    return hashlib.sha256(nvrtc.compile(text, arch).cubin).hexdigest()


def differing_kernels(before: dict[str, dict], after: dict[str, dict]) -> list[str]:
    """The requests whose kernels are not the same machine code in both dumps.

    ptxas makes one code of one PTX, so cubins are compared only where the PTX is not the same.  A name of a constant
    is in a cubin's symbol table, and in no instruction.
    """
    pairs, changed = [], []
    for key in sorted(before.keys() | after.keys()):
        old, new = (tree.get(key, {"kernels": []})["kernels"] for tree in (before, after))
        if len(old) != len(new):
            changed.append(f"{key}: {len(old)} kernels, now {len(new)}")
        else:
            pairs += [
                (key, tuple(a), tuple(b)) for a, b in zip(old, new, strict=True) if essence(a[1]) != essence(b[1])
            ]
    for digest, title in ((ptx_digest, "PTX"), (cubin_digest, "cubins")):
        kernels = list(dict.fromkeys(itertools.chain.from_iterable(pair[1:] for pair in pairs)))
        print(f"{len(pairs)} pairs differ so far; {title} of {len(kernels)} texts are made", flush=True)
        with ThreadPoolExecutor(os.cpu_count()) as pool:  # NVRTC lets go of the GIL
            digests = dict(zip(kernels, pool.map(digest, kernels), strict=True))
        pairs = [pair for pair in pairs if digests[pair[1]] != digests[pair[2]]]
    return changed + [f"{key}: another cubin" for key, _, _ in pairs]


def differing_menus(before: dict[str, dict], after: dict[str, dict]) -> list[str]:
    """A unified diff for each request whose menu or refusal is not the same in both dumps."""
    changed = []
    for key in sorted(before.keys() | after.keys()):
        old, new = ({**tree.get(key, {}), "kernels": None} for tree in (before, after))
        if old != new:
            lines = ["\n".join(f"{name}: {value}" for name, value in one.items()).splitlines() for one in (old, new)]
            changed.append("\n".join([key, *difflib.unified_diff(*lines, lineterm="", n=0)]))
    return changed


def extracted(revision: str, folder: Path) -> Path:
    """The files of a revision in a folder of their own."""
    archive = subprocess.run(["git", "archive", revision], cwd=ROOT, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as packed:
        packed.extractall(folder, filter="data")
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision", nargs="?", help="what this tree is compared with")
    parser.add_argument("--menus", action="store_true", help="compare menus and messages, not machine code")
    parser.add_argument("--every", action="store_true", help="the whole grid, not head dims 64 and 128 in bfloat16")
    parser.add_argument("--specs", default="", help="names of shipped specs, by commas; all unless given")
    parser.add_argument("--dump", type=Path, help="only write what this tree makes to a file")
    given = parser.parse_args()
    specs = given.specs.split(",") if given.specs else sorted(path.stem for path in (ROOT / "specs").glob("*.py"))
    if given.dump:
        given.dump.write_text(json.dumps(dump(specs, given.every)))
        return 0
    if given.revision is None:
        parser.error("name the revision to compare with")
    with tempfile.TemporaryDirectory() as folder:
        before = dumped(extracted(given.revision, Path(folder)), specs, given.every)
    after = dumped(ROOT, specs, given.every)
    changed = (differing_menus if given.menus else differing_kernels)(before, after)
    for line in changed:
        print(line)
    kernels = sum(len(one["kernels"]) for one in after.values())
    print(f"{len(after)} requests, {kernels} kernels: {len(changed) or 'none'} differ")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
