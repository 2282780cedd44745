"""Which sessions a sample keeps: window and thinning, or sessions at random. Each is kept whole.

A key is kept or dropped by its hash alone, so that a smaller ratio keeps a subset of what a larger
one keeps, and any order of the trace gives the same.

Thinning session by session separates those that share a prefix: of a family of two, at a ratio of
0.25, three of four kept sessions are left alone. Thinning family by family keeps each session with
the same probability, and families stay together. It draws fewer lots, so that a sample's size
varies more.

A window takes the sessions that **begin** in it, each with all its requests, also those after the
window: a session cut in two would begin with a long prompt that nothing explains. The load
therefore rises at the window's start, and a thin tail of long sessions follows its end. Of what a
session shares with others, what they did before the window is lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from benchmark.agentic.traces.survey import U64, Columns, Places, Survey, mixed, session_key
from benchmark.traces.record import Record

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Plan:
    """Checked by the flags' names, as they are what a user gave."""

    window_s: float = 600.0
    window_start_s: float | None = None
    """Since the trace's first request; None for the densest window."""
    ratio: float = 0.25
    thin_by: Literal["family", "session"] = "family"
    max_single_turn: float = 1.0
    seed: int = 42

    def __post_init__(self) -> None:
        if not self.window_s > 0:
            raise ValueError(f"--window-seconds must be more than 0: {self.window_s:g}")
        if self.window_start_s is not None and self.window_start_s < 0:
            raise ValueError(f"--window-start must not be negative: {self.window_start_s:g}")
        if not 0 < self.ratio <= 1:
            raise ValueError(f"--sample-ratio must be more than 0 and at most 1: {self.ratio:g}")
        if not 0 <= self.max_single_turn <= 1:
            raise ValueError(
                f"--max-single-turn-ratio must be between 0 and 1: {self.max_single_turn:g}"
            )


@dataclass(frozen=True)
class Selection:
    sessions: U64
    """Keys of those that are kept, ascending."""
    start_s: float
    """What becomes time 0, as the trace counts."""


def window_and_thin(found: Survey, plan: Plan) -> Selection:
    """The sessions that begin in the window, thinned, then their single-turn share capped.

    Raises:
        ValueError: nothing is left.
    """
    columns = found.columns
    zero = float(columns.time_ms[0]) / 1000
    start = (
        densest(columns.time_ms, plan.window_s)
        if plan.window_start_s is None
        else zero + plan.window_start_s
    )
    keys = found.families if plan.thin_by == "family" else columns.sessions
    keep = beginning(columns, start, plan.window_s)
    if not keep.any():
        raise ValueError(
            f"no session begins in the {plan.window_s:g} s from {start - zero:g} s on "
            "(--window-start, --window-seconds)"
        )
    keep &= kept(keys, plan.ratio, plan.seed)
    inside = np.flatnonzero(keep)
    capped = cap_single_turns(
        columns.turns[inside], draws(keys[inside], plan.seed), plan.max_single_turn
    )
    inside = inside[capped]
    if not len(inside):
        raise ValueError(
            f"--sample-ratio {plan.ratio:g} with --max-single-turn-ratio "
            f"{plan.max_single_turn:g} leaves no session of the window"
        )
    return Selection(columns.sessions[inside], start)


def random_requests(columns: Columns, requests: int, seed: int) -> Selection:
    """Whole sessions at random, as many as first hold ``requests`` requests."""
    order = np.argsort(draws(columns.sessions, seed), kind="stable")
    enough = int(np.searchsorted(np.cumsum(columns.turns[order]), requests)) + 1
    return Selection(np.sort(columns.sessions[order[:enough]]), float(columns.time_ms[0]) / 1000)


def chosen(records: Iterable[Record], selection: Selection) -> Iterator[Record]:
    """The requests of the selection's sessions, timed from its start."""
    keys = set(selection.sessions.tolist())
    for record in records:
        if session_key(record) in keys:
            # Never below 0: rounding must not make a record that the reader refuses.
            at = max(0.0, record.timestamp - selection.start_s * 1000)
            yield msgspec.structs.replace(record, timestamp=round(at, 3))


def draws(keys: U64, seed: int) -> npt.NDArray[np.float64]:
    """A number in [0, 1) for each key; equal keys have equal ones."""
    return (mixed(mixed(keys), seed=seed + 16) >> np.uint64(11)).astype(np.float64) / 2.0**53


def kept(keys: U64, ratio: float, seed: int) -> Bools:
    """Which keys a thinning to ``ratio`` (0 to 1) keeps."""
    return draws(keys, seed) < ratio


def cap_single_turns(turns: Places, order: npt.NDArray[np.float64], cap: float) -> Bools:
    """Which sessions to keep so that at most ``cap`` of them (0 to 1) have a single turn.

    All sessions of several turns stay, and of the others those that come first in ``order``
    (``draws`` of the keys that were thinned by).
    """
    single: Bools = turns == 1
    if cap >= 1:
        return np.ones(len(turns), np.bool_)
    # The small addition keeps a quotient that should be whole from being rounded down.
    room = int((~single).sum() * cap / (1 - cap) + 1e-9)
    keep = ~single
    candidates = np.flatnonzero(single)
    keep[candidates[np.argsort(order[candidates], kind="stable")[:room]]] = True
    return keep


def densest(time_ms: npt.NDArray[np.float64], seconds: float) -> float:
    """Where the window of this length with the most requests begins, in seconds as ``time_ms``
    counts them; the earliest of several. A window never reaches beyond the trace, unless the trace
    is shorter than it.

    ``time_ms``: of requests, ascending.
    """
    length = seconds * 1000
    fits = time_ms[time_ms + length <= max(time_ms[-1], time_ms[0] + length)]
    inside = np.searchsorted(time_ms, fits + length, side="left") - np.searchsorted(time_ms, fits)
    return float(fits[np.argmax(inside)]) / 1000


def beginning(columns: Columns, start_s: float, seconds: float) -> npt.NDArray[np.bool_]:
    """Which of ``columns.sessions`` begin in [start, start + seconds)."""
    begins: npt.NDArray[np.float64] = columns.time_ms[columns.first] / 1000
    return (begins >= start_s) & (begins < start_s + seconds)


def requests_of(columns: Columns, sessions: U64) -> int:
    """Requests of the sessions with these keys."""
    return int(columns.turns[np.isin(columns.sessions, sessions)].sum())
