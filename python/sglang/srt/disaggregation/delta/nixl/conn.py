"""The decode ranks of a NIXL prefill rank: their registrations and announcements, their entries in
NIXL, and the prepared lists of each; and the sender of a room.

Contract: messages are taken on the reader thread, which never calls NIXL. Workers call NIXL, and
change its table of peers between posts (``NixlPeers``). ``NixlPeers`` and ``PreparedLists`` have a
lock each; the one of ``NixlPeers`` is not held while NIXL is called.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any  # Any: NIXL's binding; page indices in SGLang's forms

import numpy as np
from typing_extensions import Self, override

from sglang.srt.disaggregation.delta.metrics import Reason
from sglang.srt.disaggregation.delta.nixl import descriptors
from sglang.srt.disaggregation.delta.nixl.descriptors import (
    ChunkPayload,
    Destination,
    Heads,
    Pool,
)
from sglang.srt.disaggregation.delta.nixl.layout import Pair
from sglang.srt.disaggregation.delta.pages import DeltaMismatch, Pages
from sglang.srt.disaggregation.delta.peer_messages import (
    Announcements,
    BadMessage,
    DeltaTransferInfo,
    check_registration,
)
from sglang.srt.disaggregation.delta.prefill.scheduler import DeltaSender
from sglang.srt.disaggregation.delta.prefill.transfer_backend import TransferError

if TYPE_CHECKING:
    from sglang.srt.disaggregation.nixl.conn import KVArgsRegisterInfo, NixlKVSender
else:
    NixlKVSender = object

logger = logging.getLogger(__name__)

#: Seconds that a change of NIXL's peers waits for posts under way. A post takes the longer, the
#: more descriptors it has.
PATIENCE_S = 5.0
#: NIXL's name for the side that starts transfers.
OURS = "NIXL_INIT_AGENT"


# ---- what decode ranks register and announce ----


@dataclasses.dataclass
class NixlTransferInfo(DeltaTransferInfo):
    """A decode rank's announcement of a room over NIXL."""

    #: True if this rank sends nothing to it, not even metadata. For messages of later SGLang
    #: releases without pages.
    is_left_out: bool = False

    @classmethod
    @override
    def from_zmq(cls, msg: list[bytes]) -> Self:
        info = super().from_zmq(msg)
        # Convert SGLang's list back to an array, which the scheduler's thread copies faster.
        info.dst_state_indices = np.array(info.dst_state_indices, np.int32)
        return info

    @override
    def is_dummy(self) -> bool:
        if self.delta is not None:
            # Use the frame, because no pages is a full prefix hit, which still gets its metadata.
            return self.delta.is_dummy
        if self.later_prefix_len:
            return self.is_left_out
        return self.delta_error is None and bool(super().is_dummy())


def cut_chunk(
    room: int,
    announcements: Iterable[NixlTransferInfo],
    pages: Pages,
    index_slice: slice,
    chunk_id: int,
    metadata_slot: int | None,
    state_pages: Sequence[Any] | None,
) -> ChunkPayload:
    """Return the payload of one chunk, with a destination for each decode rank that gets a part.

    ``pages`` are copied, because SGLang's may be a view of its own table, which changes while the
    chunk is in a queue. ``index_slice`` is the chunk's place among the room's destination pages.
    ``metadata_slot`` and ``state_pages`` are None except for the last chunk.

    Raises:
        DeltaMismatch: a rank listed another number of pages there.
    """
    own = _copy(pages)
    destinations = {}
    for info in announcements:
        if info.is_dummy():
            continue
        listed = info.dst_kv_indices[index_slice]
        if len(listed) != len(own):
            raise DeltaMismatch(
                f"room {room}: chunk {chunk_id} has {len(own)} pages, and decode rank "
                f"{info.agent_name} listed {len(listed)} for it"
            )
        frame = info.delta
        destinations[info.agent_name] = Destination(
            pages=listed,
            state_pages=_copy(info.dst_state_indices if state_pages is not None else ()),
            metadata_slot=info.dst_aux_index,
            pool_pages=(frame.pool_pages or None) if frame else None,
            metadata_slots=(frame.metadata_slots or None) if frame else None,
            takes_metadata=bool(frame and frame.takes_metadata),
        )
    return ChunkPayload(
        chunk_id=chunk_id,
        pages=own,
        metadata_slot=metadata_slot,
        state_pages=_copy(state_pages if state_pages is not None else ()),
        destinations=destinations,
    )


def _copy(pages: Sequence[Any] | Pages) -> Pages:
    """Return an immutable copy. SGLang passes lists of numbers, arrays, and lists of arrays."""
    own = np.array(pages, np.int32).reshape(-1)
    own.setflags(write=False)
    return own


