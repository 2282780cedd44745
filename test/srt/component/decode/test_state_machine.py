"""Hypothesis searches a short sequence of events that breaks an invariant, and shrinks it.

48 sequences of up to 50 steps for each setting of ``test_any_sequence_of_events``, checked after
every step; ten times as many at night.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from component.decode.actions import Life, RankLife
from component.decode.checks import check_idle
from component.decode.decoder import Decoder
from component.decode.pair import Pair, RankGroup, ranks_reduce
from effort import tries

NUMBERS = st.integers(0, 2**30)
#: Minimum number of sequences, with this number of steps on average, for each server.
SEQUENCES, STEPS = tries(32), 50
#: Events that can happen at any time.
TICKS = ["queues", "batch", "flush", "update_weights", "pause_and_update"]
#: Number of sequences to run: more, because Hypothesis ends some early.
EXAMPLES = tries(48)


class DecodeServer(RuleBasedStateMachine):
    """The actions of a decode server's life, in any order; each checks everything."""

    #: Numbers of sequences and steps that were really taken.
    taken: ClassVar[Counter[str]]
    lives: list[Any]

    @initialize(
        page=st.sampled_from([1, 2, 16, 64]),
        pages=st.integers(10, 40),
        steps=st.sampled_from([0, 0, 1, 3]),
    )
    def start(self, page: int, pages: int, steps: int) -> None:
        """Build the server; ``steps``: draft steps, 0 without a draft model."""
        tokens = min(max(pages * page, 600), 2048) // page * page
        self.lives = self.build(page, tokens, steps)
        self.taken["sequences"] += 1

    def build(self, page: int, tokens: int, steps: int) -> list[Any]:
        """Return the life of each rank."""
        return [Life(Decoder(page, tokens, rows=6, steps=steps))]

    def on_ranks(self, action: Callable[[Any], Any]) -> None:
        """Run an action on each rank, at the same time."""
        action(self.lives[0])

    @property
    def decoder(self) -> Decoder:
        """The first rank; all ranks have the same queues."""
        decoder: Decoder = self.lives[0].decoder
        return decoder

    def take(self, action: str, number: int) -> None:
        self.taken["steps"] += 1
        self.on_ranks(lambda life: life.step(action, number))

    @rule(number=NUMBERS)
    def arrive(self, number: int) -> None:
        self.take("arrive", number)

    @rule()
    def serve(self) -> None:
        """Serve one normal turn, so that short sequences make progress."""
        self.taken["steps"] += 1
        self.on_ranks(lambda life: life.serve())

    @precondition(lambda self: self.decoder.queued)
    @rule(number=NUMBERS, action=st.sampled_from(["handshake", "fail_handshake", "abort_queued"]))
    def queued(self, number: int, action: str) -> None:
        self.take(action, number)

    @precondition(lambda self: self.decoder.in_transfer)
    @rule(number=NUMBERS, action=st.sampled_from(["deliver", "fail_transfer", "abort_transfer"]))
    def in_transfer(self, number: int, action: str) -> None:
        self.take(action, number)

    @precondition(lambda self: self.decoder.waiting_queue)
    @rule(number=NUMBERS)
    def waiting(self, number: int) -> None:
        self.take("abort_waiting", number)

    @precondition(lambda self: self.decoder.running_batch.reqs)
    @rule(number=NUMBERS, action=st.sampled_from(["batch", "retract", "abort_running"]))
    def running(self, number: int, action: str) -> None:
        self.take(action, number)

    @precondition(lambda self: self.decoder.retracted)
    @rule(number=NUMBERS)
    def retracted(self, number: int) -> None:
        self.take("abort_retracted", number)

    @precondition(lambda self: self.decoder.held)
    @rule(number=NUMBERS)
    def held(self, number: int) -> None:
        self.take("write_late", number)

    @rule(number=NUMBERS, action=st.sampled_from(TICKS))
    def tick(self, number: int, action: str) -> None:
        self.take(action, number)

    def teardown(self) -> None:
        if hasattr(self, "lives"):
            self.on_ranks(lambda life: life.decoder.drain())
            self.on_ranks(lambda life: check_idle(life.decoder))


class LocalServer(DecodeServer):
    """A server that computes some turns itself."""

    def build(self, page: int, tokens: int, steps: int) -> list[Any]:
        return [Life(Decoder(page, tokens, rows=6, local=60, lost=100, chunk=24, steps=steps))]

    @precondition(lambda self: self.decoder.local)
    @rule(number=NUMBERS, action=st.sampled_from(["batch", "abort_local", "pause_and_update"]))
    def local(self, number: int, action: str) -> None:
        self.take(action, number)

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "lives"):
            turns = self.decoder.local_turns.telemetry.by("decode_turns")
            for (where, reason), count in turns.items():
                self.taken.update({where: count, reason: count})


class TwoRanks(DecodeServer):
    """The same server with two ranks that see different events."""

    pair: Pair

    def build(self, page: int, tokens: int, steps: int) -> list[Any]:
        def side(rank: int, group: RankGroup) -> RankLife:
            policy = ("lru", "mru")[rank]
            decoder = Decoder(page, tokens, rows=6, policy=policy, group=group, steps=steps)
            return RankLife(decoder, rank)

        self.pair = Pair(side)
        return self.pair.sides

    def on_ranks(self, action: Callable[[Any], Any]) -> None:
        self.pair.run(action)

    @rule(number=NUMBERS, action=st.sampled_from(["skew", "pass_time", "evict_one"]))
    def drift(self, number: int, action: str) -> None:
        self.take(action, number)

    @precondition(lambda self: self.decoder.queued or self.decoder.in_transfer)
    @rule(number=NUMBERS)
    def heartbeat(self, number: int) -> None:
        self.take("fail_on_one_rank", number)

    @precondition(lambda self: self.decoder.in_transfer)
    @rule(number=NUMBERS)
    def late(self, number: int) -> None:
        self.take("late_metadata", number)

    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            if hasattr(self, "pair"):
                self.pair.close()


@pytest.fixture(autouse=True)
def _two_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Set deadlines that fifty steps can reach."""
    monkeypatch.setenv("SGLANG_DISAGGREGATION_DECODE_ADMISSION_TIMEOUT", "60")
    with ranks_reduce():
        yield


@pytest.mark.fuzz
@pytest.mark.timeout(1800)  # takes minutes on a slow machine; a timeout would look like flaky data
@pytest.mark.parametrize("server", [DecodeServer, TwoRanks, LocalServer])
def test_any_sequence_of_events(server: type[DecodeServer]) -> None:
    """Guards against an order of events without a separate test."""
    server.taken = Counter()
    run_state_machine_as_test(
        server,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=STEPS,
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert server.taken["sequences"] >= SEQUENCES
    assert server.taken["steps"] >= SEQUENCES * STEPS
    if server is LocalServer:  # enough turns of both kinds, and some after a loss of prefill
        taken = server.taken
        assert min(taken["local"], taken["long"]) > 20 and taken["no_prefill"] > 0, taken
