"""The prealloc queue: a step admits, resumes, or answers requests that have no pages, in order.

A step answers who failed, was aborted or waited for too long; admits from the first in line until
one does not fit; and notes why that one waits. Retracted requests come first: while any waits,
nobody is admitted.
"""

from __future__ import annotations

import logging
from functools import cached_property
from typing import TYPE_CHECKING, Any  # Any: LocalTurns, where it is there; a stock answer

import torch
from typing_extensions import override

from sglang.srt.disaggregation.delta.decode import candidates as line
from sglang.srt.disaggregation.delta.decode.admission import DecodeBudget
from sglang.srt.disaggregation.delta.decode.candidates import Candidate, Planner
from sglang.srt.disaggregation.delta.decode.claims import Claims
from sglang.srt.disaggregation.delta.decode.handshakes import Handshakes, bootstrap_addr
from sglang.srt.disaggregation.delta.decode.record import (
    ArrivingPrefixes,
    Refusal,
    Wait,
    record_of,
)
from sglang.srt.disaggregation.delta.decode.retraction import restore_private
from sglang.srt.disaggregation.delta.decode.speculation import step_tokens
from sglang.srt.disaggregation.delta.decode.transfer_queue import StepWrites, announce, take_slot
from sglang.srt.disaggregation.delta.decode.waiting import WaitingLine
from sglang.srt.disaggregation.delta.observability import RateLimitedLog
from sglang.srt.disaggregation.delta.pages import page_ceil
from sglang.srt.disaggregation.delta.rank_agreement import (
    AdmissionVote,
    Checksum,
    Offer,
    State,
    agree,
    alone,
    over,
)

if TYPE_CHECKING:
    from sglang.srt.disaggregation.decode import DecodeRequest
    from sglang.srt.managers.schedule_batch import Req

logger = logging.getLogger(__name__)
#: Seconds between two errors about ranks whose pools differ.
LOG_EVERY_S = 30.0


