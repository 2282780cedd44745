"""The prealloc queue: a step admits, resumes, or answers requests that have no pages, in order.

A step answers who failed, was aborted or waited for too long; admits from the first in line until
one does not fit; and notes why that one waits. Retracted requests come first: while any waits,
nobody is admitted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any  # Any: LocalTurns, where it is there; a stock answer

import torch
from typing_extensions import override

from sglang.srt.disaggregation.delta.decode import candidates as line
from sglang.srt.disaggregation.delta.decode import waiting
from sglang.srt.disaggregation.delta.decode.admission import DecodeBudget, Limits
from sglang.srt.disaggregation.delta.decode.candidates import AgreedSteps, Candidate
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
from sglang.srt.disaggregation.delta.decode.transfer_queue import StepWrites, announce
from sglang.srt.disaggregation.delta.decode.without_prefill import WithoutPrefill
from sglang.srt.disaggregation.delta.pages import page_ceil
from sglang.srt.disaggregation.delta.rank_agreement import AdmissionVote, Offer, State

if TYPE_CHECKING:
    from sglang.srt.disaggregation.decode import DecodePreallocQueue, DecodeRequest
    from sglang.srt.managers.schedule_batch import Req
else:
    DecodePreallocQueue = object

logger = logging.getLogger(__name__)


class RadixPreallocQueue(DecodePreallocQueue):
    """Pre-allocates only what the decode tree lacks. Stock behaviour without the flag.

    No rank decides anything alone: each step begins with one reduction (``AgreedSteps``).
    """

    # Owned by the upstream class; named for the type checker.
    queue: list[DecodeRequest]
    pending_reqs: list[DecodeRequest]
    retracted_queue: list[Req]
    #: Seconds on this rank. Nothing is decided from it without the other ranks.
    clock: Callable[[], float] = staticmethod(time.monotonic)
    #: Candidates of the next step. More than can be tried only while the line moves: each costs a
    #: little, and behind one that does not fit nobody is checked.
    _looked_at: int = line.LOOKED_AT
    #: Where the part of the line begins that is checked next.
    _next_part: int = 0

    @cached_property
    def _budget(self) -> DecodeBudget:
        step = step_tokens(self.scheduler, self._page)
        return DecodeBudget(self, Claims(self.num_reserved_decode_tokens, self._page, step))

    @cached_property
    def _steps(self) -> AgreedSteps:
        return AgreedSteps(self, self._budget, self._may_share)

    @cached_property
    def step_writes(self) -> StepWrites:
        """Announcements that wait for the step in flight."""
        return StepWrites(self.scheduler, self._page)

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

    @cached_property
    def without_prefill(self) -> WithoutPrefill:
        """What becomes of requests whose prefill server is lost."""
        return WithoutPrefill(self)

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
        admitted: list[DecodeRequest] = []
        ready = self._ready()
        if ready:  # equal on all ranks, so all of them take the step
            limits = self._limits
            arriving = line.under_way(self)
            first = [] if self._memory_is_away else self._first_in_line(ready, arriving)
            checked = self._to_check(ready, first)
            taken: list[DecodeRequest] = []
            with self._steps.step(checked, first, limits, arriving) as (agreed, candidates):
                failed += self._answer(checked, agreed)
                stopped = self._admit(candidates, arriving, agreed, admitted, taken)
            self._note_refusal(first, candidates, agreed, stopped)
            moves = admitted or taken or Offer.WAITS in agreed.offers
            self._looked_at = line.LOOKED_AT if moves else line.TRIED
            self._leave([*admitted, *taken])
            self._log_waits([entry.req for entry in checked], limits)
        return admitted, failed

    def _end_handshakes(self) -> list[DecodeRequest]:
        """Answer and return those whose handshake failed, on all ranks."""
        turns = self.local_turns
        tries_here = turns is not None and turns.choice.limits.when_lost > 0
        pending = [entry for entry in self.queue if not entry.waiting_for_input]
        failed, unreached = self._handshakes.finish(pending, self.gloo_group, tries_here=tries_here)
        for entry in unreached:
            self.without_prefill.try_here(entry)
        gone = []
        for entry in failed:
            if self.without_prefill.save(entry, waiting.why_failed(self, entry)):
                continue
            waiting.fail(self, entry, "Decode handshake failed for request")
            if self.scheduler.enable_metrics:
                self.scheduler.metrics_collector.increment_bootstrap_failed_reqs()
            gone.append(entry)
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
        checked = self._to_check(self._ready(), [])
        limits = self._limits
        first = [Candidate(None, req) for req in self.retracted_queue[: line.TRIED]]
        step = self._steps.step(checked, first, limits, {}, slots_needed=False)
        with step as (agreed, candidates):
            self._answer(checked, agreed)
            back: list[Req] = []
            stopped = self._resume(candidates, agreed, back)
        self._note_refusal(first, candidates, agreed, stopped)
        self.retracted_queue = self.retracted_queue[len(back) :]
        self._log_waits(self.retracted_queue, limits)
        return back

    @property
    def local_turns(self) -> Any:
        """The turns that this server computes itself (``local_turns``); None where it does not."""
        return getattr(self.scheduler, "local_turns", None)

    @property
    def _memory_is_away(self) -> bool:
        """Between SGLang's release of memory and its return nobody gets any."""
        return bool(getattr(self.scheduler, "offload_tags", None))

    @cached_property
    def _limits(self) -> Limits:
        """The settings, read once: each step would spend a tenth of its time on the environment."""
        return Limits.read(self._page, self.tree_cache.is_eagle)

    def _ready(self) -> list[DecodeRequest]:
        """Requests whose handshake is done on all ranks and that have no pages yet, in order."""
        return [entry for entry in self.queue if entry.waiting_for_input]

    def _to_check(
        self, ready: list[DecodeRequest], first: Sequence[Candidate]
    ) -> list[DecodeRequest]:
        """Those whose state the ranks agree on in this step: the candidates, none of which may get
        in after it failed, and the next part of the line."""
        at = self._next_part if line.CHECKED < len(ready) > self._next_part else 0
        self._next_part = at + line.CHECKED
        entries = [candidate.entry for candidate in first if candidate.entry is not None]
        known = set(map(id, entries))
        return entries + [e for e in ready[at : self._next_part] if id(e) not in known]

    def _leave(self, gone: Sequence[object]) -> None:
        """Take entries out of the lists that hold them."""
        if not gone:
            return
        self._next_part = max(self._next_part - len(gone), 0)  # so that nobody is left out
        ids = {id(entry) for entry in gone}
        self.queue = [entry for entry in self.queue if id(entry) not in ids]
        self.pending_reqs = [entry for entry in self.pending_reqs if id(entry) not in ids]

    # ---- who leaves without pages ----

    def _answer(self, checked: list[DecodeRequest], agreed: AdmissionVote) -> list[DecodeRequest]:
        """Notify the clients of requests that failed, were aborted or waited for too long; end
        waits for prefixes that lasted as long as they may."""
        if min(agreed.states, default=State.FINE) == State.FINE:
            return []
        gone = waiting.answer(self, checked, agreed.states, self._limits)
        self._leave(gone)
        return gone

    # ---- admission ----

    def _first_in_line(
        self, ready: list[DecodeRequest], arriving: ArrivingPrefixes
    ) -> list[Candidate]:
        """The next candidates; who waits for a prefix that is still arriving is passed over."""
        first = []
        for entry in ready:
            record = record_of(entry.req)
            wait = record.wait
            awaited = wait.refusal.prefix if wait.refusal is not None else None
            if awaited in arriving and not wait.prefix_timed_out:
                continue
            first.append(Candidate(entry, entry.req, is_alone=record.is_alone))
            if record.is_alone:
                first[-1].most_new = self.local_turns.choice.limits.when_lost
            if len(first) == self._looked_at:
                break
        return first

    def _may_share(self, candidate: Candidate) -> bool:
        """Whether a request may share a prefix; one that resumes asks no prefill server."""
        req = candidate.req
        if not self.tree_cache.may_share(req):
            return False
        if candidate.resumes or candidate.is_alone:
            return True
        return bool(self.kv_manager.peer_takes_delta(bootstrap_addr(req)))

    def _admit(
        self,
        candidates: list[Candidate],
        arriving: ArrivingPrefixes,
        agreed: AdmissionVote,
        admitted: list[DecodeRequest],
        taken: list[DecodeRequest],
    ) -> Candidate | None:
        """Add who gets pages to ``admitted``, or to ``taken`` if it is computed locally; return the
        first one that does not get any, with its refusal.

        Nobody passes it (FIFO: large requests get their turn).
        """
        turns = self.local_turns
        if turns is not None:
            turns.agree(agreed.turns)
        for at, candidate in enumerate(candidates):
            entry, req = candidate.entry, candidate.req
            assert entry is not None, "it comes from the queue"
            if req.finished_reason is not None:
                continue  # answered in this step
            if record_of(req).is_alone and not candidate.is_alone:
                continue  # saved in this step
            awaited = candidate.awaits(arriving)
            if awaited is not None:
                self._refuse(req, Refusal("prefix_arriving", prefix=awaited))
                continue
            if agreed.offers[at] == Offer.WAITS or candidate.lease is None:
                continue
            candidate.refusal = self._no_place(agreed, len(admitted) + len(taken))
            if candidate.refusal is not None:
                return candidate
            brought = candidate.brings(self._limits.window)
            decision = turns.decide(candidate, at) if turns is not None else None
            is_local = decision is not None and decision.local
            if candidate.is_alone and not is_local:
                if self.without_prefill.is_too_long(entry):
                    self._leave([entry])
                continue
            if is_local:
                candidate.shorten(self.tree_cache, turns.prefix_here(candidate))
            slots = self._reserve(candidates, at)
            if slots is None:
                return candidate
            self._enter(candidate, slots)
            record_of(req).arriving = brought
            if brought is not None:
                arriving[brought] = None
            if is_local:
                turns.take(entry, decision)
                taken.append(entry)
                continue
            announce(self, entry, slots)  # prefill fills them
            admitted.append(entry)
            if decision is not None:
                turns.announced(entry, decision)
        return None

    @staticmethod
    def _no_place(
        agreed: AdmissionVote, taken: int, *, slots_needed: bool = True
    ) -> Refusal | None:
        """Why no request can get in after ``taken`` others did in this step, whatever its size."""
        if agreed.rows <= taken:
            return Refusal("no_request_row")
        return Refusal("no_metadata_slot") if slots_needed and agreed.slots <= taken else None

    def _reserve(self, candidates: list[Candidate], at: int) -> torch.Tensor | None:
        """Slots for the candidate ``at`` (1-D int64); None and its refusal where there are none.

        If need be, those behind it let go of their prefixes. They are not attempted any more then:
        what they held may have been evicted.
        """
        candidate, lease = candidates[at], candidates[at].lease
        assert lease is not None, "who has none is not attempted"
        found = self._budget.reserve(candidate, lease)
        if isinstance(found, Refusal) and len(candidates) > at + 1:
            line.release(candidates[at + 1 :])
            del candidates[at + 1 :]
            found = self._budget.reserve(candidate, lease)
        if isinstance(found, Refusal):
            candidate.refusal = found
            return None
        return found

    def _enter(self, candidate: Candidate, slots: torch.Tensor) -> None:
        """From here on the request holds its pages, and waits for them no longer."""
        req, lease = candidate.req, candidate.lease
        assert lease is not None, "its slots were reserved behind it"
        self.step_writes.rows_are_free()
        lease.bind(self.req_to_token_pool, req, slots)
        shared, allocated = req.cache_protected_len, req.kv_allocated_len
        self._budget.claims.entered(req, req.last_node, shared, allocated)
        record_of(req).wait = Wait()

    # ---- retracted requests ----

    def _resume(
        self, candidates: list[Candidate], agreed: AdmissionVote, back: list[Req]
    ) -> Candidate | None:
        """Give retracted requests their memory back: from the tree, the rest from their copies."""
        for at, candidate in enumerate(candidates):
            candidate.refusal = self._no_place(agreed, len(back), slots_needed=False)
            if candidate.refusal is not None:
                return candidate
            slots = self._reserve(candidates, at)
            if slots is None:
                return candidate
            self._enter(candidate, slots)
            candidate.req.is_retracted = False
            pools = self.token_to_kv_pool_allocator, self.tree_cache.draft_pool
            restore_private(candidate.req, slots, *pools)
            back.append(candidate.req)
        return None

    # ---- who waits, and for what: ``record.Wait``, which nothing else writes ----

    def _note_refusal(
        self,
        first: list[Candidate],
        tried: list[Candidate],
        agreed: AdmissionVote,
        stopped: Candidate | None,
    ) -> None:
        """Keep why the first one that did not get in, did not. ``stopped``: it, if it was
        attempted."""
        if stopped is None and len(tried) < len(first):
            stopped = first[len(tried)]
            if stopped.refusal is None and not tried:  # else another rank stops it
                stopped.refusal = self._no_place(agreed, 0, slots_needed=not stopped.resumes)
        if stopped is not None and stopped.refusal is not None:
            self._refuse(stopped.req, stopped.refusal)

    def _refuse(self, req: Req, refusal: Refusal) -> None:
        """Note why ``req`` waits; count it once for each request and reason."""
        record = record_of(req)
        record.wait.refusal = refusal
        if refusal.prefix is not None and record.wait.prefix_since is None:
            record.wait.prefix_since = self.clock()
        if refusal.reason not in record.refused_for:
            record.refused_for.add(refusal.reason)
            self.scheduler.telemetry.count("decode_admission_refused", reason=refusal.reason)

    def _log_waits(self, reqs: Sequence[Req], limits: Limits) -> None:
        """A warning once for each wait that has become long."""
        since = self.clock() - limits.log_after
        waits = ((req, record_of(req).wait) for req in reqs if req.finished_reason is None)
        late = [r for r, w in waits if w.since is not None and w.since <= since and not w.logged]
        if late:
            waiting.log_waits(self, late)

    def what_is_missing(self) -> Callable[[Req], str]:
        """Says what a request waits for, as text, as line and pool are now."""
        in_line = chain(self.retracted_queue, (entry.req for entry in self.queue))
        head = next((other for other in in_line if record_of(other).wait.is_blocked), None)
        pool = self._budget.describe()

        wanted = self._budget.cost
        return lambda req: waiting.missing(req, head, wanted(Candidate(None, req), 0), pool)
