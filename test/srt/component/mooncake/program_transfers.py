"""Rooms over two real Mooncake engines; prints one line for each scenario.

Run by ``test_transfers.py``, whose tests say what each scenario guards against.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

os.environ.setdefault("MC_FORCE_TCP", "1")
sys.path.insert(0, str(Path(__file__).parents[2]))

from component.mooncake import deliveries, endings  # noqa: E402
from component.mooncake.pair import until  # noqa: E402
from component.mooncake.scene import PAIR  # noqa: E402

for scenario in (*deliveries.SCENARIOS, *endings.SCENARIOS):
    PAIR.wipe()
    try:
        scenario()
        until(lambda: not PAIR.leftovers(), f"left behind: {PAIR.leftovers()}")
        print("PASSED", scenario.__name__, flush=True)
    except Exception:
        print("FAILED", scenario.__name__, traceback.format_exc(), flush=True)
os._exit(0)  # the engines' threads need not end
