"""Runs tests of a pair in this interpreter, each with a pair of its own; prints a line a test.

python program.py BACKEND MODULE TEST...
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from component import programs
from component.transfer.pair import until


def run(build: Callable[[], Any], test: Callable[[Any], None]) -> None:
    """When it has ended, no table of either side may hold an entry of a room."""
    pair = build()
    test(pair)
    until(lambda: not pair.leftovers(), f"left behind: {pair.leftovers()}")
    pair.close()


if __name__ == "__main__":
    backend, module, *names = sys.argv[1:]
    build = importlib.import_module(f"component.{backend}.pair").Pair
    tests = importlib.import_module(module)
    programs.run_scenarios({name: partial(run, build, getattr(tests, name)) for name in names})
