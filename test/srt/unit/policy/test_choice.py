"""The choice of a server for a turn, from its length and the load of decode."""

from __future__ import annotations

import pytest

from sglang.srt.disaggregation.delta.metrics import REASONS
from sglang.srt.disaggregation.policy.choice import (
    Load,
    choose,
    choose_without_prefill,
)
from sglang.srt.disaggregation.policy.pace import MIN_CHUNK, Limits

LIMITS = Limits(tokens=1000, chunk=100, share=0.5)
BOUNDED = Limits(tokens=1000, chunk=512, max_itl=0.1, page=16)


@pytest.mark.parametrize(
    ("limits", "tokens", "load", "local", "reason"),
    [
        (LIMITS, 1000, Load(), True, "short"),
        (LIMITS, 1001, Load(), False, "long"),
        (LIMITS, 1000, Load(queued=10**6), True, "short"),
        # The first free place of a full batch is not left empty.
        (LIMITS, 100, Load(is_full=True), False, "no_place"),
        # No chunk fits into the bound on inter-token latency.
        (BOUNDED, 200, Load(chunk=400), True, "short"),
        (BOUNDED, 200, Load(chunk=MIN_CHUNK), True, "short"),
        (BOUNDED, 200, Load(chunk=MIN_CHUNK - 1), False, "itl"),
        (BOUNDED, 20, Load(chunk=20), True, "short"),
        (BOUNDED, 20, Load(chunk=19), False, "itl"),
        (BOUNDED, 1, Load(chunk=0), False, "itl"),
        # It would wait behind a turn that no chunk fits.
        (BOUNDED, 20, Load(500, chunk=MIN_CHUNK - 1), False, "itl"),
    ],
)
def test_the_choice(limits: Limits, tokens: int, load: Load, local: bool, reason: str) -> None:
    """Guards against a limit that is not kept, and against a turn that decode can compute and that
    goes to prefill."""
    decision = choose(tokens, load, limits)
    assert (decision.local, decision.reason) == (local, reason)
    assert decision.reason in REASONS and (decision.tokens, decision.load) == (tokens, load)


@pytest.mark.parametrize(("tokens", "local"), [(300, True), (301, False)])
def test_a_turn_without_prefill(tokens: int, local: bool) -> None:
    """Guards against fallback prefill beyond its own limit."""
    decision = choose_without_prefill(tokens, Limits(0, when_lost=300), "no_prefill")
    assert (decision.local, decision.reason) == (local, "no_prefill")
