"""How long a request may wait for decode memory, and what is said while it does.

A client that waits for ever learns nothing. After the admission timeout it gets one error that says
what was missing; and long before that, the log says once that a request waits, and for what.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from sglang.srt.disaggregation.decode_radix import inflight
from sglang.srt.disaggregation.delta.env import env_seconds

TIMEOUT_ENV = "SGLANG_DISAGGREGATION_DECODE_ADMISSION_TIMEOUT"
LOG_ENV = "SGLANG_DISAGGREGATION_DECODE_WAIT_LOG"


def admission_timeout() -> float:
    """Seconds that a request waits at most for decode memory after its handshake.

    Raises:
        ValueError: the environment variable is not a number of seconds.
    """
    return env_seconds(TIMEOUT_ENV, 300.0)


def log_after() -> float:
    """Seconds of waiting after which the log says so, once a request.

    Raises:
        ValueError: the environment variable is not a number of seconds.
    """
    return env_seconds(LOG_ENV, 10.0)


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
            admission_timeout(), inflight.wait_seconds(), log_after(), inflight.window_tokens(page)
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
