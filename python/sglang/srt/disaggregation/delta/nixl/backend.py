"""NIXL backend of a prefill rank's transfer pool: describes and posts chunks, and notifies decode's
ranks of complete rooms.

Prefill sends a notification (*note*) when everything else of the room is in decode's memory. Decode
ranks that take metadata in the note get one per room and writer; the *writer* is unique among the
room's prefill ranks.

    <room>_done_<writer>_<metadata>      a msgpack list of bytes, one for each metadata buffer

All other decode ranks get stock SGLang's notes, with one change: they name the writer instead of
only the sender's pipeline stage. If several ranks write for one decode rank (tensor parallelism),
the first one to finish would otherwise count for all. A stock decode server reads both forms.

    <room>_kv_<chunk>_<is last>_<writer>
    <room>_aux_<writer>          stock: <room>_aux
    <room>_state_<writer>

Contract: each chunk is posted, polled and released by one transfer worker's thread; several workers
call at the same time. ``NixlPeers`` has the lock of the peers, ``PreparedLists`` that of their
lists; the agent is thread-safe
(``agent.configured_agents``).
"""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any  # Any: NIXL's binding has no types

import msgspec
import numpy as np

from sglang.srt.disaggregation.delta import wire
from sglang.srt.disaggregation.delta.metrics import Reason
from sglang.srt.disaggregation.delta.nixl import descriptors
from sglang.srt.disaggregation.delta.nixl.conn import OURS, NixlPeers, Peer, PreparedLists
from sglang.srt.disaggregation.delta.nixl.descriptors import ChunkPayload, Destination
from sglang.srt.disaggregation.delta.nixl.layout import Layout, Pair
from sglang.srt.disaggregation.delta.observability import (
    STATS,
    Moved,
    count_sent,
    now,
    record,
)
from sglang.srt.disaggregation.delta.pages import Pages
from sglang.srt.disaggregation.delta.prefill.transfer_backend import (
    Chunk,
    TransferError,
    TransferState,
)

logger = logging.getLogger(__name__)

_STATES = {
    "PROC": TransferState.IN_PROGRESS,
    "DONE": TransferState.DONE,
    "ERR": TransferState.ERROR,
}
#: Returns a copy of this process's host memory at (address, length).
read_memory: Callable[[int, int], bytes] = ctypes.string_at


def done(room: int, writer: int, metadata: Sequence[bytes]) -> bytes:
    """Return the note that completes ``room`` for one writer."""
    return f"{room}_done_{writer}_".encode() + msgspec.msgpack.encode(list(metadata))


def stock_notes(room: int, writer: int, has_state: bool) -> list[bytes]:
    """Return the notes that complete ``room`` for one writer if the metadata were written. Stock
    counts chunks; because all have landed, they are announced as a single chunk."""
    kinds = ["kv_0_1", *["state"] * has_state, "aux"]
    return [f"{room}_{kind}_{writer}".encode() for kind in kinds]


@dataclass(eq=False)
class _PostedChunk:
    """One chunk to one peer, with its statistics; durations in seconds."""

    chunk: Chunk
    peer: str
    began_at: float
    build_s: float = 0.0
    post_s: float = 0.0
    ended_at: float = 0.0
    descriptors: int = 0
    bytes: int = 0
    #: Handles not released.
    open: int = 0
    is_broken: bool = False


@dataclass(eq=False)
class _Posted:
    """A NIXL handle, with its transfer and the objects that it needs."""

    handle: Any
    peer: Peer
    transfer: _PostedChunk
    #: Prepared lists that a selected transfer reads; kept alive.
    lists: tuple[Any, ...] = field(default=(), repr=False)


