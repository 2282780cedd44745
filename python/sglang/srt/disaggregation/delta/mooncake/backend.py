"""How Mooncake moves a chunk: the backend of a prefill rank's transfer pool.

The engine's blocking calls are made on threads of our own, and a handle is the ``Future`` of what
goes of one chunk to one decode rank. Its asynchronous calls do not serve: asking how far a batch is
(``get_batch_transfer_status``) waits until the batch has settled, and the engines of other
accelerators have none. A call that hangs is under way until it returns, at most for the engine's
own ``MC_TRANSFER_TIMEOUT``; it holds up transfers to its own decode rank, and keeps its thread, for
which another one is started.

SGLang's staging buffers gather head slices on the GPU by a worker of SGLang's own: with them the
whole group stays stock.
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

#: Seconds after which a call counts as hanging, and no longer among the calls at one time. Well
#: below MC_TRANSFER_TIMEOUT, because a call to a stopped rank lasts that long.
_HANGS_S = 1.0

#: What one call of the engine writes: rows of (source, target, bytes).
Batch = npt.NDArray[np.uint64]


def obstacle() -> str:
    """Why SGLang's own Mooncake transfer is needed; empty if ours serves."""
    from sglang.srt.environ import envs

    name = "SGLANG_DISAGG_STAGING_BUFFER"
    return f"{name} is set: SGLang's own worker is used" if getattr(envs, name).get() else ""


class MooncakePayload(msgspec.Struct, frozen=True, eq=False):
    """The payload of a chunk."""

    pages: Pages
    #: Its place among the room's destination pages.
    place: slice
    #: With the last chunk only.
    metadata_slot: int | None
    state_pages: Any
    #: Announcements (``MooncakeTransferInfo``) by session.
    destinations: dict[str, Any]


_SHUT_OUT = "an earlier transfer to decode rank {} failed, or it is gone; it must register again"


class _Call(NamedTuple):
    """A handle: one call of the engine."""

    room: int
    future: Future[TransferState]


@dataclass(eq=False)
class Registered:
    """A decode rank, from one of its registrations to the next."""

    #: SGLang's ``KVArgsRegisterInfo``.
    registration: Any
    #: A write failed, or its process was replaced: nothing more goes to it.
    has_failed: bool = False


@dataclass
class _CallQueue:
    """Calls to one decode rank that wait, and how many threads serve them or are about to."""

    waiting: deque[tuple[Future[TransferState], Callable[[], TransferState]]] = field(
        default_factory=deque
    )
    turns: int = 0


class Callers:
    """At least two daemon threads that make blocking calls. Daemons, because an executor would wait
    at exit for a call that hangs. Decode ranks take turns, each with at most ``at_once`` calls
    (whatever it registers meanwhile) and never with one on each thread.

    A thread whose call hangs is replaced, because the ranks of one stopped decode server could take
    all threads.
    """

    def __init__(
        self, threads: int, at_once: int, spare: int = 0, hangs_s: float = _HANGS_S
    ) -> None:
        """``spare``: most threads that replace others; ``hangs_s``: seconds after which a call
        counts as hanging."""
        threads = max(threads, 2)
        self._at_once = min(at_once, threads - 1)
        self._hangs_s, self._spare = hangs_s, spare
        self._lock = threading.Lock()
        self._lines: dict[str, _CallQueue] = {}
        self._turns: SimpleQueue[str] = SimpleQueue()
        #: When each call under way began; without those that hang, whose threads were replaced.
        self._began: dict[Future[TransferState], float] = {}
        for _ in range(threads):
            threading.Thread(target=self._run, name="kv-mooncake", daemon=True).start()

    def replace_if_hanging(self, future: Future[TransferState]) -> None:
        """Start another thread for the one whose call began ``hangs_s`` ago. Called by the transfer
        workers when they poll a call."""
        hangs_since = time.monotonic() - self._hangs_s
        # A system without threads fails no room: the next poll tries again.
        with self._lock, suppress(RuntimeError):
            if self._spare and self._began.get(future, math.inf) <= hangs_since:
                threading.Thread(target=self._run, name="kv-mooncake", daemon=True).start()
                del self._began[future]
                self._spare -= 1

    def submit(
        self, peer: str, call: Callable[..., TransferState], *arguments: Any
    ) -> Future[TransferState]:
        future: Future[TransferState] = Future()
        with self._lock:
            line = self._lines.setdefault(peer, _CallQueue())
            line.waiting.append((future, partial(call, *arguments)))
            if line.turns < self._at_once:
                line.turns += 1
                self._turns.put(peer)
        return future

    def _run(self) -> None:
        use_batch_scheduling()  # as the transfer workers: these threads take the GIL, too
        while True:
            peer = self._turns.get()
            with self._lock:
                line = self._lines[peer]
                if not line.waiting:
                    line.turns -= 1
                    if not line.turns:
                        del self._lines[peer]
                    continue
                future, call = line.waiting.popleft()
                self._began[future] = time.monotonic()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:
                    future.set_exception(error)
            self._turns.put(peer)
            with self._lock:
                if self._began.pop(future, None) is None:  # it was replaced
                    self._spare += 1
                    return


