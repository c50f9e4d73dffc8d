"""The kept CUDA by its path: files name it, so that collecting tests plans nothing, and it is made when first asked
for.  test_golden.py says that no file is missing and none is left over."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path

from flashgen.codegen.golden import Golden, goldens

FOLDER = Path(__file__).parents[1] / "generated"


class _Kept(Mapping[Path, Golden]):
    @functools.cached_property
    def made(self) -> dict[Path, Golden]:
        return {golden.path: golden for golden in goldens()}

    @functools.cached_property
    def paths(self) -> list[Path]:
        return sorted(path.relative_to(FOLDER) for path in FOLDER.rglob("*.cu"))

    def __getitem__(self, path: Path) -> Golden:
        return self.made[path]

    def __iter__(self) -> Iterator[Path]:
        return iter(self.paths)

    def __len__(self) -> int:
        return len(self.paths)


KEPT = _Kept()
