"""No part of SGLang may keep a reference to a class that was replaced."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from sglang.srt.patchset import TABLE


def test_every_row_binds_and_no_stock_class_is_left():
    """Guards against a stale reference, which runs unpatched code in one place."""
    scan = Path(__file__).with_name("scan_references.py")
    result = subprocess.run(
        [sys.executable, "-W", "ignore", scan], capture_output=True, text=True, timeout=240
    )
    assert result.stdout.splitlines() == [f"{len(TABLE)} rows"], result.stdout + result.stderr
