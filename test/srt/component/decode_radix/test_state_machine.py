"""Hypothesis looks for a short sequence of events that breaks an invariant, and shrinks it."""

from __future__ import annotations

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

from component.decode_radix.actions import Life
from component.decode_radix.decoder import Decoder

NUMBERS = st.integers(0, 2**30)


class DecodeServer(RuleBasedStateMachine):
    """The actions of a decode server's life, in any order; each checks everything."""

    life: Life

    @initialize(page=st.sampled_from([1, 16, 64]), pages=st.integers(10, 40))
    def start(self, page: int, pages: int) -> None:
        tokens = min(max(pages * page, 600), 2048) // page * page
        self.life = Life(Decoder(page, tokens, rows=6))

    @rule(number=NUMBERS)
    def arrive(self, number: int) -> None:
        self.life.step("arrive", number)

    @rule()
    def serve(self) -> None:
        """The usual way of things, so that short sequences get far."""
        for action in ("handshake", "queues", "deliver", "queues", "batch"):
            self.life.step(action, 2**30 - 1)

    @precondition(lambda self: self.life.decoder.queued)
    @rule(number=NUMBERS, action=st.sampled_from(["handshake", "fail_handshake", "abort_queued"]))
    def queued(self, number: int, action: str) -> None:
        self.life.step(action, number)

    @precondition(lambda self: self.life.decoder.in_transfer)
    @rule(number=NUMBERS, action=st.sampled_from(["deliver", "fail_transfer", "abort_transfer"]))
    def in_transfer(self, number: int, action: str) -> None:
        self.life.step(action, number)

    @precondition(lambda self: self.life.decoder.waiting_queue)
    @rule(number=NUMBERS)
    def waiting(self, number: int) -> None:
        self.life.step("abort_waiting", number)

    @precondition(lambda self: self.life.decoder.running_batch.reqs)
    @rule(number=NUMBERS, action=st.sampled_from(["batch", "retract", "abort_running"]))
    def running(self, number: int, action: str) -> None:
        self.life.step(action, number)

    @precondition(lambda self: self.life.decoder.disagg_decode_prealloc_queue.retracted_queue)
    @rule(number=NUMBERS)
    def retracted(self, number: int) -> None:
        self.life.step("abort_retracted", number)

    @rule(number=NUMBERS, action=st.sampled_from(["queues", "batch", "flush"]))
    def tick(self, number: int, action: str) -> None:
        self.life.step(action, number)

    def teardown(self) -> None:
        if hasattr(self, "life"):
            self.life.end()


@pytest.mark.parametrize("wait", ["0", "16"])
def test_any_sequence_of_events(monkeypatch: pytest.MonkeyPatch, wait: str) -> None:
    """Guards against an order of events that nobody thought of; with and without waiting for a
    prefix that is just arriving."""
    monkeypatch.setenv("SGLANG_DISAGGREGATION_DECODE_PREFIX_WAIT_TOKENS", wait)
    run_state_machine_as_test(
        DecodeServer,
        settings=settings(
            max_examples=60,
            stateful_step_count=30,
            suppress_health_check=list(HealthCheck),
        ),
    )
