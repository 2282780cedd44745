"""How requests without pages are answered, kept without a prefill server, or logged as waiting.

A queued request that failed, was aborted or has waited too long owns only its place in the queue.
Its client is answered once, and prefill is notified that no announcement comes. A request whose
prefill server is lost may stay, to be computed locally (``NoPrefill``).

Contract: the scheduler's thread only. Callers pass what the ranks have agreed on, so that all ranks
answer and keep the same requests.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Any  # Any: SGLang's entries; LocalTurns, or None

from sglang.srt.disaggregation.delta.decode.request import (
    QueueState,
    Refusal,
    Stage,
    Wait,
    bootstrap_addr,
    record_of,
)
from sglang.srt.disaggregation.delta.metrics import REFUSALS
from sglang.srt.patchset import environment, flags

if TYPE_CHECKING:
    from sglang.srt.disaggregation.delta.observability import Telemetry
    from sglang.srt.managers.schedule_batch import Req

logger = logging.getLogger(__name__)


class NoPrefill:
    """Replaces the receiver of a request without a prefill server: fallback prefill.

    The request returns to the prealloc queue and is admitted again: matched, locked, with pages of
    its own. The pages of its failed transfer stay with a stand-in (``request.remains``) until
    prefill can no longer write to them. Their content is not used, because prefill confirms a room
    as a whole and confirmed none of these.

    ``reason``: "no_prefill" if the server could not be reached or was lost before the announcement,
    or "transfer_failed"; ``why``: text for log and client. ``asking``: the receiver, while its
    prefill server is still being queried; a request that is too long for this server continues with
    it.
    """

    require_staging = False

    def __init__(self, reason: str, why: str, asking: Any = None) -> None:
        self.reason, self.why, self.asking = reason, why, asking
        self._is_aborted = False

    def poll(self) -> int:
        """Return the state for admission: ready, until the client leaves."""
        from sglang.srt.disaggregation.base.conn import KVPoll

        return int(KVPoll.Failed if self._is_aborted else KVPoll.WaitingForInput)

    def abort(self) -> None:
        """Note that the client left."""
        self._is_aborted = True

    def yield_room(self) -> None:
        """Do nothing: a server that has the request all the same ends it by its own deadline."""

    def clear(self) -> None:
        """Forget the room, on all ranks in one step: otherwise one of them would refuse the next
        request of this number alone."""
        if self.asking is not None:
            self.asking.clear()


class Answers:
    """Answers requests of one prealloc queue. The queue removes them from its lists."""

    def __init__(
        self,
        stream: Callable[[list[Req], bool], object],
        failures: Mapping[int, str],
        rank: int,
        turns: Any,
        telemetry: Telemetry,
        clock: Callable[[], float],
        describe: Callable[[Req], str],
    ) -> None:
        """``stream`` sends requests' output to their clients; ``failures``: why rooms failed;
        ``turns``: ``LocalTurns``, or None; ``clock``: the queue's; ``describe`` says what a
        request lacks, with queue and pool as they are now."""
        self._stream, self._failures, self._rank = stream, failures, rank
        self._turns, self._telemetry = turns, telemetry
        self._clock, self._describe = clock, describe

    def _end(
        self, entry: Any, message: str, status: HTTPStatus = HTTPStatus.INTERNAL_SERVER_ERROR
    ) -> None:
        from sglang.srt.disaggregation.utils import prepare_abort

        req, receiver = entry.req, entry.kv_receiver
        logger.warning(message)
        prepare_abort(req, message, status_code=status)
        if hasattr(receiver, "withdraw"):  # warm-up and stock receivers cannot
            receiver.withdraw(message)
        receiver.clear()
        record_of(req).enter(Stage.ENDED)
        self._stream([req], req.return_logprob)

    def _why_failed(self, req: Req) -> str:
        return self._failures.get(req.bootstrap_room, "it was aborted, or failed on another rank")

    def fail(self, entry: Any, event: str) -> None:
        """Answer a request whose room failed. ``event``: text with a place for its name."""
        req = entry.req
        # Set by SGLang for a grammar or a length that it refuses.
        refused = req.to_finish
        if refused is not None and refused.status_code is not None:
            return self._end(entry, refused.message, refused.status_code)
        name = f"{req.rid} (rank={self._rank}, bootstrap_room={req.bootstrap_room})"
        self._end(entry, f"{event.format(name)}: {self._why_failed(req)}")

    def settle(self, states: Iterable[tuple[Any, int]]) -> list[Any]:
        """Answer entries that failed or waited too long, by their agreed states, and return them.
        Requests that may be computed locally stay, and are attempted from the next step on."""
        gone = []
        for entry, state in states:
            if state == QueueState.EXPIRED:
                req = entry.req
                waited = self._clock() - (record_of(req).wait.since or 0.0)
                message = (
                    f"Request {req.rid} (bootstrap_room={req.bootstrap_room}) waited {waited:.0f} "
                    f"s for decode memory, and {environment.ADMISSION_TIMEOUT.name} allows "
                    f"{environment.ADMISSION_TIMEOUT.read():.0f} s: {self._describe(req)}"
                )
                self._end(entry, message, HTTPStatus.SERVICE_UNAVAILABLE)
            elif self.keep(entry):
                continue
            else:
                self.fail(entry, "Request {} was aborted while waiting for decode memory")
            gone.append(entry)
        return gone

    # ---- requests without a prefill server ----

    def may_keep(self, entry: Any) -> bool:
        """True if a request whose room failed may be computed locally, if it is short enough."""
        may_save = self._turns is not None and self._turns.may_save(entry.req)
        return bool(may_save and not entry.kv_receiver.aborted)

    def keep(self, entry: Any) -> bool:
        """Keep a queued request whose room failed before its announcement; False if it may not."""
        if record_of(entry.req).is_alone or not self.may_keep(entry):
            return False
        why = self._why_failed(entry.req)
        entry.kv_receiver.withdraw(why)
        entry.kv_receiver.clear()
        self.continue_alone(entry, NoPrefill("no_prefill", why))
        return True

    def try_here(self, entry: Any) -> None:
        """Attempt a request locally, once, because its prefill server cannot be reached now."""
        record_of(entry.req).tried_here = True
        if self.may_keep(entry):
            why = f"prefill server {bootstrap_addr(entry.req)} could not be reached"
            self.continue_alone(entry, NoPrefill("no_prefill", why, entry.kv_receiver))

    def continue_alone(self, entry: Any, receiver: NoPrefill) -> None:
        """Make ``entry`` ready for admission without a prefill server."""
        entry.kv_receiver, entry.waiting_for_input = receiver, True
        record = record_of(entry.req)
        record.enter(Stage.IN_LINE)
        record.wait, record.is_alone = Wait(since=self._clock()), True
        logger.warning(
            "request %s (bootstrap_room=%s) has no prefill server: %s. Fallback prefill computes "
            "it if it is short enough",
            entry.req.rid,
            entry.req.bootstrap_room,
            receiver.why,
        )

    def is_too_long(self, entry: Any) -> bool:
        """End the attempt of a request that has more new tokens than may be computed locally: it
        waits for its prefill server again, if that is still being queried, or fails. Return True
        if it failed."""
        receiver, record = entry.kv_receiver, record_of(entry.req)
        if receiver.asking is not None:
            entry.kv_receiver, entry.waiting_for_input = receiver.asking, False
            record.enter(Stage.HANDSHAKE)
            record.wait, record.is_alone = Wait(), False
            return False
        message = (
            f"Request {entry.req.rid} (bootstrap_room={entry.req.bootstrap_room}) has no prefill "
            f"server, and more new tokens than {flags.LOCAL_WHEN_LOST} allows: {receiver.why}"
        )
        self._end(entry, message)
        return True

    # ---- requests that wait ----

    def note_refusal(self, req: Req, refusal: Refusal) -> None:
        """Record why ``req`` waits; count each reason once a request."""
        record = record_of(req)
        record.wait.refusal, counted = refusal, record.explanation.refused_for
        if refusal.reason not in counted:
            counted.add(refusal.reason)
            self._telemetry.count("decode_admission_refused", reason=refusal.reason)

    def log_waits(self, late: Iterable[Req]) -> None:
        """Warn, once, of requests that have waited long. One line for all with the same reason: it
        describes the first and names the others."""
        now = self._clock()
        by_reason = defaultdict[str | None, list["Req"]](list)
        for req in late:
            wait = record_of(req).wait
            wait.logged = True
            by_reason[wait.refusal and wait.refusal.reason].append(req)
        for first, *others in by_reason.values():
            also = f"; {len(others)} more wait for the same: " + ", ".join(r.rid for r in others)
            logger.warning(
                "request %s (bootstrap_room=%s) has waited %.0f s for decode memory%s: %s%s",
                first.rid,
                first.bootstrap_room,
                now - (record_of(first).wait.since or 0.0),
                " after it was retracted" if first.is_retracted else "",
                self._describe(first),
                also if others else "",
            )


def missing(req: Req, cost: int, queued: Iterable[Req], pool: str) -> str:
    """Describe what ``req`` waits for. ``cost``: tokens that it takes without a prefix; ``queued``:
    all requests that wait, in order; ``pool``: the pool's state."""
    refusal = record_of(req).wait.refusal
    if refusal is not None:
        why = REFUSALS[refusal.reason]
        cost = cost if refusal.cost is None else refusal.cost
    else:
        why = "its admission was not attempted yet"
        for other in queued:
            ahead = record_of(other).wait.refusal
            if ahead is not None:
                why = f"request {other.rid} ahead of it does not fit: {REFUSALS[ahead.reason]}"
                break
    return f"{why}; it needs {cost} tokens, {pool}"
