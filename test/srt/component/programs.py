"""Runs a program of a test's folder in its own interpreter and judges its output.

NIXL may crash an interpreter at its exit without a GPU driver, and Mooncake's threads outlive an
engine: neither may affect other tests.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

import cpu_standin

_ENV = {
    "OMP_NUM_THREADS": "1",
    "UCX_TLS": "tcp,self",
    "MC_FORCE_TCP": "1",
}
_TESTS = str(Path(__file__).parents[1])


def run(test: str, program: str, *arguments: str) -> str:
    """Return the output of the program beside the file ``test``. It runs all scenarios once, and
    can import the tests' modules."""
    path = os.pathsep.join((_TESTS, *_known_paths()))
    done = subprocess.run(
        [sys.executable, str(Path(test).with_name(program)), *arguments],
        env=cpu_standin.environment(os.environ | _ENV | {"PYTHONPATH": path}),
        capture_output=True,
        text=True,
        timeout=580,
    )
    return done.stdout + "\n--- stderr ---\n" + done.stderr


def _known_paths() -> list[str]:
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


def passed(output: str, *scenarios: str) -> None:
    """Check that the scenarios passed; otherwise show the output of the first failed one."""
    for scenario in scenarios:
        # Not up to the end of the line: UCX writes into the same line.
        if not re.search(rf"^PASSED {re.escape(scenario)}(?!\w)", output, re.MULTILINE):
            _, failed, message = output.partition(f"FAILED {scenario} ")
            raise AssertionError(message.split("\nPASSED ")[0] if failed else output)


def run_scenarios(scenarios: Mapping[str, Callable[[], None]]) -> None:
    """Run every scenario, even after failures, and print a line for each. Ends the interpreter.

    Called by the program.
    """
    for name, scenario in scenarios.items():
        try:
            scenario()
            # One write, because libraries log in between.
            print(f"\nPASSED {name}\n", end="", flush=True)
        except BaseException:
            print("FAILED", name, traceback.format_exc(), flush=True)
    os._exit(0)
