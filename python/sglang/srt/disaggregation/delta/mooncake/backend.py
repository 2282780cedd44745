"""Mooncake backend of a prefill rank's transfer pool.

The engine's blocking calls run on threads of our own; a handle is the ``Future`` of the calls for
one chunk and one decode rank. The engine's asynchronous calls are not used, because a query of a
batch's state (``get_batch_transfer_status``) waits until the batch has settled, and the engines of
other accelerators have none. A hung call is in flight until it returns, at most for the engine's
``MC_TRANSFER_TIMEOUT``. It delays transfers to its own decode rank and keeps its thread, which is
replaced.

SGLang's staging buffers gather head slices on the GPU in a worker of SGLang's own; with them the
whole group stays stock.

Contract: transfer workers call ``post``, ``state``, ``release`` and ``complete``; the reader thread
calls ``register`` and ``forget``; ``_send`` runs on the threads of ``Callers``. ``Callers`` and
``MooncakeBackend`` have one lock each, not held during a call of the engine.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple  # Any: SGLang's registrations and announcements

import msgspec
import numpy as np
import numpy.typing as npt

from sglang.srt.disaggregation.delta.metrics import Reason
from sglang.srt.disaggregation.delta.observability import STATS
from sglang.srt.disaggregation.delta.pages import Pages
from sglang.srt.disaggregation.delta.prefill.transfer_backend import (
    Chunk,
    TransferError,
    TransferState,
    use_batch_scheduling,
)

logger = logging.getLogger(__name__)

#: Time after which a call counts as hung, and no longer as one of the concurrent calls. Well below
#: MC_TRANSFER_TIMEOUT, because a call to a stopped rank lasts that long.
_HANGS_S = 1.0

#: Writes of one call of the engine: rows of (source, target, bytes).
Batch = npt.NDArray[np.uint64]


def obstacle() -> str:
    """Return why SGLang's own Mooncake transfer is needed; empty if ours can be used."""
    from sglang.srt.environ import envs

    name = "SGLANG_DISAGG_STAGING_BUFFER"
    return f"{name} is set: SGLang's own worker is used" if getattr(envs, name).get() else ""


class MooncakePayload(msgspec.Struct, frozen=True, eq=False):
    """The payload of a chunk."""

    pages: Pages
    #: Slice of the room's destination pages.
    place: slice
    #: With the last chunk only.
    metadata_slot: int | None
    state_pages: Any
    #: Session -> announcement (``MooncakeTransferInfo``).
    destinations: dict[str, Any]


_UNREGISTERED = "decode rank {}: an earlier transfer failed, or it is gone; it must register again"


class _Call(NamedTuple):
    """A handle: the engine's calls for one chunk and one decode rank."""

    room: int
    future: Future[TransferState]


@dataclass(eq=False)
class Registered:
    """A decode rank, from one registration to the next."""

    #: SGLang's ``KVArgsRegisterInfo``.
    registration: Any
    #: True after a failed write or a replacement of its process: nothing more is written to it.
    has_failed: bool = False


@dataclass
class _CallQueue:
    """Queued calls to one decode rank."""

    waiting: deque[tuple[Future[TransferState], Callable[[], TransferState]]] = field(
        default_factory=deque
    )
    #: Number of threads that serve it, or will.
    turns: int = 0


class Callers:
    """At least two daemon threads that make blocking calls (an executor would wait at exit for a
    hung call). Decode ranks take turns, each with at most ``at_once`` calls (also after it
    registers again), and never with a call on every thread.

    The thread of a hung call is replaced, because otherwise the ranks of one stopped decode server
    could take all threads.
    """

    def __init__(
        self, threads: int, at_once: int, spare: int = 0, hangs_s: float = _HANGS_S
    ) -> None:
        """``spare``: maximum threads that replace others; ``hangs_s``: seconds after which a call
        counts as hung."""
        threads = max(threads, 2)
        self._at_once = min(at_once, threads - 1)
        self._hangs_s, self._spare = hangs_s, spare
        self._lock = threading.Lock()
        self._queues: dict[str, _CallQueue] = {}
        self._turns: SimpleQueue[str] = SimpleQueue()
        #: Call in flight -> its start time. A hung call is removed when its thread is replaced.
        self._began: dict[Future[TransferState], float] = {}
        for _ in range(threads):
            threading.Thread(target=self._run, name="kv-mooncake", daemon=True).start()

    def replace_if_hanging(self, future: Future[TransferState]) -> None:
        """Replace the thread of a call that began ``hangs_s`` ago or earlier. Called by the
        transfer workers when they poll a call."""
        hung_since = time.monotonic() - self._hangs_s
        # Ignore a failed start of a thread, because the next poll retries it.
        with self._lock, suppress(RuntimeError):
            if self._spare and self._began.get(future, math.inf) <= hung_since:
                threading.Thread(target=self._run, name="kv-mooncake", daemon=True).start()
                del self._began[future]
                self._spare -= 1

    def submit(
        self, peer: str, call: Callable[..., TransferState], *arguments: Any
    ) -> Future[TransferState]:
        """Queue a call for ``peer``. Return its future."""
        future: Future[TransferState] = Future()
        with self._lock:
            queue = self._queues.setdefault(peer, _CallQueue())
            queue.waiting.append((future, partial(call, *arguments)))
            if queue.turns < self._at_once:
                queue.turns += 1
                self._turns.put(peer)
        return future

    def _run(self) -> None:
        use_batch_scheduling()  # like the transfer workers, because these threads take the GIL too
        while True:
            peer = self._turns.get()
            with self._lock:
                queue = self._queues[peer]
                if not queue.waiting:
                    queue.turns -= 1
                    if not queue.turns:
                        del self._queues[peer]
                    continue
                future, call = queue.waiting.popleft()
                self._began[future] = time.monotonic()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:
                    future.set_exception(error)
            self._turns.put(peer)
            with self._lock:
                if self._began.pop(future, None) is None:  # this thread was replaced
                    self._spare += 1
                    return


