"""Prompts on their way to this decode server.

When a burst of requests with one new prefix arrives, none of them hits: the first one's KV is
still being moved. Admitting them all would move the prefix once for each and fill the pool with
duplicates. So a request whose *next* tokens after its match are just arriving for another one, from
the same prefill server, waits for those to land. Prefill computes them first in any case, so little
is lost.

How long a request may wait for decode memory, and what is said while it does.

A client that waits for ever learns nothing. After the admission timeout it gets one error that says
what was missing; and long before that, the log says once that a request waits, and for what.

Giving up a request that has no pages yet: one way out, whatever the reason.

The client is answered once, prefill is told not to wait for the announcement, and the receiver
forgets the room. What the request holds at this stage is nothing but its place in the queue.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterable
from http import HTTPStatus
from typing import Any, NamedTuple

from sglang.srt.disaggregation.delta.pages import page_ceil
from sglang.srt.patchset import environment

logger = logging.getLogger(__name__)

#: (prefill server, extra key, tree node, next tokens). Keys are looked up in every step, and bytes
#: remember their hash.
PrefixKey = tuple[str, str | None, int, bytes]


def window_tokens(page: int) -> int:
    """How many equal next tokens make waiting worth it; zero turns waiting off.

    Raises:
        ValueError: the environment variable is not a number.
    """
    return page_ceil(environment.PREFIX_WAIT_TOKENS.read(), page)


def prefix_key(prefill: str, req: Any, node: Any, prefix: int, window: int) -> PrefixKey | None:
    """Where in the tree ``req`` will add KV, and which; None if less than ``window``.

    The node that a match ended at keeps its identity when others split the path above it, so two
    requests with a common continuation have equal keys.
    """
    following = req.origin_input_ids[prefix : prefix + window]
    if window == 0 or len(following) < window:
        return None
    return prefill, req.extra_key, node.id, array("q", following).tobytes()


def arriving(decode_requests: Iterable[Any]) -> set[PrefixKey]:
    """The keys of requests in transfer (set by the prealloc queue when it admits one)."""
    keys = {getattr(decode_req, "arriving_prefix", None) for decode_req in decode_requests}
    return {key for key in keys if key is not None}


class Limits(NamedTuple):
    """The settings of one step, read once: seconds, and the tokens of ``inflight``'s window."""

    for_memory: float
    for_prefix: float
    say_after: float
    window: int

    @classmethod
    def read(cls, page: int) -> Limits:
        """From the environment.

        Raises:
            ValueError: a variable is not the number that it must be.
        """
        return cls(
            environment.ADMISSION_TIMEOUT.read(),
            environment.PREFIX_WAIT_TIMEOUT.read(),
            environment.WAIT_LOG.read(),
            window_tokens(page),
        )


class Refusal(NamedTuple):
    """Why a request did not get in. ``cost`` in tokens, where tokens were counted."""

    rid: str
    reason: str
    cost: int | None = None


REASONS = {
    "no_tokens": "not enough free KV tokens",
    "cannot_finish": "with it, a running request could be left without memory for its answer",
    "no_request_row": "no free request row",
    "no_metadata_slot": "no free metadata slot",
    "prefix_arriving": "its prefix is just arriving for another request",
}


def missing(req: Any, own: Refusal | None, head: Refusal | None, wanted: int, pool: str) -> str:
    """What ``req`` waits for, in words. ``own`` is its last refusal, ``head`` the queue's last."""
    refusal = own or head
    if refusal is None:
        why = "it was not tried yet"
    elif refusal.rid == req.rid:
        why = REASONS[refusal.reason]
    else:
        why = f"request {refusal.rid} ahead of it does not fit: {REASONS[refusal.reason]}"
    if refusal is not None and refusal.rid == req.rid and refusal.cost is not None:
        wanted = refusal.cost
    return f"{why}; {wanted} tokens wanted, {pool}"


def once(entry: Any, since: float | None, now: float, after: float) -> bool:
    """Whether it is time to say that ``entry`` waits: true once for each wait from ``since`` on,
    when it has lasted for ``after`` seconds."""
    if since is None or now - since < after or getattr(entry, "wait_said_for", None) == since:
        return False
    entry.wait_said_for = since
    return True


def give_up(scheduler: Any, entry: Any, message: str, status: HTTPStatus) -> None:
    """End ``entry``, a request of the prealloc queue; the caller takes it out of the lists."""
    from sglang.srt.disaggregation.utils import prepare_abort

    req, receiver = entry.req, entry.kv_receiver
    logger.warning(message)
    prepare_abort(req, message, status_code=status)
    withdraw = getattr(receiver, "withdraw", None)  # warm-up and stock receivers have none
    if withdraw is not None:
        withdraw(message)
    receiver.clear()
    scheduler.stream_output([req], req.return_logprob)


def reason(manager: Any, room: int | None) -> str:
    """Why this rank's transfer manager failed ``room``; it may know nothing of it."""
    records = getattr(manager, "failure_records", {})
    return str(records.get(room, "it was aborted, or failed on another rank"))
