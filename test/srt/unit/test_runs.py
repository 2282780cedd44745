"""The tests that this suite's runs include (``test/srt/conftest.py``)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_fast_run_includes_most_unit_tests() -> None:
    """Guards against an import of torch or SGLang that silently removes a feature's tests from the
    run after every edit, and against such a test in that run."""
    command = [sys.executable, "-m", "pytest", "--fast", "--collect-only", "-qq", "test/srt/unit"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:]
    included = {line.split(":")[0] for line in done.stdout.splitlines() if ".py: " in line}
    folder = Path(__file__).parent
    files = {str(file.relative_to(ROOT)) for file in folder.rglob("test_*.py")}
    assert included <= files and len(included) > 0.55 * len(files), sorted(files - included)
    assert "test/srt/unit/models/test_random_qwen3.py" in files - included, "torch is not hidden"
