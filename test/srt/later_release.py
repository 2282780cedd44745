"""A later release of SGLang, in a folder of its own, on the dependencies of this environment.

The release brings torch and CUDA packages of several gigabytes, which its disaggregation does not
need: it is installed without them, by name and version, beside the ones that are here.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

RELEASE = "0.5.12.post1"
#: Set to 1 to have the tests install and run the release; else they are skipped.
SWITCH = "SGLANG_LATER_RELEASE"
FOLDER = Path(__file__).resolve().parents[2] / ".interop"
_INSTALL_S = 600


#: For the tests that want it; before any fixture of theirs starts a server.
ON_REQUEST = pytest.mark.skipif(
    os.environ.get(SWITCH) != "1",
    reason=f"set {SWITCH}=1 to install SGLang {RELEASE} into .interop/ and run against it",
)


def installed() -> Path:
    """The folder with the release, installed there the first time; skips the test where it cannot
    be had."""
    package = f"sglang=={RELEASE}"
    folder = FOLDER / package.replace("==", "-")
    mark = folder / "installed.txt"
    if not mark.exists() or mark.read_text() != package:
        command = [sys.executable, "-m", "pip", "install", "--no-deps", "--quiet", "--target"]
        found = subprocess.run(
            [*command, str(folder), package],
            capture_output=True,
            text=True,
            timeout=_INSTALL_S,
            check=False,
        )
        if found.returncode:
            pytest.skip(f"{package} cannot be installed: {found.stderr[-300:]}")
        mark.write_text(package)
    return folder


def environment() -> dict[str, str]:
    """What a process gets to run that release, and none of the patch set but the CPU stand-in."""
    return {"PYTHONPATH": str(installed()), "SGLANG_PATCHSET": "0"}
