"""A request in transfer: announced, polled, committed to the tree or freed, if need be later.

Metadata slots are where prefill writes the first token. Whether the metadata of a room have landed
must be known *before* the ranks agree that its transfer is complete: a rank that found out
afterwards would keep the request while the others run it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, NamedTuple  # Any: SGLang's manager, batches and results

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import override

from sglang.srt.disaggregation.delta import observability
from sglang.srt.disaggregation.delta.decode.request import (
    bootstrap_addr,
    is_fake,
    record_of,
    remains,
)
from sglang.srt.disaggregation.delta.decode.speculation import own_draft_state
from sglang.srt.disaggregation.delta.observability import STATS, Admitted, now
from sglang.srt.patchset import environment

if TYPE_CHECKING:
    from sglang.srt.disaggregation.decode import DecodeRequest, DecodeTransferQueue
    from sglang.srt.disaggregation.utils import MetadataBuffers
    from sglang.srt.managers.schedule_batch import Req
else:
    DecodeTransferQueue = object

logger = logging.getLogger(__name__)

#: What a metadata slot says where no room's metadata are in it.
EMPTY = 0
_NO_PAGES: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)


# ---- announcements ----


class StepWrites:
    """What the step in flight still uses of requests that have ended: rows, and slots.

    Holds announcements back until the result of a step that may use their pages is in.

    With overlap scheduling a request is found to have ended when the next step, which it is part
    of, is running already. That step writes one more slot for it, which was just freed, or put into
    the tree and perhaps evicted; and it reads slots that may be free, too: those whose tokens the
    tree had already. Other steps come after it on the device; a prefill server's write does not.

    SGLang's loop admits, launches the next step, and then processes the result of the last one: an
    announcement waits within one turn of the loop, and only where pages really meet.

    A speculative step of spec v2 looks up on the device, in its requests' rows, which slots it
    writes: of one that has ended, those that it held ahead of its text. Another request gets the
    row when that is done (``rows_are_free``): the step would write into the prefix that it shares.
    """

    def __init__(self, in_flight: Callable[[], Sequence[tuple[Any, Any]]], page: int) -> None:
        """``in_flight``: the batches that were launched and whose results are not in, oldest first,
        each with what will be its result."""
        self._in_flight, self._page = in_flight, page
        self._batch: Any = None  # compared by identity
        self._pages = _NO_PAGES
        self._waiting: list[Callable[[], None]] = []

    def after(self, pages: npt.NDArray[np.int32], announce: Callable[[], None]) -> None:
        """``announce`` now, or when no step uses ``pages`` any more."""
        results = self._in_flight()
        batch = results[-1][0] if results else None
        if batch is not self._batch:
            # Pages that it uses for requests that have ended since, and that were their own.
            self._batch, self._pages = batch, _NO_PAGES
            reqs = batch.reqs if batch is not None else ()
            ended = [req for req in reqs if req.finished() or req.is_retracted]
            if ended:
                slots = torch.cat([record_of(req).slots_at_end for req in ended])
                self._pages = (slots // self._page).cpu().numpy()
        if len(self._pages) and np.isin(pages, self._pages).any():
            self._waiting.append(announce)
        else:
            announce()

    def rows_are_free(self) -> None:
        """Return when no step looks anything up in the row of a request that has ended.

        With spec v2 that may have to be waited for, as SGLang does later in the same turn of the
        loop, before it launches the next step (``EagleDraftInput.prepare_for_decode``).
        """
        for batch, result in self._in_flight():
            start = getattr(result, "next_draft_input", None)
            if start is None or start.verify_done is None:
                continue
            # The rows of all others are theirs still, and a step takes long.
            if any(req.finished() or req.is_retracted for req in batch.reqs):
                start.verify_done.synchronize()

    def result_processed(self) -> None:
        """The oldest step in flight has ended: its slots are nobody's but their owners'."""
        waiting, self._waiting = self._waiting, []
        for announce in waiting:
            announce()


def announce(
    entry: DecodeRequest,
    pages: npt.NDArray[np.int32],
    state: npt.NDArray[np.int32] | None,
    manager: Any,
    writes: StepWrites,
) -> None:
    """Send prefill the ``pages`` of the delta to fill, shape (pages,), and the indices of the
    ``state``. From here on they belong to the transfer, and so does the metadata slot of ``entry``.

    Later in the same turn of the loop where the step in flight may write to them.
    """
    req, ours = entry.req, manager.kv_args
    req.time_stats.set_decode_transfer_queue_entry_time()
    requested = len(pages) * sum(ours.kv_item_lens)
    requested += 0 if state is None else len(state) * sum(ours.state_item_lens)

    def notify() -> None:
        # The entry's own request: one that starts over without prefill has left a stand-in there.
        if entry.req.finished_reason is not None:
            return  # given up meanwhile: prefill was notified that no announcement comes
        at = now()  # prefill may have logged that it knows before the next line is over
        index, prefix = entry.metadata_buffer_index, req.cache_protected_len
        record_of(req).hit_tokens = prefix
        if is_fake(req):
            entry.kv_receiver.send_metadata(pages, index, state)
            return
        prompt = len(req.origin_input_ids)
        if manager.peer_takes_delta(bootstrap_addr(req)):
            entry.kv_receiver.announce(pages, index, prefix, state, prompt)
        else:
            entry.kv_receiver.send_metadata(pages, index, state)
        STATS.count("decode_prefix_prompt_tokens", prompt)
        STATS.count("decode_prefix_hit_tokens", prefix)
        STATS.count("kv_transfer_requested_bytes", requested)
        observability.record(
            "decode",
            lambda: Admitted(
                at=at,
                room=req.bootstrap_room,
                rid=str(req.rid),  # msgspec encodes no subclass
                prompt_tokens=prompt,
                prefix_tokens=prefix,
                pages=pages.tolist(),
                state=[] if state is None else state.tolist(),
            ),
        )

    writes.after(pages, notify)


@dataclass
class Progress:
    """What the prefill ranks that write for a room have said so far. A decode rank has one from a
    room's handshake on, until prefill can write to the room's pages no more."""

    #: Those that delivered everything: KV, metadata, and state where it is due.
    done_writers: set[int] = field(default_factory=set)
    #: Those that said that they write no more, whatever they have written.
    stopped_writers: set[int] = field(default_factory=set)
    #: Where the metadata belong that come in a message; None where none was announced.
    metadata_slot: int | None = None
    #: Of the prefill server's bootstrap server (host:port).
    address: str = ""
    #: The prefill processes that could write are certain not to exist any more.
    writers_are_gone: bool = False
    #: The room was given up, and its client answered. Its number is refused to new requests.
    is_deferred: bool = False

    def is_drained(self, writers: int) -> bool:
        """Whether each of ``writers`` ranks has delivered everything or stopped, or is gone."""
        return self.writers_are_gone or len(self.done_writers | self.stopped_writers) >= writers


# ---- transfers that ended early ----


@dataclass(eq=False)
class DeferredFree:
    """One room that decode gave up, and from ``keep`` on what its request owns.

    Without ``progress`` this rank's room is drained from the start; another rank's may not be, and
    all ranks free together. ``writers``: how many prefill ranks write for it; ``collect`` reads
    what has arrived of it; ``forget``: it is followed no longer. The scheduler's thread alone.
    """

    progress: Progress | None = None
    writers: int = 0
    collect: Callable[[], object] = lambda: None
    forget: Callable[[], object] = lambda: None
    #: The queue entry whose pages, row, lock and metadata slot are kept, and since when.
    entry: Any = None
    since: float = 0.0

    def keep(self, entry: DecodeRequest) -> None:
        """``entry``, whose client has been answered, keeps what it owns from now on."""
        self.entry, self.since = entry, time.monotonic()

    def is_drained(self) -> bool:
        """Whether prefill can write to the pages no more; also reads what has arrived."""
        if self.progress is None:
            return True
        self.collect()
        return self.progress.is_drained(self.writers)

    def poll(self) -> int:
        """This rank's vote, polled beside the transfers: ``KVPoll.Success`` once the pages may be
        freed, because the room is drained or was waited for too long."""
        from sglang.srt.disaggregation.base.conn import KVPoll

        if self.is_drained():
            return int(KVPoll.Success)
        waited = time.monotonic() - self.since
        if waited < environment.QUARANTINE_TIMEOUT.read():
            return int(KVPoll.Transferring)
        req = self.entry.req
        logger.error(
            "request %s (bootstrap_room=%s) ended early, and prefill %s:%s has not confirmed "
            "within %.0f s that it stopped writing. Its deferred release ends: %d tokens of KV "
            "are freed now, and a late write would corrupt other requests. Check whether that "
            "prefill server hangs or is unreachable, and restart it",
            req.rid,
            req.bootstrap_room,
            req.bootstrap_host,
            req.bootstrap_port,
            waited,
            req.kv_allocated_len - req.cache_protected_len,
        )
        return int(KVPoll.Success)

    def free(self, free_entry: Callable[[DecodeRequest], None]) -> None:
        """Give what is kept to ``free_entry``, once, and follow the room no longer."""
        if self.progress is not None:
            self.progress = None
            self.forget()
        entry, self.entry = self.entry, None
        if entry is not None:
            free_entry(entry)


# ---- transfers ----


class Arrival(NamedTuple):
    """One transfer as the ranks poll it: complete when its KV *and* its metadata are here."""

    entry: DecodeRequest
    buffers: MetadataBuffers

    def poll(self) -> int:
        """The receiver's state; Success only with this room's metadata.

        Failed with another room's, or without any for as long as a transfer may take: prefill says
        that it delivered everything, so nothing else would end the wait.
        """
        from sglang.srt.disaggregation.base.conn import KVPoll
        from sglang.srt.environ import envs

        req, slot = self.entry.req, self.entry.metadata_buffer_index
        state = int(self.entry.kv_receiver.poll())
        if state != KVPoll.Success or is_fake(req):
            return state
        expected, record = req.bootstrap_room or EMPTY, record_of(req)
        found = int(self.buffers.bootstrap_room[slot, 0].item())
        if expected == EMPTY:
            record.failure = "room 0 cannot be distinguished from an empty metadata slot"
        elif found == EMPTY:
            record.without_metadata_since = record.without_metadata_since or time.monotonic()
            waited = time.monotonic() - record.without_metadata_since
            if waited < envs.SGLANG_DISAGGREGATION_WAITING_TIMEOUT.get():
                return int(KVPoll.Transferring)
            record.failure = (
                f"its KV has arrived, but metadata slot {slot} is still empty after {waited:.0f} s "
                "(SGLANG_DISAGGREGATION_WAITING_TIMEOUT)"
            )
            return int(KVPoll.Failed)
        elif found != expected:
            record.failure = f"metadata slot {slot} holds the metadata of room {found}"
        record.arrived = True
        return int(KVPoll.Failed) if record.failure else state


class RadixTransferQueue(DecodeTransferQueue):
    """Puts the KV of finished transfers into the decode tree. Stock behaviour without the flag."""

    queue: list[DecodeRequest]  # SGLang's; named for the type checker

    @cached_property
    def deferred(self) -> list[DeferredFree]:
        """Transfers that ended early and whose pages prefill may still write to."""
        return []

    @property
    def deferred_requests(self) -> list[Req]:
        """They were answered, and still own pages, a row, a metadata slot and a lock."""
        return [deferred.entry.req for deferred in self.deferred]

    @override
    def pop_transferred(self, rids_to_check: list[str] | None = None) -> list[Req]:
        if not getattr(self.tree_cache, "serves_decode", False):
            return super().pop_transferred(rids_to_check)
        if not self.queue and not self.deferred:
            return []
        from sglang.srt.disaggregation.base.conn import KVPoll
        from sglang.srt.disaggregation.utils import poll_and_all_reduce

        # One reduction for the transfers and for the rooms that were given up before: what was
        # deferred is freed when its room is drained on all ranks, so that their pools stay equal.
        arrivals = [Arrival(entry, self.metadata_buffers) for entry in self.queue]
        polls = poll_and_all_reduce([*arrivals, *self.deferred], self.gloo_group)
        votes = zip(self.deferred, polls[len(arrivals) :], strict=True)
        drained = [deferred for deferred, poll in votes if poll == KVPoll.Success]
        for deferred in drained:
            self.deferred.remove(deferred)
        waiting, transferred = [], []
        for entry, poll in zip(self.queue, polls, strict=False):
            req = entry.req
            if poll == KVPoll.Failed:
                self._give_up(entry)
            elif poll != KVPoll.Success or not self._commit_transfer_to_req(entry):
                waiting.append(entry)
            elif req.finished_reason is None:
                if not self.spec_algorithm.is_none():
                    own_draft_state(req)
                self._free_slot(entry)
                # SGLang counts those that decode itself computes.
                self.scheduler._maybe_update_reasoning_tokens(req, req.output_ids[-1])
                self.tree_cache.adopt(req)
                transferred.append(req)
            else:  # its metadata were overwritten after the poll
                self._answer(req)
                self._free(entry)
        self.queue = waiting
        for deferred in drained:
            deferred.free(self._free)
        return transferred

    def _give_up(self, entry: DecodeRequest) -> None:
        """Answer the client of a failed transfer; keep what prefill may still write to."""
        from sglang.srt.disaggregation.utils import prepare_abort

        req, receiver = entry.req, entry.kv_receiver
        message = (
            f"Decode transfer failed for request rank={self.tp_rank} "
            f"rid={req.rid} bootstrap_room={req.bootstrap_room}"
        )
        # What says that prefill stopped writing; at once where everything had arrived already. A
        # warm-up's receiver has none. Before the receiver forgets the room.
        follows = hasattr(receiver, "defer_free") and not record_of(req).arrived
        deferred = (receiver.defer_free() if follows else None) or DeferredFree()
        try:
            receiver.failure_exception()
        except Exception as error:  # that is how a receiver says why it failed
            message += f": {record_of(req).failure or error}"
        line = self.scheduler.disagg_decode_prealloc_queue
        claims = self.tree_cache.claims
        if line.answers.may_keep(entry):
            # The request starts over; what it owned stays in the entry.
            entry.req = left = remains(req)
            claims.left(req)
            claims.entered(left, left.last_node, left.cache_protected_len, left.kv_allocated_len)
            if self.scheduler.enable_metrics:
                self.scheduler.metrics_collector.increment_transfer_failed_reqs()
            line.take_back(req, message)
        else:
            logger.error(message)
            prepare_abort(req, message, status_code=HTTPStatus.INTERNAL_SERVER_ERROR)
            self._answer(req)
        # Also where this rank's room is drained: another's may not be, and all free together.
        deferred.keep(entry)
        self.deferred.append(deferred)
        claims.deferred(entry.req)

    def _answer(self, req: Req) -> None:
        scheduler = self.scheduler
        scheduler.stream_output([req], req.return_logprob)
        if scheduler.enable_metrics:
            scheduler.metrics_collector.increment_transfer_failed_reqs()

    def _free(self, entry: DecodeRequest) -> None:
        """Free all that a failed transfer owned; nothing of it enters the tree."""
        from sglang.srt.mem_cache.common import release_kv_cache

        release_kv_cache(entry.req, self.tree_cache, is_insert=False)
        self._free_slot(entry)

    def _free_slot(self, entry: DecodeRequest) -> None:
        """Give the metadata slot back; what it says of its room is forgotten."""
        index = entry.metadata_buffer_index
        self.metadata_buffers.bootstrap_room[index, 0] = EMPTY
        self.req_to_metadata_buffer_idx_allocator.free(index)
