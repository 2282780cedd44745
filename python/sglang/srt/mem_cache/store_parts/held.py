"""Host pages that nobody may get yet, because a given-up call of a store may still use them."""

from __future__ import annotations

import threading

import torch

from sglang.srt.mem_cache.store_parts.guard import Busy


class HeldPages:
    """Between the owner of the stage, who wants to free pages, and the guard, who knows which are
    busy. ``hold`` may be given to the guard as ``on_busy``; the rest is the owner's thread's.

    A page is busy from ``hold`` to the return of its call, and *kept* once its owner has tried to
    free it meanwhile; a kept page comes back by ``returned``.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._busy: dict[Busy, None] = {}
        self._kept: set[int] = set()

    def hold(self, busy: Busy) -> None:
        """The pages of a given-up call are busy until it returns. From any thread."""
        with self._lock:
            self._busy[busy] = None

    def free(self, host_indices: torch.Tensor) -> torch.Tensor:
        """Those of ``host_indices`` that may be handed out again now; the others are kept."""
        busy = self._slots()
        if not busy:
            return host_indices
        free = torch.tensor([int(slot) not in busy for slot in host_indices], dtype=torch.bool)
        self._kept.update(host_indices[~free].tolist())
        return host_indices[free]

    def returned(self) -> torch.Tensor:
        """Kept slots that no call uses any more, 1-D int64, ascending; each is given once."""
        if not self._kept:
            return torch.empty(0, dtype=torch.int64)
        free = self._kept - self._slots()
        self._kept -= free
        return torch.tensor(sorted(free), dtype=torch.int64)

    @property
    def kept(self) -> int:
        """Slots that were freed by their owner and are not free."""
        return len(self._kept)

    def _slots(self) -> set[int]:
        with self._lock:
            for busy in [busy for busy in self._busy if busy.returned.done()]:
                del self._busy[busy]
            return {int(slot) for busy in self._busy for slot in busy.host_indices}