class NixlBackend:
    """``transfer_backend.Backend``; the payload of a chunk is a ``ChunkPayload``.

    Each peer gets the chunk's KV, and with the last chunk the model's state, if any. The metadata
    are sent in the completing note, or written if the peer does not take them there. Writes carry
    no note of their own, because NIXL would send it whenever the write settles, also after its room
    was given up here.
    """

    def __init__(
        self,
        agent: Any,
        peers: NixlPeers,
        layout: Layout,
        *,
        writer: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``writer``: ``RankView.writer_id`` of this rank."""
        self._agent = agent
        self._peers = peers
        self._layout = layout
        self._writer = writer
        self._clock = clock
        self._lists = PreparedLists(agent, OURS)
        size = sum(layout.ours.aux_item_lens)
        self._fits_a_note = size <= wire.MAX_METADATA and wire.metadata_in_host_memory()

    # ---- transfer_backend.Backend ----

    def post(self, chunk: Chunk, peer: str) -> Iterator[_Posted]:
        """Post KV, state and metadata of one chunk to one peer. Yield each handle before its
        post."""
        payload: ChunkPayload = chunk.payload
        to = payload.destinations[peer]
        began = self._clock()
        transfer = _PostedChunk(chunk, peer, began, ended_at=began)
        known = self._peers.hold(peer)
        try:
            if len(payload.pages):
                pair = known.pair("kv", to.pool_pages, self._layout.kv)
                if pair.source.bases:  # else a replica sends it
                    may_prepare = to.pool_pages is not None
                    yield from self._pages(
                        pair, payload.pages, to.pages, "VRAM", known, transfer, may_prepare
                    )
                    count_sent(chunk.room, peer, payload.pages, to.pages, transfer.bytes)
            if len(payload.state_pages):  # with the last chunk
                if len(payload.state_pages) != len(to.state_pages):
                    raise TransferError(
                        Reason.MISMATCH,
                        f"room {chunk.room}: {len(payload.state_pages)} pages of state, and decode "
                        f"rank {peer} listed {len(to.state_pages)}",
                    )
                pair, before = self._layout.state(known.info), transfer.bytes
                yield from self._pages(
                    pair, payload.state_pages, to.state_pages, "VRAM", known, transfer, False
                )
                STATS.count("kv_transfer_sent_bytes", transfer.bytes - before)
            if chunk.is_last and not self._is_in_note(to):
                ours, theirs = (
                    np.array([slot], np.int32) for slot in (payload.metadata_slot, to.metadata_slot)
                )
                pair = known.pair("metadata", to.metadata_slots, self._layout.metadata)
                may_prepare = to.metadata_slots is not None
                yield from self._pages(pair, ours, theirs, "DRAM", known, transfer, may_prepare)
        except Exception as error:
            self._drop_if_disconnected(known, error)
            raise
        finally:
            self._peers.release(known)
        transfer.ended_at = self._clock()
        STATS.observe("kv_transfer_build_seconds", transfer.build_s)
        STATS.observe("kv_transfer_post_seconds", transfer.post_s)
        STATS.observe("kv_transfer_descriptors", transfer.descriptors)
        STATS.observe("kv_transfer_bytes", transfer.bytes)
        if not transfer.open:
            self._log(transfer)  # a full hit or a replica has no handle to wait for

    def state(self, posted: _Posted) -> TransferState:
        """Return the state of a posted handle. Raises if the peer is gone, which ends the transfer
        like any other error.

        DONE means that every byte is in decode's memory, so that a later note arrives after them:
        NIXL's UCX backend (SGLang's default) ends each transfer with a flush of its endpoints
        (``sendXferRange`` in ``ucx_backend.cpp``), which UCX completes when all earlier writes are
        complete at the target.
        """
        try:
            state = _STATES[self._agent.check_xfer_state(posted.handle)]
        except Exception as error:
            posted.transfer.is_broken = True
            self._drop_if_disconnected(posted.peer, error)
            raise
        posted.transfer.is_broken |= state is TransferState.ERROR
        return state

    def release(self, posted: _Posted) -> None:
        """Release NIXL's handle and the peer, and record the transfer's statistics."""
        transfer = posted.transfer
        transfer.open -= 1
        if not transfer.is_broken and not transfer.open:
            self._log(transfer)
        try:
            self._agent.release_xfer_handle(posted.handle)
        finally:
            self._peers.release(posted.peer)

    def complete(self, chunk: Chunk) -> None:
        """Notify each peer of the complete room: with one note that has the metadata, or with stock
        SGLang's notes."""
        payload, room, ours = chunk.payload, chunk.room, self._layout.ours
        slot: int = payload.metadata_slot
        notes: dict[str, list[bytes]] = {}
        for name in chunk.peers:
            if self._is_in_note(payload.destinations[name]):
                if not 0 <= slot < ours.aux_data_lens[0] // ours.aux_item_lens[0]:
                    text = f"metadata slot {slot} does not exist on this rank"
                    raise TransferError(Reason.MISMATCH, text)
                metadata = [
                    read_memory(base + slot * length, length)
                    for base, length in zip(ours.aux_data_ptrs, ours.aux_item_lens, strict=True)
                ]
                notes[name] = [done(room, self._writer, metadata)]
            else:
                notes[name] = stock_notes(room, self._writer, len(payload.state_pages) > 0)
        for name in chunk.peers:
            peer = self._peers.hold(name)
            try:
                for note in notes[name]:
                    with self._peers.posting():
                        self._agent.send_notif(name, note)
            except Exception as error:
                self._drop_if_disconnected(peer, error)
                raise
            finally:
                self._peers.release(peer)

    def _is_in_note(self, to: Destination) -> bool:
        return to.takes_metadata and self._fits_a_note

    # ---- description and post ----

    def _pages(
        self, pair: Pair, source: Pages, destination: Pages, memory: str, peer: Peer,
        transfer: _PostedChunk, may_prepare: bool,
    ) -> Iterator[_Posted]:  # fmt: skip
        """Post pages of a pair of pools, as ranges or selected from prepared lists. Yield the
        handle before the post."""
        began = self._clock()
        try:
            pair.source.check(source)
            pair.destination.check(destination)
        except ValueError as error:
            raise TransferError(Reason.MISMATCH, str(error)) from error
        runs = descriptors.runs_of(source, destination, pair.source.heads)
        slots = len(source) * pair.source.slots_a_page
        ours = theirs = None
        if may_prepare:
            ours = self._lists.get(memory, pair.source)
            theirs = peer.lists.get(memory, pair.destination)
        buffers = len(pair.source.bases)
        has_lists = ours is not None and theirs is not None
        is_selected = has_lists and descriptors.is_selected_faster(buffers, slots, len(runs))
        transfer.descriptors += buffers * (slots if is_selected else len(runs))
        transfer.bytes += slots * sum(pair.source.item_lens)
        if not is_selected:
            rows = descriptors.ranges(pair.source, pair.destination, runs)
            sides = [self._agent.get_xfer_descs(side, memory) for side in rows]
            handle = self._agent.initialize_xfer("WRITE", *sides, peer.name)
        else:
            handle = self._agent.make_prepped_xfer(
                "WRITE",
                ours,
                descriptors.select(pair.source, source),
                theirs,
                descriptors.select(pair.destination, destination),
            )
        if not handle:
            raise TransferError(Reason.TRANSPORT, f"NIXL made no transfer to {peer.name}")
        transfer.build_s += self._clock() - began
        posted = _Posted(handle, self._peers.share(peer), transfer, (ours, theirs))
        transfer.open += 1
        yield posted  # before the post, so that the handle is released also if the post raises
        began = self._clock()
        with self._peers.posting():
            state = self._agent.transfer(handle)
        transfer.post_s += self._clock() - began
        if state == "ERR":
            raise TransferError(Reason.TRANSPORT, f"NIXL refused a transfer to {peer.name}")

    def _drop_if_disconnected(self, peer: Peer, error: Exception) -> None:
        """Forget ``peer`` after a disconnect, because NIXL never reconnects to a lost peer; the
        peer has to register again."""
        if type(error).__name__ == "nixlRemoteDisconnectError":
            self._peers.forget(peer.name)

    def _log(self, transfer: _PostedChunk) -> None:
        chunk = transfer.chunk
        record(
            "prefill",
            lambda: Moved(
                at=now(),
                room=chunk.room,
                peer=transfer.peer,
                chunk=chunk.payload.chunk_id,
                is_last=chunk.is_last,
                queue_s=transfer.began_at - chunk.enqueued_at,
                build_s=transfer.build_s,
                post_s=transfer.post_s,
                wire_s=self._clock() - transfer.ended_at,
                descriptors=transfer.descriptors,
                bytes=transfer.bytes,
            ),
        )
