"""Closed forms: what a pool holds, what a transfer costs, and which limit a split meets first.

Lengths and pools in tokens, times in seconds, rates in requests a second.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from benchmark.agentic.capacity.costs import Costs

GIB = 2**30


@dataclass(frozen=True)
class Workload:
    """A steady stream of requests that each start with one of a few prefixes."""

    prefix: int
    suffix: int
    output: float
    prefixes: int
    """Distinct ones that are in use together."""

    @property
    def prompt(self) -> int:
        return self.prefix + self.suffix

    @property
    def context(self) -> float:
        """Tokens of a running request on average: half of its answer is there."""
        return self.prompt + self.output / 2


def holds(workload: Workload, pool: float, *, shared: bool, reserved: float = 0.0) -> int:
    """Requests that fit into one decode pool.

    ``reserved``: tokens kept for each one's answer. With ``shared``, a prefix is held once however
    many use it; as many requests as there are prefixes are assumed to use different ones.
    """
    own = workload.suffix + reserved
    whole = workload.prefix + own
    alone = math.floor(pool / whole)
    if not shared or alone < workload.prefixes:
        return alone
    return math.floor((pool - workload.prefixes * workload.prefix) / own)


def pool_tokens(pool_bytes: float, token_bytes: int) -> int:
    """Tokens in so many bytes of KV."""
    return math.floor(pool_bytes / token_bytes)


@dataclass(frozen=True)
class Isolation:
    """A prefill event on a colocated server of ``streams`` decodes against the same apart."""

    tokens: int
    prefill_s: float
    transfer_s: float
    benefit_s: float
    """Decode time that is not lost: each stream would have stood still for the prefill."""

    @property
    def ratio(self) -> float:
        """Transfer charge over benefit."""
        return self.transfer_s / self.benefit_s


def isolation(
    tokens: int, prefill_s: float, transfer_s: float, streams: int, slowdown: float = math.inf
) -> Isolation:
    """The corrected accounting of MB2: ``streams * prefill_s * (1 - 1 / slowdown)``.

    ``slowdown``: TPOT during the prefill over TPOT without; infinite where decode stands still.
    """
    return Isolation(tokens, prefill_s, transfer_s, streams * prefill_s * (1 - 1 / slowdown))


@dataclass(frozen=True)
class Limits:
    """Requests a second at which each part of a split is full, and requests that it can hold."""

    prefill_workers: int
    decode_workers: int
    prefill: float
    link: float
    """Links of the side with fewer workers."""
    pool: float
    """Decode pools: their requests over the time that each holds its pages."""
    step: float
    """Decode batches at ``max_running``, if memory were no limit."""
    running: int
    """Requests that a decode pool holds, those that are prefilled or on the wire included."""

    @property
    def rate(self) -> float:
        return min(self.prefill, self.link, self.pool, self.step)

    @property
    def binds(self) -> str:
        """Which limit is met first."""
        return min(("prefill", "link", "pool", "step"), key=lambda name: float(getattr(self, name)))

    def prefill_busy(self, rate: float) -> float:
        """Share of time that a prefill worker computes at ``rate``."""
        return rate / self.prefill

    def pool_full(self, rate: float) -> float:
        """Share of the decode slots in use at ``rate``, steps taken as slow as in a full pool."""
        return rate / self.pool


def limits(
    workload: Workload,
    costs: Costs,
    *,
    prefill_workers: int,
    decode_workers: int,
    pool: float,
    shared: bool,
    prefill_cached: bool = True,
    reserved: float = 0.0,
    max_running: int = 256,
) -> Limits:
    """Where a split of a fleet is full.

    ``prefill_cached``: prefill finds the prefix in its own cache. ``shared``: so does decode, which
    then gets the suffix alone. Queueing for prefill is left out: it takes pool, so the simulation
    finds a lower wall.
    """
    cached = workload.prefix if prefill_cached else 0
    prefill_s = costs.request_prefill_s(workload.prompt - cached, cached)
    wire_s = costs.transfer_s(workload.suffix if shared else workload.prompt)
    held = holds(workload, pool, shared=shared, reserved=reserved)

    def rate_of(slots: float, before_s: float, batch: float) -> float:
        seconds = before_s + workload.output * costs.step_of(batch, batch * workload.context)
        return decode_workers * slots / seconds

    batch = min(_running(workload, costs, held, prefill_s + wire_s), max_running)
    return Limits(
        prefill_workers,
        decode_workers,
        prefill=prefill_workers / prefill_s,
        link=min(prefill_workers, decode_workers) / wire_s if wire_s else math.inf,
        pool=rate_of(held, prefill_s + wire_s, batch) if held else 0.0,
        step=rate_of(max_running, 0.0, max_running),
        running=held,
    )


def _running(workload: Workload, costs: Costs, held: int, before_s: float) -> float:
    """Of ``held`` requests those that decode; the others are prefilled or on the wire."""
    low, high = 0.0, float(held)
    for _ in range(60):
        batch = (low + high) / 2
        decode_s = workload.output * costs.step_of(batch, batch * workload.context)
        if batch * (before_s + decode_s) > held * decode_s:
            high = batch
        else:
            low = batch
    return low


def splits(workers: int, steps: int = 16) -> Iterator[tuple[int, int]]:
    """(prefill, decode) workers of a fleet: all splits, or about ``steps`` of them, evenly."""
    stride = max(1, workers // steps)
    for prefill in sorted({*range(stride, workers, stride), 1}):
        yield prefill, workers - prefill
