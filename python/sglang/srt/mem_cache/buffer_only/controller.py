"""SGLang's ``HiCacheController`` without its storage threads: the pipelines bring their own."""

from __future__ import annotations

import queue
from typing import TYPE_CHECKING

from typing_extensions import override

from sglang.srt.mem_cache.buffer_only.host_pool import staging

if TYPE_CHECKING:
    from sglang.srt.managers.cache_controller import HiCacheController
else:
    HiCacheController = object


class StageController(HiCacheController):
    """Stock unless it is built inside :func:`~.host_pool.of_pages`."""

    #: Whether the host pool is a stage.
    staging: bool = False

    @override
    def _start_storage_threads(self) -> None:
        # Called first by the constructor; the mode of a controller does not change after that.
        self.staging = self.staging or staging()
        if not self.staging:
            super()._start_storage_threads()
            return
        # Others look at their lengths.
        self.prefetch_queue: queue.Queue[object] = queue.Queue()
        self.backup_queue: queue.Queue[object] = queue.Queue()
        self.prefetch_revoke_queue: queue.Queue[object] = queue.Queue()
        self.ack_backup_queue: queue.Queue[object] = queue.Queue()
        self.host_mem_release_queue: queue.Queue[object] = queue.Queue()

    @override
    def reset(self) -> None:
        # A stage has no threads to stop, and the pipelines have seen to the copies before.
        if not self.staging:
            super().reset()

    @property
    def zero_copy(self) -> bool:
        """Whether the storage backend reads and writes the host pool itself."""
        # Bound methods are made anew at each access; they are equal, not identical.
        return bool(self.page_get_func == self._page_get_zero_copy)
