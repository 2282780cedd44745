"""Costs scaled until a simulated arm shows what a real one did."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from benchmark.agentic.capacity.costs import Costs
from benchmark.agentic.capacity.sim.outcome import Outcome

PREFILL = ("prefill_batch_s", "prefill_token_s", "prefill_pair_s")
TOLERANCE = 0.02
"""Relative, of both numbers that a fit must reach."""
STEP = ("step_s", "step_request_s", "step_context_s")


@dataclass(frozen=True)
class Target:
    """What the real arm showed."""

    requests_per_s: float
    itl_s: float
    """Mean over requests, or their median: ``itl`` reads the same from a simulation."""


@dataclass(frozen=True)
class Fit:
    """The scaled costs; scales are times those that were given."""

    costs: Costs
    prefill_scale: float
    step_scale: float
    outcome: Outcome
    """Of the simulation with them."""


def scaled(costs: Costs, prefill: float, step: float, step_fields: Sequence[str] = STEP) -> Costs:
    """All prefill times ``prefill`` times as long, and these parts of a step ``step`` times."""
    changed = {name: getattr(costs, name) * prefill for name in PREFILL}
    changed |= {name: getattr(costs, name) * step for name in step_fields}
    return msgspec.structs.replace(costs, **changed)


def fit(
    costs: Costs,
    target: Target,
    simulate: Callable[[Costs], Outcome],
    itl: Callable[[Outcome], float] = lambda outcome: outcome.itl.mean,
    step_fields: Sequence[str] = STEP,
    rounds: int = 6,
    bisections: int = 14,
) -> Fit:
    """Two scales for two numbers: steps follow the ITL, prefill the requests a second, in turn.

    Raises:
        ValueError: the rounds do not come to both numbers, as where the links are the bottleneck.
    """
    prefill = step = 1.0
    for _ in range(rounds):
        step *= target.itl_s / itl(simulate(scaled(costs, prefill, step, step_fields)))
        low, high = 1e-3, 1e3  # bisected by ratio: throughput falls with the scale
        for _ in range(bisections):
            prefill = (low * high) ** 0.5
            if (
                simulate(scaled(costs, prefill, step, step_fields)).requests_per_s
                > target.requests_per_s
            ):
                low = prefill
            else:
                high = prefill
    fitted = scaled(costs, prefill, step, step_fields)
    found = Fit(fitted, prefill, step, simulate(fitted))
    reached = Target(found.outcome.requests_per_s, itl(found.outcome))
    if (
        max(
            abs(reached.requests_per_s / target.requests_per_s - 1),
            abs(reached.itl_s / target.itl_s - 1),
        )
        > TOLERANCE
    ):
        raise ValueError(
            f"no costs found for {target}: {reached} at {prefill:.2g} times the given prefill and "
            f"{step:.2g} times the given step"
        )
    return found
