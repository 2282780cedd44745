"""Ordinary memory where SGLang expects a device, or memory that CUDA page-locks."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any  # Any: modules that are edited, and their objects


class Instead:
    """A module, except for the names that are given."""

    def __init__(self, module: ModuleType, **names: Any) -> None:
        self.__dict__.update(names, _module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def without_pinning(module: Any) -> None:
    """Have ``torch.tensor`` and ``torch.zeros`` of ``module`` ignore ``pin_memory``."""
    torch = module.torch

    def unpinned(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, pin_memory=False, **options: function(*args, **options)

    module.torch = Instead(torch, tensor=unpinned(torch.tensor), zeros=unpinned(torch.zeros))


def without_pinning_of_adapters(module: Any) -> None:
    """Have the lengths and ranks of a LoRA batch's segments made in ordinary memory."""
    module.torch.Tensor.pin_memory = lambda tensor, device=None: tensor
    without_pinning(module)


def without_pinning_of_host_pools(module: Any) -> None:
    """Construct every host pool of HiCache with ``pin_memory=False``, whatever the caller asks for:
    of no use to a CPU."""
    # The two bases that keep the argument; MHA, MLA and NSA pools reach the first.
    for base in (module.HostKVCache, module.MambaPoolHost):
        base.__init__ = _never_pinned(base.__init__)


def _never_pinned(construct: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(construct)
    if "pin_memory" not in signature.parameters:
        raise ImportError(f"{construct.__qualname__} takes no pin_memory: another SGLang release?")

    @functools.wraps(construct)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = signature.bind(self, *args, **kwargs)
        bound.arguments["pin_memory"] = False
        construct(*bound.args, **bound.kwargs)

    return init


def nixl_in_host_memory(module: Any) -> None:
    """Have each new ``nixl_agent`` read ``VRAM`` as ``DRAM``.

    SGLang registers and describes its KV pools as ``VRAM``. NIXL's Python agent looks such names up
    in a table of its own, so this covers every call, present and future, without wrapping any.
    """
    agent = module.nixl_agent
    construct = agent.__init__

    @functools.wraps(construct)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        host = self.nixl_mems["DRAM"]
        self.nixl_mems = {**self.nixl_mems, "VRAM": host, "cuda": host}

    agent.__init__ = init
