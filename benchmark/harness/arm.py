"""One arm of a comparison: a load on a running pair, and everything measured about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmark.harness import metrics
from benchmark.harness.client import Result
from benchmark.harness.pair import Pair, PairConfig, peak_running
from benchmark.harness.report import Summary, summarize
from benchmark.harness.workload import token_range


@dataclass(frozen=True)
class Traffic:
    """KV that went from prefill to decode during a load."""

    bytes_moved: float
    skipped_tokens: float
    """Prompt tokens that were not sent because decode held them."""
    prompt_tokens: float
    """Prompt tokens that decode matched against its tree; 0 where it has none."""
    hit_tokens: float
    counted_by: str
    """``pages sent``, or ``whole prompts`` where a server counts no more (the stock release)."""
    local_tokens: float = 0.0
    """Prompt tokens that decode computed itself."""


@dataclass(frozen=True)
class Measured:
    """A load on one arm."""

    summary: Summary
    traffic: Traffic
    peak_running: int
    """Largest decode batch, requests."""
    loopback_bytes: int
    """Everything the kernel carried over the loopback interface meanwhile."""
    results: list[Result]

    def told(self) -> dict[str, object]:
        """For a summary: all but the results."""
        return {name: value for name, value in vars(self).items() if name != "results"}


def traffic(prefill: Mapping[str, float], decode: Mapping[str, float]) -> Traffic:
    """From what the counters of both servers gained.

    The stock release counts the pages of each whole prompt, which is what it sends. A server of
    ours without the flag exports the stock metrics only.
    """
    if metrics.SENT_BYTES in prefill:
        moved, counted_by = prefill[metrics.SENT_BYTES], "pages sent"
    else:
        moved, counted_by = prefill.get(metrics.STOCK_TRANSFER_MB, 0.0) * 2**20, "whole prompts"
    return Traffic(
        bytes_moved=moved,
        skipped_tokens=prefill.get(metrics.SKIPPED_TOKENS, 0.0),
        prompt_tokens=decode.get(metrics.PROMPT_TOKENS, 0.0),
        hit_tokens=decode.get(metrics.HIT_TOKENS, 0.0),
        counted_by=counted_by,
        local_tokens=decode.get(metrics.LOCAL_TOKENS, 0.0),
    )


def measure(pair: Pair, load: Callable[[], Sequence[Result]]) -> Measured:
    """Runs the load on the idle pair and returns what it cost; checks the servers afterwards.

    Raises:
        ServerFailed: a server died or failed SGLang's memory check.
    """
    decode = pair.processes["decode"]
    log_start = len(decode.log_text())
    before = pair.metrics()
    wire_before = metrics.loopback_bytes()
    results = list(load())
    wire = metrics.loopback_bytes() - wire_before
    pair.check()  # also lets the last transfers be counted
    after = pair.metrics()
    gained = [metrics.gained(b, a) for b, a in zip(before, after, strict=True)]
    return Measured(
        summary=summarize(results),
        traffic=traffic(*gained),
        peak_running=peak_running(decode.log_text()[log_start:]),
        loopback_bytes=wire,
        results=results,
    )


def on_fresh_pair(
    config: PairConfig, logs: Path, load: Callable[[Pair], Sequence[Result]]
) -> Measured:
    """Starts a pair, warms it up, measures the load on it, and ends it.

    Raises:
        ServerFailed: a server did not start, died or failed SGLang's memory check.
    """
    with Pair(config, logs) as pair:
        warm_up(pair)
        return measure(pair, lambda: load(pair))


def warm_up(pair: Pair) -> None:
    """One request outside the load.

    The first transfer of a pair pays for the connections between its NIXL agents (seconds over
    UCX), which no later one does. Its prompt counts down, which no seeded load does.
    """
    pair.generate([token_range(pair.config.model)[:-33:-1]], max_new_tokens=4)
