"""The bound on inter-token latency in a real scheduler of 0.5.23."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any  # Any: objects of SGLang

import pytest

from current.decode import Decode
from current.environment import PLAIN
from current.test_local_turns import LOCAL, Peers
from current.texts import text
from sglang.srt.disaggregation.delta.observability import Telemetry
from sglang.srt.disaggregation.policy.chunk_times import StepTimes
from sglang.srt.disaggregation.policy.pace import STEPS_BEFORE_BREACH

#: Seconds: constant and slope per token of a chunk's duration, and duration of a decode step.
CONSTANT, SLOPE, STEP = 0.005, 0.0001, 0.01
BOUND = 0.1
ENV = LOCAL | {
    "SGLANG_DISAGGREGATION_DECODE_LOCAL_CHUNK": "256",
    "SGLANG_DISAGGREGATION_DECODE_LOCAL_MAX_ITL_MS": str(BOUND * 1000),
}
overlap = pytest.mark.server(env=ENV)
plain = pytest.mark.server(PLAIN, env=ENV)
loops = pytest.mark.parametrize(
    (), [pytest.param(marks=overlap, id="overlap"), pytest.param(marks=plain, id="plain")]
)


class Noted(Telemetry):
    """Telemetry that also records the gaps between tokens, with a chunk and without."""

    def __init__(self, gaps: dict[bool, list[float]]) -> None:
        super().__init__()
        self.gaps = gaps

    def observe(self, name: str, value: float, **own: str) -> None:
        if name == "decode_itl_seconds":
            self.gaps[own["chunk"] == "true"].append(value)


class Bounded:
    """Local turns of a decode server, on a clock that steps advance."""

    def __init__(self, decode: Decode) -> None:
        from sglang.srt.disaggregation.lead.local import QueuedTurns

        self._decode, self._make = decode, QueuedTurns
        self._limits = decode.scheduler.lead_turns.limits
        self._run = decode.scheduler.run_batch
        self.now, self.late = 0.0, 0.0
        #: Tokens of each chunk; gaps between tokens with a chunk and without.
        self.chunks: list[int] = []
        self.gaps: dict[bool, list[float]] = {True: [], False: []}
        #: Number of decode steps before each chunk.
        self.steps: list[int] = []
        self._steps = 0
        self.within(BOUND)

    def within(self, bound: float | None, **options: Any) -> Any:
        """Install and return local turns without measurements, with this bound in seconds."""
        limits = replace(self._limits, max_itl=bound, **options)
        turns = self._make(self._decode.scheduler, limits, lambda: self.now)
        turns.peers = Peers()
        turns.telemetry = Noted(self.gaps)
        self._decode.scheduler.lead_turns = self.turns = turns
        return turns

    def fix(self, slack: float) -> None:
        """Fix the measured costs."""
        costs = [int(CONSTANT * 1e6), int(SLOPE * 1e9), int(STEP * 1e6), int(slack * 1e6)]
        self.turns.measured.votes = lambda: costs

    def run(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a batch in place of SGLang's ``run_batch`` and advance the clock."""
        if batch.forward_mode.is_extend():
            self.now += CONSTANT + SLOPE * batch.extend_num_tokens + self.late
            self.chunks.append(batch.extend_num_tokens)
            self.steps.append(self._steps)
        else:
            self.now += STEP
            self._steps += 1
        return self._run(batch, *args, **kwargs)


@pytest.fixture
def bounded(decode: Decode) -> Iterator[Bounded]:
    """The bounded local turns of this test's decode server."""
    decode.bring_prefill()
    before = decode.scheduler.lead_turns
    made = Bounded(decode)
    decode.scheduler.run_batch = made.run
    yield made
    del decode.scheduler.run_batch
    decode.scheduler.lead_turns = before


def running(decode: Decode, new: int) -> str:
    """Return a running request with an answer of ``new`` tokens."""
    rid = decode.ask(text(20, 1), new)
    decode.until(lambda: rid in decode.requests and len(decode.output(rid)) > 1)
    return rid


