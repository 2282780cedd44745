"""Runs unmodified SGLang on a CPU, on a machine that has no GPU driver.

For tests, the demo and laptops: the scheduler, the caches, the transfer engines and the wire
are the real ones; only the names of CUDA kernels are filled in and a handful of CUDA-only steps
get a CPU form. ``SGLANG_CPU_STANDIN=1`` turns it on, through the start-up hook of the patch set.

``install()`` may run before SGLang or torch can be imported, so this file imports the standard
library only, and everything below it is loaded when the module that it edits is imported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

__all__ = ["StandinRefused", "install"]

#: Nodes that a GPU driver makes: NVIDIA's control node, Tegra's, and the one of WSL 2.
DEVICE_NODES = ("/dev/nvidiactl", "/dev/nvhost-gpu", "/dev/nvgpu", "/dev/dxg")


class StandinRefused(RuntimeError):
    """The stand-in was requested on a machine whose GPU SGLang could use."""

    def __init__(self, evidence: str) -> None:
        super().__init__(
            f"SGLANG_CPU_STANDIN=1 is for machines without a GPU, but {evidence}: "
            "unset it, so that the real kernels are used"
        )


def gpu_device_node() -> str | None:
    """The first GPU device node of this machine, or None. Costs four stat calls."""
    return next((node for node in DEVICE_NODES if Path(node).exists()), None)


def install(probe: Callable[[], str | None] = gpu_device_node) -> None:
    """Put the stand-in's finder in front of ``sys.meta_path``; a second call changes nothing.

    Raises ``StandinRefused`` where ``probe`` names a GPU. torch is queried again when it is
    imported (see ``edits.py``), since a device can be reachable without one of the known nodes.
    """
    node = probe()
    if node is not None:
        raise StandinRefused(f"{node} exists")

    from .finder import StandinFinder

    # By attribute, not by type: the package may have been loaded under two names, by the hook
    # from its file and by a later import.
    if any(getattr(finder, "is_cpu_standin", False) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, StandinFinder())
