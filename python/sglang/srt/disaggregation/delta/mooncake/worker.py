"""Sends the chunks of one queue, one after the other: KV, state, metadata, and then the status.

The engine's calls return when what they moved has settled, so a room is busy exactly while its
chunk is in here, with one exception: a call that returns an error says nothing about the other
writes of its batch.

SGLang's staging buffers gather head slices on the GPU by a worker of SGLang's own: with them the
whole group stays stock.
"""

from __future__ import annotations

import concurrent.futures
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar  # Any: of whatever is submitted

from sglang.srt.disaggregation.delta.metrics import Reason
from sglang.srt.disaggregation.delta.observability import count_sent

if TYPE_CHECKING:
    from sglang.srt.disaggregation.delta.mooncake.manager import DeltaMooncakeManager
    from sglang.srt.disaggregation.delta.mooncake.messages import MooncakeTransferInfo
    from sglang.srt.disaggregation.mooncake.conn import KVArgsRegisterInfo, TransferKVChunk

logger = logging.getLogger(__name__)


def obstacle() -> str:
    """Why SGLang's own Mooncake transfer is needed; empty if ours serves."""
    from sglang.srt.environ import envs

    name = "SGLANG_DISAGG_STAGING_BUFFER"
    return f"{name} is set: SGLang's own worker is used" if getattr(envs, name).get() else ""


Result = TypeVar("Result")


# ---- what waits in the queues, and until when ----


