"""Runs unmodified SGLang on a CPU, on a machine that has no GPU driver.

For tests, the demo and laptops: the scheduler, the caches, the transfer engines and the wire
are the real ones; only the names of CUDA kernels are filled in and a handful of CUDA-only steps
get a CPU form. A process has it if the folder that holds this package is on its ``PYTHONPATH``
(``sitecustomize.py`` there), or if it calls ``install()`` before it imports torch or SGLang.

``install()`` may run before SGLang or torch can be imported, so this file imports the standard
library only, and everything below it is loaded when the module that it edits is imported.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping

__all__ = ["FOLDER", "StandinRefused", "environment", "gpu_device_node", "install"]

#: The folder for ``PYTHONPATH``.
FOLDER = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))

#: Nodes that a GPU driver makes: NVIDIA's control node, Tegra's, and the one of WSL 2.
DEVICE_NODES = ("/dev/nvidiactl", "/dev/nvhost-gpu", "/dev/nvgpu", "/dev/dxg")


class StandinRefused(RuntimeError):
    """The stand-in was requested beside a GPU that SGLang could use."""

    def __init__(self, evidence: str) -> None:
        super().__init__(
            f"the CPU stand-in is for machines without a GPU, but {evidence}: "
            f"take {FOLDER} off PYTHONPATH, so that the real kernels are used"
        )


def gpu_device_node() -> str | None:
    """The first GPU device node of this machine, or None. Costs four stat calls."""
    return next(filter(os.path.exists, DEVICE_NODES), None)


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """Return the variables ``given`` for a process that runs SGLang: with the stand-in if this
    machine has no GPU, as they are if it has one."""
    if gpu_device_node() is not None:
        return dict(given)
    paths = [path for path in given.get("PYTHONPATH", "").split(os.pathsep) if path]
    others = [path for path in paths if path != FOLDER]
    return {**given, "PYTHONPATH": os.pathsep.join((FOLDER, *others))}


def install(probe: Callable[[], str | None] = gpu_device_node) -> None:
    """Put the stand-in's finder in front of ``sys.meta_path``; a second call changes nothing.

    Raises ``StandinRefused`` where ``probe`` names a GPU. torch is queried again when it is
    imported (see ``edits.py``), since a device can be reachable without one of the known nodes.
    """
    node = probe()
    if node is not None:
        raise StandinRefused(f"{node} exists")

    from .finder import StandinFinder

    if not any(isinstance(finder, StandinFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, StandinFinder())
