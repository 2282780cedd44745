"""Giving up a request that has no pages yet: one way out, whatever the reason.

The client is answered once, prefill is told not to wait for the announcement, and the receiver
forgets the room. What the request holds at this stage is nothing but its place in the queue.
"""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import Any

logger = logging.getLogger(__name__)


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
