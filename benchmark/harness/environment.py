"""Environment of a measurement: date, machine, versions, commit. No host names, no paths."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections import Counter
from datetime import date
from importlib.metadata import distributions
from pathlib import Path

from benchmark.harness.models import REPOSITORY


def describe(venv: str | None = None) -> dict[str, str]:
    """Return date, machine, versions and commit of a run.

    ``venv``: folder of the servers' environment in the repository, if it is not this one.
    """
    packages = [str(path) for path in (REPOSITORY / (venv or "")).glob("lib/python*/site-packages")]

    def version(*names: str) -> str:
        """Return the version of the first of these packages that is installed."""
        installed = (
            package
            for name in names
            for package in distributions(name=name, path=packages or sys.path)
        )
        return next((package.version for package in installed), "not installed")

    cpu = re.search(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    memory_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    name = cpu[1] if cpu else platform.machine()
    return {
        "date": date.today().isoformat(),
        "machine": f"{os.cpu_count()}-core CPU ({name}), {memory_gb:.0f} GB{gpus()}",
        "python": platform.python_version(),
        **{name: version(name) for name in ("sglang", "torch", "nixl")},
        "mooncake": version("mooncake-transfer-engine", "mooncake-transfer-engine-non-cuda"),
        "commit": commit(),
    }


def gpus(folder: Path = Path("/proc/driver/nvidia/gpus")) -> str:
    """Return the GPUs of this machine as the end of its description, empty if there are none."""
    texts = [path.read_text() for path in sorted(folder.glob("*/information"))]
    models = Counter(
        found[1] for text in texts if (found := re.search(r"^Model:\s*(.*)", text, re.M))
    )
    return "".join(f", {count} x {model}" for model, count in models.items())


def commit() -> str:
    """Return the commit of this checkout, with ``+`` if tracked files differ from it."""
    words = ("describe", "--always", "--exclude=*", "--abbrev=10", "--dirty=+")
    try:
        command = ["git", "-C", str(REPOSITORY), *words]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()
