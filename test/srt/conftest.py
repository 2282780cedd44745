"""Settings that every test needs before SGLang or torch is imported."""

from __future__ import annotations

import gc
import glob
import os

from hypothesis import settings

# So that a bare `pytest` behaves like `make test`: the import hook reads this at the first import.
if not glob.glob("/dev/nvidia[0-9]*"):
    os.environ.setdefault("SGLANG_CPU_STANDIN", "1")

# The same examples in every run, and no deadline: CI shares its two cores.
settings.register_profile("patchset", derandomize=True, deadline=None)
settings.load_profile("patchset")


def pytest_collection_finish() -> None:
    """What was imported until now stays: the collector need not look through it again and again."""
    gc.collect()
    gc.freeze()
