"""``benchmark/admission`` builds its own queues, which no other test here runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[4]


def cases_of(tmp_path: Path, *more: str) -> list[dict[str, Any]]:
    """Return the cases of a short run."""
    arguments = ["--steps", "8", "--pages", "16", "--running", "8", "--out", str(tmp_path), *more]
    done = subprocess.run(
        [sys.executable, "-m", "benchmark.admission", *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (summary,) = tmp_path.glob("*.json")
    cases: list[dict[str, Any]] = json.loads(summary.read_text())["cases"]
    return cases


@pytest.mark.slow
def test_the_benchmark_runs(tmp_path: Path) -> None:
    """Guards against a fake scheduler that lacks an attribute that admission reads."""
    cases = cases_of(tmp_path)
    assert [case["admits"] for case in cases] == [0, 1, 4] * 2
    assert [case["queued"] for case in cases] == [64] * 3 + [10_000] * 3


@pytest.mark.slow
def test_the_benchmark_runs_with_writes(tmp_path: Path) -> None:
    """Guards against a tree that the benchmark sets up differently from a server."""
    (case,) = cases_of(tmp_path, "--writes")
    assert {"without", "with"} <= case.keys()
