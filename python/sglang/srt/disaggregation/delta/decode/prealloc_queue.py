"""The prealloc queue: who gets pages, who gets them back, and who leaves without; in order."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from sglang.srt.disaggregation.delta.decode import candidates as line
from sglang.srt.disaggregation.delta.decode import waiting
from sglang.srt.disaggregation.delta.decode.admission import DecodeBudget, Rules
from sglang.srt.disaggregation.delta.decode.candidates import Candidate
from sglang.srt.disaggregation.delta.decode.handshakes import (
    Handshakes,
    announce,
    bind,
    bootstrap_addr,
)
from sglang.srt.disaggregation.delta.decode.prebuilt import restore_private
from sglang.srt.disaggregation.delta.decode.prefix_tree import PrefixLease, StepWrites
from sglang.srt.disaggregation.delta.decode.step import AgreedSteps
from sglang.srt.disaggregation.delta.decode.waiting import Refusal
from sglang.srt.disaggregation.delta.pages import page_ceil
from sglang.srt.disaggregation.delta.rank_agreement import Agreed, State
from sglang.srt.patchset import environment

if TYPE_CHECKING:
    from sglang.srt.disaggregation.decode import DecodePreallocQueue
else:
    DecodePreallocQueue = object

logger = logging.getLogger(__name__)


class RadixPreallocQueue(DecodePreallocQueue):
    """Pre-allocates only what the decode tree lacks. Stock behaviour without the flag.

    No rank decides anything alone: each step begins with one reduction (``step``).
    """

    # Owned by the upstream class; named for the type checker.
    queue: list[Any]
    pending_reqs: list[Any]
    retracted_queue: list[Any]

    #: Seconds on this rank. Nothing is decided from it without the other ranks.
    clock: Callable[[], float] = staticmethod(time.monotonic)
    _limits: waiting.Limits
    #: Why the first in line did not get in when it was last tried.
    _refusal: Refusal | None = None

    @cached_property
    def _budget(self) -> DecodeBudget:
        return DecodeBudget(self)

    @cached_property
    def _steps(self) -> AgreedSteps:
        rules = Rules(self._may_share, self._arriving_key, self._must_wait)
        return AgreedSteps(self, self._budget, rules)

    @cached_property
    def step_writes(self) -> StepWrites:
        """Announcements that wait for the step in flight."""
        return StepWrites(self.scheduler, self._page)

    @cached_property
    def _handshakes(self) -> Handshakes:
        return Handshakes(self)

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
    def _resolve_prefill_dp_rank(self, req: Any) -> int | None:
        rank = self.prefill_dp_rank(req)
        if rank is None or not self.shares_prefixes:
            return rank
        # SGLang takes the rank that a router names for a rank that is connected.
        connections = self.kv_manager.servers.connections
        return rank if connections.is_connected(bootstrap_addr(req), rank) else None

    def prefill_dp_rank(self, req: Any) -> int | None:
        """The data-parallel rank that serves ``req``; None where prefill has to be asked."""
        rank: int | None = super()._resolve_prefill_dp_rank(req)
        return rank

    @override
    def _resolve_pending_reqs(self) -> None:
        if self.shares_prefixes:
            self._handshakes.advance()
        else:
            super()._resolve_pending_reqs()

    # ---- one step ----

    @override
    def pop_preallocated(self, rids_to_check: list[str] | None = None) -> Any:
        if not self.shares_prefixes:
            return super().pop_preallocated(rids_to_check)
        self._resolve_pending_reqs()
        failed = self._finish_handshakes()
        admitted: list[Any] = []
        ready = self._ready()
        if ready:  # equal on all ranks, so all of them take the step
            limits = self._read_limits()
            arriving = waiting.arriving(
                entry for entry in self.transfer_queue.queue if self.tree_cache.may_share(entry.req)
            )
            first = [] if self._memory_is_away else self._first_in_line(ready, arriving)
            with self._steps.step(ready, first, limits, arriving) as (agreed, candidates):
                failed += self._answer(ready, agreed)
                self._end_waits(ready, agreed)
                refusal = self._admit(candidates, arriving, agreed, admitted)
            self._remember(first, candidates, agreed, refusal)
            self._leave(admitted)
            waiting_since = [(entry, entry.req, entry.ready_since) for entry in self._ready()]
            self._say_who_waits(waiting_since, limits)
        return admitted, failed

    @override
    def resume_retracted_reqs(self, rids_to_check: list[str] | None = None) -> list[Any]:
        if not self.shares_prefixes:
            resumed: list[Any] = super().resume_retracted_reqs(rids_to_check)
            return resumed
        paused = self._memory_is_away or getattr(self.scheduler, "_engine_paused", False)
        if not self.retracted_queue or paused:
            return []
        for req in self.retracted_queue:
            if getattr(req, "retracted_since", None) is None:
                req.retracted_since = self.clock()
        ready = self._ready()  # nobody is admitted while these wait, but who failed is answered
        limits = self._read_limits()
        first = [Candidate(req, req) for req in self.retracted_queue[: line.LIMIT]]
        step = self._steps.step(ready, first, limits, set(), slots_needed=False)
        with step as (agreed, candidates):
            self._answer(ready, agreed)
            back: list[Any] = []
            refusal = self._resume(candidates, agreed, back)
        self._remember(first, candidates, agreed, refusal)
        self.retracted_queue = self.retracted_queue[len(back) :]
        still = [(req, req, req.retracted_since) for req in self.retracted_queue]
        self._say_who_waits(still, limits)
        return back

    @property
    def _memory_is_away(self) -> bool:
        """Between SGLang's release of memory and its return nobody gets any."""
        return bool(getattr(self.scheduler, "offload_tags", None))

    def _read_limits(self) -> waiting.Limits:
        """The settings, once a step."""
        self._limits = waiting.Limits.read(self._page)
        return self._limits

    def _ready(self) -> list[Any]:
        """Requests whose handshake is done on all ranks and that have no pages yet, in order."""
        return [entry for entry in self.queue if entry.waiting_for_input]

    def _leave(self, gone: Sequence[Any]) -> None:
        """Take entries out of the lists that hold them."""
        if not gone:
            return
        ids = {id(entry) for entry in gone}
        self.queue = [entry for entry in self.queue if id(entry) not in ids]
        self.pending_reqs = [entry for entry in self.pending_reqs if id(entry) not in ids]

    # ---- who leaves without pages ----

    def _finish_handshakes(self) -> list[Any]:
        """Poll the handshakes that are not done, on all ranks; answer and return who failed."""
        from sglang.srt.disaggregation.base.conn import KVPoll
        from sglang.srt.disaggregation.utils import poll_and_all_reduce

        pending = [entry for entry in self.queue if not entry.waiting_for_input]
        if not pending:
            return []
        polls = poll_and_all_reduce([entry.kv_receiver for entry in pending], self.gloo_group)
        failed = []
        for entry, poll in zip(pending, polls, strict=True):
            if poll == KVPoll.Failed:
                self._give_up(entry, "Decode handshake failed for request")
                if self.scheduler.enable_metrics:
                    self.scheduler.metrics_collector.increment_bootstrap_failed_reqs()
                failed.append(entry)
            elif poll == KVPoll.WaitingForInput:
                entry.waiting_for_input = True
                entry.ready_since = self.clock()
                entry.req.time_stats.set_bootstrap_done_time()
        self._leave(failed)
        return failed

    def _answer(self, ready: list[Any], agreed: Agreed) -> list[Any]:
        """Tell the clients of requests that failed, were aborted or waited for too long."""
        gone: list[Any] = []
        if min(agreed.states, default=State.FINE) > State.EXPIRED:
            return gone
        for entry, state in zip(ready, agreed.states, strict=True):
            req = entry.req
            if state == State.FAILED:
                self._give_up(entry, "Aborted while it waited for decode memory: request")
            elif state == State.EXPIRED:
                limit = environment.ADMISSION_TIMEOUT
                message = (
                    f"Request {req.rid} (bootstrap_room={req.bootstrap_room}) waited "
                    f"{self.clock() - entry.ready_since:.0f} s for decode memory, and "
                    f"{limit.name} allows {limit.read():.0f} s: "
                    f"{self._what_is_missing(entry, req)}"
                )
                waiting.give_up(self.scheduler, entry, message, HTTPStatus.SERVICE_UNAVAILABLE)
            else:
                continue
            gone.append(entry)
        self._leave(gone)
        return gone

    def _give_up(self, entry: Any, what: str) -> None:
        req = entry.req
        why = waiting.reason(self.kv_manager, req.bootstrap_room)
        place = f"rank={self.tp_rank}, bootstrap_room={req.bootstrap_room}"
        message = f"{what} {req.rid} ({place}): {why}"
        waiting.give_up(self.scheduler, entry, message, HTTPStatus.INTERNAL_SERVER_ERROR)

    # ---- admission ----

    def _first_in_line(self, ready: list[Any], arriving: set[waiting.PrefixKey]) -> list[Candidate]:
        """The next candidates; who waits for a prefix that is still arriving is passed over."""
        first = []
        for entry in ready:
            if getattr(entry, "waits_for_prefix", None) in arriving:
                continue
            first.append(Candidate(entry, entry.req))
            if len(first) == line.LIMIT:
                break
        return first

    def _may_share(self, candidate: Candidate) -> bool:
        """Whether a request may share a prefix; one that resumes asks no prefill server."""
        req = candidate.req
        if not self.tree_cache.may_share(req):
            return False
        return candidate.resumes or bool(self.kv_manager.peer_takes_delta(bootstrap_addr(req)))

    def _end_waits(self, ready: list[Any], agreed: Agreed) -> None:
        """Who waited long enough for another request's prefix is tried from the next step on."""
        if State.WAITED_ENOUGH not in agreed.states:
            return
        for entry, state in zip(ready, agreed.states, strict=True):
            if state == State.WAITED_ENOUGH:
                entry.waits_for_prefix, entry.waited_enough = None, True

    def _admit(
        self,
        candidates: list[Candidate],
        arriving: set[waiting.PrefixKey],
        agreed: Agreed,
        admitted: list[Any],
    ) -> Refusal | None:
        """Add who gets pages to ``admitted``; return why the first one that does not, does not.

        Nobody passes it (FIFO: large requests get their turn).
        """
        for at, candidate in enumerate(candidates):
            entry, req, lease = candidate.entry, candidate.req, candidate.lease
            if req.finished_reason is not None or lease is None:
                continue  # answered in this step
            full = self._no_place(agreed, len(admitted))
            if full is not None:
                return Refusal(req.rid, full)
            key = self._arriving_key(candidate)
            if key is not None and self._must_wait(candidate, key, arriving):
                self._wait_for_prefix(entry, key)
                continue
            slots = self._reserve(candidates, at)
            if isinstance(slots, Refusal):
                return slots
            self._enter(req, lease, slots)
            entry.arriving_prefix = key
            announce(self, entry, slots)
            admitted.append(entry)
            if key is not None:
                arriving.add(key)
        return None

    @staticmethod
    def _no_place(agreed: Agreed, taken: int, *, slots_needed: bool = True) -> str | None:
        """Why no request can get in after ``taken`` others did in this step, whatever its size."""
        if agreed.rows <= taken:
            return "no_request_row"
        return "no_metadata_slot" if slots_needed and agreed.slots <= taken else None

    def _reserve(self, candidates: list[Candidate], at: int) -> torch.Tensor | Refusal:
        """Slots for the candidate ``at``. If need be, those behind it let go of their prefixes.

        They are not tried any more then: what they held may have been evicted.
        """
        candidate = candidates[at]
        req, lease, length = candidate.req, candidate.lease, candidate.length
        assert lease is not None, "who has none is not tried"
        slots = self._budget.reserve(req, lease, length, resumes=candidate.resumes)
        if isinstance(slots, Refusal) and len(candidates) > at + 1:
            line.release(candidates[at + 1 :])
            del candidates[at + 1 :]
            slots = self._budget.reserve(req, lease, length, resumes=candidate.resumes)
        return slots

    def _enter(self, req: Any, lease: PrefixLease, slots: torch.Tensor) -> None:
        """From here on the request holds its pages."""
        bind(self.req_to_token_pool, req, lease, slots)
        shared, allocated = req.cache_protected_len, req.kv_allocated_len
        self._budget.claims.entered(req, req.last_node, shared, allocated)

    def _arriving_key(self, candidate: Candidate) -> waiting.PrefixKey | None:
        req, lease = candidate.req, candidate.lease
        if candidate.resumes or not candidate.shares or lease is None:
            return None
        address = bootstrap_addr(req)
        return waiting.prefix_key(address, req, lease.node, lease.length, self._limits.window)

    @staticmethod
    def _must_wait(
        candidate: Candidate, key: waiting.PrefixKey | None, arriving: set[waiting.PrefixKey]
    ) -> bool:
        return key in arriving and not getattr(candidate.entry, "waited_enough", False)

    def _wait_for_prefix(self, entry: Any, key: waiting.PrefixKey) -> None:
        entry.waits_for_prefix = key
        if getattr(entry, "waits_for_prefix_since", None) is None:
            entry.waits_for_prefix_since = self.clock()
        self._refused(entry, Refusal(entry.req.rid, "prefix_arriving"))

    # ---- retracted requests ----

    def _resume(
        self, candidates: list[Candidate], agreed: Agreed, back: list[Any]
    ) -> Refusal | None:
        """Give retracted requests their memory back: from the tree, the rest from their copies."""
        for at, candidate in enumerate(candidates):
            req, lease = candidate.req, candidate.lease
            assert lease is not None, "retracted requests have no receiver that could fail"
            full = self._no_place(agreed, len(back), slots_needed=False)
            if full is not None:
                return Refusal(req.rid, full)
            slots = self._reserve(candidates, at)
            if isinstance(slots, Refusal):
                return slots
            self._enter(req, lease, slots)
            req.is_retracted, req.retracted_since = False, None
            restore_private(req, slots, self.token_to_kv_pool_allocator)
            back.append(req)
        return None

    # ---- who waits, and for what ----

    def _remember(
        self,
        first: list[Candidate],
        tried: list[Candidate],
        agreed: Agreed,
        refusal: Refusal | None,
    ) -> None:
        """Keep why the first in line did not get in."""
        if refusal is None and len(tried) < len(first):
            refusal = first[len(tried)].refusal
        if refusal is None and first and not tried:
            full = self._no_place(agreed, 0, slots_needed=not first[0].resumes)
            if full is None:
                return  # another rank stops it
            refusal = Refusal(first[0].req.rid, full)
        self._refusal = refusal
        if refusal is not None:
            entry = next(c.entry for c in first if c.req.rid == refusal.rid)
            self._refused(entry, refusal)

    def _refused(self, entry: Any, refusal: Refusal) -> None:
        """Count a refusal once for each request and reason."""
        entry.refusal = refusal
        counted = entry.__dict__.setdefault("refused_for", set())
        if refusal.reason not in counted:
            counted.add(refusal.reason)
            self.scheduler.decode_metrics.refused(refusal.reason)

    def _what_is_missing(self, entry: Any, req: Any) -> str:
        own: Refusal | None = getattr(entry, "refusal", None)
        length = len(req.origin_input_ids) + max(len(req.output_ids) - 1, 0)
        wanted = self._budget.cost(req, 0, length, resumes=entry is req)
        return waiting.missing(req, own, self._refusal, wanted, self._budget.describe())

    def _say_who_waits(self, who: Sequence[tuple[Any, Any, float]], limits: waiting.Limits) -> None:
        """A warning once a wait, when it has become long. ``who``: entry, request, since when."""
        now = self.clock()
        for entry, req, since in who:
            if waiting.once(entry, since, now, limits.say_after):
                logger.warning(
                    "request %s (bootstrap_room=%s) has waited %.0f s for decode memory%s: %s",
                    req.rid,
                    req.bootstrap_room,
                    now - since,
                    " after it was retracted" if entry is req else "",
                    self._what_is_missing(entry, req),
                )
