"""A fit must say so where it does not reach what it was given."""

from __future__ import annotations

import pytest

from benchmark.agentic.capacity import costs as cost_files
from benchmark.agentic.capacity.costs import Costs
from benchmark.agentic.capacity.sim.decode import DecodeConfig
from benchmark.agentic.capacity.sim.fit import Target, fit, scaled
from benchmark.agentic.capacity.sim.fleet import Fleet, FleetConfig
from benchmark.agentic.capacity.sim.jobs import SharedPrefixes
from benchmark.agentic.capacity.sim.outcome import Outcome, outcome
from benchmark.agentic.capacity.sim.prefill import PrefillConfig

BASE = cost_files.load("cpu-rig")


def simulate(costs: Costs) -> Outcome:
    load = SharedPrefixes(30, 2, 300, 50, 40, block_tokens=50)
    config = FleetConfig(PrefillConfig(10_000, 128), DecodeConfig(2000), block_tokens=50)
    return outcome(Fleet(config, costs).run(load.jobs(), concurrency=8))


def test_fit_finds_the_scales_that_made_its_target() -> None:
    made = simulate(scaled(BASE, prefill=7.0, step=1.5))
    found = fit(BASE, Target(made.requests_per_s, made.itl.mean), simulate)
    assert found.outcome.requests_per_s == pytest.approx(made.requests_per_s, rel=0.02)
    assert found.step_scale == pytest.approx(1.5, rel=0.05)
    assert found.prefill_scale == pytest.approx(7.0, rel=0.1)


def test_fit_refuses_what_no_costs_can_give() -> None:
    """Steps of 10 ms bound the rate; a scale returned all the same would pass for a finding."""
    with pytest.raises(ValueError, match="no costs found"):
        fit(BASE, Target(requests_per_s=1e6, itl_s=0.01), simulate)
