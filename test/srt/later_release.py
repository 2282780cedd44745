"""A later release of SGLang, in a separate folder, on the dependencies of this environment.

The release would bring torch and CUDA packages of several gigabytes, which its disaggregation does
not need: it is installed without them, by name and version, beside the installed ones.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

RELEASE = "0.5.12.post1"
#: Set to 1 to install and run the release; otherwise the tests are skipped.
SWITCH = "SGLANG_LATER_RELEASE"
FOLDER = Path(__file__).resolve().parents[2] / ".interop"
_INSTALL_S = 600


#: Mark of tests that need the release; evaluated before a fixture starts a server.
ON_REQUEST = pytest.mark.skipif(
    os.environ.get(SWITCH) != "1",
    reason=f"set {SWITCH}=1 to install SGLang {RELEASE} into .interop/ and run against it",
)


def installed() -> Path:
    """Return the folder with the release, installed on the first call; skip the test if it cannot
    be installed."""
    package = f"sglang=={RELEASE}"
    folder = FOLDER / package.replace("==", "-")
    mark = folder / "installed.txt"
    if not mark.exists() or mark.read_text() != package:
        command = [sys.executable, "-m", "pip", "install", "--no-deps", "--quiet", "--target"]
        done = subprocess.run(
            [*command, str(folder), package],
            capture_output=True,
            text=True,
            timeout=_INSTALL_S,
            check=False,
        )
        if done.returncode:
            pytest.skip(f"{package} cannot be installed: {done.stderr[-300:]}")
        mark.write_text(package)
    return folder


def environment() -> dict[str, str]:
    """Return the variables that run that release without the patch set, except for the CPU
    stand-in."""
    return {"PYTHONPATH": str(installed()), "SGLANG_PATCHSET": "0"}