class RadixPreallocQueue(WaitingLine):
    """Pre-allocates only what the decode tree lacks. Stock behaviour without the flag.

    No rank decides anything alone: each step begins with one reduction (``_agree``).
    """

    #: Candidates of the next step. More than can be tried only while the line moves: each costs a
    #: little, and behind one that does not fit nobody is checked.
    _looked_at: int = line.LOOKED_AT

    @cached_property
    def _budget(self) -> DecodeBudget:
        step = step_tokens(self.scheduler, self._page)
        claims = Claims(self.num_reserved_decode_tokens, self._page, step)
        pool, total = self.token_to_kv_pool_allocator, self.max_total_num_tokens
        return DecodeBudget(self.tree_cache, pool, claims, total, alone(self.gloo_group))

    @cached_property
    def _planner(self) -> Planner:
        return Planner(self._budget, self.tree_cache, self._may_share, self._limits.window)

    @cached_property
    def _pools_log(self) -> RateLimitedLog:
        return RateLimitedLog(logger, LOG_EVERY_S, lambda: self.clock())

    @cached_property
    def step_writes(self) -> StepWrites:
        """Announcements that wait for the step in flight."""
        # Only a scheduler with overlap has a queue of results.
        return StepWrites(lambda: getattr(self.scheduler, "result_queue", ()), self._page)

    @cached_property
    def _handshakes(self) -> Handshakes:
        return Handshakes(
            self.kv_manager.servers.connections,
            self.prefill_dp_rank,
            self.clock,
            allowed_s=self.kv_manager.waiting_timeout,
            attempts=self._max_ensure_retries,
            retry_s=self._ensure_retry_interval,
        )

    @property
    def shares_prefixes(self) -> bool:
        """Whether this decode server runs with the radix cache on."""
        return bool(getattr(self.tree_cache, "serves_decode", False))

    @property
    def _page(self) -> int:
        return int(self.token_to_kv_pool_allocator.page_size)

    @property
    @override
    def num_tokens_pre_allocated(self) -> int:
        if not self.shares_prefixes:
            return int(super().num_tokens_pre_allocated)
        # What was taken for transfers; the tree's tokens are counted once, by the tree.
        return sum(
            page_ceil(entry.req.kv_allocated_len, self._page) - entry.req.cache_protected_len
            for entry in self.transfer_queue.queue
        )

    # ---- which prefill rank serves a request ----

    @override
    def _resolve_prefill_dp_rank(self, req: Req) -> int | None:
        rank = self.prefill_dp_rank(req)
        if rank is None or not self.shares_prefixes:
            return rank
        # SGLang takes the rank that a router names for a rank that is connected.
        connections = self.kv_manager.servers.connections
        return rank if connections.is_connected(bootstrap_addr(req), rank) else None

    def prefill_dp_rank(self, req: Req) -> int | None:
        """The data-parallel rank that serves ``req``; None where prefill has to be queried."""
        return super()._resolve_prefill_dp_rank(req)

    @override
    def _resolve_pending_reqs(self) -> None:
        if self.shares_prefixes:
            self.pending_reqs = self._handshakes.advance(self.pending_reqs)
        else:
            super()._resolve_pending_reqs()

    # ---- one step ----

    @override
    def pop_preallocated(self, rids_to_check: list[str] | None = None) -> Any:
        if not self.shares_prefixes:
            return super().pop_preallocated(rids_to_check)
        self._resolve_pending_reqs()
        failed = self._end_handshakes()
        self._leave(failed)
        ready = self._ready()
        if not ready:  # equal on all ranks, so all of them take the step
            return [], failed
        arriving = self._arriving()
        first = [] if self._memory_is_away else self._first_in_line(ready, arriving)
        gone, entered = self._step(ready, first, arriving)
        self._leave([candidate.entry for candidate in entered])
        return [each.entry for each in entered if not each.is_local], failed + gone

    def _end_handshakes(self) -> list[DecodeRequest]:
        """Answer and return those whose handshake failed, on all ranks."""
        turns = self.local_turns
        tries_here = turns is not None and turns.choice.limits.when_lost > 0
        pending = [entry for entry in self.queue if not entry.waiting_for_input]
        failed, unreached = self._handshakes.finish(pending, self.gloo_group, tries_here=tries_here)
        for entry in unreached:
            self._try_here(entry)
        gone = [entry for entry in failed if not self._save(entry)]
        for entry in gone:
            self._fail(entry, "Decode handshake failed for request")
            if self.scheduler.enable_metrics:
                self.scheduler.metrics_collector.increment_bootstrap_failed_reqs()
        return gone

    @override
    def resume_retracted_reqs(self, rids_to_check: list[str] | None = None) -> list[Req]:
        if not self.shares_prefixes:
            return super().resume_retracted_reqs(rids_to_check)
        paused = self._memory_is_away or getattr(self.scheduler, "_engine_paused", False)
        if not self.retracted_queue or paused:
            return []
        for req in self.retracted_queue:
            wait = record_of(req).wait
            if wait.since is None:
                wait.since = self.clock()
        # Nobody is admitted while these wait, but who failed is answered.
        first = [Candidate(None, req) for req in self.retracted_queue[: line.TRIED]]
        _, entered = self._step(self._ready(), first, {}, resumes=True)
        self.retracted_queue = self.retracted_queue[len(entered) :]
        return [candidate.req for candidate in entered]

    def _step(
        self,
        ready: list[DecodeRequest],
        first: list[Candidate],
        arriving: ArrivingPrefixes,
        *,
        resumes: bool = False,
    ) -> tuple[list[DecodeRequest], list[Candidate]]:
        """Answer who leaves without pages, and admit of ``first`` who gets in, as all ranks agree.

        Returns who left, and who got in. ``ready`` and ``first`` are the same requests on all
        ranks, and there is at least one of either. ``resumes``: the candidates were retracted.
        """
        budget, tree = self._budget, self.tree_cache
        checked = self._to_check(ready, first)
        states = self._states(checked)
        if min(states, default=State.FINE) <= State.EXPIRED:
            ended = {id(e) for e, s in zip(checked, states, strict=True) if s <= State.EXPIRED}
            for candidate in first:
                candidate.given_up = id(candidate.entry) in ended
        rows = self.req_to_token_pool.available_size()
        # Who resumes has had its metadata.
        slots = rows if resumes else self.req_to_metadata_buffer_idx_allocator.available_size()
        budget.claims.recount()
        free, protected, turns = budget.free, tree.protected_size(), self.local_turns
        entered: list[Candidate] = []
        try:
            offers = self._planner.take_leases(first, min(rows, slots), arriving)
            costs = [] if turns is None else turns.votes(first)
            vote = AdmissionVote(
                states, offers, rows, slots, free, protected, -free, -protected, costs
            )
            agreed = self._agree(vote, checked, first)
            budget.surplus = free - agreed.free
            tried = line.settle(tree, first, agreed.offers)
            if len(tried) < len(first) and first[len(tried)].offer != Offer.STOP:
                self._planner.stopped(first[len(tried)])  # another rank stops it
            gone = self._answer(checked, agreed.states)
            stopped = self._admit(tried, agreed, arriving, entered)
        finally:
            line.release(first)
        if stopped is None and len(tried) < len(first):
            stopped = first[len(tried)]
            if stopped.refusal is None and not tried:  # else another rank stops it
                stopped.refusal = self._no_place(agreed, 0)
        if stopped is not None and stopped.refusal is not None:
            self._refuse(stopped.req, stopped.refusal)
        if not resumes:
            moves = entered or Offer.WAITS in agreed.offers
            self._looked_at = line.LOOKED_AT if moves else line.TRIED
        self._log_waits(self.retracted_queue if resumes else [entry.req for entry in checked])
        return gone, entered

    def _agree(
        self, vote: AdmissionVote, checked: list[DecodeRequest], first: list[Candidate]
    ) -> AdmissionVote:
        """What the ranks agree on, with one collective; none for one rank."""
        if alone(self.gloo_group):
            return vote
        checksum = Checksum()
        checksum.note([entry.req.rid for entry in checked], [one.req.rid for one in first])
        agreed = agree(vote, checksum, over(self.gloo_group))
        if agreed.pools_differ:
            self._pools_log.error(
                "pools",
                "the KV pools of this server's ranks differ: this rank has %d free and %d "
                "protected tokens, the smallest numbers on any rank are %d and %d. Admission uses "
                "those. If this persists, a rank leaks pages: "
                "SGLANG_DISAGGREGATION_CHECK_INVARIANTS=1 checks idle servers, and ends one that "
                "leaks",
                vote.free,
                vote.protected,
                agreed.free,
                agreed.protected,
            )
        return agreed

    @property
    def _memory_is_away(self) -> bool:
        """Between SGLang's release of memory and its return nobody gets any."""
        return bool(getattr(self.scheduler, "offload_tags", None))

    # ---- admission ----

    def _arriving(self) -> ArrivingPrefixes:
        """What prefill sends to this server, and what it computes itself."""
        reqs, turns = [entry.req for entry in self.transfer_queue.queue], self.local_turns
        if turns is not None:
            reqs += [req for req in turns.requests if not record_of(req).committed]
        return line.arriving(req for req in reqs if self.tree_cache.may_share(req))

    def _first_in_line(
        self, ready: list[DecodeRequest], arriving: ArrivingPrefixes
    ) -> list[Candidate]:
        """The next candidates; who waits for a prefix that is still arriving is passed over."""
        first: list[Candidate] = []
        for entry in ready:
            wait = record_of(entry.req).wait
            awaited = wait.refusal.prefix if wait.refusal is not None else None
            if awaited in arriving and not wait.prefix_timed_out:
                continue
            first.append(Candidate(entry, entry.req))
            if first[-1].is_alone:
                first[-1].most_new = self.local_turns.choice.limits.when_lost
            if len(first) == self._looked_at:
                break
        return first

    def _may_share(self, candidate: Candidate) -> bool:
        """Whether a request may share a prefix; one that resumes asks no prefill server."""
        if not self.tree_cache.may_share(candidate.req):
            return False
        asks_nobody = candidate.resumes or candidate.is_alone
        return asks_nobody or bool(self.kv_manager.peer_takes_delta(bootstrap_addr(candidate.req)))

    def _admit(
        self,
        candidates: list[Candidate],
        agreed: AdmissionVote,
        arriving: ArrivingPrefixes,
        entered: list[Candidate],
    ) -> Candidate | None:
        """Add who gets pages to ``entered``; return the first one that does not get any, with its
        refusal.

        Nobody passes it (FIFO: large requests get their turn).
        """
        turns = self.local_turns
        if turns is not None:
            turns.agree(agreed.turns)
        for at, candidate in enumerate(candidates):
            req, record = candidate.req, record_of(candidate.req)
            if req.finished_reason is not None or record.is_alone != candidate.is_alone:
                continue  # answered in this step, or saved in it
            awaited = candidate.awaits(arriving)
            if awaited is not None:
                self._refuse(req, Refusal("prefix_arriving", prefix=awaited))
                continue
            if agreed.offers[at] == Offer.WAITS or candidate.lease is None:
                continue
            candidate.refusal = self._no_place(agreed, len(entered))
            if candidate.refusal is not None:
                return candidate
            brought, decision = candidate.brings(self._limits.window), None
            if turns is not None and not candidate.resumes:
                decision = turns.decide(candidate, at)
                candidate.is_local = decision.local
                if candidate.is_local:
                    candidate.shorten(self.tree_cache, turns.prefix_here(candidate))
                elif candidate.is_alone:
                    self._is_too_long(candidate.entry)
                    continue
            slots = self._reserve(candidates, at)
            if slots is None:
                return candidate
            self._enter(candidate, slots, decision)
            entered.append(candidate)
            record.arriving = brought
            if brought is not None:
                arriving[brought] = None
        return None

    @staticmethod
    def _no_place(agreed: AdmissionVote, taken: int) -> Refusal | None:
        """Why no request can get in after ``taken`` others did in this step, whatever its size."""
        if agreed.rows <= taken:
            return Refusal("no_request_row")
        return Refusal("no_metadata_slot") if agreed.slots <= taken else None

    def _reserve(self, candidates: list[Candidate], at: int) -> torch.Tensor | None:
        """Slots for the candidate ``at`` (1-D int64); None and its refusal where there are none.

        If need be, those behind it let go of their prefixes. They are not attempted any more then:
        what they held may have been evicted.
        """
        candidate = candidates[at]
        found = self._budget.reserve(candidate.req, candidate.lease)
        if isinstance(found, Refusal) and len(candidates) > at + 1:
            line.release(candidates[at + 1 :])
            del candidates[at + 1 :]
            found = self._budget.reserve(candidate.req, candidate.lease)
        if isinstance(found, Refusal):
            candidate.refusal = found
            return None
        return found

    def _enter(self, candidate: Candidate, slots: torch.Tensor, decision: Any) -> None:
        """From here on the request holds its pages, and waits for them no longer: its KV comes from
        its copy, is computed locally, or is written by prefill."""
        req, entry, allocator = candidate.req, candidate.entry, self.token_to_kv_pool_allocator
        self.step_writes.rows_are_free()
        candidate.lease.bind(self.req_to_token_pool, req, slots)
        shared, allocated = req.cache_protected_len, req.kv_allocated_len
        self._budget.claims.entered(req, req.last_node, shared, allocated)
        record_of(req).wait = Wait()
        if candidate.resumes:
            req.is_retracted = False
            restore_private(req, slots, allocator, self.tree_cache.draft_pool)
        elif candidate.is_local:
            self.local_turns.take(entry, decision)
        else:
            entry.metadata_buffer_index = take_slot(
                self.req_to_metadata_buffer_idx_allocator, self.metadata_buffers
            )
            # Page ids on the device first: one in ``page`` indices crosses to the host.
            pages = (slots[:: self._page] // self._page).to(torch.int32).cpu().numpy()
            announce(entry, pages, self.kv_manager, self.step_writes)
            if decision is not None:
                self.local_turns.announced(entry, decision)
