"""The prealloc queue: a step admits, resumes, or answers requests that have no pages, in order.

``step.Admission`` decides; what is decided has its effects here (``carry_out``). Retracted requests
come first: while any waits, nobody is admitted.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any  # Any: LocalTurns, where it is there; a stock answer

import torch
from typing_extensions import override

from sglang.srt.disaggregation.delta.decode import step
from sglang.srt.disaggregation.delta.decode.answers import Answers, NoPrefill, missing
from sglang.srt.disaggregation.delta.decode.claims import Claims, page_ceil, private_tokens
from sglang.srt.disaggregation.delta.decode.receiver import Handshakes
from sglang.srt.disaggregation.delta.decode.record import (
    Refusal,
    Stage,
    Wait,
    bootstrap_addr,
    record_of,
    restore_private,
)
from sglang.srt.disaggregation.delta.decode.speculation import step_tokens
from sglang.srt.disaggregation.delta.decode.transfer_queue import EMPTY, StepWrites, announce
from sglang.srt.disaggregation.delta.observability import RateLimitedLog
from sglang.srt.disaggregation.delta.pages import moved_state
from sglang.srt.disaggregation.delta.rank_agreement import agree_on, alone, part_of
from sglang.srt.patchset.environment import ADMISSION_TIMEOUT, WAIT_LOG

if TYPE_CHECKING:
    from sglang.srt.disaggregation.decode import DecodePreallocQueue, DecodeRequest
    from sglang.srt.managers.schedule_batch import Req
else:
    DecodePreallocQueue = DecodeRequest = object

logger = logging.getLogger(__name__)


#: Most steps between two passes over the pending handshakes: a new one waits for the next pass.
MAX_STEPS = 16


class RadixPreallocQueue(DecodePreallocQueue):
    """Pre-allocates only what the decode tree lacks. Stock behaviour without the flag.

    No rank decides anything alone: each step begins with one reduction (``agree_on``).
    """

    # SGLang's; named for the type checker.
    queue: list[DecodeRequest]
    pending_reqs: list[DecodeRequest]
    retracted_queue: list[Req]
    #: Seconds on this rank. Nothing is decided from it without the other ranks.
    clock: Callable[[], float] = staticmethod(time.monotonic)
    #: Offset of the next slice of queued requests; below, of pending handshakes.
    _next_part: int = 0
    _next_handshakes: int = 0
    #: Steps until all pending handshakes are advanced again.
    _steps_to_advance: int = 0

    @cached_property
    def _admission(self) -> step.Admission:
        wanted = step_tokens(self.scheduler, self._page)
        claims = Claims(
            self.num_reserved_decode_tokens, self._page, wanted, self.max_total_num_tokens
        )
        allocator, turns = self.token_to_kv_pool_allocator, self.local_turns
        takes_delta = self.kv_manager.peer_takes_delta
        return step.Admission(self.tree_cache, allocator, claims, takes_delta, turns)

    @cached_property
    def answers(self) -> Answers:
        failures = getattr(self.kv_manager, "failure_records", {})
        return Answers(
            self.scheduler.stream_output,
            failures,
            self.tp_rank,
            self.local_turns,
            lambda: self.clock(),
            self._what_is_missing,
        )

    @cached_property
    def _is_alone(self) -> bool:
        return alone(self.gloo_group)

    @cached_property
    def _pools_log(self) -> RateLimitedLog:
        return RateLimitedLog(logger, 30.0, lambda: self.clock())

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
    def local_turns(self) -> Any:
        """The turns that this server computes itself (``local_turns``); None where it does not."""
        return getattr(self.scheduler, "local_turns", None)

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
        return private_tokens((entry.req for entry in self.transfer_queue.queue), self._page)

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
        if not self.shares_prefixes:
            super()._resolve_pending_reqs()
        elif self._steps_to_advance > 0:
            self._steps_to_advance -= 1
        else:
            self.pending_reqs = self._handshakes.advance(self.pending_reqs)
            # A long line, as of a server that does not answer, must not slow down every step.
            self._steps_to_advance = min(len(self.pending_reqs) // step.CHECKED, MAX_STEPS)

    def _end_handshakes(self) -> list[DecodeRequest]:
        """Answer and return those whose handshake failed, on all ranks."""
        turns = self.local_turns
        tries_here = turns is not None and turns.limits.when_lost > 0
        pending = [entry for entry in self.queue if not entry.waiting_for_input]
        # Poll the newest handshakes in every step, because their server may answer at once.
        older, newest = pending[: -step.CHECKED], pending[-step.CHECKED :]
        part, self._next_handshakes = part_of(older, self._next_handshakes, step.CHECKED)
        polled = part + newest
        failed, unreached = self._handshakes.finish(polled, self.gloo_group, tries_here=tries_here)
        for entry in unreached:
            self.answers.try_here(entry)
        gone = [entry for entry in failed if not self.answers.keep(entry)]
        for entry in gone:
            self.answers.fail(entry, "Decode handshake failed for request")
            if self.scheduler.enable_metrics:
                self.scheduler.metrics_collector.increment_bootstrap_failed_reqs()
        if failed or unreached:
            self._leave(gone)
            self.pending_reqs = [e for e in self.pending_reqs if not e.waiting_for_input]
        return gone

    # ---- one step ----

    @override
    def pop_preallocated(self, rids_to_check: list[str] | None = None) -> Any:
        if not self.shares_prefixes:
            return super().pop_preallocated(rids_to_check)
        self._resolve_pending_reqs()
        failed = self._end_handshakes()
        # Those whose handshake is done on all ranks: if there are any, all ranks take the step.
        ready = [entry for entry in self.queue if entry.waiting_for_input]
        if not ready:
            return [], failed
        # No request is admitted before a retracted one, but failed ones are answered.
        blocked = self._memory_is_away or self.retracted_queue
        first = [] if blocked else self._first_in_line(ready)
        seen = self._see(ready, first)
        gone, entered = self._step(seen)
        self._log_waits(entry.req for entry in seen.checked)
        self._leave([each.candidate.entry for each in entered])
        return [each.candidate.entry for each in entered if not each.is_local], failed + gone

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
        first = [step.Candidate(None, req) for req in self.retracted_queue[: step.TRIED]]
        rows = self.req_to_token_pool.available_size()
        # Count no metadata slots, because retracted requests already have their metadata.
        _, entered = self._step(step.Snapshot([], [], first, rows, rows))
        self._log_waits(self.retracted_queue)
        resumed = [each.candidate.req for each in entered]
        self.retracted_queue = [req for req in self.retracted_queue if req not in resumed]
        return resumed

    @property
    def _memory_is_away(self) -> bool:
        """Between SGLang's release of memory and its return nobody gets any."""
        return bool(getattr(self.scheduler, "offload_tags", None))

    def _first_in_line(self, ready: list[DecodeRequest]) -> list[step.Candidate]:
        """Return the next candidates."""
        first: list[step.Candidate] = []
        for entry in ready[: step.TRIED]:
            alone = record_of(entry.req).is_alone
            most_new = self.local_turns.limits.when_lost if alone else math.inf
            first.append(step.Candidate(entry, entry.req, alone, most_new))
        return first

    def _see(self, ready: list[DecodeRequest], first: list[step.Candidate]) -> step.Snapshot:
        """Return what this rank sees. It checks all candidates, so that no failed one is admitted,
        and the next slice of the queue."""
        part, self._next_part = part_of(ready, self._next_part, step.CHECKED)
        checked = [candidate.entry for candidate in first]
        known = set(map(id, checked))
        checked += [entry for entry in part if id(entry) not in known]
        states = step.states_of(checked, self.clock(), ADMISSION_TIMEOUT.read())
        rows = self.req_to_token_pool.available_size()
        slots = self.req_to_metadata_buffer_idx_allocator.available_size()
        return step.Snapshot(checked, states, first, rows, slots)

    def _step(self, seen: step.Snapshot) -> tuple[list[DecodeRequest], list[step.Admit]]:
        """Run one step. Return the entries removed without pages, and the admitted ones."""
        admission = self._admission
        try:
            vote = admission.vote(seen)
            agreed = vote
            if not self._is_alone:
                lists = seen.checked, seen.candidates
                names = [[each.req.rid for each in part] for part in lists]
                agreed = agree_on(vote, names, self.gloo_group, self._pools_log)
            return self.carry_out(admission.decide(seen, vote, agreed))
        finally:
            step.release(seen.candidates)

    def carry_out(
        self, decisions: Iterable[step.Outcome]
    ) -> tuple[list[DecodeRequest], list[step.Admit]]:
        """The effects of a step, decision by decision; who left without pages, and who got in."""
        from sglang.srt.disaggregation.base.conn import KVPoll

        gone: list[DecodeRequest] = []
        entered: list[step.Admit] = []
        for decision in decisions:
            if isinstance(decision, step.Answer):
                gone = self.answers.settle(decision.states)
                self._leave(gone)
            elif isinstance(decision, step.TooLong):
                entry = decision.candidate.entry
                if self.answers.is_too_long(entry):
                    self._leave([entry])
                elif entry.kv_receiver.poll() == KVPoll.Bootstrapping:
                    self.pending_reqs.append(entry)  # else this rank's handshake is done already
            elif isinstance(decision, step.Admit):
                if self._enter(decision):
                    entered.append(decision)
            else:
                self._refuse(decision.req, decision.refusal)
        return gone, entered

    def _enter(self, admit: step.Admit) -> bool:
        """From here on the request holds its pages, and waits for them no longer: its KV comes from
        its copy, is computed locally, or is written by prefill. False where the allocator has fewer
        pages than were counted."""
        candidate, claims, page = admit.candidate, self._admission.claims, self._page
        req, entry, lease = candidate.req, candidate.entry, candidate.lease
        # With the lease held: locking takes the prefix out of what can be evicted.
        needed = page_ceil(candidate.length, page) - lease.length
        allocator, tree = self.token_to_kv_pool_allocator, self.tree_cache
        slots = tree.allocate(needed)
        if slots is None:
            free, evictable = allocator.available_size(), tree.evictable_size()
            if not self._is_alone:
                # Others may have got theirs. A wrong count is better found here than by a hang.
                raise RuntimeError(
                    f"request {req.rid} needs {needed} tokens, and the tree freed fewer than it "
                    f"counts: {free} are free, {evictable} evictable"
                )
            logger.warning(
                "request %s stays queued: it needs %d tokens, %d are free after eviction, %d "
                "evictable",
                req.rid,
                needed,
                free,
                evictable,
            )
            candidate.refusal = Refusal("no_tokens", claims.cost(req, lease.length))
            return False
        slots = slots[: candidate.length - lease.length]
        self.step_writes.rows_are_free()
        lease.bind(self.req_to_token_pool, req, slots)
        claims.entered(req, req.last_node, req.cache_protected_len, req.kv_allocated_len)
        record = record_of(req)
        record.wait = Wait()
        if candidate.resumes:
            req.is_retracted = False
            restore_private(req, slots, allocator, self.req_to_token_pool, tree.draft_pool)
            record.enter(Stage.COMMITTED)
        elif admit.is_local:
            record.enter(Stage.LOCAL)
            self.local_turns.take(entry, admit.turn)
        else:
            record.enter(Stage.TRANSFER)
            entry.metadata_buffer_index = self.req_to_metadata_buffer_idx_allocator.alloc()
            # A transfer that was given up may have written into the slot since it was freed.
            self.metadata_buffers.bootstrap_room[entry.metadata_buffer_index, 0] = EMPTY
            # Page ids on the device first: one in ``page`` indices crosses to the host.
            pages = (slots[::page] // page).to(torch.int32).cpu().numpy()
            pool, rows = allocator.get_kvcache(), self.req_to_token_pool
            state = moved_state(pool, rows, req, lambda: pages)
            announce(entry, pages, state, self.kv_manager, self.step_writes)
            if admit.turn is not None:
                self.local_turns.placed(entry.req, admit.turn)
        return True

    # ---- who leaves the line, or goes on without a prefill server ----

    def _leave(self, gone: Sequence[object]) -> None:
        """Take entries out of the lists that hold them."""
        if not gone:
            return
        self._next_part = max(self._next_part - len(gone), 0)  # so that nobody is left out
        self.queue, self.pending_reqs = without(self.queue, gone), without(self.pending_reqs, gone)

    def take_back(self, req: Req, why: str) -> None:
        """The transfer of a request failed, and it is in line again, before all others."""
        from sglang.srt.disaggregation.decode import DecodeRequest

        self.queue.insert(0, DecodeRequest(req=req, kv_receiver=None))
        self.answers.goes_alone(self.queue[0], NoPrefill("transfer_failed", why))

    # ---- who waits, and for what ----

    def _refuse(self, req: Req, refusal: Refusal) -> None:
        """Note why ``req`` waits; count it once for each request and reason."""
        record = record_of(req)
        record.wait.refusal = refusal
        if refusal.reason not in record.refused_for:
            record.refused_for.add(refusal.reason)
            self.scheduler.telemetry.count("decode_admission_refused", reason=refusal.reason)

    def _log_waits(self, reqs: Iterable[Req]) -> None:
        since = self.clock() - WAIT_LOG.read()
        waits = ((req, record_of(req).wait) for req in reqs if req.finished_reason is None)
        late = [
            req
            for req, wait in waits
            if wait.since is not None and wait.since <= since and not wait.logged
        ]
        if late:
            self.answers.log_waits(late)

    def _what_is_missing(self) -> Callable[[Req], str]:
        """Says what a request waits for, as text, as line and pool are now."""
        in_line = chain(self.retracted_queue, (entry.req for entry in self.queue))
        claims, tree = self._admission.claims, self.tree_cache
        deferred = private_tokens(self.transfer_queue.deferred_requests, self._page)
        pool = (
            f"{self.token_to_kv_pool_allocator.available_size()} free, {tree.evictable_size()} "
            f"evictable, {tree.protected_size()} protected, {claims.reserved} reserved, {deferred} "
            "in deferred release"
        )
        return missing(in_line, claims.cost, pool)


def without(entries: list[DecodeRequest], gone: Sequence[object]) -> list[DecodeRequest]:
    """``entries`` without ``gone``; not gone through behind the last of those."""
    ids = {id(entry) for entry in gone}
    kept: list[DecodeRequest] = []
    for at, entry in enumerate(entries):
        if not ids:
            return kept + entries[at:]
        if id(entry) in ids:
            ids.discard(id(entry))
        else:
            kept.append(entry)
    return kept


class CountedEntry(DecodeRequest):
    """A request in a queue, as SGLang's statistics count it."""

    @property
    def priority(self) -> int | None:
        """Where SGLang schedules by priority it counts a queue by that, and asks its entries."""
        return self.req.priority