class MooncakeBackend:
    """``transfer_backend.Backend``. After a failed write, nothing more is written to a decode rank
    until it registers again."""

    def __init__(
        self,
        engine: Any,
        describe: Callable[[MooncakePayload, Any, Any], Iterable[tuple[str, Batch]]],
        complete: Callable[[Any], None],
        is_stopped: Callable[[int], bool],
        registered: dict[str, Any],
        callers: Callers,
    ) -> None:
        """Create the backend.

        Args:
            describe: returns the batches of a payload for an announcement and a registration, each
                with a name for errors.
            complete: notifies the decode rank of an announcement.
            is_stopped: returns True if a room was given up.
            registered: SGLang's ``decode_kv_args_table``, written here.
        """
        self._engine = engine
        self._describe = describe
        self._complete = complete
        self._is_stopped = is_stopped
        self._registered = registered
        self._callers = callers
        self._ranks: dict[str, Registered] = {}
        #: Guards ``_ranks`` and ``_registered``.
        self._lock = threading.Lock()

    def post(self, chunk: Chunk, peer: str) -> list[_Call]:
        """Queue KV, state and metadata of one chunk to one peer, in this order. The memory is
        described when the call begins, so that a queued call keeps only page indices."""
        rank = self._ranks.get(peer)
        if rank is None or rank.has_failed:
            raise TransferError(Reason.PEER_LOST, _UNREGISTERED.format(peer))
        part = chunk.payload
        future = self._callers.submit(peer, self._send, part, part.destinations[peer], rank)
        return [_Call(chunk.room, future)]

    def _send(self, part: MooncakePayload, to: Any, rank: Registered) -> TransferState:
        """Write one chunk to one decode rank, on a thread of ``Callers``."""
        peer: str = to.mooncake_session_id
        rows = moved = 0
        for name, batch in self._describe(part, to, rank.registration):
            if self._is_stopped(to.room):
                return TransferState.DROPPED  # the room ended while a slow call delayed this one
            if rank.has_failed:
                raise TransferError(Reason.PEER_LOST, _UNREGISTERED.format(peer))
            if status := self._engine.batch_transfer_sync(peer, *batch.T.tolist()):
                logger.error("transfers to decode rank %s fail until it registers again", peer)
                rank.has_failed = True
                if to.is_ours:  # a patched rank registers again when it learns that it is unknown
                    self.forget(peer, rank)
                raise TransferError(
                    Reason.TRANSPORT,
                    f"Mooncake could not write {name} to decode rank {peer} (status {status})",
                )
            rows, moved = rows + len(batch), moved + int(batch[:, 2].sum())
        STATS.observe("kv_transfer_descriptors", rows)
        STATS.observe("kv_transfer_bytes", moved)
        return TransferState.DONE

    def state(self, call: _Call) -> TransferState:
        """Return the state of a call. After an error, other writes of its batch may still land."""
        if self._is_stopped(call.room) and call.future.cancel():
            return TransferState.DROPPED
        if not call.future.done():
            self._callers.replace_if_hanging(call.future)
            return TransferState.IN_PROGRESS
        return call.future.result()

    def release(self, call: _Call) -> None:
        """Do nothing, because the engine has freed the call's resources."""

    def complete(self, chunk: Chunk) -> None:
        """Send each decode rank the status message of SGLang's own worker."""
        for announcement in chunk.payload.destinations.values():
            self._complete(announcement)

    # ---- decode ranks ----

    def register(self, registration: Any) -> None:
        """Register a decode rank. Results of calls for its earlier registration are ignored. If
        another process registers under its address, those calls write no further batch."""
        peer = registration.mooncake_session_id
        with self._lock:
            before = self._ranks.get(peer)
            if before is not None and before.registration != registration:
                before.has_failed = True
            self._ranks[peer], self._registered[peer] = Registered(registration), registration

    def forget(self, peer: str, rank: Registered | None = None) -> None:
        """Remove a decode rank; with ``rank``, only if that is its current registration."""
        with self._lock:
            if rank in (None, self._ranks.get(peer)):
                self._ranks.pop(peer, None)
                self._registered.pop(peer, None)
