"""What became of one request, a JSON line of the output file; and its class.

WARM, MEDIUM and HEAVY say how many prompt tokens a request needs prefilled: those that an endless
cache, shared by all workers and in the order of the trace, would not hold. They are known before
sending, so that a request has one class in every arm, also where it fails.
"""

from __future__ import annotations

import msgspec

from benchmark.harness.stream import ErrorKind
from benchmark.traces.record import BLOCK_TOKENS

WARM, MEDIUM, HEAVY = NAMES = ("WARM", "MEDIUM", "HEAVY")


class Classes(msgspec.Struct, frozen=True):
    """Thresholds in new tokens: WARM below ``medium``, HEAVY above ``heavy``."""

    medium: int = 5_000
    heavy: int = 20_000

    def scaled(self, block_tokens: int) -> Classes:
        """For a trace whose blocks were made smaller: its requests keep their classes."""
        return Classes(
            max(1, round(self.medium * block_tokens / BLOCK_TOKENS)),
            max(1, round(self.heavy * block_tokens / BLOCK_TOKENS)),
        )

    def of(self, new: int) -> str:
        if new < self.medium:
            return WARM
        return MEDIUM if new <= self.heavy else HEAVY


class Outcome(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Times in seconds of the load's clock, whose 0 is its beginning; durations in
    seconds. Fields that never came to be are None."""

    index: int
    """Of the request among those that are replayed, from 0."""
    session_id: str | None = None
    turn: int | None = None

    prompt_tokens: int
    """As sent."""
    wanted_tokens: int
    """Output tokens asked for."""
    trace_new_tokens: int
    """Prompt tokens that an endless cache would not hold."""
    load_new_tokens: int | None = None
    """Those that no earlier request of this load had, in whole blocks; None: not counted."""
    cached_tokens: int | None = None
    """As the server reported."""
    output_tokens: int = 0
    request_class: str = msgspec.field(name="class")

    scheduled_s: float
    """When it should have been sent."""
    started_s: float
    """When it was handed to the HTTP client; TTFT and E2E count from here."""
    sent_s: float | None = None
    """When its body was written to a connection (to both, for a pair)."""
    first_token_s: float | None = None
    finished_s: float

    late_s: float
    """Sent minus scheduled, time to connect included; started minus scheduled if never sent."""
    ttft_s: float | None = None
    tpot_s: float | None = None
    """Mean time a token after those that came first."""
    e2e_s: float
    itl_s: tuple[float, ...] = ()
    """Time before each token but the first ones. Tokens that came together share their gap."""
    loop_lag_s: float = 0.0
    """The longest that this process's event loop was late while the request was open."""

    counted: bool = True
    """Whether it began within the window of a steady load that is measured."""
    answer: str | None = None
    """A digest of the answer's token ids, where they are read."""
    error: ErrorKind | None = None
    message: str | None = None
    prefill_worker: str | None = None
    decode_worker: str | None = None
    """Who served it: as a router's headers say, else the address that it was sent to. A colocated
    worker is both."""


def gaps(times: list[float], totals: list[int]) -> tuple[float, ...]:
    """Inter-token latencies, in seconds and rounded to 10 microseconds.

    ``times``: when each piece of an answer came. ``totals``: output tokens so far after each.
    """
    result: list[float] = []
    for i in range(1, len(times)):
        tokens = totals[i] - totals[i - 1]
        result += [round((times[i] - times[i - 1]) / tokens, 5)] * tokens
    return tuple(result)
