"""Which worker of a pool gets a request. Pure functions of the workers' state and the request.

Scores are in tokens (``lmetric``: tokens times requests); the lowest wins. Policies look at one
pool at a time, so prefill and decode workers are chosen by policies of their own.
"""

from __future__ import annotations

import random as _random
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
    """Weights of the policies."""

    alpha: float = option(1.0, "linear: ongoing tokens that weigh as much as one cached token")
    overload_factor: float = option(
        2.0, "linear: ratio of the load to the others' mean above which a session moves"
    )
    batch_weight: float = option(1.0, "delta_kv: cost of a full batch, in prompts to transfer")
    migrate_turns: int = option(
        0, "linear: requests after which a session moves to another worker; 0: never"
    )
    seed: int = option(0, "random")


class Terms(NamedTuple):
    """A worker's score and what it is made of."""

    score: float
    parts: Mapping[str, float]


@dataclass(frozen=True)
class Choice:
    """The outcome for one pool."""

    index: int
    """Into the candidates."""
    reason: str
    """``score``, ``turn``, ``drawn``, ``pinned`` (the session's worker), ``overloaded`` (the
    session's worker was passed over), ``migrated`` (it has had the session for long enough)."""
    terms: Sequence[Terms] = field(default=())
    """One for each candidate; empty for policies that look at no state."""


Score = Callable[[View, Work, float, Knobs], Terms]


def least_tokens(view: View, work: Work, mean_requests: float, knobs: Knobs) -> Terms:
    """Tokens in flight."""
    return Terms(view.ongoing_tokens, {"ongoing": view.ongoing_tokens})


def linear(view: View, work: Work, mean_requests: float, knobs: Knobs) -> Terms:
    """Tokens in flight, less ``alpha`` times the cached ones of this prompt."""
    cached = knobs.alpha * view.matched_tokens
    return Terms(
        view.ongoing_tokens - cached, {"ongoing": view.ongoing_tokens, "alpha_cached": cached}
    )


def lmetric(view: View, work: Work, mean_requests: float, knobs: Knobs) -> Terms:
    """Tokens to prefill, this prompt's included, times requests, this one included.

    Counting this request keeps an idle worker from scoring 0 whatever it would have to prefill.
    No session affinity: uncached tokens alone attract a session to its worker.
    """
    new = work.tokens - view.matched_tokens
    parts = {"pending": view.pending_tokens, "new": new, "requests": view.requests + 1}
    return Terms((view.pending_tokens + new) * (view.requests + 1), parts)


def lmetric_literal(view: View, work: Work, mean_requests: float, knobs: Knobs) -> Terms:
    """LMetric as published: requests without this one, so that any idle worker scores 0."""
    new = work.tokens - view.matched_tokens
    parts = {"pending": view.pending_tokens, "new": new, "requests": view.requests}
    return Terms((view.pending_tokens + new) * view.requests, parts)


def least_pending(view: View, work: Work, mean_requests: float, knobs: Knobs) -> Terms:
    """Tokens to prefill, this prompt's uncached ones included."""
    new = work.tokens - view.matched_tokens
    return Terms(view.pending_tokens + new, {"pending": view.pending_tokens, "new": new})


def delta_kv(view: View, work: Work, mean_requests: float, knobs: Knobs) -> Terms:
    """What it costs to decode here, for a worker that keeps finished KV. In prompt tokens:

    transfer = prompt - matched                          KV to move
    hold     = need * (added + need) / pool              KV to keep; need = transfer + reserve
    batch    = batch_weight * prompt * requests / (SMALL_BATCH + mean requests)

    ``hold`` is near 0 on an empty pool, and above ``need`` where the request has to wait for
    others to end or evicts what they would have reused. ``batch`` keeps sessions from piling
    up: a worker with ``SMALL_BATCH`` + mean more requests than another loses to it even with the
    whole prompt. With fewer than ``SMALL_BATCH`` running, one request more or less says little.
    """
    transfer = work.tokens - view.matched_tokens
    need = transfer + work.reserve_tokens
    hold = need * (view.added_tokens + need) / view.pool_tokens
    batch = knobs.batch_weight * work.tokens * view.requests / (SMALL_BATCH + mean_requests)
    parts = {"transfer": transfer, "hold": hold, "batch": batch}
    return Terms(transfer + hold + batch, parts)


SCORES: Mapping[str, Score] = {
    "least_tokens": least_tokens,
    "linear": linear,
    "lmetric": lmetric,
    "lmetric_literal": lmetric_literal,
    "least_pending": least_pending,
    "delta_kv": delta_kv,
}
POLICIES = ("round_robin", "random", *SCORES)


def choose(
    policy: str,
    views: Sequence[View],
    work: Work,
    knobs: Knobs,
    turn: int,
    pinned: int | None,
    stayed: int = 0,
) -> Choice:
    """Chooses among at least one candidate.

    Args:
        turn: number of this decision in its pool; rotates ties and draws.
        pinned: index of the session's worker, if it is a candidate; only ``linear`` heeds it.
        stayed: requests that the session has sent to that worker in a row.
    """
    if policy == "round_robin":
        return Choice(turn % len(views), "turn")
    if policy == "random":
        return Choice(_random.Random(f"{knobs.seed}/{turn}").randrange(len(views)), "drawn")
    mean_requests = sum(view.requests for view in views) / len(views)
    score = SCORES[policy]
    terms = [score(view, work, mean_requests, knobs) for view in views]
    reason = "score"
    if policy == "linear" and pinned is not None:
        if 0 < knobs.migrate_turns <= stayed and len(views) > 1:
            others = [i for i in range(len(views)) if i != pinned]
            load = [least_tokens(views[i], work, mean_requests, knobs) for i in others]
            return Choice(others[best([views[i] for i in others], load, turn)], "migrated", terms)
        if not overloaded(views, pinned, work, knobs):
            return Choice(pinned, "pinned", terms)
        reason = "overloaded"
    return Choice(best(views, terms, turn), reason, terms)


def best(views: Sequence[View], terms: Sequence[Terms], turn: int) -> int:
    """Lowest score; of equal ones the fewest requests; of those each in turn."""
    count = len(views)
    return min(range(count), key=lambda i: (terms[i].score, views[i].requests, (i - turn) % count))


def overloaded(views: Sequence[View], pinned: int, work: Work, knobs: Knobs) -> bool:
    """Whether the session's worker would carry more than its share with this request.

    Its load with the request on it is held against the mean of the others' with the request on
    them. A mean over all workers could never be exceeded twofold by one of two.
    """
    others = [view.ongoing_tokens for i, view in enumerate(views) if i != pinned]
    if not others:
        return False
    mine = work.tokens + work.reserve_tokens
    limit = knobs.overload_factor * (sum(others) / len(others) + mine)
    return views[pinned].ongoing_tokens + mine > limit
