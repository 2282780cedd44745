"""Requests that a pair cannot serve: answered at once, where SGLang would raise and end the server.

A router gives each request of a pair the number of its room and the address of its prefill server.
SGLang drops both where it builds a request of a session (``session_params``); and a client may send
anything.
"""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import Any  # Any: SGLang's scheduler and request, of either side

logger = logging.getLogger(__name__)

#: What SGLang's metadata buffers take as the number of a room (more raises, although they have 64
#: bits without a sign), and how many top log probabilities of the first token they hold.
_ROOMS, _MOST_TOP_LOGPROBS = 2**63, 128


def why_unserved(req: Any, *, on_decode: bool = False) -> str | None:
    """Why a pair cannot serve ``req``; None if it can."""
    room, host, port = req.bootstrap_room, req.bootstrap_host, req.bootstrap_port
    has_room = isinstance(room, int) and 0 <= room < _ROOMS
    has_prefill = isinstance(host, str) and isinstance(port, int)  # SGLang takes lists, too
    if not has_room or (on_decode and not has_prefill):
        return (
            f"it has no room of a prefill and a decode server (bootstrap_host={host}, "
            f"bootstrap_port={port}, bootstrap_room={room}): send it through a router. Sessions "
            "(session_params) are not served by a pair"
        )
    if req.return_logprob and (req.top_logprobs_num or 0) > _MOST_TOP_LOGPROBS:
        return (
            f"prefill sends {_MOST_TOP_LOGPROBS} top log probabilities of the first token at most, "
            f"and top_logprobs_num is {req.top_logprobs_num}"
        )
    return None


def refuse(scheduler: Any, req: Any, why: str) -> None:
    """Answer a request that is not served with status 400."""
    from sglang.srt.disaggregation.utils import prepare_abort

    message = f"Request {req.rid} is not served: {why}"
    logger.warning(message)
    prepare_abort(req, message, status_code=HTTPStatus.BAD_REQUEST)
    req.finished_reason = req.to_finish or req.finished_reason  # what SGLang found is said instead
    scheduler.stream_output([req], req.return_logprob)
