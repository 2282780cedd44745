"""Which worker of a pool gets a request. Pure functions of the workers' state and the request.

Scores are in tokens (``lmetric``: tokens times requests); the lowest wins. Policies look at one
pool at a time, so prefill and decode workers are chosen by policies of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

SMALL_BATCH = 4
"""Requests below which a batch is taken to cost little: chosen, not measured."""


class View(NamedTuple):
    """A worker as a policy sees it, for one request."""

    name: str
    requests: int
    """Requests in flight on it."""
    pending_tokens: int
    """Prompt tokens that it has yet to compute (decode: to receive) for requests in flight."""
    ongoing_tokens: int
    """Prompt and reserved answer tokens of the requests in flight."""
    added_tokens: int
    """Those of them that were not in its cache when they came: what they took from its pool."""
    pool_tokens: int
    """Tokens that its KV pool holds."""
    matched_tokens: int
    """Leading tokens of this request's prompt that it is believed to hold."""


class Work(NamedTuple):
    """What a request asks for."""

    tokens: int
    """Prompt length."""
    reserve_tokens: int
    """Answer tokens to keep room for."""


def option(default: Any, text: str) -> Any:
    """A field with what ``--help`` says of it."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class Knobs:
    """What ``linear`` weighs."""

    alpha: float = option(1.0, "linear: ongoing tokens that weigh as much as one cached token")
    overload_factor: float = option(
        2.0, "linear: ratio of the load to the others' mean above which a session moves"
    )


class Terms(NamedTuple):
    """A worker's score and what it is made of."""

    score: float
    parts: Mapping[str, float]


class Choice(NamedTuple):
    """The outcome for one pool."""

    index: int
    """Into the candidates."""
    reason: str
    """``score``, ``turn``, ``pinned`` (the session's worker), ``overloaded`` (the session's worker
    was passed over)."""
    terms: Sequence[Terms] = ()
    """One for each candidate; empty for a policy that looks at no state."""


Score = Callable[[View, Work, float, Knobs], Terms]


def linear(view: View, work: Work, mean_requests: float, knobs: Knobs) -> Terms:
    """Tokens in flight, less ``alpha`` times the cached ones of this prompt."""
    cached = knobs.alpha * view.matched_tokens
    parts = {"ongoing": view.ongoing_tokens, "alpha_cached": cached}
    return Terms(view.ongoing_tokens - cached, parts)


def lmetric(view: View, work: Work, mean_requests: float, knobs: Knobs) -> Terms:
    """Tokens to prefill, this prompt's included, times requests, this one included.

    The published form (arXiv 2603.15202) does not count this request, so that an idle worker scores
    0 whatever it would have to prefill.
    No session affinity: uncached tokens alone attract a session to its worker.
    """
    new, requests = work.tokens - view.matched_tokens, view.requests + 1
    parts = {"pending": view.pending_tokens, "new": new, "requests": requests}
    return Terms((view.pending_tokens + new) * requests, parts)


def delta_kv(view: View, work: Work, mean_requests: float, knobs: Knobs) -> Terms:
    """What it costs to decode here, for a worker that keeps finished KV. In prompt tokens:

    transfer = prompt - matched                          KV to move
    hold     = need * (added + need) / pool              KV to keep; need = transfer + reserve
    batch    = prompt * requests / (SMALL_BATCH + mean requests)

    ``hold`` is near 0 on an empty pool, and above ``need`` where the request has to wait for
    others to end or evicts what they would have reused. ``batch`` keeps sessions from piling
    up: a worker with ``SMALL_BATCH`` + mean more requests than another loses to it even with the
    whole prompt. With fewer than ``SMALL_BATCH`` running, one request more or less says little.
    """
    transfer = work.tokens - view.matched_tokens
    need = transfer + work.reserve_tokens
    hold = need * (view.added_tokens + need) / view.pool_tokens
    batch = work.tokens * view.requests / (SMALL_BATCH + mean_requests)
    parts = {"transfer": transfer, "hold": hold, "batch": batch}
    return Terms(transfer + hold + batch, parts)


SCORES: Mapping[str, Score] = {
    "linear": linear,
    "lmetric": lmetric,
    "delta_kv": delta_kv,
}
POLICIES = ("round_robin", *SCORES)


def choose(
    policy: str,
    views: Sequence[View],
    work: Work,
    knobs: Knobs,
    turn: int,
    pinned: int | None,
) -> Choice:
    """Chooses among at least one candidate. Of equal scores the fewest requests win; of those each
    in turn.

    Args:
        turn: number of this decision in its pool; rotates ties.
        pinned: index of the session's worker, if it is a candidate; only ``linear`` heeds it.
    """
    count = len(views)
    if policy == "round_robin":
        return Choice(turn % count, "turn")
    mean_requests = sum(view.requests for view in views) / count
    terms = [SCORES[policy](view, work, mean_requests, knobs) for view in views]
    reason = "score"
    if policy == "linear" and pinned is not None:
        others = [view.ongoing_tokens for i, view in enumerate(views) if i != pinned]
        # With this request its worker is held against the mean of the others with the request. A
        # mean over all workers could never be exceeded twofold by one of two.
        mine = work.tokens + work.reserve_tokens
        mean = sum(others) / max(1, len(others)) + mine
        if not others or views[pinned].ongoing_tokens + mine <= knobs.overload_factor * mean:
            return Choice(pinned, "pinned", terms)
        reason = "overloaded"
    best = min(range(count), key=lambda i: (terms[i].score, views[i].requests, (i - turn) % count))
    return Choice(best, reason, terms)
