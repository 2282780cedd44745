"""Slots that the step in flight may still use, though nobody owns them any more.

With overlap scheduling a request is found to have ended when the next step, which it is part of, is
running already. That step writes one more slot for it, which was just freed, or put into the tree
and perhaps evicted. What it writes depends on slots that may be free, too: those whose tokens the
tree had already. Other steps come after it on the device; a prefill server's write does not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_NONE: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)
_SLOTS = "decode_slots_at_end"


def remember_slots(req: Any, rows: torch.Tensor) -> None:
    """``req`` is about to give its own slots back. ``rows``: the request-to-slot table."""
    own = rows[req.req_pool_idx, req.cache_protected_len : req.kv_committed_len]
    setattr(req, _SLOTS, own.to(torch.int64, copy=True))


def slots_at_end(req: Any) -> torch.Tensor:
    """The slots that were a request's own when it last gave them back (1-D int64)."""
    slots: torch.Tensor = getattr(req, _SLOTS)
    return slots


class StepWrites:
    """Holds announcements back until the result of a step that may use their pages is in.

    SGLang's loop admits, launches the next step, and then processes the result of the last one: an
    announcement waits within one turn of the loop, and only where pages really meet.
    """

    def __init__(self, scheduler: Any, page: int) -> None:
        self._scheduler = scheduler
        self._page = page
        self._batch: Any = None
        self._pages = _NONE
        self._waiting: list[Callable[[], None]] = []

    def after(self, pages: npt.NDArray[np.int32], announce: Callable[[], None]) -> None:
        """``announce`` now, or when no step uses ``pages`` any more."""
        used = self._used()
        if len(used) and np.isin(pages, used).any():
            self._waiting.append(announce)
        else:
            announce()

    def result_processed(self) -> None:
        """The oldest step in flight has ended: its slots are nobody's but their owners'."""
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            for announce in waiting:
                announce()

    def _used(self) -> npt.NDArray[np.int64]:
        """Page ids that the step in flight uses for requests that have ended since, and that were
        their own."""
        results = getattr(self._scheduler, "result_queue", None)  # overlap scheduling only
        if not results:
            return _NONE
        batch = results[-1][0]
        if batch is not self._batch:
            self._batch = batch
            ended = [at for at, req in enumerate(batch.reqs) if req.finished() or req.is_retracted]
            self._pages = _NONE
            if ended:
                own = [slots_at_end(batch.reqs[at]) for at in ended]
                slots = torch.cat([batch.out_cache_loc[ended], *own])
                self._pages = (slots // self._page).cpu().numpy()
        return self._pages
