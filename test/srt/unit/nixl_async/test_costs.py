"""The costs by which a chunk's form is chosen, as an operator gives them."""

from __future__ import annotations

import pytest

from sglang.srt.disaggregation.delta.nixl import descriptors
from sglang.srt.disaggregation.delta.nixl.manager import COSTS
from unit.nixl_async.prefill_rank import PrefillRank


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
        monkeypatch.setenv(COSTS, given)
    rank = PrefillRank(monkeypatch)
    assert rank.manager.transfers.backend._costs == expected


@pytest.mark.parametrize("given", ["", "1,2,3", "1,2,3,4,5", "1,2,3,-4", "1,2,3,inf", "1,2,x,4"])
def test_wrong_costs(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    """Guards against a typing error that is taken for the default."""
    monkeypatch.setenv(COSTS, given)
    with pytest.raises(ValueError, match=COSTS):
        PrefillRank(monkeypatch)
