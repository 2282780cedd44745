"""Runs tests of a pair in this interpreter, each with a pair of its own; prints a line a test.

python program.py BACKEND MODULE TEST...
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from component.transfer.pair import until  # noqa: E402

backend, module, *names = sys.argv[1:]
build = importlib.import_module(f"component.{backend}.pair").Pair
tests = importlib.import_module(module)
for name in names:
    try:
        pair = build()
        getattr(tests, name)(pair)
        until(lambda: not pair.leftovers(), f"left behind: {pair.leftovers()}")  # noqa: B023
        pair.close()
        print("PASSED", name, flush=True)
    except BaseException:
        print("FAILED", name, traceback.format_exc(), flush=True)
# NIXL crashes an interpreter without a GPU driver at exit; Mooncake's threads need not end.
os._exit(0)
