"""Faster server starts for tests: fork SGLang's processes instead of spawning them, on request.

SGLang spawns its scheduler and detokenizer, and each imports everything again: on a CPU that is
nearly all of a server's start. With ``SGLANG_CPU_STANDIN_START_METHOD=fork`` they are forked from
the launcher, which has it all in memory. That is safe here because no CUDA context and no OpenMP
pool exist at that time. It is not the default, since a spawned process is what production runs.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any  # Any: modules that are edited, and their objects


class ForkingMultiprocessing:
    """``multiprocessing``, except that its start method cannot be set to another than ``fork``."""

    def __init__(self, multiprocessing: ModuleType) -> None:
        self._multiprocessing = multiprocessing

    def __getattr__(self, name: str) -> Any:
        return getattr(self._multiprocessing, name)

    def set_start_method(self, method: str, force: bool = False) -> None:
        """Set ``fork``, whatever the caller asks for."""
        self._multiprocessing.set_start_method("fork", force=True)


def edit(engine: Any) -> None:
    """Have ``entrypoints.engine`` fork, where the environment asks for it."""
    from sglang.srt.patchset.environment import START_METHOD

    try:
        method = START_METHOD.read()
    except ValueError as error:
        raise ImportError(str(error)) from None
    if method == "fork":
        engine.mp = ForkingMultiprocessing(engine.mp)
