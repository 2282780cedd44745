"""Judges the end of each observed request, by pure functions."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

AFTERMATH_S = 6.0
"""A request sent this soon after the end of a fault may still fail because of it: decode detects
a restarted server by its next heartbeat (2 s), and a first transfer reconnects the agents."""


class Outcome(str, Enum):
    """The end of a request; the last three are bugs."""

    RIGHT = "right"
    ABORTED = "aborted"
    FAILED = "failed with cause"
    LOST = "lost"
    WRONG = "wrong"
    UNEXPLAINED = "unexplained"


BUGS = (Outcome.LOST, Outcome.WRONG, Outcome.UNEXPLAINED)


@dataclass(frozen=True)
class Window:
    """A fault was in force from ``start`` to ``end``, seconds on the clock of the run."""

    kind: str
    start: float
    end: float


@dataclass(frozen=True)
class Observed:
    """One request as its client saw it. Times are seconds on the clock of the run."""

    number: int
    started_at: float
    ended_at: float
    expected: Sequence[int]
    tokens: Sequence[int]
    """Generated tokens that arrived at the client."""
    finishes: Sequence[str]
    """The type of each finish reason that decode sent; exactly one in a proper answer."""
    error: str | None
    """The error of decode's half; None if it ended as an answer does."""
    prefill_error: str | None = None
    left: bool = False
    """The client disconnected before the answer was complete."""
    abort_sent: bool = False
    """Its abort was requested, by id or for all requests, before it had ended."""
    late: tuple[str, ...] = ()
    """Halves (decode, prefill) that did not end within the deadline."""


@dataclass(frozen=True)
class Verdict:
    """An outcome, and for all but ``right`` the reason in words."""

    outcome: Outcome
    reason: str = ""


# A room, a peer, or a reason that an operator can act on.
_SAYS_WHY = re.compile(
    r"room|prefill|decode|peer|time[d ]*out|abort|connect|refused|reset|payload|starting|"
    r"\d+\.\d+\.\d+\.\d+",
    re.IGNORECASE,
)

ABORT_TEXT = "Aborted by AbortReq"
"""SGLang's error for an aborted request."""


def judge(seen: Observed, windows: Iterable[Window]) -> Verdict:
    """Return the verdict on one request."""
    count = len(seen.tokens)
    if list(seen.tokens) != list(seen.expected[:count]):
        index = next(
            (i for i, (a, b) in enumerate(zip(seen.tokens, seen.expected, strict=False)) if a != b),
            len(seen.expected),
        )
        return Verdict(Outcome.WRONG, f"token {index} of {len(seen.expected)} differs")
    if len(seen.finishes) > 1:
        return Verdict(Outcome.WRONG, f"it was answered {len(seen.finishes)} times")
    if seen.late:
        halves = " and ".join(seen.late)
        return Verdict(Outcome.LOST, f"no end on {halves} within the deadline; {count} tokens")
    if seen.left:
        return Verdict(Outcome.ABORTED, f"disconnected after {count} tokens")
    error = seen.error
    if error is None and seen.finishes and seen.finishes[0] != "abort":
        if count == len(seen.expected):
            return Verdict(Outcome.RIGHT)
        return Verdict(Outcome.WRONG, f"it ended after {count} of {len(seen.expected)} tokens")
    if error is None:
        error = f"the connection ended after {count} tokens without a finish reason"
    if seen.abort_sent:
        return Verdict(Outcome.ABORTED, error)
    causes = [window for window in windows if touches(seen, window)]
    if not causes:
        return Verdict(Outcome.UNEXPLAINED, f"no fault near: {error}")
    if ABORT_TEXT in error:
        return Verdict(Outcome.UNEXPLAINED, f"aborted without a request to abort: {error}")
    if not _SAYS_WHY.search(error):
        return Verdict(Outcome.UNEXPLAINED, f"the error names no cause: {error!r}")
    return Verdict(Outcome.FAILED, f"{causes[-1].kind}: {error}")


def touches(seen: Observed, window: Window) -> bool:
    """Return True if a fault was in force, or just over, while the request was running."""
    return seen.started_at <= window.end + AFTERMATH_S and seen.ended_at >= window.start


@dataclass(frozen=True)
class Tally:
    """The counts of one arm or of a whole run."""

    outcomes: Counter[Outcome]
    faults: Counter[str]
    """Number of times that each kind of fault and of abort was carried out."""
    restarts: int = 0
    leaked_tokens: int = 0
    """KV tokens that an idle server, or a flush, did not free."""
    problems: tuple[str, ...] = ()
    """Problems besides requests: a server that died, a log that shows an error, ..."""

    @property
    def requests(self) -> int:
        return sum(self.outcomes.values())

    @property
    def clean(self) -> bool:
        """True if there was no bug, and at least one right answer."""
        bugs = sum(self.outcomes[bug] for bug in BUGS)
        right = self.outcomes[Outcome.RIGHT]
        return not (bugs or self.leaked_tokens or self.problems) and right > 0

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            self.outcomes + other.outcomes,
            self.faults + other.faults,
            self.restarts + other.restarts,
            self.leaked_tokens + other.leaked_tokens,
            self.problems + other.problems,
        )


EMPTY = Tally(Counter(), Counter())
