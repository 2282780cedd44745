"""Slots that the step in flight may still write, though nobody owns them any more.

With overlap scheduling a request is found to have ended when the next step, which it is part of, is
running already. That step writes one more slot for it, which was just freed, or put into the tree
and perhaps evicted. Other steps come after it on the device; a prefill server's write does not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

_NONE: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)


class StepWrites:
    """Holds announcements back until the result of a step that may write to their pages is in.

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
        """``announce`` now, or when no step writes to ``pages`` any more."""
        written = self._written()
        if len(written) and np.isin(pages, written).any():
            self._waiting.append(announce)
        else:
            announce()

    def result_processed(self) -> None:
        """The oldest step in flight has ended: its slots are nobody's but their owners'."""
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            for announce in waiting:
                announce()

    def _written(self) -> npt.NDArray[np.int64]:
        """Page ids that the step in flight writes for requests that have ended since."""
        results = getattr(self._scheduler, "result_queue", None)  # overlap scheduling only
        if not results:
            return _NONE
        batch = results[-1][0]
        if batch is not self._batch:
            self._batch = batch
            ended = [at for at, req in enumerate(batch.reqs) if req.finished() or req.is_retracted]
            self._pages = _NONE
            if ended:
                self._pages = (batch.out_cache_loc[ended] // self._page).cpu().numpy()
        return self._pages
