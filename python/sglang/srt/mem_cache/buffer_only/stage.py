"""The staging pages: who has which, and the copies between them and the device.

A lease ends once, and how much is in use is derived from the leases that live."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.buffer_only.settings import Share

if TYPE_CHECKING:
    import torch


class Direction(enum.Enum):
    """Which way the pages of a lease go."""

    WRITE = "write"  # device to store
    READ = "read"  # store to device


class Lease:
    """Pages that belong to one transfer until ``release``, which may be called again."""

    def __init__(self, stage: Stage, direction: Direction, pages: tuple[int, ...]) -> None:
        self._stage: Stage | None = stage
        self.direction = direction
        self.pages = pages
        #: A call of the store that was given up may use the pages, nobody knows for how long.
        self.stranded = False

    @property
    def live(self) -> bool:
        """Whether the pages are still this lease's."""
        return self._stage is not None

    def split(self, pages: int) -> Lease:
        """Keep the first ``pages`` pages; the rest is the new lease's."""
        if self._stage is None or not 0 < pages < len(self.pages):
            raise ValueError(f"{pages} of {len(self.pages)} pages cannot be split off")
        rest = Lease(self._stage, self.direction, self.pages[pages:])
        self.pages = self.pages[:pages]
        self._stage._leases.add(rest)
        return rest

    def release(self) -> None:
        """Give the pages back; the first call counts."""
        stage, self._stage = self._stage, None
        if stage is not None:
            stage._take_back(self)


class Stage:
    """Page numbers ``0 .. pages - 1``, lent to transfers.

    Used by the scheduler thread alone. How much is in use is the sum over the live leases: there is
    no counter that could disagree with them.
    """

    def __init__(self, pages: int, write: Share, read: Share) -> None:
        self.pages = pages
        self.shares: Mapping[Direction, Share] = {Direction.WRITE: write, Direction.READ: read}
        if write.floor + read.floor > pages or max(write.ceiling, read.ceiling) > pages:
            raise ValueError(f"shares {write} and {read} do not fit into {pages} staging pages")
        self._free = deque(range(pages))
        self._leases: set[Lease] = set()
        #: Most pages in use at one time.
        self.peak = 0

    def room(self, direction: Direction) -> int:
        """Pages that a lease in ``direction`` could get now."""
        return self._room(direction, self._leases)

    def reachable(self, direction: Direction) -> int:
        """Pages that a lease in ``direction`` could get when all others have ended, apart from the
        stranded ones: who needs more than that would wait for a store that may never answer."""
        return self._room(direction, [lease for lease in self._leases if lease.stranded])

    def lease(self, direction: Direction, pages: int) -> Lease | None:
        """Lend ``pages`` pages, or None where :meth:`room` has fewer.

        Raises:
            ValueError: ``pages`` is not positive.
        """
        if pages <= 0:
            raise ValueError(f"a lease of {pages} pages")
        if pages > self.room(direction):
            return None
        lease = Lease(self, direction, tuple(self._free.popleft() for _ in range(pages)))
        self._leases.add(lease)
        self.peak = max(self.peak, self.used())
        return lease

    def used(self, direction: Direction | None = None) -> int:
        """Pages that are lent, in one direction or in both."""
        return sum(len(x.pages) for x in self._leases if direction in (None, x.direction))

    @property
    def stranded(self) -> int:
        """Pages that are kept for calls of the store that were given up."""
        return sum(len(lease.pages) for lease in self._leases if lease.stranded)

    @property
    def leases(self) -> frozenset[Lease]:
        """The leases that live."""
        return frozenset(self._leases)

    def problems(self) -> list[str]:
        """What is wrong with the books; empty unless somebody wrote into them."""
        numbers = [*self._free, *(page for lease in self._leases for page in lease.pages)]
        if sorted(numbers) == list(range(self.pages)):
            return []
        return [f"staging pages lost or lent twice: {sorted(numbers)} of {self.pages}"]

    def _room(self, direction: Direction, leases: Collection[Lease]) -> int:
        used = dict.fromkeys(Direction, 0)
        for lease in leases:
            used[lease.direction] += len(lease.pages)
        other = Direction.READ if direction is Direction.WRITE else Direction.WRITE
        promised = max(0, self.shares[other].floor - used[other])
        within = self.shares[direction].ceiling - used[direction]
        return max(0, min(within, self.pages - sum(used.values()) - promised))

    def _take_back(self, lease: Lease) -> None:
        self._leases.remove(lease)
        self._free.extend(lease.pages)


