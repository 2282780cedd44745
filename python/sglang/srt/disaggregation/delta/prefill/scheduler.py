"""Overrides of SGLang's prefill scheduler and sender: what is sent, and when a request ends.

Sending starts behind the prefix that decode holds (``send_kv_chunk``). A request in flight ends in
the step in which it has ended on every rank (``rank_agreement.ended``), because SGLang would end it
with the first rank that failed, and free pages and a metadata slot that other ranks' writes still
read. Each rank's deadline for its transfers bounds that wait. A request whose room failed before it
is computed is not computed (``leave_uncomputed``). ``DeltaSender`` is prefill's end of a room, on
any backend.

Contract: the scheduler's thread only, and nothing waits. ``ended`` is a collective.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import TYPE_CHECKING, Any  # Any: a result of SGLang's; ids as it has them

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.delta.metrics import Reason
from sglang.srt.disaggregation.delta.observability import STATS
from sglang.srt.disaggregation.delta.pages import (
    DeltaMismatch,
    has_other_state,
    moved_state,
    page_indices,
    plan_delta,
    share_of_chunk,
)
from sglang.srt.disaggregation.delta.prefill.rooms import Announcement, Room
from sglang.srt.disaggregation.delta.prefill.transfer_backend import Chunk
from sglang.srt.disaggregation.delta.prefill.yielded import (
    EndYielded,
    Frontend,
    end_yielded,
    leave_unannounced,
)
from sglang.srt.disaggregation.delta.rank_agreement import ended, part_of
from sglang.srt.disaggregation.delta.unserved import ExactId, named_by

if TYPE_CHECKING:
    from sglang.srt.disaggregation.common.conn import CommonKVSender
    from sglang.srt.disaggregation.delta import wire
    from sglang.srt.disaggregation.delta.manager import DeltaManager
    from sglang.srt.disaggregation.prefill import SchedulerDisaggregationPrefillMixin
    from sglang.srt.managers.io_struct import AbortReq, TokenizedGenerateReqInput
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler
else:
    CommonKVSender = SchedulerDisaggregationPrefillMixin = Scheduler = object


#: Number of waiting requests whose rooms are checked before each batch: the first ones, and as many
#: of the others, slice by slice, because requests of a higher priority can stay ahead of these.
MAX_CHECKED = 128


def prefill_manager(scheduler: Any) -> DeltaManager | None:
    """Return the manager of a prefill server with our rooms; None on another server."""
    queue = getattr(scheduler, "disagg_prefill_bootstrap_queue", None)
    manager = getattr(queue, "kv_manager", None)
    return manager if getattr(manager, "rooms", None) is not None else None


def ended_uncomputed(scheduler: Any) -> list[str]:
    """Return the ids of waiting requests whose rooms failed on all ranks. Checks the next requests
    and a slice of the others, because polling a long queue would delay every step."""
    groups = scheduler.attn_tp_cpu_group, scheduler.attn_cp_cpu_group
    first, others = scheduler.waiting_queue[:MAX_CHECKED], scheduler.waiting_queue[MAX_CHECKED:]
    part, scheduler.next_unchecked = part_of(others, scheduler.next_unchecked, MAX_CHECKED)
    return ended(first + part, groups)


def leave_uncomputed(scheduler: Any, rids: Collection[str]) -> None:
    """Move requests from the waiting queue back to the bootstrap queue, where SGLang ends failed
    ones. On all ranks in one step."""
    if not rids:
        return
    rids = set(rids)
    waiting: list[Req] = []
    gone = scheduler.disagg_prefill_bootstrap_queue.queue
    for req in scheduler.waiting_queue:
        if req.rid in rids:
            scheduler.req_to_metadata_buffer_idx_allocator.free(req.metadata_buffer_index)
            gone.append(req)
        else:
            waiting.append(req)
    scheduler.waiting_queue = waiting


class DeltaPrefill(SchedulerDisaggregationPrefillMixin):
    """Sends the pages that decode lacks, in order, once, and always the metadata. A request ends on
    all ranks in one step."""

    #: Offset of the next slice of ``ended_uncomputed``.
    next_unchecked: int = 0

    @override
    def send_kv_chunk(self, req: Req, last_chunk: bool = False, end_idx: int | None = None) -> None:
        if last_chunk:
            # Drop the grammar, because decode's checks the first token. SGLang would check it here
            # too, and if it fails free the pages that are being sent, and again at the end.
            req.grammar = None
        sender = req.disagg_kv_sender
        prefix: int | None = getattr(sender, "decode_prefix_len", None)
        pool = self.token_to_kv_pool_allocator.get_kvcache()
        if prefix is None or (last_chunk and has_other_state(pool)):
            # SGLang's own backend; or the model has a window pool, for which SGLang chooses what to
            # send. Such models never have a prefix on decode.
            super().send_kv_chunk(req, last_chunk, end_idx)
            return
        page: int = self.token_to_kv_pool_allocator.page_size
        computed = min(len(req.fill_ids), len(req.origin_input_ids)) if end_idx is None else end_idx
        # The partly filled last page waits for the next chunk, unless there is none.
        start, end = max(req.start_send_idx, prefix), computed // page * page
        if last_chunk:
            end = computed
            self.disagg_metadata_buffers.set_buf(req)
            if prefix:
                STATS.count("kv_transfer_skipped_tokens", prefix)
        elif end <= start:
            # Decode holds all of this chunk, or it fills no page. Keep the cursor: moving it back
            # would send prefix pages into the delta's destinations.
            return
        elif getattr(self, "launch_event", None) is not None:
            # Wait for the chunk, which a pipeline stage launched a turn ago. The stream that copies
            # the slots already waits for it on the other stages, but not on the last one with
            # --pp-async-batch-depth.
            self.launch_event.synchronize()
        req.start_send_idx = max(start, end)
        row = self.req_to_token_pool.req_to_token[req.req_pool_idx]
        state = None
        if last_chunk:  # as in SGLang
            rows = self.req_to_token_pool
            state = moved_state(pool, rows, req, lambda: page_indices(row, prefix, end, page))
        sender.send(page_indices(row, start, end, page), state)

    @override
    def get_next_disagg_prefill_batch_to_run(self) -> ScheduleBatch | None:
        if prefill_manager(self) is not None:
            leave_uncomputed(self, ended_uncomputed(self))
            if not self.last_batch:  # otherwise its result answers health checks
                self.maybe_send_health_check_signal()
        return super().get_next_disagg_prefill_batch_to_run()

    @override
    def process_batch_result_disagg_prefill(self, batch: ScheduleBatch, result: Any) -> None:
        # Restore the start of the first draft, which the copy of the batch lacks with overlap
        # scheduling: the metadata would have that of the request that had the slot before.
        start = getattr(result, "next_draft_input", None)
        if start is not None:
            batch.spec_info = start
        if batch.return_logprob:
            # Convert to lists, as SGLang does on every other server, because its tokenizer would
            # get tensors here and end.
            if result.copy_done is not None:
                result.copy_done.synchronize()
            output = result.logits_output
            for rows in (
                output.next_token_top_logprobs_val,
                output.next_token_top_logprobs_idx,
                output.next_token_token_ids_logprobs_val,
            ):
                for i, row in enumerate(rows or ()):
                    rows[i] = row.tolist() if hasattr(row, "tolist") else row
        super().process_batch_result_disagg_prefill(batch, result)

    @override
    def process_disagg_prefill_inflight_queue(
        self, rids_to_check: list[str] | None = None
    ) -> list[Req]:
        import torch.distributed as dist

        queue: list[Req] = self.disagg_prefill_inflight_queue
        groups = self.attn_tp_cpu_group, self.attn_cp_cpu_group
        if (
            rids_to_check is None  # otherwise a pipeline stage has queried its ranks already
            and queue
            and any(dist.get_world_size(group) > 1 for group in groups)
            and prefill_manager(self) is not None
        ):
            rids_to_check = ended(queue, groups)
            if not rids_to_check:
                return []  # skips SGLang's method, which would reduce once more
        return super().process_disagg_prefill_inflight_queue(rids_to_check)


class DeltaScheduler(Scheduler):
    """Unchanged on servers other than prefill, except for the ids of a pair's requests."""

    @override
    def handle_generate_request(self, recv_req: TokenizedGenerateReqInput) -> None:
        from sglang.srt.disaggregation.utils import DisaggregationMode

        if self.disaggregation_mode != DisaggregationMode.NULL:
            recv_req.rid = ExactId(recv_req.rid)
        super().handle_generate_request(recv_req)

    @override
    def abort_request(self, recv_req: AbortReq) -> None:
        if isinstance(recv_req, EndYielded):
            end_yielded(self, recv_req.rid)
            return
        if prefill_manager(self) is not None:
            # Move it first, because SGLang drops it from the waiting queue with its sender: the
            # room would stay in every table, and decode would wait for it until its deadline.
            named = filter(named_by(recv_req), self.waiting_queue)
            # A warm-up's sender has no room.
            has_room = [req.rid for req in named if hasattr(req.disagg_kv_sender, "abort")]
            leave_uncomputed(self, has_room)
        super().abort_request(recv_req)

    @override
    def _add_request_to_queue(self, req: Req, is_retracted: bool = False) -> None:
        if prefill_manager(self) is not None and self.enable_priority_scheduling:
            # Set the default priority here, because SGLang leaves it None on prefill and then
            # cannot sort.
            self._set_or_validate_priority(req)
        super()._add_request_to_queue(req, is_retracted)
        if isinstance(req.disagg_kv_sender, DeltaSender):
            req.disagg_kv_sender.prompt_tokens = len(req.origin_input_ids)
            if req.to_finish is not None:
                # End it now, because SGLang has replaced its prompt by [0], and decode would take
                # that KV for its own prompt's.
                leave_unannounced(self, req)
                req.disagg_kv_sender.abort()
                req.disagg_kv_sender.end()
                req.finished_reason = req.to_finish
                self.stream_output([req], req.return_logprob)

    @override
    def init_disaggregation(self) -> None:
        super().init_disaggregation()
        manager = prefill_manager(self)
        if manager is None:
            return
        if self.send_to_tokenizer.socket is not None:
            address = self.send_to_tokenizer.socket.LAST_ENDPOINT
            manager.decode_ranks.on_computed = Frontend(address).yielded
        if self.current_scheduler_metrics_enabled:
            STATS.bind(self.metrics_collector.labels, "prefill", "both")

    @override
    def maybe_sleep_on_idle(self) -> None:
        # Do not sleep while rooms are pending, because the end of a handshake reaches our reader
        # thread and does not wake SGLang's sleeper, which would wait for up to a second.
        is_ours = self.idle_sleeper is not None and prefill_manager(self) is not None
        if not is_ours or self.is_fully_idle():
            super().maybe_sleep_on_idle()


