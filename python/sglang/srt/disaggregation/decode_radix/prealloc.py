"""The prealloc queue: lease, budget, delta pages, announcement; one request at a time, in order."""

from __future__ import annotations

import enum
import logging
import time
from functools import cached_property
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from sglang.srt.disaggregation.decode_radix import inflight
from sglang.srt.disaggregation.decode_radix.budget import DecodeBudget
from sglang.srt.disaggregation.decode_radix.eligibility import is_fake, may_match
from sglang.srt.disaggregation.decode_radix.lease import PrefixLease
from sglang.srt.disaggregation.decode_radix.ranks import minimum
from sglang.srt.disaggregation.decode_radix.resume import restore_private
from sglang.srt.disaggregation.delta.events import Admitted, event_log, now
from sglang.srt.disaggregation.delta.stats import STATS

if TYPE_CHECKING:
    from sglang.srt.disaggregation.decode import DecodePreallocQueue
else:
    DecodePreallocQueue = object

logger = logging.getLogger(__name__)


class Verdict(enum.Enum):
    """What became of one candidate in one scheduler step."""

    ADMITTED = enum.auto()
    #: No room: it stays, and everybody behind it waits (FIFO: large requests get their turn).
    NO_ROOM = enum.auto()
    #: Its prefix is just arriving for another request: it stays, the next one is tried.
    PREFIX_ARRIVING = enum.auto()


