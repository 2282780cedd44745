"""The choice of a server for a turn, from its length and the two queues."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang.srt.disaggregation.local_prefill.pace import MIN_CHUNK, Limits
from sglang.srt.disaggregation.local_prefill.policy import (
    REASONS,
    Load,
    choose,
    choose_without_prefill,
)

LIMITS = Limits(tokens=1000, chunk=100, share=0.5)
ALWAYS = Limits(tokens=1000, always=True, max_itl=0.1)
BOUNDED = Limits(tokens=1000, chunk=512, max_itl=0.1, page=16)
FULL = Load(remote=9000, is_full=True)


@pytest.mark.parametrize(
    ("limits", "tokens", "load", "local", "reason"),
    [
        (LIMITS, 1001, Load(remote=9000), False, "long"),
        # The shorter queue; decode if both are equal.
        (LIMITS, 1000, Load(), True, "shorter_queue"),
        (LIMITS, 100, Load(running=50), True, "shorter_queue"),
        (LIMITS, 100, Load(queued=1), False, "shorter_queue"),
        (LIMITS, 100, Load(queued=500, remote=499), False, "shorter_queue"),
        (LIMITS, 100, Load(queued=500, remote=500), True, "shorter_queue"),
        (LIMITS, 100, Load(queued=500, remote=5000), True, "shorter_queue"),
        # The first free place of a full batch is not left empty.
        (LIMITS, 100, FULL, False, "no_place"),
        # Whatever the queues are.
        (ALWAYS, 1000, Load(queued=10**6), True, "always"),
        (ALWAYS, 1001, Load(), False, "long"),
        (ALWAYS, 100, FULL, True, "always"),
        (ALWAYS, 200, Load(running=1, chunk=0), True, "always"),
        # No chunk fits into the bound on inter-token latency, however long prefill's queue is.
        (BOUNDED, 200, Load(remote=9000, chunk=400), True, "shorter_queue"),
        (BOUNDED, 200, Load(remote=9000, chunk=MIN_CHUNK), True, "shorter_queue"),
        (BOUNDED, 200, Load(remote=9000, chunk=MIN_CHUNK - 1), False, "itl"),
        (BOUNDED, 20, Load(remote=9000, chunk=20), True, "shorter_queue"),
        (BOUNDED, 20, Load(remote=9000, chunk=19), False, "itl"),
        (BOUNDED, 1, Load(remote=9000, chunk=0), False, "itl"),
        # It would wait behind a turn that no chunk fits.
        (BOUNDED, 20, Load(500, 9000, chunk=MIN_CHUNK - 1), False, "itl"),
    ],
)
def test_the_choice(limits: Limits, tokens: int, load: Load, local: bool, reason: str) -> None:
    """Guards against a turn that waits in the longer queue, and a limit that is not kept."""
    decision = choose(tokens, load, limits)
    assert (decision.local, decision.reason) == (local, reason)
    assert decision.reason in REASONS and (decision.tokens, decision.load) == (tokens, load)


@given(st.integers(1, 1000), st.integers(0, 5000), st.integers(0, 5000), st.integers(1, 500))
def test_a_longer_queue_attracts_no_turns(tokens: int, queued: int, remote: int, more: int) -> None:
    """Guards against a comparison of the wrong sign."""
    if not choose(tokens, Load(queued, remote), LIMITS).local:
        assert not choose(tokens, Load(queued + more, remote), LIMITS).local
    else:
        assert choose(tokens, Load(queued, remote + more), LIMITS).local


@pytest.mark.parametrize(("tokens", "local"), [(300, True), (301, False)])
def test_a_turn_without_prefill(tokens: int, local: bool) -> None:
    """Guards against fallback prefill beyond its own limit."""
    decision = choose_without_prefill(tokens, Limits(0, when_lost=300), "no_prefill")
    assert (decision.local, decision.reason) == (local, "no_prefill")
