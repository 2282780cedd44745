"""Runs tests of a pair in this interpreter, each with its own pair; prints a line a cell.

python program.py BACKEND MODULE TEST[/PARAMETER=TEXT]...
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from component import programs
from component.transfer.pair import until


def run(build: Callable[[], Any], tests: Any, cell: str) -> None:
    """Run one test; afterwards no table of either side may hold an entry of a room."""
    name, *parameters = cell.split("/")
    pair = build()
    getattr(tests, name)(pair, **dict(each.split("=", 1) for each in parameters))
    until(
        lambda: pair.expire(deadlines=False) or not pair.leftovers(),
        f"left behind: {pair.leftovers()}",
    )
    pair.close()


if __name__ == "__main__":
    backend, module, *cells = sys.argv[1:]
    build = importlib.import_module(f"component.{backend}.pair").Pair
    tests = importlib.import_module(module)
    programs.run_scenarios({cell: partial(run, build, tests, cell) for cell in cells})
