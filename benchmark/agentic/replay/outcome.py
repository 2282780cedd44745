"""What became of one request; one JSON line of the output file."""

from __future__ import annotations

import msgspec

from benchmark.harness.stream import ErrorKind


class Outcome(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Times in seconds of the replay's clock, whose 0 is the trace's first request; durations in
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
    """Prompt tokens that an endless cache would not hold; see ``classes``."""
    cached_tokens: int | None = None
    """As the server reported."""
    new_tokens: int | None = None
    """Prompt tokens minus cached tokens."""
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


def tpot(times: list[float], totals: list[int]) -> float | None:
    """Mean seconds a token after the first piece; None where nothing followed it."""
    if not times or totals[-1] == totals[0]:
        return None
    return (times[-1] - times[0]) / (totals[-1] - totals[0])
