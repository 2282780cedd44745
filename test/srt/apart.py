"""Packages in a folder of their own, for processes that run with them instead of with those of this
environment."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / ".interop"
_INSTALL_S = 600


def installed(*packages: str) -> Path:
    """The folder with ``packages`` ("name==version"), without their dependencies; installed there
    the first time. Skips the test where they cannot be had."""
    folder = FOLDER / packages[0].replace("==", "-")
    mark = folder / "installed.txt"
    if mark.exists() and mark.read_text().split() == list(packages):
        return folder
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--quiet", "--target"]
    found = subprocess.run(
        [*command, str(folder), *packages],
        capture_output=True,
        text=True,
        timeout=_INSTALL_S,
        check=False,
    )
    if found.returncode:
        pytest.skip(f"{', '.join(packages)} cannot be installed: {found.stderr[-300:]}")
    mark.write_text("\n".join(packages))
    return folder