class ChunkDeadlines:
    """Each chunk's, from ``send()`` to its end. Filled by the scheduler, emptied by the workers,
    looked at by the reader thread: a worker in a call of the engine cannot look at its watch."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """``seconds``: how long a chunk may take."""
        self.seconds = seconds
        self._clock = clock
        self._lock = threading.Lock()
        #: Of each chunk that is not over, by its identity, in the order of ``queued``: the chunk,
        #: when it is due, and the decode rank that it is written to (None: it waits).
        self._due: dict[int, tuple[TransferKVChunk, float, str | None]] = {}

    def queued(self, chunk: TransferKVChunk) -> None:
        """It is put into its queue."""
        with self._lock:
            self._due[id(chunk)] = chunk, self._clock() + self.seconds, None

    def sending(self, chunk: TransferKVChunk, peer: str) -> None:
        """It is written to the decode rank ``peer`` now."""
        with self._lock:
            if id(chunk) in self._due:
                _, due, _ = self._due[id(chunk)]
                self._due[id(chunk)] = chunk, due, peer

    def over(self, chunk: TransferKVChunk) -> None:
        """It is over, or dropped. Harmless for one that is not in here."""
        with self._lock:
            self._due.pop(id(chunk), None)

    def take_overdue(self) -> list[tuple[TransferKVChunk, str | None]]:
        """Take out the chunks that are late, and the decode rank that each is written to; None
        while it waits in its queue."""
        now, late = self._clock(), []
        with self._lock:
            for chunk, due, peer in self._due.values():
                if due > now:
                    break
                late.append((chunk, peer))
            for chunk, _ in late:
                del self._due[id(chunk)]
        return late

    def rooms(self) -> list[int]:
        """Rooms with chunks that are not over."""
        with self._lock:
            return sorted({chunk.room for chunk, _, _ in self._due.values()})


# ---- how a chunk is sent ----


class ChunkError(Exception):
    """A chunk cannot be sent; fails its room.

    ``settled``: nothing of it can still be under way.
    """

    def __init__(self, kind: Reason, text: str, *, settled: bool = True) -> None:
        super().__init__(text)
        self.kind = kind
        self.settled = settled


class SettlingExecutor:
    """Stock stops waiting at the first failed layer; here nothing outlives the chunk."""

    def __init__(self, executor: concurrent.futures.Executor) -> None:
        self._executor = executor
        self._futures: list[concurrent.futures.Future[Any]] = []

    def submit(
        self, function: Callable[..., Result], *arguments: Any
    ) -> concurrent.futures.Future[Result]:
        """As ``Executor.submit``, whose arguments have no types either."""
        future = self._executor.submit(function, *arguments)
        self._futures.append(future)
        return future

    def settle(self) -> None:
        """Wait for all that was submitted."""
        concurrent.futures.wait(self._futures)
        self._futures.clear()


class ChunkWorker:
    """Used by one thread; a room's chunks all come to the same one."""

    def __init__(
        self, manager: DeltaMooncakeManager, executor: concurrent.futures.Executor
    ) -> None:
        self._manager = manager
        self._executor = SettlingExecutor(executor)

    def take(self, chunk: TransferKVChunk) -> None:
        """Send one ``TransferKVChunk``, or fail its room. Never raises."""
        try:
            if self._manager.rooms.enter(chunk.owner):
                self._serve(chunk)
        except Exception as error:  # the thread must outlive what it meets
            logger.exception(
                "room %s failed: an unexpected error in a transfer worker, which continues",
                chunk.room,
            )
            text = f"room {chunk.room}: {error!r}"
            self._manager.rooms.fail(chunk.room, Reason.TRANSPORT, text, meant=chunk.owner)
        finally:
            self._manager.chunk_deadlines.over(chunk)

    def _serve(self, chunk: TransferKVChunk) -> None:
        settled = True
        try:
            self._send(chunk)
        except ChunkError as error:
            settled = error.settled
            self._manager.fail_room(chunk, error.kind, str(error), settled=settled)
        except Exception as error:  # the engine's binding raises what it likes
            text = f"room {chunk.room}: {error!r}"
            self._manager.fail_room(chunk, Reason.TRANSPORT, text, settled=True)
        finally:
            self._executor.settle()
            if settled:
                self._manager.rooms.leave(chunk.room)
            else:
                self._manager.leave_later(chunk.room)

    def _send(self, chunk: TransferKVChunk) -> None:
        from sglang.srt.disaggregation.base.conn import KVPoll

        manager, room = self._manager, chunk.room
        infos = [info for info in manager.rooms.destinations(room) if not info.is_dummy]
        for info in infos:
            if self._is_stopped(room):
                return
            self._send_to(info, chunk)
        if not chunk.is_last_chunk or not manager.rooms.complete(chunk.owner):
            return
        for info in infos:
            manager.send_status(info, KVPoll.Success)
        manager.rooms.deliver(room)

    def _send_to(self, info: MooncakeTransferInfo, chunk: TransferKVChunk) -> None:
        """Everything of one chunk that goes to one decode rank."""
        manager, session = self._manager, info.mooncake_session_id
        manager.chunk_deadlines.sending(chunk, session)
        target = manager.decode_kv_args_table.get(session)
        if manager.has_failed_session(session) or target is None:
            raise ChunkError(
                Reason.PEER_LOST,
                f"room {info.room}: an earlier transfer to decode rank {session} failed, or it is "
                "gone; it must register again",
            )
        self._send_pages(info, target, chunk)
        # A call of the engine may last so long that decode gives its slot to another room.
        if not chunk.is_last_chunk or self._is_stopped(info.room):
            return
        if chunk.state_indices is not None:
            self._check_index(info, chunk.state_indices)
            status = manager.maybe_send_extra(
                info, chunk.state_indices, target.dst_state_data_ptrs, self._executor, target
            )
            self._check(status, "state", info)
            if self._is_stopped(info.room):
                return
        status = manager.send_aux(info, chunk.prefill_aux_index, target.dst_aux_ptrs)
        self._check(status, "metadata", info)

    def _check_index(self, info: MooncakeTransferInfo, pages: Sequence[int]) -> None:
        """SGLang would write the first of them, or others', where two numbers of pages differ."""
        if self._manager.kv_args.state_type != "nsa" or len(pages) == len(info.dst_state_indices):
            return
        raise ChunkError(
            Reason.MISMATCH,
            f"room {info.room}: {len(pages)} pages of state, and decode rank "
            f"{info.mooncake_session_id} listed {len(info.dst_state_indices)}",
        )

    def _is_stopped(self, room: int) -> bool:
        return self._manager.rooms.stopped(room) is not None

    def _send_pages(
        self, info: MooncakeTransferInfo, target: KVArgsRegisterInfo, chunk: TransferKVChunk
    ) -> None:
        manager, session = self._manager, info.mooncake_session_id
        source = chunk.prefill_kv_indices
        if len(source) == 0:
            return  # a full prefix hit: only metadata
        if target.enable_hisparse:
            status = manager.send_kvcache_hisparse(
                session, source, target.dst_kv_ptrs, info.dst_kv_indices, chunk.index_slice,
                self._executor,
            )  # fmt: skip
            self._check(status, "KV", info)
            return
        destination = info.dst_kv_indices[chunk.index_slice]
        if len(source) != len(destination):
            raise ChunkError(
                Reason.MISMATCH,
                f"room {info.room}: {len(source)} pages cannot be written to the "
                f"{len(destination)} that decode rank {session} listed for them",
            )
        where = session, source, target.dst_kv_ptrs, destination
        if manager.is_mla_backend or manager.attn_tp_size == target.dst_attn_tp_size:
            status = manager.send_kvcache(*where, self._executor)
            page_bytes = sum(manager.kv_args.kv_item_lens)
        else:
            layout = target.dst_tp_rank, target.dst_attn_tp_size
            status = manager.send_kvcache_slice(
                *where, *layout, target.dst_kv_item_len, self._executor
            )
            page_bytes = manager.slice_bytes(*layout)
        self._check(status, "KV", info)
        if page_bytes:
            count_sent(info.room, session, source, destination, len(source) * page_bytes)

    def _check(self, status: int, what: str, info: MooncakeTransferInfo) -> None:
        """Raise unless the engine's ``status`` is 0."""
        if status == 0:
            return
        self._manager.session_failed(info)
        raise ChunkError(
            Reason.TRANSPORT,
            f"room {info.room}: Mooncake could not write {what} to decode rank "
            f"{info.mooncake_session_id} (status {status})",
            settled=False,
        )