class MooncakeBackend:
    """``transfer_backend.Backend``. A decode rank to which a write failed gets nothing more until
    it registers again."""

    def __init__(
        self,
        engine: Any,
        describe: Callable[[MooncakePayload, Any, Any], Iterable[tuple[str, Batch]]],
        complete: Callable[[Any], None],
        is_stopped: Callable[[int], bool],
        registered: dict[str, Any],
        callers: Callers,
    ) -> None:
        """``describe``: what goes to the decode rank of an announcement, by its registration, as
        batches, each with what it is. ``complete`` notifies the decode rank of an announcement;
        ``is_stopped``: whether a room was given up. ``registered``: SGLang's
        ``decode_kv_args_table``, which is written here."""
        self._engine = engine
        self._describe = describe
        self._complete = complete
        self._is_stopped = is_stopped
        self._registered = registered
        self._callers = callers
        self._ranks: dict[str, Registered] = {}
        #: Of ``_ranks`` and ``_registered``.
        self._lock = threading.Lock()

    def post(self, chunk: Chunk, peer: str) -> list[_Call]:
        """KV, state and metadata of one chunk to one peer, in this order. They are described when
        the call begins, so that only page indices wait behind a call that hangs."""
        rank = self._ranks.get(peer)
        if rank is None or rank.has_failed:
            raise TransferError(Reason.PEER_LOST, _SHUT_OUT.format(peer))
        part = chunk.payload
        future = self._callers.submit(peer, self._send, part, part.destinations[peer], rank)
        return [_Call(chunk.room, future)]

    def _send(self, part: MooncakePayload, to: Any, rank: Registered) -> TransferState:
        """On one of the threads."""
        peer: str = to.mooncake_session_id
        rows = moved = 0
        for what, batch in self._describe(part, to, rank.registration):
            if self._is_stopped(to.room):
                return TransferState.DROPPED  # it waited behind a call that took long
            if rank.has_failed:
                raise TransferError(Reason.PEER_LOST, _SHUT_OUT.format(peer))
            if status := self._engine.batch_transfer_sync(peer, *batch.T.tolist()):
                logger.error("transfers to decode rank %s fail until it registers again", peer)
                rank.has_failed = True
                if to.is_ours:  # it registers again when it learns that it is unknown
                    self.forget(peer, rank)
                raise TransferError(
                    Reason.TRANSPORT,
                    f"Mooncake could not write {what} to decode rank {peer} (status {status})",
                )
            rows, moved = rows + len(batch), moved + int(batch[:, 2].sum())
        STATS.observe("kv_transfer_descriptors", rows)
        STATS.observe("kv_transfer_bytes", moved)
        return TransferState.DONE

    def state(self, call: _Call) -> TransferState:
        """An error says nothing about the other writes of the batch: they may still land."""
        if self._is_stopped(call.room) and call.future.cancel():
            return TransferState.DROPPED
        if not call.future.done():
            self._callers.replace_if_hanging(call.future)
            return TransferState.IN_PROGRESS
        return call.future.result()

    def release(self, call: _Call) -> None:
        """The engine has freed what the call took."""

    def complete(self, chunk: Chunk) -> None:
        """Send each decode rank the status that SGLang's own worker sends."""
        for announcement in chunk.payload.destinations.values():
            self._complete(announcement)

    # ---- decode ranks ----

    def register(self, registration: Any) -> None:
        """Register a decode rank. Results of calls for its earlier registration are ignored; if
        another process registers under its address, those calls write no more."""
        peer = registration.mooncake_session_id
        with self._lock:
            before = self._ranks.get(peer)
            if before is not None and before.registration != registration:
                before.has_failed = True
            self._ranks[peer], self._registered[peer] = Registered(registration), registration

    def forget(self, peer: str, rank: Registered | None = None) -> None:
        """It is gone; ``rank``: only if that is its registration now."""
        with self._lock:
            if rank in (None, self._ranks.get(peer)):
                self._ranks.pop(peer, None)
                self._registered.pop(peer, None)
