"""How Mooncake moves a chunk: the backend of a prefill rank's transfer pool.

The engine's blocking calls are made on threads of each decode rank, and a handle is the ``Future``
of one call. Its asynchronous calls do not serve: asking how far a batch is
(``get_batch_transfer_status``) waits until the batch has settled, and the engines of other
accelerators have none. A call that hangs is under way until it returns, at most for the engine's
own ``MC_TRANSFER_TIMEOUT``; it holds up transfers to its own decode rank, and is one of the calls
that may be made at once.

SGLang's staging buffers gather head slices on the GPU by a worker of SGLang's own: with them the
whole group stays stock.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
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


class Line:
    """The threads of one decode rank. Daemons: a process that ends does not wait for a call that
    hangs, as it would for an executor's."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        #: Calls that wait. None: the thread that takes it ends.
        self._calls: SimpleQueue[tuple[Future[State], Callable[[], State]] | None] = SimpleQueue()
        for _ in range(threads):
            threading.Thread(target=self._run, name="kv-mooncake", daemon=True).start()

    def submit(self, call: Callable[..., State], *arguments: Any) -> Future[State]:
        future: Future[State] = Future()
        self._calls.put((future, partial(call, *arguments)))
        return future

    def close(self) -> None:
        """The threads end when what waits is done."""
        for _ in range(self._threads):
            self._calls.put(None)

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            future, call = item
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:
                    future.set_exception(error)
            del item, call  # a batch is large


class MooncakeBackend:
    """``transfer_backend.Backend``. A decode rank to which a transfer failed gets nothing more
    until it registers again."""

    def __init__(
        self,
        engine: Any,
        describe: Callable[[Part, str], Iterable[tuple[str, Batch]]],
        complete: Callable[[Any], None],
        is_stopped: Callable[[int], bool],
        registered: dict[str, Any],
        threads: int,
        calls: int,
    ) -> None:
        """``describe``: the batches that go to a decode rank, each with what it is.
        ``complete`` notifies the decode rank of an announcement; ``is_stopped``: whether a room was
        given up. ``registered``: SGLang's ``decode_kv_args_table``. ``threads``: for each decode
        rank; ``calls``: of the engine at once, over all of them."""
        self._engine = engine
        self._describe = describe
        self._complete = complete
        self._is_stopped = is_stopped
        self._registered = registered
        self._threads = threads
        #: A call of the engine takes a core until it is done, whatever it waits for.
        self._calls = threading.Semaphore(calls)
        self._lines: dict[str, Line] = {}
        self._lines_lock = threading.Lock()
        self._failed: set[str] = set()

    def post(self, chunk: Chunk, peer: str) -> Iterator[_Call]:
        """KV, state and metadata of one chunk to one peer, in this order."""
        if peer in self._failed or peer not in self._registered:
            raise TransferError(Reason.PEER_LOST, _SHUT_OUT.format(peer))
        with self._lines_lock:
            line = self._lines.get(peer)
            if line is None:
                line = self._lines[peer] = Line(self._threads)
        rows = moved = 0
        for what, batch in self._describe(chunk.payload, peer):
            rows, moved = rows + len(batch), moved + int(batch[:, 2].sum())
            to = chunk.payload.destinations[peer]
            yield _Call(chunk.room, line.submit(self._write, to, what, batch))
        STATS.observe("kv_transfer_descriptors", rows)
        STATS.observe("kv_transfer_bytes", moved)

    def _write(self, to: Any, what: str, batch: Batch) -> State:
        """On a thread of the decode rank's.

        The numbers become Python's only here: those of all layers would be hundreds of megabytes.
        """
        peer = to.mooncake_session_id
        with self._calls:
            if self._is_stopped(to.room):
                return State.DROPPED  # it waited behind a call that took long
            if peer in self._failed:
                raise TransferError(Reason.PEER_LOST, _SHUT_OUT.format(peer))  # it never began
            status = self._engine.batch_transfer_sync(peer, *batch.T.tolist())
        if status == 0:
            return State.DONE
        logger.error("transfers to decode rank %s fail until it registers again", peer)
        self._failed.add(peer)
        if to.is_ours:  # it registers again when it learns that it is unknown; a stock one does not
            self._registered.pop(peer, None)
        raise TransferError(
            Reason.TRANSPORT,
            f"Mooncake could not write {what} to decode rank {peer} (status {status})",
        )

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

    def registered(self, peer: str) -> None:
        """It has registered: no failure of its session counts any more."""
        self._failed.discard(peer)

    def forget(self, peer: str) -> None:
        """It is gone."""
        self._failed.discard(peer)
        with self._lines_lock:
            line = self._lines.pop(peer, None)
        if line is not None:
            line.close()
