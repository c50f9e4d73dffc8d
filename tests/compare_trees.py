"""Whether two trees of this repository make the same kernels: `python tests/compare_trees.py REVISION`, without a GPU.

This file makes each tree dump every kernel of a grid: shipped specs x head dims x dtypes x archs x passes x options,
all entries of each menu, and every golden.  Texts that differ by comments and white space alone are equal; of others
NVRTC makes PTX, and where that differs cubins, which have to be equal to the byte.  `--menus` compares menus, predicted
times, rejections, choices and messages instead, of pins of every kind too.  `--dump FILE` writes what this tree makes,
and `--before FILE` reads what a revision made, in place of REVISION.
"""

from __future__ import annotations

import argparse
import dataclasses
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

#: What calls fix, in a forward and in a backward: what works, and what is refused with a message.
FORWARD_PINS = (
    {"stages": 2},
    {"stages": 3},
    {"stages": 9},
    {"tile": (64, 64)},
    {"tile": (128, 80), "stages": 2},
    {"tile": (192, 128), "stages": 4},
    {"tile": (100, 70)},
    {"q_stages": 1},
    {"q_stages": 2, "stages": 3},
    {"q_stages": 3},
    {"pipeline": "ampere"},
    {"pipeline": "ampere", "packed": True},
    {"pipeline": "ampere", "dropout": True, "q_stages": 2},
    {"pipeline": "hopper", "dropout": True},
    {"pipeline": "hopper", "q_stages": 2},
    {"packed": True, "tile": (192, 96)},
    {"packed": True, "dropout": True},
    {"dropout": True, "tile": (64, 32), "stages": 3},
    {"pipeline": "turing"},
    {"deterministic": True},
)
BACKWARD_PINS = (
    {"stages": 1},
    {"stages": 2, "tile": (64, 128)},
    {"stages": 5},
    {"tile": (48, 128)},
    {"pipeline": "ampere"},
    {"pipeline": "ampere", "deterministic": True, "dropout": True},
    {"pipeline": "hopper", "deterministic": True, "dropout": True},
    {"pipeline": "hopper", "stages": 3, "tile": (128, 128)},
    {"packed": True},
    {"q_stages": 1},
    {"gradients": ["nothing"]},
)

#: Head dims and dtypes that are rounded up, differ, or are refused, in `--menus`.
SHAPES = (
    {"head_dim": 72},
    {"head_dim": 60},
    {"head_dim": 512},
    {"head_dim": 128, "v_head_dim": 64},
    {"head_dim": 64, "dtype": "float32"},
    {"head_dim": 64, "arch": "sm_70"},
)

#: (batch, heads, kv_heads, q_len, kv_len) that an entry of a menu is chosen for.
CALLS = ((1, 8, 8, 8192, 8192), (1, 2, 2, 100, 100), (2, 32, 4, 1, 4096), (1, 16, 8, 40, 3000), (4, 16, 16, 900, 900))


# ---------------------------------------------------------------------------------------------------------------------
# What a tree makes


def requests(specs: list[str], every: bool, pinned: bool) -> Iterator[tuple[str, dict]]:
    """(spec, options of a menu) of the grid; not `every`: of head dims 64 and 128 in bfloat16."""
    from flashgen.analysis.derivative import differentiable
    from flashgen.lang.load import load_spec

    dims, dtypes = (HEAD_DIMS, DTYPES) if every else ((64, 128), DTYPES[:1])
    for spec in specs:
        gradients = differentiable(load_spec(spec).score_node)
        options = [{}, {"dropout": True}, {"packed": True}, {"backward": True}]
        options += [{"backward": True, "deterministic": True}, {"backward": True, "dropout": True}]
        options += [{"backward": True, "gradients": list(gradients)}] if gradients else []
        if pinned:
            options += [*FORWARD_PINS, *({"backward": True, **fixed} for fixed in BACKWARD_PINS)]
            for arch, shape, backward in itertools.product(ARCHS, SHAPES, (False, True)):
                yield spec, {"arch": arch, "dtype": DTYPES[0], "backward": backward, **shape}
        for arch, head_dim, dtype, chosen in itertools.product(ARCHS, dims, dtypes, options):
            yield spec, {"arch": arch, "head_dim": head_dim, "dtype": dtype, **chosen}


def menu_of(spec: str, arch: str, dtype: str, head_dim: int, v_head_dim: int | None = None, **options: object):
    """The menu that this process' flashgen makes of a request."""
    from flashgen.lang.load import load_spec

    try:
        from flashgen.planning.planner import menu_of
        from flashgen.planning.request import KernelRequest
    except ImportError:  # a tree before requests
        from flashgen.ops.stages import menu_of

        return menu_of(load_spec(spec).bind(), arch, dtype, head_dim, v_head_dim, **options)
    return menu_of(KernelRequest.of(load_spec(spec).bind(), arch, dtype, head_dim, v_head_dim, **options))


