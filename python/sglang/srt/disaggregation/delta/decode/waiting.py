"""Requests that wait for decode memory: what is said of them, and how they leave without any.

One that failed, was aborted or has waited for too long holds nothing but its place in the queue.
Its client is answered, once, and prefill is told not to wait for an announcement.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING

from sglang.srt.disaggregation.delta.decode.record import record_of
from sglang.srt.disaggregation.delta.rank_agreement import State
from sglang.srt.patchset import environment

if TYPE_CHECKING:
    from sglang.srt.disaggregation.decode import DecodeRequest
    from sglang.srt.disaggregation.delta.decode.admission import Limits
    from sglang.srt.disaggregation.delta.decode.prealloc_queue import RadixPreallocQueue
    from sglang.srt.disaggregation.delta.decode.scheduler import DisaggScheduler
    from sglang.srt.managers.schedule_batch import Req
else:
    DecodeRequest = object

logger = logging.getLogger(__name__)

#: What a request waits for, as text.
Lacks = Callable[["Req"], str]

#: Why a request is refused, as text.
REASONS = {
    "no_tokens": "not enough free KV tokens",
    "cannot_finish": "its admission could leave a running request without memory for its output",
    "no_request_row": "no free request row",
    "no_metadata_slot": "no free metadata slot",
    "prefix_arriving": "its prefix is still being transferred or computed for another request",
}


def missing(req: Req, head: Req | None, wanted: int, pool: str) -> str:
    """What ``req`` waits for, as text. ``head``: the first in line that is blocked, if any;
    ``wanted``: tokens; ``pool``: where the pool's tokens are."""
    own = record_of(req).wait.refusal
    ahead = record_of(head).wait.refusal if head is not None else None
    if own is not None:
        why = REASONS[own.reason]
        wanted = wanted if own.cost is None else own.cost
    elif head is not None and ahead is not None:
        why = f"request {head.rid} ahead of it does not fit: {REASONS[ahead.reason]}"
    else:
        why = "its admission was not attempted yet"
    return f"{why}; it needs {wanted} tokens, {pool}"


def log_waits(queue: RadixPreallocQueue, late: Sequence[Req]) -> None:
    """A warning once for each wait that has become long: of those that wait for the same, the first
    is described and the others are named."""
    same: defaultdict[str | None, list[Req]] = defaultdict(list)
    for req in late:
        wait = record_of(req).wait
        wait.logged = True
        same[wait.refusal and wait.refusal.reason].append(req)
    lacks = queue.what_is_missing()
    for first, *others in same.values():
        also = f"; {len(others)} more wait for the same: " + ", ".join(req.rid for req in others)
        logger.warning(
            "request %s (bootstrap_room=%s) has waited %.0f s for decode memory%s: %s%s",
            first.rid,
            first.bootstrap_room,
            queue.clock() - (record_of(first).wait.since or 0.0),
            " after it was retracted" if first.is_retracted else "",
            lacks(first),
            also if others else "",
        )


def answer(
    queue: RadixPreallocQueue,
    checked: Sequence[DecodeRequest],
    states: Sequence[int],
    limits: Limits,
) -> list[DecodeRequest]:
    """Notify the clients of those of ``checked`` that failed or waited for too long, by the
    ``states`` that the ranks agreed on; who leaves.

    Who waited long enough for another request's prefix is attempted from the next step on."""
    gone: list[DecodeRequest] = []
    lacks: Lacks | None = None
    for entry, state in zip(checked, states, strict=True):
        req = entry.req
        if state == State.FAILED:
            if queue.without_prefill.save(entry, why_failed(queue, entry)):
                continue  # tried from the next step on
            fail(queue, entry, "Aborted while waiting for decode memory: request")
        elif state == State.EXPIRED:
            lacks = lacks or queue.what_is_missing()
            waited = queue.clock() - (record_of(req).wait.since or 0.0)
            message = (
                f"Request {req.rid} (bootstrap_room={req.bootstrap_room}) waited "
                f"{waited:.0f} s for decode memory, and "
                f"{environment.ADMISSION_TIMEOUT.name} allows {limits.for_memory:.0f} s: "
                f"{lacks(req)}"
            )
            give_up(queue.scheduler, entry, message, HTTPStatus.SERVICE_UNAVAILABLE)
        else:
            record_of(req).wait.prefix_timed_out |= state == State.WAITED_ENOUGH
            continue
        gone.append(entry)
    return gone


def give_up(
    scheduler: DisaggScheduler, entry: DecodeRequest, message: str, status: HTTPStatus
) -> None:
    """End a request of the prealloc queue; the caller takes it out of the lists.

    The client is answered once, prefill is notified not to wait for the announcement, and the
    receiver forgets the room. What the request holds at this stage is nothing but its place in the
    queue.
    """
    from sglang.srt.disaggregation.utils import prepare_abort

    req, receiver = entry.req, entry.kv_receiver
    logger.warning(message)
    prepare_abort(req, message, status_code=status)
    withdraw = getattr(receiver, "withdraw", None)  # warm-up and stock receivers have none
    if withdraw is not None:
        withdraw(message)
    receiver.clear()
    scheduler.stream_output([req], req.return_logprob)


def why_failed(queue: RadixPreallocQueue, entry: DecodeRequest) -> str:
    """Why the room of a request failed, as far as this rank knows."""
    records = getattr(queue.kv_manager, "failure_records", {})
    return records.get(entry.req.bootstrap_room, "it was aborted, or failed on another rank")


def fail(queue: RadixPreallocQueue, entry: DecodeRequest, what: str) -> None:
    """End a request whose room failed; ``what`` began and did not end well."""
    req = entry.req
    place = f"rank={queue.tp_rank}, bootstrap_room={req.bootstrap_room}"
    message = f"{what} {req.rid} ({place}): {why_failed(queue, entry)}"
    give_up(queue.scheduler, entry, message, HTTPStatus.INTERNAL_SERVER_ERROR)


class CountedEntry(DecodeRequest):
    """A request in a queue, as SGLang's statistics count it."""

    @property
    def priority(self) -> int | None:
        """Where SGLang schedules by priority it counts a queue by that, and asks its entries."""
        return self.req.priority
