"""The costs by which a chunk's form is chosen, as an operator gives them."""

from __future__ import annotations

import pytest

from sglang.srt.disaggregation.delta.nixl import descriptors
from sglang.srt.patchset.environment import DESCRIPTOR_COSTS
from unit.delta.nixl.prefill_rank import PrefillRank


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, descriptors.COSTS),
        ("10, 0.5,0,2e-3", descriptors.Costs(10.0, 0.5, 0.0, 0.002)),
    ],
)
def test_costs_of_this_machine(
    monkeypatch: pytest.MonkeyPatch, given: str | None, expected: descriptors.Costs
) -> None:
    """Guards against constants of another machine where this one's were measured."""
    if given is not None:
        monkeypatch.setenv(DESCRIPTOR_COSTS.name, given)
    rank = PrefillRank(monkeypatch)
    assert rank.manager.transfers.backend._costs == expected
