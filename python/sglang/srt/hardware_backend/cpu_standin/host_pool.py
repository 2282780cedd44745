"""HiCache's host pools in ordinary memory: page-locking is CUDA's, and of no use to a CPU."""

from __future__ import annotations

import functools
import inspect
from typing import Any  # Any: modules that are edited, and their objects


def edit(module: Any) -> None:
    """Construct every host pool with ``pin_memory=False``, whatever the caller asks for."""
    # The two bases that keep the argument; MHA, MLA and NSA pools reach the first.
    for base in (module.HostKVCache, module.MambaPoolHost):
        _never_pin(base)


def _never_pin(base: Any) -> None:
    construct = base.__init__
    signature = inspect.signature(construct)
    if "pin_memory" not in signature.parameters:
        raise ImportError(f"{base.__qualname__} takes no pin_memory: another SGLang release?")

    @functools.wraps(construct)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = signature.bind(self, *args, **kwargs)
        bound.arguments["pin_memory"] = False
        construct(*bound.args, **bound.kwargs)

    base.__init__ = init