def decisions(bounded: Bounded) -> dict[tuple[str, str], int]:
    """Return the counts of turns by side and reason."""
    return dict(bounded.turns.telemetry.by("decode_turns"))


@loops
@pytest.mark.parametrize(
    ("slack", "sizes"),
    [
        (0.05, [256, 44]),
        (0.02, [144, 144, 12]),  # 150 tokens fit, in whole pages
        (0.0115, [64, 64, 64, 64, 44]),
    ],
)
def test_chunks_beside_requests_that_run(
    decode: Decode, bounded: Bounded, slack: float, sizes: list[int]
) -> None:
    """Guards against a chunk that delays running requests beyond the bound, and against answers
    that depend on the chunks."""
    prompt = text(300, 2)
    (answer,) = decode.learn([prompt], 8)
    bounded.fix(slack)
    running(decode, 60)
    bounded.chunks.clear()
    rid = decode.ask(prompt, 8)
    decode.finish()
    assert bounded.chunks == sizes and decode.output(rid) == answer
    assert all(b > a for a, b in zip(bounded.steps[1:], bounded.steps[2:], strict=False))


@overlap
def test_no_bound_applies_while_nobody_runs(decode: Decode, bounded: Bounded) -> None:
    """Guards against a turn in small chunks while no request runs that it could delay."""
    bounded.fix(0.001)
    decode.ask(text(300, 2), 4)
    decode.finish()
    assert bounded.chunks == [256, 44]


@overlap
def test_what_does_not_fit_goes_to_prefill(decode: Decode, bounded: Bounded) -> None:
    """Guards against a turn that is computed here although none of its chunks fits."""
    prompt = text(300, 2)
    decode.learn([prompt], 8)
    bounded.chunks.clear()
    bounded.fix(0.002)
    running(decode, 30)
    rid = decode.ask(prompt, 8)
    decode.step(3)
    assert decode.arriving() == [rid] and decisions(bounded)["remote", "itl"] == 1
    decode.finish()
    assert bounded.chunks == [20]


@overlap
def test_what_fits_no_more_goes_to_prefill(decode: Decode, bounded: Bounded) -> None:
    """Guards against a turn that was accepted while no request ran, and that waits behind another
    turn until requests run. It holds no memory yet, so prefill can compute it."""
    prompts = [text(400, 2), text(300, 3)]
    answers = decode.learn(prompts, 8)
    bounded.chunks.clear()
    bounded.fix(0.002)
    rids = [decode.ask(prompt, 8) for prompt in prompts]
    decode.until(lambda: len(bounded.chunks) == 2)
    decode.finish()
    assert bounded.chunks == [256, 144]
    assert decisions(bounded) == {("local", "short"): 1, ("remote", "itl"): 1}
    assert [decode.output(rid) for rid in rids] == answers


@overlap
def test_a_turn_that_began_is_computed_to_its_end(decode: Decode, bounded: Bounded) -> None:
    """Guards against a turn that waits for ever because requests began to run and no chunk fits any
    more, and against one with chunks in more than one gap of a hundred."""
    first, long = text(50, 1), text(400, 2)
    decode.learn([first, long], 8)
    bounded.chunks.clear()
    bounded.steps.clear()
    bounded.fix(0.001)
    other = decode.ask(first, 500)
    bounded.turns.peers = Peers(known=False)
    decode.step(2)
    bounded.turns.peers = Peers()
    assert decode.arriving() == [other]
    rid = decode.ask(long, 8)
    decode.until(lambda: bounded.chunks == [256])
    decode.deliver(other)
    decode.finish()
    assert bounded.chunks == [256, 64, 64, 16] and decode.ended(rid)
    apart = [b - a for a, b in zip(bounded.steps[1:], bounded.steps[2:], strict=False)]
    assert min(apart) >= STEPS_BEFORE_BREACH


@overlap
def test_what_fits_is_agreed_on_while_nobody_arrives(decode: Decode, bounded: Bounded) -> None:
    """Guards against a started turn that keeps the limit of the last arrival."""
    bounded.fix(0.0115)
    running(decode, 60)
    decode.ask(text(300, 2), 8)
    decode.until(lambda: len(bounded.chunks) == 2)
    bounded.fix(0.02)
    decode.finish()
    assert bounded.chunks[1:] == [64, 144, 92]


