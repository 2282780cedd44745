"""NIXL for KV that lies in host memory.

SGLang registers and describes its KV pools as ``VRAM``; on a CPU they are ordinary memory. NIXL's
Python agent looks such names up in a table of its own, so giving ``VRAM`` the meaning of ``DRAM``
there covers every call, present and future, without wrapping any.
"""

from __future__ import annotations

import functools
from typing import Any  # Any: modules that are edited, and their objects


def edit(module: Any) -> None:
    """Have each new ``nixl_agent`` read ``VRAM`` as ``DRAM``."""
    agent = module.nixl_agent
    construct = agent.__init__

    @functools.wraps(construct)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        self.nixl_mems = {
            **self.nixl_mems,
            "VRAM": self.nixl_mems["DRAM"],
            "cuda": self.nixl_mems["DRAM"],
        }

    agent.__init__ = init
