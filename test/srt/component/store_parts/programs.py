"""Runs a program of this folder in an interpreter of its own and judges what it printed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run(name: str, *arguments: str) -> str:
    """What the program printed, all scenarios run once. A crash at its exit does not matter."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name(name)), *arguments],
        env=os.environ | {"SGLANG_CPU_STANDIN": "1", "OMP_NUM_THREADS": "1", "MC_FORCE_TCP": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    return done.stdout + "\n--- stderr ---\n" + done.stderr


def passed(output: str, scenario: str) -> None:
    """The scenario passed; if not, show what it said."""
    if f"PASSED {scenario}\n" in output:
        return
    _, failed, said = output.partition(f"FAILED {scenario} ")
    raise AssertionError(said.split("\nPASSED ")[0] if failed else output)
