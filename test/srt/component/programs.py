"""Runs a program of a test's folder in an interpreter of its own and judges what it printed.

NIXL may crash an interpreter at its exit where there is no GPU driver, and Mooncake's threads
outlive an engine: neither may take other tests along.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_ENV = {
    "SGLANG_CPU_STANDIN": "1",
    "OMP_NUM_THREADS": "1",
    "UCX_TLS": "tcp,self",
    "MC_FORCE_TCP": "1",
}


def run(test: str, program: str, *arguments: str) -> str:
    """What the program beside the file ``test`` printed, all scenarios run once."""
    done = subprocess.run(
        [sys.executable, str(Path(test).with_name(program)), *arguments],
        env=os.environ | _ENV,
        capture_output=True,
        text=True,
        timeout=580,
    )
    return done.stdout + "\n--- stderr ---\n" + done.stderr


def passed(output: str, *scenarios: str) -> None:
    """The scenarios passed; if not, show what the first of the others said."""
    for scenario in scenarios:
        if f"PASSED {scenario}\n" not in output:
            _, failed, said = output.partition(f"FAILED {scenario} ")
            raise AssertionError(said.split("\nPASSED ")[0] if failed else output)
