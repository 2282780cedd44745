"""How Mooncake moves a chunk: the backend of a prefill rank's transfer pool.

The engine's blocking calls are made on threads of our own, and a handle is the ``Future`` of what
goes of one chunk to one decode rank. Its asynchronous calls do not serve: asking how far a batch is
(``get_batch_transfer_status``) waits until the batch has settled, and the engines of other
accelerators have none. A call that hangs is under way until it returns, at most for the engine's
own ``MC_TRANSFER_TIMEOUT``; it holds up transfers to its own decode rank, and keeps its thread.

SGLang's staging buffers gather head slices on the GPU by a worker of SGLang's own: with them the
whole group stays stock.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
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
from sglang.srt.disaggregation.delta.prefill.transfer_backend import Chunk, State, TransferError

logger = logging.getLogger(__name__)

#: What one call of the engine writes: rows of (source, target, bytes).
Batch = npt.NDArray[np.uint64]


def obstacle() -> str:
    """Why SGLang's own Mooncake transfer is needed; empty if ours serves."""
    from sglang.srt.environ import envs

    name = "SGLANG_DISAGG_STAGING_BUFFER"
    return f"{name} is set: SGLang's own worker is used" if getattr(envs, name).get() else ""


class Part(msgspec.Struct, frozen=True, eq=False):
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
    future: Future[State]


@dataclass(eq=False)
class Line:
    """What goes to a decode rank, from one of its registrations to the next."""

    #: SGLang's ``KVArgsRegisterInfo``.
    registration: Any
    #: Calls that wait.
    waiting: deque[tuple[Future[State], Callable[[], State]]] = field(default_factory=deque)
    #: How many threads serve it, or are about to.
    turns: int = 0
    #: A write failed: nothing more goes to it.
    has_failed: bool = False


class Callers:
    """Threads that make calls. Daemons: a process that ends does not wait for a call that hangs, as
    it would for an executor's. Lines take turns, each with so many calls at once, so that one whose
    calls hang leaves threads to the others."""

    def __init__(self, threads: int, at_once: int) -> None:
        self._at_once = at_once
        self._lock = threading.Lock()
        self._turns: SimpleQueue[Line] = SimpleQueue()
        for _ in range(threads):
            threading.Thread(target=self._run, name="kv-mooncake", daemon=True).start()

    def submit(self, line: Line, call: Callable[..., State], *arguments: Any) -> Future[State]:
        future: Future[State] = Future()
        with self._lock:
            line.waiting.append((future, partial(call, *arguments)))
            if line.turns < self._at_once:
                line.turns += 1
                self._turns.put(line)
        return future

    def _run(self) -> None:
        while True:
            line = self._turns.get()
            with self._lock:
                if not line.waiting:
                    line.turns -= 1
                    continue
                future, call = line.waiting.popleft()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:
                    future.set_exception(error)
            self._turns.put(line)


class MooncakeBackend:
    """``transfer_backend.Backend``. A decode rank to which a write failed gets nothing more until
    it registers again."""

    def __init__(
        self,
        engine: Any,
        describe: Callable[[Part, Any, Any], Iterable[tuple[str, Batch]]],
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
        self._lines: dict[str, Line] = {}
        #: Of ``_lines`` and ``_registered``.
        self._lock = threading.Lock()

    def post(self, chunk: Chunk, peer: str) -> list[_Call]:
        """KV, state and metadata of one chunk to one peer, in this order. They are described when
        the call begins: what waits behind one that hangs is page indices."""
        line = self._lines.get(peer)
        if line is None or line.has_failed:
            raise TransferError(Reason.PEER_LOST, _SHUT_OUT.format(peer))
        part = chunk.payload
        future = self._callers.submit(line, self._send, part, part.destinations[peer], line)
        return [_Call(chunk.room, future)]

    def _send(self, part: Part, to: Any, line: Line) -> State:
        """On one of the threads."""
        peer: str = to.mooncake_session_id
        rows = moved = 0
        for what, batch in self._describe(part, to, line.registration):
            if self._is_stopped(to.room):
                return State.DROPPED  # it waited behind a call that took long
            if line.has_failed:
                raise TransferError(Reason.PEER_LOST, _SHUT_OUT.format(peer))
            if status := self._engine.batch_transfer_sync(peer, *batch.T.tolist()):
                logger.error("transfers to decode rank %s fail until it registers again", peer)
                line.has_failed = True
                if to.is_ours:  # it registers again when it learns that it is unknown
                    self.forget(peer, line)
                raise TransferError(
                    Reason.TRANSPORT,
                    f"Mooncake could not write {what} to decode rank {peer} (status {status})",
                )
            rows, moved = rows + len(batch), moved + int(batch[:, 2].sum())
        STATS.observe("kv_transfer_descriptors", rows)
        STATS.observe("kv_transfer_bytes", moved)
        return State.DONE

    def state(self, call: _Call) -> State:
        """An error says nothing about the other writes of the batch: they may still land."""
        if self._is_stopped(call.room) and call.future.cancel():
            return State.DROPPED
        if not call.future.done():
            return State.IN_PROGRESS
        return call.future.result()

    def release(self, call: _Call) -> None:
        """The engine has freed what the call took."""

    def complete(self, chunk: Chunk) -> None:
        """Send each decode rank the status that SGLang's own worker sends."""
        for announcement in chunk.payload.destinations.values():
            self._complete(announcement)

    # ---- decode ranks ----

    def register(self, registration: Any) -> None:
        """A decode rank registers. Calls for an earlier registration of it say nothing about it."""
        peer = registration.mooncake_session_id
        with self._lock:
            self._lines[peer], self._registered[peer] = Line(registration), registration

    def forget(self, peer: str, line: Line | None = None) -> None:
        """It is gone, or its registration that has this line does not serve any more."""
        with self._lock:
            if line in (None, self._lines.get(peer)):
                self._lines.pop(peer, None)
                self._registered.pop(peer, None)
