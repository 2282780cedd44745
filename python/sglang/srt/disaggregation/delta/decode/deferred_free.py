"""Following a room that was given up on decode, until prefill can write to its pages no more.

Pages of transfers that ended early, held until prefill cannot write to them.

When a request in transfer is aborted or fails, prefill may still be writing to its pages. Given to
another request, or kept in the tree, they would be overwritten, and everybody who shares them would
read that. So the request keeps its pages, its row, its metadata slot and its lock until its backend
says that the room is quiet, at most for a bound; after that they are released, and the log says so.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sglang.srt.patchset import environment

logger = logging.getLogger(__name__)


class Progress(Protocol):
    """What the prefill ranks that write for one room have said so far."""

    def stop(self, writer: int) -> None:
        """The rank ``writer`` said that it writes no more."""

    def is_quiet(self, writers: int) -> bool:
        """Whether each of ``writers`` ranks has delivered everything or stopped."""


class RoomWatch:
    """Quiet once each writer has delivered everything, said that it stopped, or is gone.

    A remote write cannot be taken back by its target: pages that are given to another request while
    one is under way would be overwritten, and with a radix tree so would everybody who shares them.
    """

    def __init__(
        self, servers: Any, room: int, address: str, progress: Progress, writers: int
    ) -> None:
        self._servers = servers
        self._progress = progress
        #: Prefill ranks that write for the room.
        self.writers = writers
        self._gone = False
        self.room = room
        #: The prefill server, host:port of its bootstrap server.
        self.address = address

    @property
    def progress(self) -> Progress:
        """What arrived for the room, for the backend to keep up to date."""
        return self._progress

    def writer_is_gone(self) -> None:
        """The prefill processes that could write are certain not to exist any more."""
        self._gone = True

    def quiet(self) -> bool:
        """Whether the pages may be given to others; also reads what has arrived."""
        self._servers.collect_arrivals()
        return self._gone or self._progress.is_quiet(self.writers)

    def close(self) -> None:
        """Stop following the room."""
        self._servers.close_watch(self.room)


class Watch(Protocol):
    """A backend's view of a room that was given up."""

    def quiet(self) -> bool:
        """Whether prefill can write to the room's pages no more."""

    def close(self) -> None:
        """Stop following the room."""


class QuietRoom:
    """The watch of a room that prefill cannot write to."""

    def quiet(self) -> bool:
        """Always."""
        return True

    def close(self) -> None:
        """Nothing to stop."""


@dataclass(frozen=True, eq=False)
class Held:
    """One request whose pages are held."""

    decode_req: Any
    watch: Watch
    since: float


class Quarantine:
    """The held requests of one decode rank, in the order in which they were given up."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._held: list[Held] = []

    def __len__(self) -> int:
        return len(self._held)

    @property
    def decode_requests(self) -> list[Any]:
        """The queue entries, whose metadata slots are held as well."""
        return [held.decode_req for held in self._held]

    @property
    def requests(self) -> list[Any]:
        """Requests that still own pages, a row and a lock."""
        return [held.decode_req.req for held in self._held]

    def hold(self, decode_req: Any, watch: Watch) -> None:
        """Keep what ``decode_req`` owns until ``watch`` is quiet."""
        self._held.append(Held(decode_req, watch, self._clock()))

    @property
    def pollers(self) -> list[HeldPoller]:
        """For each held request, what the ranks poll: see ``HeldPoller``."""
        return [HeldPoller(self, held) for held in self._held]

    def pop(self, polls: Sequence[int]) -> list[Any]:
        """The decode requests whose pages may be released now; the caller releases them.

        ``polls``: those of ``pollers``, reduced over the ranks: a room is released when it is quiet
        on all of them, so that their pools stay equal.
        """
        from sglang.srt.disaggregation.base.conn import KVPoll

        out = [held for held, poll in zip(self._held, polls, strict=True) if poll == KVPoll.Success]
        for held in out:
            self._held.remove(held)
            held.watch.close()
        return [held.decode_req for held in out]

    def may_release(self, held: Held) -> bool:
        """Whether this rank would let go of ``held``: it is quiet, or was waited for too long."""
        if held.watch.quiet():
            return True
        waited = self._clock() - held.since
        if waited < environment.QUARANTINE_TIMEOUT.read():
            return False
        req = held.decode_req.req
        logger.error(
            "room %s of request %s: prefill %s:%s gave no sign in %.0f s that it stopped writing; "
            "its %d tokens of KV are released all the same",
            req.bootstrap_room,
            req.rid,
            req.bootstrap_host,
            req.bootstrap_port,
            waited,
            req.kv_allocated_len - req.cache_protected_len,
        )
        return True


@dataclass(frozen=True)
class HeldPoller:
    """A held room beside the transfers in one poll: Success once its pages may be released."""

    quarantine: Quarantine
    held: Held

    def poll(self) -> int:
        """``KVPoll.Success``, or ``KVPoll.Transferring`` while prefill may still write."""
        from sglang.srt.disaggregation.base.conn import KVPoll

        quiet = self.quarantine.may_release(self.held)
        return int(KVPoll.Success if quiet else KVPoll.Transferring)


def held_requests(queue: Any) -> Sequence[Any]:
    """The held requests of a decode transfer queue; none for a stock queue."""
    quarantine: Quarantine | None = getattr(queue, "quarantine", None)
    return quarantine.requests if quarantine is not None else ()
