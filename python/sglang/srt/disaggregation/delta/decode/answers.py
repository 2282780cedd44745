"""How requests leave the line without pages, and which of them stay without a prefill server.

A request that failed, was aborted or has waited for too long holds nothing but its place in the
queue. Its client is answered, once, and prefill is told not to wait for an announcement. One whose
prefill server is lost may stay, to be computed locally (``NoPrefill``): that its room failed,
or its server was not reached, was agreed, so all ranks do the same.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Any  # Any: SGLang's entries; LocalTurns, or None

from sglang.srt.disaggregation.delta.decode.record import (
    REASONS,
    Stage,
    Wait,
    bootstrap_addr,
    record_of,
)
from sglang.srt.disaggregation.delta.rank_agreement import State
from sglang.srt.patchset import environment, flags

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

logger = logging.getLogger(__name__)


class NoPrefill:
    """Stands where the receiver of a request without a prefill server was: fallback prefill.

    Such a request goes back into the prealloc queue, and is admitted once more: matched, locked,
    given pages of its own. What it held for its transfer stays behind with a stand-in
    (``record.remains``) until prefill can write to it no more. Nothing of a transfer that failed is
    used: prefill says of a room as a whole that everything is here, and said it of none of these.

    ``reason``: "no_prefill", where it could not be reached or was lost before the announcement, or
    "transfer_failed"; ``why``: what happened, for the log and the client. ``asking``: the receiver,
    if its prefill server is still being asked who it is; a request that is too long for this server
    goes on with it.
    """

    require_staging = False

    def __init__(self, reason: str, why: str, asking: Any = None) -> None:
        self.reason, self.why, self.asking = reason, why, asking
        self._has_left = False

    def poll(self) -> int:
        """Ready for admission, until the client leaves."""
        from sglang.srt.disaggregation.base.conn import KVPoll

        return int(KVPoll.Failed if self._has_left else KVPoll.WaitingForInput)

    def abort(self) -> None:
        """The client left."""
        self._has_left = True

    def yield_room(self) -> None:
        """No server can be notified: a server that has the request all the same ends it by its
        own deadline."""

    def clear(self) -> None:
        """Forget the room. All ranks do so in one step, or one of them would refuse the next
        request of this number alone."""
        if self.asking is not None:
            self.asking.clear()


class Answers:
    """One for each prealloc queue, which takes out of its lists who is answered here."""

    def __init__(
        self,
        stream: Callable[[list[Req], bool], object],
        failures: Mapping[int, str],
        rank: int,
        turns: Any,
        clock: Callable[[], float],
        describe: Callable[[], Callable[[Req], str]],
    ) -> None:
        """``stream`` sends requests' output to their clients; ``failures``: why rooms failed;
        ``turns``: ``LocalTurns``, or None; ``clock``: of the queue; ``describe`` makes what says
        what a request lacks, as line and pool are now."""
        self._stream, self._failures, self._rank = stream, failures, rank
        self._turns, self._clock, self._describe = turns, clock, describe

    def _give_up(
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
        """Why the room of a request failed, as far as this rank knows."""
        return self._failures.get(req.bootstrap_room, "it was aborted, or failed on another rank")

    def fail(self, entry: Any, what: str) -> None:
        """Its room failed; ``what`` began and did not end well."""
        req = entry.req
        # Set by SGLang for a grammar or a length that it refuses.
        refused = req.to_finish
        if refused is not None and refused.status_code is not None:
            return self._give_up(entry, refused.message, refused.status_code)
        place = f"rank={self._rank}, bootstrap_room={req.bootstrap_room}"
        self._give_up(entry, f"{what} {req.rid} ({place}): {self._why_failed(req)}")

    def settle(self, states: Iterable[tuple[Any, int]]) -> list[Any]:
        """End entries that failed or waited for memory too long, by the states that the ranks
        agreed on. Return the entries that left. Requests that may be computed locally are attempted
        from the next step on."""
        gone = []
        for entry, state in states:
            if state == State.EXPIRED:
                req = entry.req
                waited = self._clock() - (record_of(req).wait.since or 0.0)
                message = (
                    f"Request {req.rid} (bootstrap_room={req.bootstrap_room}) waited {waited:.0f} "
                    f"s for decode memory, and {environment.ADMISSION_TIMEOUT.name} allows "
                    f"{environment.ADMISSION_TIMEOUT.read():.0f} s: {self._describe()(req)}"
                )
                self._give_up(entry, message, HTTPStatus.SERVICE_UNAVAILABLE)
            elif self.keep(entry):
                continue
            else:
                self.fail(entry, "Aborted while waiting for decode memory: request")
            gone.append(entry)
        return gone

    # ---- who has no prefill server ----

    def may_keep(self, entry: Any) -> bool:
        """True if a request whose room failed may be computed locally if it is short enough."""
        may_save = self._turns is not None and self._turns.may_save(entry.req)
        return bool(may_save and not entry.kv_receiver.aborted)

    def keep(self, entry: Any) -> bool:
        """Keep a request in line whose room failed before it was announced; False if that may not
        be."""
        if record_of(entry.req).is_alone or not self.may_keep(entry):
            return False
        why = self._why_failed(entry.req)
        entry.kv_receiver.withdraw(why)
        entry.kv_receiver.clear()
        self.goes_alone(entry, NoPrefill("no_prefill", why))
        return True

    def try_here(self, entry: Any) -> None:
        """Its prefill server cannot be reached just now: a request is attempted locally, once."""
        record_of(entry.req).tried_here = True
        if self.may_keep(entry):
            why = f"prefill server {bootstrap_addr(entry.req)} could not be reached"
            self.goes_alone(entry, NoPrefill("no_prefill", why, entry.kv_receiver))

    def goes_alone(self, entry: Any, receiver: NoPrefill) -> None:
        """``entry`` is ready for admission, for the first time or once more."""
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
        """A request has more new tokens than may be computed locally: it waits for its prefill
        server again, if that is still being asked who it is, or fails. Whether it was answered."""
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
        self._give_up(entry, message)
        return True

    # ---- what is said of those that wait ----

    def log_waits(self, late: Iterable[Req]) -> None:
        """Warn, once, of requests that have waited long: of all that wait for the same one is
        described, and the others are named."""
        same = defaultdict[str | None, list["Req"]](list)
        for req in late:
            wait = record_of(req).wait
            wait.logged = True
            same[wait.refusal and wait.refusal.reason].append(req)
        for first, *others in same.values():
            also = f"; {len(others)} more wait for the same: " + ", ".join(r.rid for r in others)
            logger.warning(
                "request %s (bootstrap_room=%s) has waited %.0f s for decode memory%s: %s%s",
                first.rid,
                first.bootstrap_room,
                self._clock() - (record_of(first).wait.since or 0.0),
                " after it was retracted" if first.is_retracted else "",
                self._describe()(first),
                also if others else "",
            )


def missing(
    in_line: Iterable[Req], cost_of: Callable[[Req, int], int], pool: str
) -> Callable[[Req], str]:
    """Says what a request waits for, as text. ``in_line``: all that wait, in order; ``cost_of``:
    the tokens that one takes beyond a prefix; ``pool``: where the pool's tokens are."""
    waits = ((other, record_of(other).wait.refusal) for other in in_line)
    head, ahead = next((each for each in waits if each[1] is not None), (None, None))

    def lacks(req: Req) -> str:
        own, cost = record_of(req).wait.refusal, cost_of(req, 0)
        if own is not None:
            why = REASONS[own.reason]
            cost = cost if own.cost is None else own.cost
        elif head is not None and ahead is not None:
            why = f"request {head.rid} ahead of it does not fit: {REASONS[ahead.reason]}"
        else:
            why = "its admission was not attempted yet"
        return f"{why}; it needs {cost} tokens, {pool}"

    return lacks
