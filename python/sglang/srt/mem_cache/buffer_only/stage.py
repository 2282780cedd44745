"""The staging pages: who has which, and the copies between them and the device.

Pages are given back once.
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
    """What staging pages are used for."""

    BACKUP = "backup"  # device to store
    PREFETCH = "prefetch"  # store to device


class StagingPages:
    """Pages that belong to one transfer until ``release``, which may be called again."""

    def __init__(self, stage: Stage, direction: Direction, pages: tuple[int, ...]) -> None:
        self._stage: Stage | None = stage
        self.direction = direction
        self.pages = pages
        #: Whether a call of the store that was given up may use the pages, nobody knows for how
        #: long.
        self.stranded = False
        stage.allocated.add(self)

    def strand(self) -> None:
        """A call of the store that uses the pages was given up, on some rank: they stay out of use
        until it has returned."""
        if self._stage is None or self.stranded:
            return
        self.stranded = True
        self._stage.kept[self.direction] += len(self.pages)
        logger.warning(
            "HiCache: a call of the store that was given up may still use %d staging pages. They "
            "stay out of use until it returns, as do %d of %d (--hicache-buffer-pages) in all; if "
            "it never does, restart the server. Look at sglang:hicache_buffer_store_overdue_calls",
            len(self.pages),
            self._stage.stranded,
            self._stage.pages,
        )

    def split(self, pages: int) -> StagingPages:
        """Keep the first ``pages`` pages; the result has the rest."""
        if self._stage is None or self.stranded or not 0 < pages < len(self.pages):
            raise ValueError(f"{pages} of {len(self.pages)} pages cannot be split off")
        rest = StagingPages(self._stage, self.direction, self.pages[pages:])
        self.pages = self.pages[:pages]
        return rest

    def release(self) -> None:
        """Give the pages back; the first call counts."""
        stage, self._stage = self._stage, None
        if stage is not None:
            stage.allocated.remove(self)
            stage.lent[self.direction] -= len(self.pages)
            stage.kept[self.direction] -= len(self.pages) if self.stranded else 0
            stage.free.extend(self.pages)


class Stage:
    """Page numbers ``0 .. pages - 1``, allocated to transfers.

    Used by the scheduler thread alone, which queries the capacity many times in a step: sums are
    kept.
    """

    def __init__(self, pages: int, backup: Share, prefetch: Share) -> None:
        self.pages = pages
        self.shares: Mapping[Direction, Share] = {
            Direction.BACKUP: backup,
            Direction.PREFETCH: prefetch,
        }
        if backup.floor + prefetch.floor > pages or max(backup.ceiling, prefetch.ceiling) > pages:
            raise ValueError(f"shares {backup} and {prefetch} do not fit into {pages} pages")
        self.free = deque(range(pages))
        #: What has not been given back.
        self.allocated: set[StagingPages] = set()
        #: Pages of these by direction, and those of them that are stranded.
        self.lent, self.kept = dict.fromkeys(Direction, 0), dict.fromkeys(Direction, 0)
        #: Most pages in use at one time.
        self.peak = 0

    def capacity(self, direction: Direction, eventually: bool = False) -> int:
        """Pages that ``direction`` could get now; ``eventually``: when all but the stranded ones
        have been given back. Who needs more than that would wait for a store that may never
        answer."""
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
        found = StagingPages(self, direction, tuple(self.free.popleft() for _ in range(pages)))
        self.lent[direction] += pages
        self.peak = max(self.peak, self.used())
        return found

    def used(self, direction: Direction | None = None) -> int:
        """Pages that are allocated, in one direction or in both."""
        return sum(self.lent.values()) if direction is None else self.lent[direction]

    @property
    def stranded(self) -> int:
        """Pages that are kept for calls of the store that were given up."""
        return sum(self.kept.values())


Owner = TypeVar("Owner")
#: Host slots and device slots.
Pair = tuple["torch.Tensor", "torch.Tensor"]


def slots_of(pages: Sequence[int], page_size: int) -> torch.Tensor:
    """Token slots of the staging pages ``pages``, in order: int64, ``(len(pages) *
    page_size,)``."""
    import torch

    starts = np.asarray(pages, np.int64) * page_size  # small: each step in torch takes longer
    return torch.from_numpy((starts[:, None] + np.arange(page_size)).reshape(-1))


@dataclass(eq=False)
class Copies(Generic[Owner]):
    """Launches of one direction that have not been seen to end, oldest first."""

    launches: deque[tuple[Event | None, tuple[Owner, ...]]] = field(default_factory=deque)

    def add(self, finish_event: Event | None, owners: Iterable[Owner]) -> None:
        """A copy for ``owners`` was launched, and has ended when ``finish_event`` says so; None: at
        once, since nothing is copied."""
        self.launches.append((finish_event, tuple(owners)))

    def ended(self) -> int:
        """Launches that have ended on this rank, up to the first that has not."""
        count = 0
        for finish_event, _ in self.launches:
            if finish_event is not None and not finish_event.query():
                break
            count += 1
        return count

    def pop(self, launches: int) -> list[Owner]:
        """The owners of the first ``launches`` launches, which have ended."""
        owners: list[Owner] = []
        for _ in range(launches):
            finish_event, some = self.launches.popleft()
            if finish_event is not None:
                finish_event.synchronize()
            owners.extend(some)
        return owners


@dataclass(eq=False)
class Copier:
    """Device-to-stage and stage-to-device copies, one launch for all of a step.

    Args:
        controller: SGLang's ``HiCacheController``.
        forward_stream: gives the stream of the forward passes, or None. What a request has just
            computed is complete only when that stream gets there.
        written: gives the device slots that the batch on that stream writes to, None where they are
            not known. A request that finished meanwhile may have given one of them back.
    """

    controller: HiCacheController
    forward_stream: Callable[[], Stream | None]
    written: Callable[[], torch.Tensor | None] = lambda: None

    def to_stage(self, pairs: Sequence[Pair]) -> Event:
        """Launch a copy from the device; its finish event."""
        from sglang.srt.managers.cache_controller import CacheOperation

        controller = self.controller
        self._after_forward(controller.write_stream)
        controller.write_queue.extend(CacheOperation(*pair, node_id=-1) for pair in pairs)
        controller.start_writing()
        return controller.ack_write_queue.pop().finish_event

    def to_device(self, pairs: Sequence[Pair]) -> tuple[Event, int]:
        """The same to the device, layer by layer; finish event and the batch's consumer index.

        It runs beside the batch that runs now, unless that writes to one of its slots.
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