class RadixPreallocQueue(DecodePreallocQueue):
    """Pre-allocates only what the decode tree lacks. Stock behaviour without the flag."""

    # Owned by the upstream class; named for the type checker.
    queue: list[Any]
    pending_reqs: list[Any]
    retracted_queue: list[Any]

    @cached_property
    def _budget(self) -> DecodeBudget:
        return DecodeBudget(self)

    @property
    def shares_prefixes(self) -> bool:
        """Whether this decode server runs with the radix cache on."""
        return bool(getattr(self.tree_cache, "serves_decode", False))

    @property
    def _page(self) -> int:
        return int(self.token_to_kv_pool_allocator.page_size)

    # ---- admission ----

    @override
    def pop_preallocated(self, rids_to_check: list[str] | None = None) -> Any:
        if not self.shares_prefixes:
            return super().pop_preallocated(rids_to_check)
        self._resolve_pending_reqs()
        self._update_handshake_waiters(rids_to_check)
        failed = self._answer_failed()
        admitted = self._admit()
        gone = {id(decode_req) for decode_req in (*failed, *admitted)}
        self.queue = [entry for entry in self.queue if id(entry) not in gone]
        return admitted, failed

    def _answer_failed(self) -> list[Any]:
        """Tell the clients of requests that failed or were aborted before they got pages."""
        from sglang.srt.disaggregation.base.conn import KVPoll
        from sglang.srt.disaggregation.utils import prepare_abort
        from sglang.srt.managers.schedule_batch import FINISH_ABORT

        failed = []
        for decode_req in self.queue:
            req = decode_req.req
            if not isinstance(req.finished_reason, FINISH_ABORT):
                # Stock looks at a receiver's state only until its handshake is done, and would give
                # pages to a request that was aborted after it.
                if getattr(decode_req.kv_receiver, "conclude_state", None) != KVPoll.Failed:
                    continue
                prepare_abort(
                    req,
                    f"Request {req.rid} was aborted while it waited for decode memory "
                    f"(bootstrap_room={req.bootstrap_room})",
                    status_code=HTTPStatus.INTERNAL_SERVER_ERROR,
                )
            self.scheduler.stream_output([req], req.return_logprob)
            decode_req.kv_receiver.clear()
            failed.append(decode_req)
        if failed:
            gone = {id(decode_req) for decode_req in failed}
            self.pending_reqs = [entry for entry in self.pending_reqs if id(entry) not in gone]
        return failed

    def _admit(self) -> list[Any]:
        admitted: list[Any] = []
        new: list[Any] = []  # their requests
        arriving: set[inflight.PrefixKey] | None = None
        for decode_req in self.queue:
            if not decode_req.waiting_for_input or decode_req.req.finished_reason is not None:
                continue
            if (
                self.req_to_token_pool.available_size() <= 0
                or self.req_to_metadata_buffer_idx_allocator.available_size() <= 0
                or self._budget.still_blocked(decode_req.req, new)
            ):
                break
            if arriving is None:
                arriving = inflight.arriving(self.transfer_queue.queue)
            verdict = self._try_admit(decode_req, new, arriving)
            if verdict is Verdict.NO_ROOM:
                break
            if verdict is Verdict.ADMITTED:
                admitted.append(decode_req)
                new.append(decode_req.req)
                if decode_req.arriving_prefix is not None:
                    arriving.add(decode_req.arriving_prefix)
        return admitted

    def _try_admit(
        self, decode_req: Any, new: list[Any], arriving: set[inflight.PrefixKey]
    ) -> Verdict:
        req = decode_req.req
        length = len(req.origin_input_ids)
        shares = may_match(req) and self.kv_manager.peer_takes_delta(_bootstrap_addr(req))
        lease = self._lease(req, req.origin_input_ids, shares)
        try:
            key = self._arriving_key(req, lease) if shares else None
            if self._agree_to_wait(decode_req, key, arriving):
                return Verdict.PREFIX_ARRIVING
            slots = self._budget.reserve(req, lease, length, new)
            if slots is None:
                return Verdict.NO_ROOM
            self._bind(req, lease, slots, length)
        finally:
            lease.release()
        decode_req.arriving_prefix = key
        self._announce(decode_req, slots)
        return Verdict.ADMITTED

    # ---- the prefix ----

    def _lease(self, req: Any, token_ids: list[int], shares: bool) -> PrefixLease:
        """Match and lock what the tree holds of ``token_ids``, the same length on all ranks.

        Ranks evict by their own clocks, so one rank's tree may hold less. With equal prefixes,
        free + evictable stays equal everywhere, and with it every decision about memory.
        """
        if shares:
            lease = PrefixLease.take(self.tree_cache, token_ids, req.extra_key)
        else:
            lease = PrefixLease.empty(self.tree_cache)
        (length,) = minimum([lease.length], self.gloo_group)
        if length == lease.length:
            return lease
        lease.release()
        return PrefixLease.take(self.tree_cache, token_ids[:length], req.extra_key)

    def _arriving_key(self, req: Any, lease: PrefixLease) -> inflight.PrefixKey | None:
        window = inflight.window_tokens(self._page)
        return inflight.prefix_key(_bootstrap_addr(req), req, lease.node, lease.length, window)

    def _agree_to_wait(
        self, decode_req: Any, key: inflight.PrefixKey | None, arriving: set[inflight.PrefixKey]
    ) -> bool:
        """Whether all ranks want this request to wait for a prefix that is on its way."""
        if key is None or key not in arriving:
            return False  # equal on all ranks: prompts, matches and the transfer queue are
        since = getattr(decode_req, "waits_for_prefix_since", None)
        if since is None:
            since = decode_req.waits_for_prefix_since = time.monotonic()
        in_time = time.monotonic() - since < inflight.wait_seconds()
        return bool(minimum([int(in_time)], self.gloo_group)[0])

    def _bind(self, req: Any, lease: PrefixLease, slots: torch.Tensor, length: int) -> None:
        """Write the request's row and make it the owner of its slots and of the lock."""
        row = self.req_to_token_pool.alloc([req])
        assert row is not None, "a free row was checked before"
        self.req_to_token_pool.write((req.req_pool_idx, slice(0, lease.length)), lease.indices)
        self.req_to_token_pool.write((req.req_pool_idx, slice(lease.length, length)), slots)
        req.kv_allocated_len = req.kv_committed_len = length
        req.fill_ids = req.origin_input_ids + req.output_ids
        lease.hand_over(req)
        req.set_extend_input_len(len(req.fill_ids) - lease.length)

    # ---- announcement ----

    def _announce(self, decode_req: Any, slots: torch.Tensor) -> None:
        """Tell prefill which pages to fill; from here on they belong to the transfer."""
        req = decode_req.req
        index = self.req_to_metadata_buffer_idx_allocator.alloc()
        assert index is not None, "a free metadata slot was checked before"
        decode_req.metadata_buffer_index = index
        # Page ids on the device first: one in ``page`` indices crosses to the host.
        pages = (slots[:: self._page] // self._page).to(torch.int32).cpu().numpy()
        if is_fake(req) or not self.kv_manager.peer_takes_delta(_bootstrap_addr(req)):
            decode_req.kv_receiver.send_metadata(pages, index, None)
        else:
            decode_req.kv_receiver.announce(pages, index, req.cache_protected_len)
        req.time_stats.set_decode_transfer_queue_entry_time()
        if not is_fake(req):
            self._count(req, pages.tolist())

    def _count(self, req: Any, pages: list[int]) -> None:
        prompt = len(req.origin_input_ids)
        STATS.add("decode_prefix_prompt_tokens", prompt)
        STATS.add("decode_prefix_hit_tokens", req.cache_protected_len)
        kv_args = self.kv_manager.kv_args
        STATS.add("kv_transfer_requested_bytes", len(pages) * sum(kv_args.kv_item_lens))
        log = event_log("decode")
        if log is not None:
            log.write(
                Admitted(
                    at=now(),
                    room=req.bootstrap_room,
                    rid=req.rid,
                    prompt_tokens=prompt,
                    prefix_tokens=req.cache_protected_len,
                    pages=pages,
                )
            )

    # ---- retracted requests ----

    @override
    def resume_retracted_reqs(self, rids_to_check: list[str] | None = None) -> list[Any]:
        if not self.shares_prefixes:
            resumed: list[Any] = super().resume_retracted_reqs(rids_to_check)
            return resumed
        back: list[Any] = []
        for req in self.retracted_queue:
            if (
                self.req_to_token_pool.available_size() <= 0
                or self._budget.still_blocked(req, back)
                or not self._resume(req, back)
            ):
                break
            back.append(req)
        self.retracted_queue = self.retracted_queue[len(back) :]
        return back

    def _resume(self, req: Any, new: list[Any]) -> bool:
        """Give a retracted request its memory back: from the tree, and the rest from its copy."""
        token_ids = (req.origin_input_ids + req.output_ids)[:-1]
        lease = self._lease(req, token_ids, may_match(req))
        try:
            slots = self._budget.reserve(req, lease, len(token_ids), new, resumes=True)
            if slots is None:
                return False
            self._bind(req, lease, slots, len(token_ids))
        finally:
            lease.release()
        req.is_retracted = False
        restore_private(req, slots, self.token_to_kv_pool_allocator)
        return True


def _bootstrap_addr(req: Any) -> str:
    from sglang.srt.utils.network import NetworkAddress

    address: str = NetworkAddress(req.bootstrap_host, req.bootstrap_port).to_host_port_str()
    return address