class NixlAnnouncements(Announcements):
    """Registrations and announcements in SGLang's NIXL messages, which begin with a guard."""

    peer_name = "agent_name"
    registration_frames = 12

    @override
    def take(self, frames: list[bytes]) -> None:
        from sglang.srt.disaggregation.nixl import conn

        if not frames or frames[0] != conn.GUARD:
            raise BadMessage("it does not start like a NIXL message of SGLang")
        self.take_message(conn, frames[1:])

    @override
    def check(self, info: KVArgsRegisterInfo) -> None:
        check_registration(
            self._rank,
            kv_buffers=len(info.dst_kv_ptrs),
            state_buffers=len(info.dst_state_data_ptrs),
            aux_buffers=len(info.dst_aux_ptrs),
            tp_size=info.decode_tp_size,
            tp_rank=info.decode_tp_rank,
            item_len=info.dst_kv_item_len,
        )

    @override
    def _announce(self, info: NixlTransferInfo) -> None:
        rank, registered = self._rank, self._registered.get(info.agent_name)
        if registered is not None and info.later_prefix_len and not len(info.dst_kv_indices):
            # Tell a dummy from a full hit, which looks the same in such a message: only the first
            # rank of a group sends latent KV.
            group = max(rank.tp_size // registered.decode_tp_size, 1)
            info.is_left_out = rank.is_mla and rank.tp_rank % group != 0
        super()._announce(info)


# ---- what NIXL knows of them ----


class PreparedLists:
    """The prepared lists of one side, made on first use: one of whole slots for each kind of
    memory, and one for each choice of heads.

    NIXL's handles release themselves, so a list is released with the last reference to it.
    """

    def __init__(self, agent: Any, name: str) -> None:
        """``name``: name of the peer, or ``OURS``."""
        self._agent = agent
        self._name = name
        self._lock = threading.Lock()
        self._lists: dict[tuple[str, Heads | None], tuple[Pool, Any]] = {}

    def get(self, memory: str, pool: Pool) -> Any | None:
        """Return the handle of a list with every slot of ``pool``, or None if there can be none.

        ``memory``: NIXL's name of the kind. A second pool of one kind is not prepared, because a
        peer that announces another pool each time must not fill the memory here. This rank has few
        choices of heads: one for each tensor parallel size of decode.
        """
        kind = memory, pool.heads
        with self._lock:
            if kind not in self._lists:
                handle = None
                try:
                    rows = descriptors.prepared_strided(pool)
                    handle = self._agent.prep_xfer_dlist(self._name, rows, memory)
                except Exception as error:  # bindings raise exceptions of any class
                    logger.warning(
                        "NIXL could not prepare %d buffers of %s (%r); ranges are built for each "
                        "chunk instead, which is slower but correct",
                        len(pool.bases),
                        "this rank" if self._name == OURS else f"decode rank {self._name}",
                        error,
                    )
                self._lists[kind] = pool, handle
            prepared_for, handle = self._lists[kind]
            return handle if prepared_for == pool else None


class Peer:
    """One decode rank, from its registration until no transfer uses it any more."""

    #: Its prepared lists, and pairs of pools, since it was last added to NIXL.
    lists: PreparedLists
    pairs: dict[str, tuple[int | None, Pair]]

    def __init__(self, info: KVArgsRegisterInfo) -> None:
        self.name: str = info.agent_name
        #: Its registration.
        self.info = info
        #: Number of transfers that are not released.
        self.users = 0
        self.forgotten = False
        #: True if NIXL has an entry of it.
        self.in_nixl = False
        #: True if NIXL's entry is of the current registration.
        self.is_loaded = False

    def pair(
        self, kind: str, slots: int | None, make: Callable[[KVArgsRegisterInfo, int | None], Pair]
    ) -> Pair:
        """Return ``make(info, slots)``, cached because a peer's pools do not change."""
        known = self.pairs.get(kind)
        if known is None or known[0] != slots:
            known = self.pairs[kind] = (slots, make(self.info, slots))
        return known[1]


class NixlPeers:
    """All decode ranks of a prefill rank. Used by the reader thread and by transfer workers.

    The reader thread only records registrations (in ``table``, SGLang's ``decode_kv_args_table``,
    by name) and peers to forget, because it must never wait for NIXL. The next worker that holds a
    peer updates NIXL. NIXL forgets a peer only when no transfer to it is under way.

    In NIXL, a change of its table of peers waits for every running post, and later calls wait for
    the change, some of them with the interpreter's lock. So changes are made between the posts
    (``posting``), which wait for them here, without that lock. If a post hangs, no change is made,
    and the other workers go on.
    """

    def __init__(
        self,
        agent: Any,
        table: dict[str, KVArgsRegisterInfo],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._agent = agent
        self._table = table
        self._clock = clock
        #: Guards the fields below; never held while NIXL is called.
        self._lock = threading.Condition()
        self._peers: dict[str, Peer] = {}
        #: Forgotten peers without transfers, to remove from NIXL.
        self._unused: list[Peer] = []
        #: Start of each post under way, oldest first.
        self._posts: dict[object, float] = {}
        self._is_changing = False

    @contextmanager
    def posting(self) -> Iterator[None]:
        """Keep changes of NIXL's peers out of the block, which posts a transfer and does nothing
        else. Posts run side by side."""
        post = object()
        with self._lock:
            self._lock.wait_for(lambda: not self._is_changing)
            self._posts[post] = self._clock()
        try:
            yield
        finally:
            with self._lock:
                del self._posts[post]
                if not self._posts:
                    self._lock.notify_all()

    def add(self, info: KVArgsRegisterInfo) -> None:
        """Record a registration. Changes nothing for a known rank. A forgotten one is added to NIXL
        again, with new lists, because its connection may have been lost."""
        with self._lock:
            known = self._peers.setdefault(info.agent_name, Peer(info))
            if known.forgotten:  # kept because a transfer to it is still under way
                known.info, known.forgotten, known.is_loaded = info, False, False
            self._table[known.name] = known.info

    def hold(self, name: str) -> Peer:
        """Return the peer for one transfer, which ends with ``release``. Called by a worker, which
        updates NIXL first. An exception of NIXL makes the peer forgotten.

        Raises:
            TransferError: the peer is unknown or forgotten, or NIXL cannot be updated now.
        """
        with self._lock:
            peer = self._peers.get(name)
            if peer is None or peer.forgotten:
                raise TransferError(Reason.PEER_LOST, f"decode rank {name} is no longer registered")
            peer.users += 1
            is_ready = peer.is_loaded and not self._unused
        if is_ready:
            return peer
        try:
            self._update_nixl(peer)
        except TimeoutError as error:  # unused peers are removed from NIXL later
            if not peer.is_loaded:
                self.release(peer)
                text = f"decode rank {name} cannot be registered: {error}"
                raise TransferError(Reason.TRANSPORT, text) from error
        except Exception:
            self.forget(name)
            self.release(peer)
            raise
        return peer

    def share(self, peer: Peer) -> Peer:
        """Count one more transfer to a peer that is held, with a ``release`` of its own."""
        with self._lock:
            peer.users += 1
            return peer

    def release(self, peer: Peer) -> None:
        """End one transfer to ``peer``."""
        with self._lock:
            peer.users -= 1
            self._drop_if_unused(peer)

    def forget(self, name: str) -> None:
        """Send nothing new to a peer that is silent or that NIXL has lost."""
        with self._lock:
            self._table.pop(name, None)
            peer = self._peers.get(name)
            if peer is not None:
                peer.forgotten = True
                self._drop_if_unused(peer)

    def _drop_if_unused(self, peer: Peer) -> None:
        if peer.forgotten and not peer.users:
            del self._peers[peer.name]
            if peer.in_nixl:
                self._unused.append(peer)

    def _update_nixl(self, peer: Peer) -> None:
        """Remove unused peers from NIXL and add ``peer``: one worker at a time, between posts. Wait
        for each post until ``PATIENCE_S`` after it began, so that one that hangs delays the other
        workers once at most.

        Raises:
            TimeoutError: a post does not return; nothing was changed.
        """
        with self._lock:
            self._lock.wait_for(lambda: not self._is_changing)
            self._is_changing = True
        try:
            with self._lock:
                oldest = next(iter(self._posts.values()), 0.0)
                left_s = max(oldest + PATIENCE_S - self._clock(), 0.0)
                if not self._lock.wait_for(lambda: not self._posts, left_s):
                    raise TimeoutError(
                        f"a post of a transfer has not returned for {PATIENCE_S:g} s"
                    )
                unused, self._unused = self._unused, []
            for each in unused:
                # Release its lists by dropping their last reference.
                each.lists = PreparedLists(None, each.name)
                try:
                    self._agent.remove_remote_agent(each.name)
                except Exception as error:  # must not keep this worker from its peer
                    logger.warning(
                        "NIXL could not remove decode rank %s (%r); nothing more is sent to it",
                        each.name,
                        error,
                    )
            if not peer.is_loaded:
                self._agent.add_remote_agent(peer.info.agent_metadata)
                peer.lists, peer.pairs = PreparedLists(self._agent, peer.name), {}
                peer.in_nixl = peer.is_loaded = True
        finally:
            with self._lock:
                self._is_changing = False
                self._lock.notify_all()


# ---- the sender ----


class DeltaNixlSender(DeltaSender, NixlKVSender):
    """Prefill's end of a room over NIXL."""

    def clear(self) -> None:
        """Forget the room. The scheduler calls it once the request left the in-flight queue."""
        self.end()
