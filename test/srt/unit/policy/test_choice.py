"""The choice of a server for a turn, from its length and the load of decode."""

from __future__ import annotations

import pytest

from sglang.srt.disaggregation.delta.metrics import REASONS
from sglang.srt.disaggregation.policy.choice import (
    choose,
    choose_without_prefill,
)
from sglang.srt.disaggregation.policy.pace import MIN_CHUNK, Costs, Limits, Pace

LIMITS = Limits(tokens=1000)


@pytest.mark.parametrize(
    ("tokens", "is_full", "fits", "local", "reason"),
    [
        (1000, False, True, True, "short"),
        (1001, False, True, False, "long"),
        # The first free place of a full batch is not left empty.
        (100, True, True, False, "no_place"),
        (100, False, False, False, "itl"),
    ],
)
def test_the_choice(tokens: int, is_full: bool, fits: bool, local: bool, reason: str) -> None:
    """Guards against a limit that is not kept, and against a turn that decode can compute and that
    goes to prefill."""
    decision = choose(tokens, LIMITS, is_full=is_full, fits=fits)
    assert decision == (local, reason, tokens) and reason in REASONS


BOUNDED = Limits(tokens=1000, chunk=512, max_itl=0.1, page=16)


@pytest.mark.parametrize(
    ("slack_tokens", "left", "fits"),
    [(400, 200, True), (MIN_CHUNK, 200, True), (MIN_CHUNK - 1, 200, False)]
    + [(20, 20, True), (19, 20, False), (0, 1, False)],
)
def test_a_chunk_below_the_least_fits_only_as_the_whole_turn(
    slack_tokens: int, left: int, fits: bool
) -> None:
    """Guards against chunks that do not pay their constant cost."""
    pace = Pace(BOUNDED)
    pace.costs = Costs(0.0, 2**-14, slack=slack_tokens * 2**-14)
    assert pace.fits(left, delays=True) is fits


@pytest.mark.parametrize(("tokens", "local"), [(300, True), (301, False)])
def test_a_turn_without_prefill(tokens: int, local: bool) -> None:
    """Guards against fallback prefill beyond its own limit."""
    decision = choose_without_prefill(tokens, Limits(0, when_lost=300), "no_prefill")
    assert (decision.local, decision.reason) == (local, "no_prefill")
