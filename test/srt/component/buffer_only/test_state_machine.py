"""Any sequence of events: long random lives, and short ones that Hypothesis looks for and
shrinks."""

from __future__ import annotations

import random
from collections import Counter
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
    run_state_machine_as_test,
)

from component.buffer_only.life import WEIGHTS, Life
from effort import tries

NUMBERS = st.integers(0, 2**16)


class Server(RuleBasedStateMachine):
    """One rank."""

    ranks: ClassVar[int] = 1
    taken: ClassVar[Counter[str]]
    life: Life

    @initialize(seed=NUMBERS)
    def start(self, seed: int) -> None:
        self.life = Life(self.ranks, seed)

    @rule(event=st.sampled_from(sorted(WEIGHTS)), number=NUMBERS)
    def take(self, event: str, number: int) -> None:
        self.life.take(event, number)

    @rule(number=NUMBERS)
    def serve(self, number: int) -> None:
        """The usual way of things, so that short sequences get far."""
        for event in ("arrive", "live", "admit", "live"):
            self.life.take(event, number)

    def teardown(self) -> None:
        if hasattr(self, "life"):
            self.life.finish()
            self.taken.update(self.life.taken)


class TwoRanks(Server):
    """Two ranks whose stores, copies and clocks differ."""

    ranks = 2


@pytest.mark.fuzz
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("server", [Server, TwoRanks])
def test_hypothesis_finds_no_sequence_that_breaks_anything(server: type[Server]) -> None:
    """Staging pages, device slots, locks and references balance after every event on every rank,
    the content is right, every request ends, and nothing is left when nothing is under way."""
    server.taken = Counter()
    run_state_machine_as_test(
        server,
        settings=settings(
            max_examples=tries(30),
            stateful_step_count=40,
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert server.taken["admitted"] > tries(50) and server.taken["flush"] > tries(3)


@pytest.mark.hazard("ranks-part-in-collective")
@pytest.mark.parametrize("ranks", [1, 2])
def test_random_lives(ranks: int) -> None:
    """The same in long lives, in which much has come from the store and much has gone wrong."""
    taken: Counter[str] = Counter()
    for seed in range(25):
        rng = random.Random(seed)
        life = Life(ranks, seed)
        for _ in range(250):
            event = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
            life.take(event, rng.randrange(2**30))
        life.finish()
        taken += life.taken
    assert taken["admitted"] > 100 and taken["from store"] > 20 and taken["stranded"] > 20
    assert all(taken[event] > 10 for event in WEIGHTS), taken
