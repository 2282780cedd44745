"""Runs a program of a test's folder in an interpreter of its own and judges what it printed.

NIXL may crash an interpreter at its exit where there is no GPU driver, and Mooncake's threads
outlive an engine: neither may take other tests along.
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
    """What the program beside the file ``test`` printed, all scenarios run once; it can import
    what tests can."""
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
    """The scenarios passed; if not, show what the first of the others said."""
    for scenario in scenarios:
        # Not up to the end of the line: UCX writes its own lines into ours.
        if not re.search(rf"^PASSED {re.escape(scenario)}(?!\w)", output, re.MULTILINE):
            _, failed, said = output.partition(f"FAILED {scenario} ")
            raise AssertionError(said.split("\nPASSED ")[0] if failed else output)


def run_scenarios(scenarios: Mapping[str, Callable[[], None]]) -> None:
    """In the program: run every scenario, whatever becomes of the others, and print a line for
    each; ends the interpreter."""
    for name, scenario in scenarios.items():
        try:
            scenario()
            print(f"\nPASSED {name}\n", end="", flush=True)  # one write: libraries log between
        except BaseException:
            print("FAILED", name, traceback.format_exc(), flush=True)
    os._exit(0)