def menu_text(menu) -> str:
    """A menu as text: its plans without their variant, seconds per score, rejections with reasons, what calls get."""
    from flashgen.planning import planner
    from flashgen.planning.arch import find
    from flashgen.planning.problem import Problem

    def told(plan) -> str:
        names = {field.name for field in dataclasses.fields(plan)} | {"q_stages"}
        told = {name: getattr(plan, name) for name in sorted(names - {"variant", "program", "roles", "fallbacks"})}
        roles = plan.program.roles if "program" in names else plan.roles  # those of a tree without programs are coarser
        told["warps"] = plan.warps, plan.threads, roles[0].registers, roles[-1].registers
        bare = re.sub(r"(Specialized\(.*?)q_stages=\d, ", r"\1", repr(told))
        return re.sub(r"(?:producer|consumer)_registers=\d+, ", "", bare)

    def chosen(batch: int, heads: int, kv_heads: int, q_len: int, kv_len: int) -> int:
        sizes = {"batch": batch, "heads": heads, "kv_heads": kv_heads, "q_len": q_len, "kv_len": kv_len}
        plan = menu.plans[0]
        problem = Problem(**sizes, head_dim=plan.head_dim, v_head_dim=plan.v_head_dim, dtype=plan.dtype)
        return menu.forms.index(planner.choose(menu, problem, find(plan.arch).sms))

    return "\n".join(
        [
            *map(told, menu.forms),
            *map(repr, menu.seconds_per_score),
            *map(str, menu.rejected),
            *(f"too large: {one}" for one in too_large(menu.plans[0])),
            f"measured: {menu.measured}",
            f"passed over: {passed_over(menu)}",
            f"chosen: {[chosen(*call) for call in CALLS]}",
        ]
    )


def too_large(plan):
    """Why a plan's tile is no larger."""
    try:
        from flashgen.planning import limits
    except ImportError:  # a tree where the planner said so
        from flashgen.planning.planner import limits as found

        return found(plan)
    return limits.of(plan)


def passed_over(menu) -> str | None:
    """The better pipelines that do not serve a menu, and why; a tree without fallbacks says so of backwards alone."""
    if hasattr(menu, "passed_over"):
        return menu.passed_over
    return "; ".join(f"pipeline {f.pipeline}: {f.reason}" for f in menu.fallbacks) or None


def dump(specs: list[str], every: bool, menus: bool) -> dict[str, dict]:
    """What this process' flashgen makes of each request: its menu, or the message of its refusal, and (unless `menus`
    alone are asked for) its kernels."""
    import flashgen
    from flashgen.codegen import emit
    from flashgen.codegen.golden import goldens
    from flashgen.errors import FlashgenError

    found, seen = {}, set()
    for golden in () if menus else goldens():
        found[f"golden {golden.path}"] = {"kernels": [[golden.plan.arch, golden.text]]}
    for spec, options in requests(specs, every, pinned=menus):
        key = f"{spec} {json.dumps(options)}"
        try:
            menu = menu_of(spec, **options)
        except FlashgenError as error:
            found[key] = {"refused": f"{type(error).__name__}: {error}", "kernels": []}
            if menus:
                reasons = flashgen.supports(spec, **options)
                found[key]["reasons"] = "\n".join(map(repr, reasons))
            continue
        found[key] = {"menu": menu_text(menu), "kernels": []}
        if not menus:
            fresh = [plan for plan in menu.forms if plan not in seen]
            seen.update(fresh)
            found[key]["kernels"] = [[plan.arch, emit(plan)] for plan in fresh]
    return found


def dumped(tree: Path, specs: list[str], every: bool, menus: bool) -> dict[str, dict]:
    """The dump of another tree, by a process that imports it alone."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "dump.json")
        options = [*(["--every"] if every else []), *(["--menus"] if menus else []), "--specs", ",".join(specs)]
        subprocess.run(
            [sys.executable, __file__, "--dump", str(out), *options],
            check=True,
            cwd=tree,
            env={**os.environ, "PYTHONPATH": str(tree)},
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
    parser.add_argument("--before", type=Path, help="what a revision made, by --dump, in place of the revision")
    parser.add_argument("--dump", type=Path, help="only write what this tree makes to a file")
    given = parser.parse_args()
    specs = given.specs.split(",") if given.specs else sorted(path.stem for path in (ROOT / "specs").glob("*.py"))
    if given.dump:
        given.dump.write_text(json.dumps(dump(specs, given.every, given.menus)))
        return 0
    asked = specs, given.every, given.menus
    if given.before:
        before = json.loads(given.before.read_text())
    elif given.revision is None:
        parser.error("name the revision to compare with")
    else:
        with tempfile.TemporaryDirectory() as folder:
            before = dumped(extracted(given.revision, Path(folder)), *asked)
    after = dumped(ROOT, *asked)
    if given.before and not (given.every and not given.specs):  # of a larger grid
        before = {key: one for key, one in before.items() if key in after}
    changed = (differing_menus if given.menus else differing_kernels)(before, after)
    for line in changed:
        print(line)
    kernels = sum(len(one["kernels"]) for one in after.values())
    print(f"{len(after)} requests, {kernels} kernels: {len(changed) or 'none'} differ")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
