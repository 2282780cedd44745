"""Where and on what a number was measured. No host names, no paths."""

from __future__ import annotations

import os
import platform
import subprocess
from contextlib import suppress
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from benchmark.harness.models import REPOSITORY


def describe() -> dict[str, str]:
    """Date, machine, versions and commit of a run."""
    return {
        "date": date.today().isoformat(),
        "machine": f"{os.cpu_count()}-core CPU ({_cpu_model()}), {_memory_gb()} GB",
        "python": platform.python_version(),
        **{name: _version(name) for name in ("sglang", "torch", "nixl")},
        "mooncake": _version("mooncake-transfer-engine", "mooncake-transfer-engine-non-cuda"),
        "commit": commit(),
    }


def commit() -> str:
    """The commit of this checkout, with ``+`` where tracked files differ from it."""
    try:
        head = _git("rev-parse", "--short=10", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("+" if changed else "")


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(REPOSITORY), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _version(*names: str) -> str:
    """Of the first of these packages that is there."""
    for name in names:
        with suppress(PackageNotFoundError):
            return version(name)
    return "not installed"


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _memory_gb() -> int:
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9)
