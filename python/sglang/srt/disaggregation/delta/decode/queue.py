"""The prealloc queue: a step admits, resumes or answers the requests without pages, in order.

``_run_step`` is the whole of it; ``admission`` has the vote and the budget. Retracted requests come
first: while any waits, no other is admitted.

Contract: the scheduler's thread only. All ranks of an attention TP group run each step together,
with equal queues. They make one reduction for handshakes, if any is pending, and one for the step
(``Admission.agree``); values that only this rank knows go into its vote.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any  # Any: LocalTurns and its decisions; a stock answer

import torch
from typing_extensions import override

from sglang.srt.disaggregation.delta.decode import admission
from sglang.srt.disaggregation.delta.decode.admission import Admission, Candidate
from sglang.srt.disaggregation.delta.decode.answers import Answers, NoPrefill, missing
from sglang.srt.disaggregation.delta.decode.claims import Claims, private_tokens
from sglang.srt.disaggregation.delta.decode.connection import Handshakes
from sglang.srt.disaggregation.delta.decode.request import (
    QueueState,
    Stage,
    bootstrap_addr,
    record_of,
    restore_private,
)
from sglang.srt.disaggregation.delta.decode.speculation import step_tokens
from sglang.srt.disaggregation.delta.decode.transfer import EMPTY, StepWrites, announce
from sglang.srt.disaggregation.delta.pages import moved_state
from sglang.srt.disaggregation.delta.rank_agreement import part_of
from sglang.srt.disaggregation.delta.wire import DeltaFrame
from sglang.srt.patchset.environment import ADMISSION_TIMEOUT

if TYPE_CHECKING:
    from sglang.srt.disaggregation.decode import DecodePreallocQueue, DecodeRequest
    from sglang.srt.managers.schedule_batch import Req
else:
    DecodePreallocQueue = DecodeRequest = object

logger = logging.getLogger(__name__)

#: Seconds after which a request that waits for memory is logged: longer than most requests run.
LONG_WAIT_S = 10.0
#: Most steps between two passes over the pending handshakes: a new one waits for the next pass.
MAX_STEPS_BETWEEN_PASSES = 16


class RadixPreallocQueue(DecodePreallocQueue):
    """Pre-allocates only the pages that the decode tree lacks. Stock behaviour without the flag."""

    # SGLang's; named for the type checker.
    queue: list[DecodeRequest]
    pending_reqs: list[DecodeRequest]
    retracted_queue: list[Req]
    #: This rank's monotonic clock. Used only in votes, never directly in a decision.
    clock: Callable[[], float] = staticmethod(time.monotonic)
    #: Offsets of the next slices of queued requests and of pending handshakes.
    _next_queued: int = 0
    _next_handshakes: int = 0
    #: Steps until all pending handshakes are advanced again.
    _steps_to_advance: int = 0

    @cached_property
    def _admission(self) -> Admission:
        # Made in the first step, because SGLang completes its scheduler after this queue.
        step = step_tokens(self.scheduler, self._page)
        claims = Claims(
            self.num_reserved_decode_tokens, self._page, step, self.max_total_num_tokens
        )
        allocator, takes_delta = self.token_to_kv_pool_allocator, self.kv_manager.peer_takes_delta
        return Admission(
            self.tree_cache,
            allocator,
            claims,
            takes_delta,
            self.local_turns,
            self.gloo_group,
            self.step_writes.rows_are_free,
        )

    @cached_property
    def answers(self) -> Answers:
        """Answers the requests that leave the queue without pages."""
        return Answers(
            self.scheduler.stream_output,
            getattr(self.kv_manager, "failure_records", {}),
            self.tp_rank,
            self.local_turns,
            self.scheduler.telemetry,
            lambda: self.clock(),
            self._missing,
        )

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
        """The turns that this server computes itself (``LocalTurns``); None without the flag."""
        return getattr(self.scheduler, "local_turns", None)

    @property
    def shares_prefixes(self) -> bool:
        """True if this decode server runs with the radix cache."""
        return bool(getattr(self.tree_cache, "serves_decode", False))

    @property
    def _page(self) -> int:
        return int(self.token_to_kv_pool_allocator.page_size)

    @property
    @override
    def num_tokens_pre_allocated(self) -> int:
        if not self.shares_prefixes:
            return int(super().num_tokens_pre_allocated)
        # Exclude the tokens that are shared with the tree, because the tree counts those.
        return private_tokens((entry.req for entry in self.transfer_queue.queue), self._page)

    # ---- handshakes ----

    @override
    def _resolve_prefill_dp_rank(self, req: Req) -> int | None:
        rank = self.prefill_dp_rank(req)
        if rank is None or not self.shares_prefixes:
            return rank
        # SGLang assumes that a rank named by the router is already connected.
        connections = self.kv_manager.servers.connections
        return rank if connections.is_connected(bootstrap_addr(req), rank) else None

    def prefill_dp_rank(self, req: Req) -> int | None:
        """Return the data-parallel rank that serves ``req``; None if prefill has to be queried."""
        return super()._resolve_prefill_dp_rank(req)

    @override
    def _resolve_pending_reqs(self) -> None:
        if not self.shares_prefixes:
            super()._resolve_pending_reqs()
        elif self._steps_to_advance > 0:
            self._steps_to_advance -= 1
        else:
            self.pending_reqs = self._handshakes.advance(self.pending_reqs)
            # Skip steps if many handshakes are pending, as when a server does not answer, because a
            # pass goes through all of them.
            steps = len(self.pending_reqs) // admission.MAX_CHECKED
            self._steps_to_advance = min(steps, MAX_STEPS_BETWEEN_PASSES)

    def _end_handshakes(self) -> list[DecodeRequest]:
        """Answer and return the requests whose handshake failed, on all ranks."""
        turns, checked = self.local_turns, admission.MAX_CHECKED
        tries_here = turns is not None and turns.limits.when_lost > 0
        pending = [entry for entry in self.queue if not entry.waiting_for_input]
        # Poll the newest handshakes in every step, because their server may answer at once.
        older, newest = pending[:-checked], pending[-checked:]
        part, self._next_handshakes = part_of(older, self._next_handshakes, checked)
        failed, unreached = self._handshakes.finish(
            part + newest, self.gloo_group, tries_here=tries_here
        )
        for entry in unreached:
            self.answers.try_here(entry)
        gone = [entry for entry in failed if not self.answers.keep(entry)]
        for entry in gone:
            self.answers.fail(entry, "Decode handshake failed for request {}")
            if self.scheduler.enable_metrics:
                self.scheduler.metrics_collector.increment_bootstrap_failed_reqs()
        if failed or unreached:
            self._remove(gone)
            self.pending_reqs = [e for e in self.pending_reqs if not e.waiting_for_input]
        return gone

    # ---- one step ----

    @override
    def pop_preallocated(self, rids_to_check: list[str] | None = None) -> Any:
        if not self.shares_prefixes:
            return super().pop_preallocated(rids_to_check)
        self._resolve_pending_reqs()
        failed = self._end_handshakes()
        # Handshakes end on all ranks at once: if any request is ready, all ranks take the step.
        ready = [entry for entry in self.queue if entry.waiting_for_input]
        if not ready:
            return [], failed
        # No request is admitted before a retracted one, but failed ones are answered.
        blocked = self._memory_is_released or self.retracted_queue
        candidates = [] if blocked else self._candidates(ready)
        # Check all candidates, so that no failed one is admitted, and a slice of the queue.
        checked = [candidate.entry for candidate in candidates]
        known = set(map(id, checked))
        part, self._next_queued = part_of(ready, self._next_queued, admission.MAX_CHECKED)
        checked += [entry for entry in part if id(entry) not in known]
        slots = self.req_to_metadata_buffer_idx_allocator.available_size()
        gone, admitted = self._run_step(checked, candidates, slots)
        self._log_long_waits(entry.req for entry in checked)
        self._remove([candidate.entry for candidate in admitted])
        announced = [it for it in admitted if record_of(it.req).stage is Stage.TRANSFER]
        return [candidate.entry for candidate in announced], failed + gone

    @override
    def resume_retracted_reqs(self, rids_to_check: list[str] | None = None) -> list[Req]:
        if not self.shares_prefixes:
            return super().resume_retracted_reqs(rids_to_check)
        paused = self._memory_is_released or getattr(self.scheduler, "_engine_paused", False)
        if not self.retracted_queue or paused:
            return []
        for req in self.retracted_queue:
            wait = record_of(req).wait
            if wait.since is None:
                wait.since = self.clock()
        first = self.retracted_queue[: admission.MAX_MATCHED]
        # A retracted request has its metadata already, so no slot limits the step.
        _, admitted = self._run_step([], [Candidate(None, req) for req in first], slots=len(first))
        self._log_long_waits(self.retracted_queue)
        resumed = [candidate.req for candidate in admitted]
        self.retracted_queue = [req for req in self.retracted_queue if req not in resumed]
        return resumed

    @property
    def _memory_is_released(self) -> bool:
        """True between release_memory_occupation and resume_memory_occupation."""
        return bool(getattr(self.scheduler, "offload_tags", None))

    def _candidates(self, ready: list[DecodeRequest]) -> list[Candidate]:
        candidates = []
        for entry in ready[: admission.MAX_MATCHED]:
            is_alone = record_of(entry.req).is_alone
            limit = self.local_turns.limits.when_lost if is_alone else math.inf
            candidates.append(Candidate(entry, entry.req, is_alone, limit))
        return candidates

    def _run_step(
        self, checked: list[DecodeRequest], candidates: list[Candidate], slots: int
    ) -> tuple[list[DecodeRequest], list[Candidate]]:
        """Run one step. Return the requests that were answered, and the admitted ones.

        ``checked``: queued requests that are answered if they failed or waited too long, the
        candidates first; empty where ``candidates`` resume. ``slots``: free metadata slots.
        """
        step = self._admission
        states = admission.states_of(checked, self.clock(), ADMISSION_TIMEOUT.read())
        rows = self.req_to_token_pool.available_size()
        admitted: list[Candidate] = []
        refusal = None
        try:
            vote = step.vote(candidates, states, rows, slots)
            agreed = step.agree(vote, [*checked, *candidates])
            step.apply(candidates, vote, agreed)
            gone = self._answer_ended(checked, agreed.states)
            if self.local_turns is not None:
                self.local_turns.agree(agreed.turns)
            for index, candidate in enumerate(candidates):
                if candidate.is_settled:
                    continue
                refusal = step.lacks_place(agreed, len(admitted)) or candidate.refusal
                if refusal is not None or not candidate.is_locked:
                    break  # without a reason where another rank refuses it
                turn = self._choose_turn(candidate, index)
                if candidate.is_alone and not turn.local:
                    self._end_wait_alone(candidate.entry)
                    continue
                refusal = step.admit(candidate, candidates[index + 1 :])
                if refusal is not None:
                    break  # first come, first served
                self._start(candidate, turn)
                admitted.append(candidate)
            if refusal is not None:
                self.answers.note_refusal(candidate.req, refusal)
            return gone, admitted
        finally:
            admission.release(candidates)

    def _answer_ended(
        self, checked: list[DecodeRequest], states: Sequence[int]
    ) -> list[DecodeRequest]:
        """Answer and remove the requests that failed or waited too long; return them."""
        if min(states, default=QueueState.WAITING) == QueueState.WAITING:
            return []
        pairs = zip(checked, states, strict=True)
        gone = self.answers.settle([pair for pair in pairs if pair[1] < QueueState.WAITING])
        self._remove(gone)
        return gone

    # ---- one request ----

    def _choose_turn(self, candidate: Candidate, index: int) -> Any:
        """Return where a candidate is computed (``policy.choice.Decision``); None if this
        server computes no turns."""
        turns = self.local_turns
        if turns is None or candidate.resumes:
            return None
        turn = turns.decide(candidate, index)
        if turn.local:
            candidate.shorten(self.tree_cache, turns.prefix_here(candidate))
        return turn

    def _start(self, candidate: Candidate, turn: Any) -> None:
        """Continue an admitted request: restore its KV, compute it locally, or announce its pages.
        ``turn``: see ``_choose_turn``."""
        req = candidate.req
        if candidate.resumes:
            self._restore(req)
            return
        explanation = record_of(req).explanation
        explanation.placed(len(req.origin_input_ids), req.cache_protected_len, turn)
        if turn is not None and turn.local:
            record_of(req).enter(Stage.LOCAL)
            self.local_turns.take(candidate.entry, turn)
        else:
            self._announce(candidate.entry)
            if turn is not None:
                self.local_turns.placed(req, turn)

    def _private_slots(self, req: Req) -> torch.Tensor:
        """Return the slots of its row behind the shared prefix (1-D, the row's type)."""
        row = self.req_to_token_pool.req_to_token[req.req_pool_idx]
        return row[req.cache_protected_len : req.kv_allocated_len]

    def _restore(self, req: Req) -> None:
        """Copy the KV of a retracted request back from the CPU."""
        req.is_retracted = False
        slots = self._private_slots(req).to(torch.int64)
        allocator, rows = self.token_to_kv_pool_allocator, self.req_to_token_pool
        restore_private(req, slots, allocator, rows, self.tree_cache.draft_pool)
        record_of(req).enter(Stage.COMMITTED)

    def _announce(self, entry: DecodeRequest) -> None:
        """Send prefill the pages of the delta; from here on they belong to the transfer."""
        req = entry.req
        record_of(req).enter(Stage.TRANSFER)
        entry.metadata_buffer_index = self.req_to_metadata_buffer_idx_allocator.alloc()
        # A transfer that was given up may have written into the slot since it was freed.
        self.metadata_buffers.bootstrap_room[entry.metadata_buffer_index, 0] = EMPTY
        # Compute page ids on the device, because one index per page is copied to the host then.
        slots = self._private_slots(req)[:: self._page]
        pages = (slots // self._page).to(torch.int32).cpu().numpy()
        pool, rows = self.token_to_kv_pool_allocator.get_kvcache(), self.req_to_token_pool
        state = moved_state(pool, rows, req, lambda: pages)
        frame = DeltaFrame(
            decode_prefix_len=req.cache_protected_len, prompt_tokens=len(req.origin_input_ids)
        )
        announce(entry, frame, pages, state, self.kv_manager, self.step_writes)

    # ---- requests that leave the queue, or stay without a prefill server ----

    def _remove(self, gone: Sequence[object]) -> None:
        """Remove entries from the lists that hold them."""
        if not gone:
            return
        self._next_queued = max(self._next_queued - len(gone), 0)  # so that none is skipped
        self.queue, self.pending_reqs = without(self.queue, gone), without(self.pending_reqs, gone)

    def _end_wait_alone(self, entry: DecodeRequest) -> None:
        """Fail a request without a prefill server that is too long to be computed locally, or let
        it continue its handshake, if its server is still being queried."""
        from sglang.srt.disaggregation.base.conn import KVPoll

        if self.answers.is_too_long(entry):
            self._remove([entry])
        elif entry.kv_receiver.poll() == KVPoll.Bootstrapping:  # else its handshake is done here
            self.pending_reqs.append(entry)

    def take_back(self, req: Req, why: str) -> None:
        """Queue a request whose transfer failed again, before all others, for local prefill."""
        from sglang.srt.disaggregation.decode import DecodeRequest

        self.queue.insert(0, DecodeRequest(req=req, kv_receiver=None))
        self.answers.continue_alone(self.queue[0], NoPrefill("transfer_failed", why))

    def _log_long_waits(self, reqs: Iterable[Req]) -> None:
        since = self.clock() - LONG_WAIT_S
        waits = ((req, record_of(req).wait) for req in reqs if req.finished_reason is None)
        late = [
            req
            for req, wait in waits
            if wait.since is not None and wait.since <= since and not wait.logged
        ]
        if late:
            self.answers.log_waits(late)

    def _missing(self, req: Req) -> str:
        """Describe what a request waits for, with the pool as it is now."""
        queued = chain(self.retracted_queue, (entry.req for entry in self.queue))
        claims, tree = self._admission.claims, self.tree_cache
        deferred = private_tokens(self.transfer_queue.deferred_requests, self._page)
        pool = (
            f"{self.token_to_kv_pool_allocator.available_size()} free, {tree.evictable_size()} "
            f"evictable, {tree.protected_size()} protected, {claims.reserved} reserved, {deferred} "
            "in deferred release"
        )
        return missing(req, claims.cost(req, 0), queued, pool)


def without(entries: list[DecodeRequest], gone: Sequence[object]) -> list[DecodeRequest]:
    """Return ``entries`` without ``gone``; stops comparing after the last match."""
    ids = {id(entry) for entry in gone}
    kept: list[DecodeRequest] = []
    for index, entry in enumerate(entries):
        if not ids:
            return kept + entries[index:]
        if id(entry) in ids:
            ids.discard(id(entry))
        else:
            kept.append(entry)
    return kept


class CountedEntry(DecodeRequest):
    """A request in a queue, as SGLang's statistics count it."""

    @property
    def priority(self) -> int | None:
        """Priority of the request: SGLang's statistics by priority read it from queue entries."""
        return self.req.priority
