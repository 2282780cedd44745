"""The decode ranks of a NIXL prefill rank: what they register and announce, what NIXL knows of
them, and the lists that were prepared for each; and the sender of a room to them."""

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

#: Seconds for which a change of NIXL's peers waits for the posts under way. (The more descriptors
#: one has, the longer it takes.)
PATIENCE_S = 5.0
#: NIXL's name for the side that starts transfers.
OURS = "NIXL_INIT_AGENT"


# ---- what decode ranks register and announce ----


@dataclasses.dataclass
class NixlTransferInfo(DeltaTransferInfo):
    """A decode rank's announcement of a room, as NIXL's prefill ranks get it."""

    #: Of a later release's message without pages: nothing goes to it from here, not even metadata.
    is_left_out: bool = False

    @classmethod
    @override
    def from_zmq(cls, msg: list[bytes]) -> Self:
        info = super().from_zmq(msg)
        # SGLang makes a list of the array, which the scheduler's thread would have to read.
        info.dst_state_indices = np.array(info.dst_state_indices, np.int32)
        return info

    @override
    def is_dummy(self) -> bool:
        if self.delta is not None:
            # No pages is a full prefix hit, not a dummy: it still gets its metadata.
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
    """Cut one chunk out of what the decode ranks of ``room`` announced.

    ``pages`` are copied: SGLang's may be a view of its own table, which changes while the chunk is
    in a queue. ``index_slice`` is the chunk's place among the room's destination pages.

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
    """SGLang gives lists of numbers, arrays, and lists of arrays."""
    own = np.array(pages, np.int32).reshape(-1)
    own.setflags(write=False)
    return own


class NixlAnnouncements(Announcements):
    """SGLang's NIXL messages begin with a guard."""

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
            # A full hit looks the same there. Of latent KV the first rank of a group sends all.
            group = max(rank.tp_size // registered.decode_tp_size, 1)
            info.is_left_out = rank.is_mla and rank.tp_rank % group != 0
        super()._announce(info)


# ---- what NIXL knows of them ----


class PreparedLists:
    """The prepared lists of one side: one of whole slots for each kind of memory, and one for each
    choice of heads; made when it is first asked for.

    A list is released when the last user of its handle lets go of it: NIXL's handles release
    themselves, once.
    """

    def __init__(self, agent: Any, name: str) -> None:
        """``name``: the peer's, or ``OURS``."""
        self._agent = agent
        self._name = name
        self._lock = threading.Lock()
        self._lists: dict[tuple[str, Heads | None], tuple[Pool, Any]] = {}

    def get(self, memory: str, pool: Pool) -> Any | None:
        """The handle of a list with every slot of ``pool``, or None where it cannot be prepared.

        ``memory``: NIXL's name of the kind. A second pool of one kind is not prepared: a peer that
        says something else each time must not fill the memory here. Of this rank's own heads there
        are few choices: those that decode ranks of any number can be sent.
        """
        kind = memory, pool.heads
        with self._lock:
            if kind not in self._lists:
                handle = None
                try:
                    rows = descriptors.prepared_strided(pool)
                    handle = self._agent.prep_xfer_dlist(self._name, rows, memory)
                except Exception as error:  # bindings raise what they like
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
    """One decode rank, from its registration until nobody uses it any more."""

    #: What was prepared for it, and its pools beside ours, since NIXL was last told about it.
    lists: PreparedLists
    pairs: dict[str, tuple[int | None, Pair]]

    def __init__(self, info: KVArgsRegisterInfo) -> None:
        self.name: str = info.agent_name
        #: What it registered.
        self.info = info
        #: Transfers to it that are not released.
        self.users = 0
        self.forgotten = False
        #: NIXL has been told of it, at all and since it registered last.
        self.in_nixl = self.is_loaded = False

    def pair(
        self, kind: str, slots: int | None, make: Callable[[KVArgsRegisterInfo, int | None], Pair]
    ) -> Pair:
        """``make(info, slots)``, kept for the next chunk: a peer's pools do not change."""
        known = self.pairs.get(kind)
        if known is None or known[0] != slots:
            known = self.pairs[kind] = (slots, make(self.info, slots))
        return known[1]


class NixlPeers:
    """All decode ranks of a prefill rank. Used by the reader thread and by transfer workers.

    The reader thread only notes who registered (in ``table``, SGLang's ``decode_kv_args_table``, by
    name) and who is to be forgotten: it never waits for NIXL, and what a rank sends is served in
    order. The next worker that holds a peer tells NIXL. NIXL is told to forget a peer only when
    nothing is under way to it.

    NIXL changes its table of peers alone: such a call waits for every post that runs, and whatever
    comes meanwhile waits for it, some of it with the interpreter's lock. So it is made between the
    posts (``posting``), which wait for it here, without that lock. Where a post hangs, it is not
    made: the other workers go on.
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
        #: Of what is below; never held while NIXL is called.
        self._lock = threading.Condition()
        self._peers: dict[str, Peer] = {}
        #: Forgotten, and nothing is under way to them: NIXL is to forget them too.
        self._unused: list[Peer] = []
        #: When the posts under way began, the oldest first.
        self._posts: dict[object, float] = {}
        self._is_changing = False

    @contextmanager
    def posting(self) -> Iterator[None]:
        """For the call that posts a transfer, and for nothing else. Posts run side by side."""
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
        """A decode rank registers; again is harmless. One that was forgotten is loaded anew, and
        nothing that was prepared before is used again: its connection may have been lost."""
        with self._lock:
            known = self._peers.setdefault(info.agent_name, Peer(info))
            if known.forgotten:  # something is still under way to it
                known.info, known.forgotten, known.is_loaded = info, False, False
            self._table[known.name] = known.info

    def hold(self, name: str) -> Peer:
        """The peer, for one transfer, to be given back with ``release``. Called by a worker: it
        tells NIXL what has changed. What NIXL raises at a peer has it forgotten.

        Raises:
            TransferError: it is not known, not any more, or NIXL cannot be told now.
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
            self._tell_nixl(peer)
        except TimeoutError as error:  # others are forgotten by NIXL later
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
        """One more transfer to a peer that is held already, to be given back on its own."""
        with self._lock:
            peer.users += 1
            return peer

    def release(self, peer: Peer) -> None:
        """One transfer to it is over."""
        with self._lock:
            peer.users -= 1
            self._let_go(peer)

    def forget(self, name: str) -> None:
        """It is silent, or NIXL lost its connection: nothing new is sent to it."""
        with self._lock:
            self._table.pop(name, None)
            peer = self._peers.get(name)
            if peer is not None:
                peer.forgotten = True
                self._let_go(peer)

    def _let_go(self, peer: Peer) -> None:
        if peer.forgotten and not peer.users:
            del self._peers[peer.name]
            if peer.in_nixl:
                self._unused.append(peer)

    def _tell_nixl(self, peer: Peer) -> None:
        """Have NIXL forget those that nobody uses, and take ``peer``: one at a time, and no post
        meanwhile. Each post is waited for until ``PATIENCE_S`` after it began, so that one that
        hangs holds up the other workers once at most.

        Raises:
            TimeoutError: a post does not come to its end; nothing was changed.
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
                # Its lists go with their last reference, which is here.
                each.lists = PreparedLists(None, each.name)
                try:
                    self._agent.remove_remote_agent(each.name)
                except Exception as error:  # the others are served all the same
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
    """Queues a room's chunks, and says what became of them."""

    def clear(self) -> None:
        """Forget the room: called by the scheduler once the request left the in-flight queue."""
        self.end()