#: SGLang's layer counter has three sets of events; one may belong to the batch that runs now.
LOADS = 2

Pair = tuple["torch.Tensor", "torch.Tensor"]


def slots_of(pages: Sequence[int], page_size: int) -> torch.Tensor:
    """Token slots of the staging pages ``pages``, in order: int64, ``(len(pages) *
    page_size,)``."""
    import torch

    starts = torch.tensor(list(pages), dtype=torch.int64) * page_size
    return (starts[:, None] + torch.arange(page_size, dtype=torch.int64)).flatten()


class Copies:
    """Launches of one direction that have not been seen to end, oldest first."""

    def __init__(self) -> None:
        self._launches: deque[tuple[Any, tuple[Any, ...]]] = deque()

    def __len__(self) -> int:
        return len(self._launches)

    @property
    def owners(self) -> list[Any]:
        """What is being copied, in order of launch."""
        return [owner for _, owners in self._launches for owner in owners]

    def add(self, finish_event: Any, owners: Iterable[Any]) -> None:
        """A copy for ``owners`` was launched, and has ended when ``finish_event`` says so."""
        self._launches.append((finish_event, tuple(owners)))

    def ended(self) -> int:
        """Launches that have ended on this rank, up to the first that has not."""
        count = 0
        for finish_event, _ in self._launches:
            if not finish_event.query():
                break
            count += 1
        return count

    def pop(self, launches: int) -> list[Any]:
        """The owners of the first ``launches`` launches, which have ended."""
        owners: list[Any] = []
        for _ in range(launches):
            finish_event, some = self._launches.popleft()
            finish_event.synchronize()
            owners.extend(some)
        return owners


class Copier:
    """Device-to-stage and stage-to-device copies, one launch for all of a step.

    Args:
        controller: SGLang's ``HiCacheController``.
        forward_stream: gives the stream of the forward passes, or None. What a request has just
            computed is complete only when that stream gets there; and a batch that is still running
            may write to a slot that a request, finished meanwhile, has given back.
    """

    def __init__(self, controller: Any, forward_stream: Callable[[], Any]) -> None:
        self._controller = controller
        self._forward_stream = forward_stream

    def to_stage(self, pairs: Sequence[Pair]) -> Any:
        """Launch a copy of ``(host slots, device slots)`` pairs; its finish event."""
        controller = self._controller
        self._after_forward(controller.write_stream)
        controller.write_queue.extend(self._operations(pairs))
        controller.start_writing()
        return controller.ack_write_queue.pop().finish_event

    def to_device(self, pairs: Sequence[Pair]) -> tuple[Any, int]:
        """The same to the device, layer by layer; finish event and the batch's consumer index."""
        controller = self._controller
        self._after_forward(controller.load_stream)
        controller.load_queue.extend(self._operations(pairs))
        consumer_index: int = controller.start_loading()
        return controller.ack_load_queue.pop().finish_event, consumer_index

    def _after_forward(self, stream: Any) -> None:
        forward = self._forward_stream()
        if forward is not None:
            stream.wait_stream(forward)

    @staticmethod
    def _operations(pairs: Sequence[Pair]) -> list[Any]:
        from sglang.srt.managers.cache_controller import CacheOperation

        return [CacheOperation(host, device, node_id=-1) for host, device in pairs]
