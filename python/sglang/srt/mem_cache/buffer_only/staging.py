"""Staging pages: their allocation, and the copies between them and the device.

Contract: scheduler thread only. Allocations and releases are made in the same steps on all ranks,
so that page numbers and ``capacity`` are equal everywhere. Each allocation is released once.
``Copies.ended`` is local; ``Copies.pop`` gets an agreed number.
"""

from __future__ import annotations

import enum
import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

from sglang.srt.mem_cache.buffer_only.settings import Share

if TYPE_CHECKING:
    import torch
    from torch import Event, Stream

    from sglang.srt.managers.cache_controller import HiCacheController


logger = logging.getLogger(__name__)


class Direction(enum.Enum):
    """Use of staging pages."""

    BACKUP = "backup"  # device to store
    PREFETCH = "prefetch"  # store to device


class StagingPages:
    """Pages of one transfer until ``release``, which is idempotent."""

    def __init__(self, pool: StagingPool, direction: Direction, pages: tuple[int, ...]) -> None:
        self._pool: StagingPool | None = pool
        self.direction = direction
        self.pages = pages
        #: True while an overdue store call may use the pages, for an unknown time.
        self.stranded = False
        pool.allocated.add(self)

    def strand(self) -> None:
        """Mark the pages as unusable, because an overdue store call of some rank uses them until it
        returns."""
        if self._pool is None or self.stranded:
            return
        self.stranded = True
        self._pool.kept[self.direction] += len(self.pages)
        logger.warning(
            "HiCache staging buffer: an overdue store call may still use %d pages. They stay out "
            "of use until it returns, as do %d of %d (--hicache-buffer-pages) in all; if it never "
            "does, restart the server. Check sglang:hicache_buffer_store_overdue_calls",
            len(self.pages),
            self._pool.stranded,
            self._pool.pages,
        )

    def split(self, pages: int) -> StagingPages:
        """Keep the first ``pages`` pages and return the rest."""
        if self._pool is None or self.stranded or not 0 < pages < len(self.pages):
            raise ValueError(f"{pages} of {len(self.pages)} pages cannot be split off")
        rest = StagingPages(self._pool, self.direction, self.pages[pages:])
        self.pages = self.pages[:pages]
        return rest

    def release(self) -> None:
        """Return the pages to the pool; further calls do nothing."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.allocated.remove(self)
            pool.lent[self.direction] -= len(self.pages)
            pool.kept[self.direction] -= len(self.pages) if self.stranded else 0
            pool.free.extend(self.pages)


class StagingPool:
    """Allocator of the page numbers ``0 .. pages - 1`` to transfers. Keeps sums, because the
    capacity is queried many times in a step."""

    def __init__(self, pages: int, backup: Share, prefetch: Share) -> None:
        self.pages = pages
        self.shares: Mapping[Direction, Share] = {
            Direction.BACKUP: backup,
            Direction.PREFETCH: prefetch,
        }
        if backup.floor + prefetch.floor > pages or max(backup.ceiling, prefetch.ceiling) > pages:
            raise ValueError(f"shares {backup} and {prefetch} do not fit into {pages} pages")
        self.free = deque(range(pages))
        #: Allocations not released.
        self.allocated: set[StagingPages] = set()
        #: Allocated pages by direction, and the stranded ones among them.
        self.lent, self.kept = dict.fromkeys(Direction, 0), dict.fromkeys(Direction, 0)
        #: Maximum pages in use at one time.
        self.peak = 0

    def capacity(self, direction: Direction, eventually: bool = False) -> int:
        """Return the number of pages that ``direction`` can get now; with ``eventually``, once all
        but the stranded pages are released. A transfer that needs more than that would wait for a
        store that may never answer."""
        used = self.kept if eventually else self.lent
        other = Direction.PREFETCH if direction is Direction.BACKUP else Direction.BACKUP
        promised = max(0, self.shares[other].floor - used[other])
        within = self.shares[direction].ceiling - used[direction]
        return max(0, min(within, self.pages - sum(used.values()) - promised))

    def allocate(self, direction: Direction, pages: int) -> StagingPages:
        """Allocate ``pages`` pages.

        Raises:
            ValueError: ``pages`` is not positive, or more than :meth:`capacity`.
        """
        if not 0 < pages <= self.capacity(direction):
            raise ValueError(f"{pages} pages cannot be allocated")
        allocation = StagingPages(self, direction, tuple(self.free.popleft() for _ in range(pages)))
        self.lent[direction] += pages
        self.peak = max(self.peak, self.used())
        return allocation

    def used(self, direction: Direction | None = None) -> int:
        """Return the number of allocated pages, in one direction or in both."""
        return sum(self.lent.values()) if direction is None else self.lent[direction]

    @property
    def stranded(self) -> int:
        """Number of pages that overdue store calls may still use."""
        return sum(self.kept.values())


Owner = TypeVar("Owner")
#: Host slots and device slots.
SlotPair = tuple["torch.Tensor", "torch.Tensor"]


def slots_of(pages: Sequence[int], page_size: int) -> torch.Tensor:
    """Return the token slots of ``pages`` in order: int64, ``(len(pages) * page_size,)``."""
    import torch

    starts = np.asarray(pages, np.int64) * page_size  # numpy, because torch is slower on few values
    return torch.from_numpy((starts[:, None] + np.arange(page_size)).reshape(-1))


@dataclass(eq=False)
class Copies(Generic[Owner]):
    """Copy launches of one direction that are not known to have ended, oldest first."""

    launches: deque[tuple[Event | None, tuple[Owner, ...]]] = field(default_factory=deque)

    def add(self, finish_event: Event | None, owners: Iterable[Owner]) -> None:
        """Add a launch for ``owners``, which ends with ``finish_event``; None: nothing is copied,
        so that it has ended."""
        self.launches.append((finish_event, tuple(owners)))

    def ended(self) -> int:
        """Return the number of leading launches that have ended on this rank."""
        count = 0
        for finish_event, _ in self.launches:
            if finish_event is not None and not finish_event.query():
                break
            count += 1
        return count

    def pop(self, launches: int) -> list[Owner]:
        """Remove the first ``launches`` launches, waiting for those that run. Return their owners,
        in order."""
        owners: list[Owner] = []
        for _ in range(launches):
            finish_event, launch_owners = self.launches.popleft()
            if finish_event is not None:
                finish_event.synchronize()
            owners.extend(launch_owners)
        return owners


@dataclass(eq=False)
class Copier:
    """Copies between device and staging buffer, one launch per step and direction.

    Args:
        controller: SGLang's ``HiCacheController``.
        forward_stream: returns the stream of the forward passes, or None. Copies from the device
            wait for it, because KV just computed is complete only then.
        written: returns the device slots that the batch on that stream writes to, None if unknown.
            A request that has finished may have freed some of them.
    """

    controller: HiCacheController
    forward_stream: Callable[[], Stream | None]
    written: Callable[[], torch.Tensor | None] = lambda: None

    def to_staging(self, pairs: Sequence[SlotPair]) -> Event:
        """Launch a copy from the device. Return its finish event."""
        from sglang.srt.managers.cache_controller import CacheOperation

        controller = self.controller
        self._after_forward(controller.write_stream)
        controller.write_queue.extend(CacheOperation(*pair, node_id=-1) for pair in pairs)
        controller.start_writing()
        return controller.ack_write_queue.pop().finish_event

    def to_device(self, pairs: Sequence[SlotPair]) -> tuple[Event, int]:
        """Launch a copy to the device, layer by layer. Return its finish event and the consumer
        index for the batch.

        It overlaps the running batch unless that batch writes to one of its slots.
        """
        import torch

        from sglang.srt.managers.cache_controller import CacheOperation

        controller, written = self.controller, self.written()
        if written is None or any(bool(torch.isin(slots, written).any()) for _, slots in pairs):
            self._after_forward(controller.load_stream)
        controller.load_queue.extend(CacheOperation(*pair, node_id=-1) for pair in pairs)
        consumer_index = controller.start_loading()
        finish_event: Event = controller.ack_load_queue.pop().finish_event
        return finish_event, consumer_index

    def _after_forward(self, stream: Stream) -> None:
        forward = self.forward_stream()
        if forward is not None:
            stream.wait_stream(forward)
