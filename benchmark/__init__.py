"""Measures what the package is worth on real servers; ``python -m benchmark --help``."""

import importlib.util
import sys
from pathlib import Path

# Before torch or SGLang is imported. Servers get the same (``harness/servers.py``).
sys.path.append(str(Path(__file__).parents[1] / "test/srt/standin"))
import cpu_standin  # noqa: E402

if cpu_standin.gpu_device_node() is None:
    cpu_standin.install()

if importlib.util.find_spec("sglang") is None:
    # On a machine without SGLang that only sends load, import the tables, server commands and log
    # formats from the checkout.
    sys.path.append(str(Path(__file__).parents[1] / "python"))
