"""A later release of SGLang, in a folder of its own, on the dependencies of this environment.

The release brings torch and CUDA packages of several gigabytes, which its disaggregation does not
need: it is installed without them, by name and version, beside the ones that are here.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import apart

RELEASE = "0.5.12.post1"
#: Set to 1 to have the tests install and run the release; else they are skipped.
SWITCH = "SGLANG_LATER_RELEASE"


#: For the tests that want it; before any fixture of theirs starts a server.
ON_REQUEST = pytest.mark.skipif(
    os.environ.get(SWITCH) != "1",
    reason=f"set {SWITCH}=1 to install SGLang {RELEASE} into .interop/ and run against it",
)


def installed() -> Path:
    """The folder with the release, installed there the first time; skips the test where it cannot
    be had."""
    return apart.installed(f"sglang=={RELEASE}")


def environment() -> dict[str, str]:
    """What a process gets to run that release, and none of the patch set but the CPU stand-in."""
    return {"PYTHONPATH": str(installed()), "SGLANG_PATCHSET": "0"}
