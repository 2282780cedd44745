"""What can be wrong before anything starts, each in one line that says what to do."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path

from benchmark.harness.ports import is_free

NEEDED_GB = 4.0
"""Memory that two servers of the tiny model take, their helper processes included."""
PACKAGES = ("sglang", "sglang_router", "nixl")


def problems(port: int | None, model: Path) -> Iterable[str]:
    """Everything that would stop a run. ``port``: the one the load balancer was asked to take."""
    import psutil

    for name in PACKAGES:
        if importlib.util.find_spec(name) is None:
            yield f"the Python package {name} is missing: install the extras cpu and bench"
    if not (model / "config.json").exists():
        yield f"the model is missing: no config.json in {model}"
    if port is not None and not is_free(port):
        yield f"port {port} is taken: choose another with --port"
    available = psutil.virtual_memory().available / 1e9
    if available < NEEDED_GB:
        yield f"memory is short: {available:.1f} GB available, about {NEEDED_GB:.0f} GB needed"
