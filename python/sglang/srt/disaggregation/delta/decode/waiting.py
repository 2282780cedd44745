"""Requests without pages: what is said of them, and how they leave the line without any.

One that failed, was aborted or has waited for too long holds nothing but its place in the queue.
Its client is answered, once, and prefill is told not to wait for an announcement. One whose prefill
server is lost may stay, to be computed locally (``without_prefill``).
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cached_property
from http import HTTPStatus
from itertools import chain
from typing import TYPE_CHECKING, Any  # Any: LocalTurns, where it is there; ``stream_output``

from sglang.srt.disaggregation.delta.decode import candidates as line
from sglang.srt.disaggregation.delta.decode.admission import Limits
from sglang.srt.disaggregation.delta.decode.candidates import Candidate
from sglang.srt.disaggregation.delta.decode.handshakes import bootstrap_addr
from sglang.srt.disaggregation.delta.decode.record import Refusal, Wait, record_of
from sglang.srt.disaggregation.delta.decode.without_prefill import (
    NO_PREFILL,
    TRANSFER_FAILED,
    NoPrefill,
)
from sglang.srt.disaggregation.delta.rank_agreement import State
from sglang.srt.patchset import environment, flags

if TYPE_CHECKING:
    from sglang.srt.disaggregation.decode import DecodePreallocQueue, DecodeRequest
    from sglang.srt.managers.schedule_batch import Req
else:
    DecodePreallocQueue = DecodeRequest = object

logger = logging.getLogger(__name__)

#: Why a request is refused, as text.
REASONS = {
    "no_tokens": "not enough free KV tokens",
    "cannot_finish": "its admission could leave a running request without memory for its output",
    "no_request_row": "no free request row",
    "no_metadata_slot": "no free metadata slot",
    "prefix_arriving": "its prefix is still being transferred or computed for another request",
}


class WaitingLine(DecodePreallocQueue):
    """Base of ``prealloc_queue.RadixPreallocQueue``."""

    # SGLang's; named for the type checker.
    queue: list[DecodeRequest]
    pending_reqs: list[DecodeRequest]
    retracted_queue: list[Req]
    #: Seconds on this rank. Nothing is decided from it without the other ranks.
    clock: Callable[[], float] = staticmethod(time.monotonic)
    #: Where the part of the line begins that is checked next.
    _next_part: int = 0

    @property
    def local_turns(self) -> Any:
        """The turns that this server computes itself (``local_turns``); None where it does not."""
        return getattr(self.scheduler, "local_turns", None)

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

    def _states(self, checked: list[DecodeRequest]) -> list[State]:
        """What this rank thinks of requests without pages, whose handshake is done."""
        from sglang.srt.disaggregation.base.conn import KVPoll

        now, limits, failed = self.clock(), self._limits, KVPoll.Failed
        states = []
        for entry in checked:
            wait, state = record_of(entry.req).wait, State.FINE
            if entry.req.finished_reason is not None or entry.kv_receiver.poll() == failed:
                state = State.FAILED
            elif now - (wait.since or 0.0) >= limits.for_memory:
                state = State.EXPIRED
            elif wait.prefix_since is not None and now - wait.prefix_since >= limits.for_prefix:
                state = State.WAITED_ENOUGH
            states.append(state)
        return states

    # ---- who leaves without pages ----

    def _answer(self, checked: list[DecodeRequest], states: Sequence[int]) -> list[DecodeRequest]:
        """Notify the clients of those of ``checked`` that failed or waited for too long, by the
        ``states`` that the ranks agreed on; who leaves. Who waited long enough for another
        request's prefix is attempted from the next step on."""
        gone: list[DecodeRequest] = []
        lacks: Callable[[Req], str] | None = None
        if min(states, default=State.FINE) == State.FINE:
            return gone
        for entry, state in zip(checked, states, strict=True):
            req, wait = entry.req, record_of(entry.req).wait
            if state == State.FAILED:
                if self._save(entry):
                    continue  # tried from the next step on
                self._fail(entry, "Aborted while waiting for decode memory: request")
                gone.append(entry)
            elif state == State.EXPIRED:
                lacks = lacks or self._what_is_missing()
                message = (
                    f"Request {req.rid} (bootstrap_room={req.bootstrap_room}) waited "
                    f"{self.clock() - (wait.since or 0.0):.0f} s for decode memory, and "
                    f"{environment.ADMISSION_TIMEOUT.name} allows {self._limits.for_memory:.0f} s: "
                    f"{lacks(req)}"
                )
                self._give_up(entry, message, HTTPStatus.SERVICE_UNAVAILABLE)
                gone.append(entry)
            elif state == State.WAITED_ENOUGH:
                wait.prefix_timed_out = True
        self._leave(gone)
        return gone

    def _give_up(
        self,
        entry: DecodeRequest,
        message: str,
        status: HTTPStatus = HTTPStatus.INTERNAL_SERVER_ERROR,
    ) -> None:
        """End a request of the line; the caller takes it out of the lists.

        The client is answered once, prefill is notified not to wait for the announcement, and the
        receiver forgets the room. What the request holds at this stage is nothing but its place in
        the queue.
        """
        from sglang.srt.disaggregation.utils import prepare_abort

        req, receiver = entry.req, entry.kv_receiver
        logger.warning(message)
        prepare_abort(req, message, status_code=status)
        if hasattr(receiver, "withdraw"):  # warm-up and stock receivers cannot
            receiver.withdraw(message)
        receiver.clear()
        self.scheduler.stream_output([req], req.return_logprob)

    def _why_failed(self, entry: DecodeRequest) -> str:
        """Why the room of a request failed, as far as this rank knows."""
        records = getattr(self.kv_manager, "failure_records", {})
        why: str = records.get(
            entry.req.bootstrap_room, "it was aborted, or failed on another rank"
        )
        return why

    def _fail(self, entry: DecodeRequest, what: str) -> None:
        """End a request whose room failed; ``what`` began and did not end well. The caller takes it
        out of the lists."""
        req = entry.req
        place = f"rank={self.tp_rank}, bootstrap_room={req.bootstrap_room}"
        self._give_up(entry, f"{what} {req.rid} ({place}): {self._why_failed(entry)}")

    # ---- who has no prefill server: equal on all ranks, for that a room failed, or its server was
    # not reached, was agreed ----

    def may_save(self, req: Req) -> bool:
        """Whether a request whose room failed may be computed locally, if it is short enough."""
        return self.local_turns is not None and bool(self.local_turns.may_save(req))

    def _save(self, entry: DecodeRequest) -> bool:
        """Keep a request in line whose room failed before it was announced; False if that may not
        be."""
        if record_of(entry.req).is_alone or not self.may_save(entry.req):
            return False
        why = self._why_failed(entry)
        entry.kv_receiver.withdraw(why)
        entry.kv_receiver.clear()
        self._goes_alone(entry, NoPrefill(NO_PREFILL, why))
        return True

    def _try_here(self, entry: DecodeRequest) -> None:
        """Its prefill server cannot be reached just now: a request is attempted locally, once."""
        record_of(entry.req).tried_here = True
        if self.may_save(entry.req):
            why = f"prefill server {bootstrap_addr(entry.req)} could not be reached"
            self._goes_alone(entry, NoPrefill(NO_PREFILL, why, entry.kv_receiver))

    def take_back(self, req: Req, why: str) -> None:
        """The transfer of a request failed, and it is in line again, before all others."""
        from sglang.srt.disaggregation.decode import DecodeRequest

        receiver = NoPrefill(TRANSFER_FAILED, why)
        self.queue.insert(0, DecodeRequest(req=req, kv_receiver=receiver))
        self._goes_alone(self.queue[0], receiver)

    def _goes_alone(self, entry: DecodeRequest, receiver: NoPrefill) -> None:
        """``entry`` is ready for admission, for the first time or once more."""
        self.pending_reqs = [other for other in self.pending_reqs if other is not entry]
        entry.kv_receiver, entry.waiting_for_input = receiver, True
        record = record_of(entry.req)
        record.wait, record.is_alone = Wait(since=self.clock()), True
        self.local_turns.lost(bootstrap_addr(entry.req))
        logger.warning(
            "request %s (bootstrap_room=%s) has no prefill server: %s. Fallback prefill computes "
            "it if it is short enough",
            entry.req.rid,
            entry.req.bootstrap_room,
            receiver.why,
        )

    def _is_too_long(self, entry: DecodeRequest) -> None:
        """A request has more new tokens than may be computed locally: it waits for its prefill
        server again, if that is still being asked who it is, or fails."""
        receiver, record = entry.kv_receiver, record_of(entry.req)
        if receiver.asking is not None:
            entry.kv_receiver, entry.waiting_for_input = receiver.asking, False
            self.pending_reqs.append(entry)
            record.wait, record.is_alone = Wait(), False
            return
        message = (
            f"Request {entry.req.rid} (bootstrap_room={entry.req.bootstrap_room}) has no prefill "
            f"server, and more new tokens than {flags.LOCAL_WHEN_LOST} allows: {receiver.why}"
        )
        self._give_up(entry, message)
        self._leave([entry])

    # ---- who waits, and for what: ``record.Wait``, which nothing else writes ----

    def _refuse(self, req: Req, refusal: Refusal) -> None:
        """Note why ``req`` waits; count it once for each request and reason."""
        record = record_of(req)
        record.wait.refusal = refusal
        if refusal.prefix is not None and record.wait.prefix_since is None:
            record.wait.prefix_since = self.clock()
        if refusal.reason not in record.refused_for:
            record.refused_for.add(refusal.reason)
            self.scheduler.telemetry.count("decode_admission_refused", reason=refusal.reason)

    def _log_waits(self, reqs: Sequence[Req]) -> None:
        """A warning once for each wait that has become long: of those that wait for the same, the
        first is described and the others are named."""
        now = self.clock()
        since = now - self._limits.log_after
        waits = ((req, record_of(req).wait) for req in reqs if req.finished_reason is None)
        late = [r for r, w in waits if w.since is not None and w.since <= since and not w.logged]
        if not late:
            return
        same: defaultdict[str | None, list[Req]] = defaultdict(list)
        for req in late:
            wait = record_of(req).wait
            wait.logged = True
            same[wait.refusal and wait.refusal.reason].append(req)
        lacks = self._what_is_missing()
        for first, *others in same.values():
            also = f"; {len(others)} more wait for the same: " + ", ".join(r.rid for r in others)
            logger.warning(
                "request %s (bootstrap_room=%s) has waited %.0f s for decode memory%s: %s%s",
                first.rid,
                first.bootstrap_room,
                now - (record_of(first).wait.since or 0.0),
                " after it was retracted" if first.is_retracted else "",
                lacks(first),
                also if others else "",
            )

    def _what_is_missing(self) -> Callable[[Req], str]:
        """Says what a request waits for, as text, as line and pool are now."""
        in_line = chain(self.retracted_queue, (entry.req for entry in self.queue))
        head = next((other for other in in_line if record_of(other).wait.is_blocked), None)
        budget = self._budget
        pool = budget.describe(self.transfer_queue.deferred_requests)

        def missing(req: Req) -> str:
            own, wanted = record_of(req).wait.refusal, budget.cost(req, 0)
            ahead = record_of(head).wait.refusal if head is not None else None
            if own is not None:
                why = REASONS[own.reason]
                wanted = wanted if own.cost is None else own.cost
            elif head is not None and ahead is not None:
                why = f"request {head.rid} ahead of it does not fit: {REASONS[ahead.reason]}"
            else:
                why = "its admission was not attempted yet"
            return f"{why}; it needs {wanted} tokens, {pool}"

        return missing


class CountedEntry(DecodeRequest):
    """A request in a queue, as SGLang's statistics count it."""

    @property
    def priority(self) -> int | None:
        """Where SGLang schedules by priority it counts a queue by that, and asks its entries."""
        return self.req.priority
