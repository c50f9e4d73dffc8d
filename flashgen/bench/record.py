"""What a benchmark leaves behind: raw numbers with the machine, the versions and the commit they belong to."""

from __future__ import annotations

import functools
import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

from flashgen import files

PACKAGES = ("torch", "triton", "cuda-bindings", "nvidia-cuda-nvrtc", "nvidia-cudnn-cu13", "numpy")


def environment() -> dict[str, object]:
    """GPU, driver, library versions and the commit, as far as each is known.

    A copy of a checkout without its history takes the commit from FLASHGEN_COMMIT; whether it was modified since is
    then not known (null).
    """
    import torch

    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    gpu: dict[str, object] = {}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        gpu = {
            "name": properties.name,
            "sms": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "driver": _driver(),
        }
    told = os.environ.get("FLASHGEN_COMMIT")
    return {
        "gpu": gpu,
        "versions": versions,
        "commit": told or _output("git", "rev-parse", "HEAD"),
        "modified": None if told else bool(_output("git", "status", "--porcelain", "--untracked-files=no")),
    }


@functools.cache
def _driver() -> str | None:
    """The driver's version, asked once: records are written row by row, and nvidia-smi takes its time."""
    return _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")


def write(path: Path, *, command: str, protocol: Mapping[str, object], cells: Sequence[Mapping[str, object]]) -> None:
    """Write one run as JSON: a cell a line, so that two runs can be compared by eye."""
    head = {"command": command, "protocol": dict(protocol), **environment()}
    lines = ",\n    ".join(json.dumps(cell) for cell in cells)
    text = json.dumps(head, indent=2)[:-2] + f',\n  "cells": [\n    {lines}\n  ]\n}}\n'
    json.loads(text)  # what is written can be read
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write(path, text)


def _output(*command: str) -> str | None:
    """The first line a program prints; None where it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return (done.stdout.splitlines() or [""])[0].strip()
