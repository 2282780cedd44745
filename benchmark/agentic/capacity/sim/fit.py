"""Costs scaled until a simulated arm shows what a real one did."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec
from rich.console import Console

from benchmark.agentic.capacity.costs import Costs
from benchmark.agentic.capacity.sim.outcome import Outcome
from benchmark.harness.report import print_table

PREFILL = ("prefill_batch_s", "prefill_token_s", "prefill_pair_s")
T = TypeVar("T")
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
    errors = (reached.requests_per_s / target.requests_per_s, reached.itl_s / target.itl_s)
    if max(abs(error - 1) for error in errors) > TOLERANCE:
        raise ValueError(
            f"no costs found for {target}: {reached} at {prefill:.2g} times the given prefill and "
            f"{step:.2g} times the given step"
        )
    return found


#: Quantity -> of a simulation, and as it was told.
Quantities = Mapping[str, tuple[Callable[[Outcome], float], Callable[[T], float]]]


def print_errors(
    title: str,
    arms: Mapping[str, T],
    outcomes: Mapping[str, Outcome],
    quantities: Quantities[T],
    more: Mapping[str, Callable[[Outcome], float]],
    console: Console,
) -> None:
    """A column an arm: predicted / told (error), and ``more`` that only the simulation knows."""

    def cell(predicted: float, told: float) -> str:
        return f"{predicted:,.3g} / {told:,.3g} ({predicted / told - 1:+.0%})"

    rows = [
        [name, *(cell(of(outcomes[arm]), said(told)) for arm, told in arms.items())]
        for name, (of, said) in quantities.items()
    ]
    rows += [[name, *(f"{of(outcomes[arm]):.3g}" for arm in arms)] for name, of in more.items()]
    print_table(f"{title}: predicted / told (error)", ["", *arms], rows, console)