# ---- prefill's end of a room ----


class DeltaSender(CommonKVSender):
    """Prefill's end of a room: queues its chunks from the end of decode's prefix, and reports how
    the room ended. Holds no transfer itself. Other backends' senders stay SGLang's."""

    curr_idx: int  # of the upstream class; named for the type checker

    #: Number of tokens that decode holds and that are not sent.
    decode_prefix_len = 0
    #: Number of prompt tokens; 0 for a request that no scheduler has queued.
    prompt_tokens = 0
    #: True if the previous pipeline stage has accepted the request. Then this one accepts it too,
    #: even if the room has failed here, and ends it in flight like the others.
    is_taken_in = False

    def __init__(
        self, mgr: DeltaManager, bootstrap_addr: str, bootstrap_room: int,
        dest_tp_ranks: list[int], pp_rank: int,
    ) -> None:  # fmt: skip
        self._created_at = time.monotonic()
        #: True if another rank of the context parallel group sends everything.
        self._is_left_out = False
        self.has_sent, self.chunk_id = False, 0
        super().__init__(mgr, bootstrap_addr, bootstrap_room, dest_tp_ranks, pp_rank)
        self._room: Room = mgr.rooms.claim(bootstrap_room)
        if not self.is_stopped:
            mgr.transfers.open(self._room)

    @override
    def _register_prefill_dp_rank(self) -> None:
        self.kv_mgr.served_rooms.tell(self.bootstrap_server_url, self.bootstrap_room)

    @override
    def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
        # Called when all decode ranks have announced, before the first chunk is computed.
        room, listed = self.bootstrap_room, []
        try:
            for info in list(self._room.announcements.values()):
                if info.delta_error:
                    raise DeltaMismatch(f"room {room}: {info.delta_error}")
                if info.gets_nothing:
                    continue
                prefix = self.read_frame(info.delta) if info.delta else info.later_prefix_len or 0
                listed.append((prefix, self.listed_pages(info)))
            plan = plan_delta(room, listed, num_kv_indices, self.kv_mgr.kv_args.page_size)
        except DeltaMismatch as error:
            super().init(num_kv_indices, aux_index)
            self.fail(Reason.MISMATCH, str(error))
            return
        self.decode_prefix_len, num_pages = plan
        super().init(num_pages, aux_index)

    def read_frame(self, frame: wire.DeltaFrame) -> int:
        """Return the prefix that decode holds, from the frame of one of its ranks. The numbers of
        the request are read here alone, on each prefill rank and for each decode rank.

        Raises:
            DeltaMismatch: the frame does not fit the request here. Fails the room.
        """
        theirs, ours = frame.prompt_tokens, self.prompt_tokens
        if theirs and ours and theirs != ours:
            raise DeltaMismatch(
                f"room {self.bootstrap_room}: the prompt has {theirs} tokens on decode, and {ours} "
                "on prefill"
            )
        return frame.decode_prefix_len

    @override
    def send(
        self, kv_indices: npt.NDArray[np.int32], state_indices: list[int] | None = None
    ) -> None:
        if self.is_stopped:
            return
        manager = self.kv_mgr
        part = slice(self.curr_idx, self.curr_idx + len(kv_indices))
        self.curr_idx = part.stop
        is_last = part.stop == self.num_kv_indices
        if manager.enable_all_cp_ranks_for_transfer:
            group = manager.attn_cp_rank, manager.attn_cp_size
            kv_indices, part = share_of_chunk(kv_indices, part, *group)
        elif manager.is_dummy_cp_rank:
            self._is_left_out |= is_last
            self.has_sent |= is_last
            return
        room, announcements = self.bootstrap_room, list(self._room.announcements.values())
        try:
            if not announcements:
                raise DeltaMismatch(f"room {room}: no decode rank's pages are known for it")
            payload = manager.cut(
                room, announcements, kv_indices, part, self.chunk_id,
                self.aux_index if is_last else None, state_indices if is_last else None,
            )  # fmt: skip
        except DeltaMismatch as error:
            self.fail(Reason.MISMATCH, str(error))
            return
        now, peers = time.monotonic(), tuple(payload.destinations)
        manager.transfers.submit(
            Chunk(room, peers, payload, is_last, now + manager.transfer_s, now)
        )
        self.chunk_id += 1
        self.has_sent = is_last

    @override
    def poll(self) -> KVPoll:
        room = self._room  # read without the lock, because every step polls every request
        if room.delivered or self._is_left_out:
            return KVPoll.Success  # also if it was stopped later: decode has everything
        if self.is_taken_in and not self.is_initialised:
            return KVPoll.WaitingForInput  # accepted in this step, as on the previous stage
        if not room.is_stopped:
            if self.has_sent:
                return KVPoll.WaitingForInput
            self.fail_if_unannounced()
        if room.is_stopped:
            # Failed lets SGLang free the pages, so not while a write reads them.
            return KVPoll.Failed if room.is_over else KVPoll.Transferring
        status = self.kv_mgr.check_status(self.bootstrap_room)
        if status == KVPoll.Bootstrapping and self.is_initialised:
            return KVPoll.WaitingForInput
        return status

    def listed_pages(self, info: Announcement) -> int:
        """Return the number of pages, of this prefill rank's size, that a decode rank listed."""
        return len(info.dst_kv_indices)

    @property
    def is_stopped(self) -> bool:
        """True if the room failed or was aborted or withdrawn."""
        return self._room.is_stopped

    @property
    def is_initialised(self) -> bool:
        """True if the scheduler has taken the request from its bootstrap queue."""
        return getattr(self, "num_kv_indices", None) is not None

    def fail(self, kind: Reason, text: str) -> None:
        """Fail this room alone; its decode ranks are notified once what was posted has settled."""
        self.kv_mgr.rooms.fail(self._room, kind, text)

    def fail_if_unannounced(self) -> None:
        """Fail the room if decode, which announces it once it has memory, takes too long."""
        manager, room = self.kv_mgr, self.bootstrap_room
        if manager.request_status.get(room) != KVPoll.Bootstrapping:
            return
        waited = time.monotonic() - self._created_at
        if waited >= manager.bootstrap_timeout:
            self.fail(
                Reason.TIMEOUT,
                f"room {room}: no decode server announced it within {waited:.0f} s "
                f"(SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT){manager.served_rooms.why_not_found(room)}",
            )

    def fail_with_others(self) -> None:
        """Fail the room because the request failed on another rank of this server."""
        if not self.is_stopped:
            self.fail(Reason.PEER_FAILED, "it failed on another rank of this server")

    @override
    def abort(self) -> None:
        # Not SGLang's method, which would overwrite the reason of a room that failed before.
        self.fail(Reason.ABORTED, "aborted on the prefill server")

    @override
    def failure_exception(self) -> None:
        self.fail_with_others()  # unless it failed here
        known = self.kv_mgr.statuses.failure_of(self.bootstrap_room)
        self.end()
        raise RuntimeError(self._room.reason or known) from self._room.error

    def end(self) -> None:
        """Forget the room, because the request has left the in-flight queue."""
        self.kv_mgr.transfers.forget(self._room)
        self.kv_mgr.rooms.forget(self._room)
