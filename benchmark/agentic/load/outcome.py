"""The outcome of one request, a JSON line of the output file; and its class.

WARM, MEDIUM and HEAVY classify a request by the number of prompt tokens that an endless cache,
shared by all workers and filled in the order of the trace, would not hold. That number is known
before sending, so that a request has one class in every arm, even if it fails.
"""

from __future__ import annotations

import msgspec

from benchmark.harness.stream import ErrorKind
from benchmark.traces.record import BLOCK_TOKENS

WARM = "WARM"
MEDIUM = "MEDIUM"
HEAVY = "HEAVY"


class Classes(msgspec.Struct, frozen=True):
    """Thresholds in new tokens: WARM below ``medium``, HEAVY above ``heavy``."""

    medium: int = 5_000
    heavy: int = 20_000

    def scaled(self, block_tokens: int) -> Classes:
        """Return the thresholds for a trace with smaller blocks, so that requests keep classes."""
        return Classes(
            max(1, round(self.medium * block_tokens / BLOCK_TOKENS)),
            max(1, round(self.heavy * block_tokens / BLOCK_TOKENS)),
        )

    def of(self, new: int) -> str:
        if new < self.medium:
            return WARM
        return MEDIUM if new <= self.heavy else HEAVY


class Outcome(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Times in seconds since the load began; durations in seconds. Fields that were never set are
    None."""

    index: int
    """Number of the request among the replayed ones, from 0."""
    session_id: str | None = None
    turn: int | None = None

    prompt_tokens: int
    """As sent."""
    wanted_tokens: int
    """Requested output tokens."""
    trace_new_tokens: int
    """Prompt tokens that an endless cache would not hold."""
    load_new_tokens: int | None = None
    """Prompt tokens that no earlier request of this load had, in whole blocks; None: unknown."""
    cached_tokens: int | None = None
    """As the server reported."""
    output_tokens: int = 0
    request_class: str = msgspec.field(name="class")

    scheduled_s: float
    """Time at which it was due."""
    started_s: float
    """Time at which it was passed to the HTTP client; TTFT and E2E count from here."""
    sent_s: float | None = None
    """Time at which its body was written to a connection (for a pair, to both)."""
    first_token_s: float | None = None
    finished_s: float

    late_s: float
    """Sent minus scheduled, including time to connect; started minus scheduled if never sent."""
    ttft_s: float | None = None
    tpot_s: float | None = None
    """Mean time per token after the first ones."""
    e2e_s: float
    itl_s: tuple[float, ...] = ()
    """Time before each token except the first ones. Tokens of one event share its gap equally."""
    loop_lag_s: float = 0.0
    """Maximum delay of this process's event loop while the request was open."""

    counted: bool = True
    """True if it began within the measured window of a steady load."""
    answer: str | None = None
    """A digest of the answer's token ids, if they are read."""
    error: ErrorKind | None = None
    message: str | None = None
    prefill_worker: str | None = None
    decode_worker: str | None = None
    """Workers that served it: from a router's headers, else the address it was sent to. For a
    colocated worker, both fields name it."""


def gaps(times: list[float], totals: list[int]) -> tuple[float, ...]:
    """Return inter-token latencies in seconds, rounded to 10 microseconds.

    ``times``: arrival of each piece of an answer. ``totals``: output tokens after each piece.
    """
    result: list[float] = []
    for i in range(1, len(times)):
        tokens = totals[i] - totals[i - 1]
        result += [round((times[i] - times[i - 1]) / tokens, 5)] * tokens
    return tuple(result)
