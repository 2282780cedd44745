"""Policies: the worker of a pool that gets a request. Pure functions of workers and request.

Scores are in tokens (``lmetric``: tokens times requests); the lowest score wins. A policy chooses
within one pool, so prefill and decode workers can have different policies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

SMALL_BATCH = 4
"""Number of requests below which a batch is assumed to cost little: chosen, not measured."""


class View(NamedTuple):
    """State of a worker, for one request."""

    name: str
    requests: int
    """Requests in flight on it."""
    pending_tokens: int
    """Prompt tokens still to compute (on decode: to receive) for its requests in flight."""
    ongoing_tokens: int
    """Prompt and reserved answer tokens of the requests in flight."""
    added_tokens: int
    """Part of ``ongoing_tokens`` that was not cached on arrival: taken from its pool."""
    pool_tokens: int
    """Size of its KV pool, tokens."""
    matched_tokens: int
    """Leading tokens of this request's prompt in its cache, by the router's estimate."""


class Work(NamedTuple):
    """Size of a request."""

    tokens: int
    """Prompt length."""
    reserve_tokens: int
    """Answer tokens to reserve."""


def option(default: Any, text: str) -> Any:
    """Return a field with its ``--help`` text."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class Knobs:
    """Parameters of ``linear``."""

    alpha: float = option(1.0, "linear: ongoing tokens that weigh as much as one cached token")
    overload_factor: float = option(
        2.0,
        "linear: ratio of a worker's load to the mean of the others above which a session moves",
    )


class Terms(NamedTuple):
    """A worker's score and its terms."""

    score: float
    parts: Mapping[str, float]


class Choice(NamedTuple):
    """The chosen worker of one pool, and the reason."""

    index: int
    """Index into the candidates."""
    reason: str
    """``score``, ``turn``, ``pinned`` (the session's worker), or ``overloaded`` (the session's
    worker was skipped)."""
    terms: Sequence[Terms] = ()
    """One entry for each candidate; empty for a policy that uses no state."""


Score = Callable[[View, Work, float, Knobs], Terms]


def linear(view: View, work: Work, mean_requests: float, knobs: Knobs) -> Terms:
    """Return tokens in flight, less ``alpha`` times the cached tokens of this prompt."""
    cached = knobs.alpha * view.matched_tokens
    parts = {"ongoing": view.ongoing_tokens, "alpha_cached": cached}
    return Terms(view.ongoing_tokens - cached, parts)


def lmetric(view: View, work: Work, mean_requests: float, knobs: Knobs) -> Terms:
    """Return tokens to prefill times requests, both including this request.

    The published form (arXiv 2603.15202) does not count this request, so that an idle worker scores
    0 for any prefill length. There is no session affinity: only cached tokens attract a session to
    its worker.
    """
    new, requests = work.tokens - view.matched_tokens, view.requests + 1
    parts = {"pending": view.pending_tokens, "new": new, "requests": requests}
    return Terms((view.pending_tokens + new) * requests, parts)


def delta_kv(view: View, work: Work, mean_requests: float, knobs: Knobs) -> Terms:
    """Return the cost of decoding here, for a worker that keeps finished KV, in prompt tokens:

    transfer = prompt - matched                          KV to move
    hold     = need * (added + need) / pool              KV to keep; need = transfer + reserve
    batch    = prompt * requests / (SMALL_BATCH + mean requests)

    ``hold`` is near 0 on an empty pool, and above ``need`` if the request has to wait for other
    requests to end or evicts KV that they would reuse. ``batch`` prevents that sessions accumulate
    on one worker: a worker with ``SMALL_BATCH`` + mean more requests than another one is not chosen
    even if it has the whole prompt. Below ``SMALL_BATCH`` requests, a small difference matters
    little.
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
    """Choose among one or more candidates. Ties go to the fewest requests, and then in turn.

    Args:
        turn: number of this decision in its pool; rotates ties.
        pinned: index of the session's worker, if it is a candidate; used only by ``linear``.
    """
    count = len(views)
    if policy == "round_robin":
        return Choice(turn % count, "turn")
    mean_requests = sum(view.requests for view in views) / count
    terms = [SCORES[policy](view, work, mean_requests, knobs) for view in views]
    reason = "score"
    if policy == "linear" and pinned is not None:
        others = [view.ongoing_tokens for i, view in enumerate(views) if i != pinned]
        # Compare the loads with this request added. The mean excludes the session's worker, because
        # one of two workers can never exceed twice a mean that includes it.
        mine = work.tokens + work.reserve_tokens
        mean = sum(others) / max(1, len(others)) + mine
        if not others or views[pinned].ongoing_tokens + mine <= knobs.overload_factor * mean:
            return Choice(pinned, "pinned", terms)
        reason = "overloaded"
    best = min(range(count), key=lambda i: (terms[i].score, views[i].requests, (i - turn) % count))
    return Choice(best, reason, terms)