@overlap
@pytest.mark.parametrize(
    ("slack", "sizes"), [(0.02, [144, 144, 12]), (0.001, [64, 64, 64, 64, 44])]
)
def test_fallback_prefill_is_bounded_too(
    decode: Decode, bounded: Bounded, slack: float, sizes: list[int]
) -> None:
    """Guards against a turn that fails because no chunk fits, and against one that stalls running
    requests for as long as one chunk takes."""
    bounded.within(BOUND, tokens=100)
    prompt = text(300, 2)
    (answer,) = decode.learn([prompt], 8)
    bounded.fix(slack)
    running(decode, 600)
    bounded.chunks.clear()
    bounded.steps.clear()
    rid = decode.ask(prompt, 8)
    decode.step(3)
    assert decode.arriving() == [rid]
    decode.fail(rid)
    decode.until(lambda: len(decode.output(rid)) > 0, 700)
    assert bounded.chunks == sizes
    apart = [b - a for a, b in zip(bounded.steps, bounded.steps[1:], strict=False)]
    assert min(apart) >= (STEPS_BEFORE_BREACH if slack == 0.001 else 1)
    decode.confirm(rid)
    decode.finish()
    assert decode.output(rid) == answer


def busy(decode: Decode, turns: int) -> None:
    """Run ``turns`` turns of 300 tokens, one after another, beside two running requests."""
    answers: list[str] = []
    for number in range(turns):
        rid = decode.ask(text(300, 100 + number), 2)
        decode.step()
        while not decode.output(rid):
            answers = [each for each in answers if not decode.ended(each)]
            answers += [decode.ask(text(20, 1), 60) for _ in range(2 - len(answers))]
            decode.step()
    decode.finish()


@overlap
@pytest.mark.parametrize("most", [0.025, 0.04, None])
def test_gaps_of_running_requests(decode: Decode, bounded: Bounded, most: float | None) -> None:
    """Guards against a bound that is not kept, and against one that is kept by computing nothing.
    Without a bound, chunks have their full size."""
    bounded.within(most)
    busy(decode, 30)
    with_chunk = bounded.gaps[True]
    assert len(with_chunk) > 30
    if most is None:
        assert max(with_chunk) == pytest.approx(CONSTANT + 256 * SLOPE + STEP, abs=1e-3)
        return
    assert sum(gap > most for gap in with_chunk) <= 0.01 * len(with_chunk) + 1
    assert max(with_chunk) > 0.6 * most


@overlap
def test_chunks_that_take_longer_than_expected(decode: Decode, bounded: Bounded) -> None:
    """Guards against breaches without an effect on the next chunks."""
    bounded.within(0.06)  # large enough that a chunk always fits
    busy(decode, 20)
    usual = max(bounded.chunks[-10:])
    bounded.late = 0.012
    bounded.chunks.clear()
    busy(decode, 10)
    assert 0 < max(bounded.chunks[-5:]) < usual


@loops
@pytest.mark.parametrize("blocking", [True, False])
def test_a_pause_is_no_gap_and_no_step(decode: Decode, bounded: Bounded, blocking: bool) -> None:
    """Guards against a pause that counts as a token's latency, or as the time of the step before
    it: chunks would become small, and local turns would look slow."""
    from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput

    turns = bounded.turns
    turns.times = StepTimes(turns.measured, blocking=blocking)
    running(decode, 30)
    decode.inbox.append(PauseGenerationReqInput(mode="in_place"))
    decode.step(2)
    bounded.now += 60.0
    decode.inbox.append(ContinueGenerationReqInput(torch_empty_cache=False))
    decode.finish()
    gaps = bounded.gaps[True] + bounded.gaps[False]
    assert len(gaps) > 20 and max(gaps) < 1.0
    assert turns.measured.step < 1.0
    assert turns.measured.chunk.at(20) < 1.0
