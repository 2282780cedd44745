"""The bound on inter-token latency, on SGLang's own loop: chunks beside requests that run."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from component.decode.decoder import Decoder
from component.decode.overlapped import Overlapped, until_idle
from component.decode.pair import Pair, RankGroup, ranks_reduce
from component.decode.stages import fail_room
from component.decode.steps import admit, finish, ids, turn
from sglang.srt.disaggregation.delta.decode import local_scheduler
from sglang.srt.disaggregation.delta.decode.local_turns import LocalTurns
from sglang.srt.disaggregation.delta.decode.turn_choice import STEPS_BEFORE_BREACH, Limits
from sglang.srt.disaggregation.delta.observability import STATS
from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput

PAGE = 16
#: Seconds: of a chunk as a constant and a slope a token, and of a decode step.
CONSTANT, SLOPE, STEP = 0.005, 0.0001, 0.01
BREACHES = "decode_itl_breaches"


def bound(decoder: Decoder, max_itl: float | None, **options: Any) -> LocalTurns:
    """The decoder's local turns, with this bound in seconds."""
    options = {"chunk": 256, "always": True} | options
    limits = Limits(400, max_itl=max_itl, page=PAGE, **options)
    decoder.__dict__["local_turns"] = turns = LocalTurns(decoder, limits)
    return turns


def agree_on(turns: LocalTurns, slack: float) -> None:
    """What the ranks agree on from now on."""
    costs = [int(CONSTANT * 1e6), int(SLOPE * 1e9), int(STEP * 1e6), int(slack * 1e6)]
    turns.measured.votes = lambda: costs


def recorded(turns: LocalTurns) -> list[int]:
    """The chunks' sizes, as they are launched."""
    sizes, launched = list[int](), turns.times.launched

    def note(tokens: int, at: float) -> None:
        if tokens:
            sizes.append(tokens)
        launched(tokens, at)

    turns.times.launched = note
    return sizes


@pytest.fixture
def decoder() -> Decoder:
    return Decoder(PAGE, 4096, local=400, chunk=256)


@pytest.mark.parametrize(
    ("slack", "sizes", "others"),
    [
        (0.05, [256, 44], 1),
        (0.02, [144, 144, 12], 1),  # 150 tokens fit, in whole pages
        (0.0115, [64, 64, 64, 64, 44], 1),
        (0.001, [256, 44], 0),  # nobody is delayed
    ],
)
def test_chunks_beside_requests_that_run(
    decoder: Decoder, slack: float, sizes: list[int], others: int
) -> None:
    """Guards against a chunk that delays running requests beyond the bound, and against a turn in
    small chunks that would delay nobody."""
    turns = bound(decoder, 0.1)
    agree_on(turns, slack)
    for _ in range(others):
        decoder.submit([3, 2, 1], new=60)
    turn(decoder, 2)
    seen = recorded(turns)
    decoder.submit(ids(1, 300))
    turn(decoder, 20)
    assert seen == sizes
    finish(decoder)


@pytest.mark.parametrize("slack", [0.002, 0.0115])
def test_what_does_not_fit_goes_to_prefill(decoder: Decoder, slack: float) -> None:
    """Guards against a turn that is computed here though none of its chunks fits."""
    turns = bound(decoder, 0.1, always=False)
    turns._vote = lambda candidate: 9_000_000  # prefill is slow
    agree_on(turns, slack)
    decoder.submit([3, 2, 1], new=60)
    turn(decoder, 2)
    before = turns.metrics.turns.copy()
    req = decoder.submit(ids(1, 300))
    decoder.tick_queues()
    where = ("remote", "itl") if slack == 0.002 else ("local", "cheaper")
    assert turns.metrics.turns - before == {where: 1}
    assert (req in decoder.in_transfer) == (slack == 0.002)
    finish(decoder)


def test_a_turn_that_began_is_computed_to_its_end(decoder: Decoder) -> None:
    """Guards against a turn that waits for ever, since others began to run and no chunk fits any
    more; and against one whose chunks then come more often than in one gap of a hundred."""
    turns = bound(decoder, 0.1)
    agree_on(turns, 0.001)
    seen = recorded(turns)
    (remote,) = admit(decoder, [3, 2, 1, *[7] * 401], new=600)
    long = decoder.submit(ids(1, 400))
    turn(decoder)  # the first chunk, of 256 tokens, alone
    decoder.deliver(remote)
    decoder.tick_queues()
    steps = []
    while not long.output_ids:
        turn(decoder)
        steps.append(len(remote.output_ids))
    assert seen == [256, 64, 64, 16]
    chunks = [tokens for tokens, later in zip(steps, steps[1:], strict=False) if tokens == later]
    assert all(b - a >= STEPS_BEFORE_BREACH for a, b in zip(chunks, chunks[1:], strict=False))
    finish(decoder)


def test_what_fits_is_agreed_on_while_a_turn_is_under_way() -> None:
    """Guards against a turn that keeps the limit of the last arrival for as long as nobody arrives:
    one chunk of 64 tokens in a hundred gaps, although all would fit long since; and against ranks
    that run chunks of different sizes."""

    def build(rank: int, group: RankGroup) -> SimpleNamespace:
        decoder = Decoder(PAGE, 4096, local=400, chunk=256, group=group)
        return SimpleNamespace(decoder=decoder, turns=bound(decoder, 0.1), rank=rank)

    def begin(side: SimpleNamespace) -> None:
        side.running = side.decoder.submit([3, 2, 1], new=60)
        turn(side.decoder, 2)
        side.sizes = recorded(side.turns)
        agree_on(side.turns, 0.001)
        side.decoder.submit(ids(1, 300))
        turn(side.decoder, 5)

    def go_on(side: SimpleNamespace) -> None:
        agree_on(side.turns, (0.02, 0.05)[side.rank])
        turn(side.decoder, 20)
        assert side.sizes == [144, 144, 12] and not side.running.finished()
        finish(side.decoder)

    with ranks_reduce():
        pair = Pair(build)
        pair.run(begin)
        pair.run(go_on)
        pair.close()


@pytest.mark.parametrize(
    ("slack", "sizes"), [(0.02, [144, 144, 12]), (0.001, [64, 64, 64, 64, 44])]
)
def test_fallback_prefill_is_bounded_too(slack: float, sizes: list[int]) -> None:
    """Guards against a turn whose prefill server is lost, and that stops running requests for as
    long as one chunk takes; and against one that fails because no chunk fits: then each chunk is
    as small as it may be, in one gap of a hundred."""
    decoder = Decoder(PAGE, 4096, local=400, lost=400, chunk=256)
    turns = bound(decoder, 0.1, when_lost=400)
    agree_on(turns, slack)
    running = decoder.submit([3, 2, 1], new=900)
    turn(decoder, 2)
    seen = recorded(turns)
    (lost,) = admit(decoder, ids(1, 300), new=8, ready=False)
    fail_room(decoder, lost)
    steps = []
    while not lost.output_ids:
        launched = len(seen)
        turn(decoder)
        if len(seen) > launched:
            steps.append(len(running.output_ids))
    assert seen == sizes and turns.metrics.turns["local", "no_prefill"] == 1
    apart = STEPS_BEFORE_BREACH if slack == 0.001 else 1
    assert all(b - a >= apart for a, b in zip(steps, steps[1:], strict=False))
    finish(decoder)


# ---- with a clock ----


class Timed(Overlapped):
    """Its clock runs in steps only."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, max_itl: float | None) -> None:
        super().__init__(PAGE, 8192, rows=24, local=400, chunk=256)
        self.late = 0.0
        turns = bound(self, max_itl)
        turns._clock = lambda: self.now
        clock = SimpleNamespace(monotonic=lambda: self.now)
        monkeypatch.setattr(local_scheduler, "time", clock)
        #: Gaps with a chunk and without.
        self.gaps: dict[bool, list[float]] = {True: [], False: []}
        count = turns.metrics.gap

        def note(seconds: float, has_chunk: bool, limit: float | None) -> None:
            self.gaps[has_chunk].append(seconds)
            count(seconds, has_chunk, limit)

        turns.metrics.gap = note

    def run_batch(self, batch: Any, *arguments: Any) -> Any:
        if batch.forward_mode.is_extend():
            self.now += CONSTANT + SLOPE * batch.extend_num_tokens + self.late
        elif batch.forward_mode.is_decode():
            self.now += STEP
        return super().run_batch(batch, *arguments)


def busy(decoder: Timed, turns: int) -> Iterator[None]:
    """Two answers under way all the time, and turns of 300 tokens, one after another."""
    running: list[Any] = []
    for number in range(turns):
        long = decoder.submit(ids(number + 1, 300), new=2)
        while not long.output_ids:
            running = [req for req in running if not req.finished()]
            while len(running) < 2:
                running.append(decoder.submit([3, 2, 1], new=60))
            yield
    yield from until_idle(decoder)


@pytest.mark.parametrize("max_itl", [0.025, 0.04, None])
def test_gaps_of_running_requests(monkeypatch: pytest.MonkeyPatch, max_itl: float | None) -> None:
    """Guards against a bound that is not kept, and one that is kept by computing nothing; without a
    bound chunks are as large as ever."""
    decoder, before = Timed(monkeypatch, max_itl), STATS.totals[BREACHES]
    decoder.play(busy(decoder, 30))
    finish(decoder)
    with_chunk = decoder.gaps[True]
    assert len(with_chunk) > 30
    if max_itl is None:
        assert max(with_chunk) == pytest.approx(CONSTANT + 256 * SLOPE + STEP, abs=1e-3)
        assert STATS.totals[BREACHES] == before
        return
    passed = sum(gap > max_itl for gap in with_chunk)
    assert passed <= 0.01 * len(with_chunk) + 1
    assert STATS.totals[BREACHES] - before == passed
    assert max(with_chunk) > 0.6 * max_itl


def test_chunks_that_take_longer_than_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against breaches that change nothing."""
    decoder = Timed(monkeypatch, 0.03)
    sizes = recorded(decoder.local_turns)
    decoder.play(busy(decoder, 20))
    usual = max(sizes[-10:])
    decoder.late = 0.012
    sizes.clear()
    decoder.play(busy(decoder, 10))
    assert 0 < max(sizes[-5:]) < usual
    finish(decoder)


def test_who_has_ended_waits_for_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against gaps of a request that has ended: with overlap scheduling one more step of it
    is in flight, and the next request may come much later."""
    decoder = Timed(monkeypatch, 0.03)

    def alone() -> Iterator[None]:
        decoder.submit(ids(1, 20), new=5)
        yield from until_idle(decoder)

    decoder.play(alone())
    assert [len(decoder.gaps[has_chunk]) for has_chunk in (False, True)] == [3, 0]
    finish(decoder)


def test_a_pause_is_no_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a pause that is counted as the wait for a token: all chunks behind it would
    be smaller, and the histogram would hold it."""
    decoder = Timed(monkeypatch, 0.03)
    slack = list[float]()

    def paused() -> Iterator[None]:
        running = decoder.submit([3, 2, 1], new=60)
        while len(running.output_ids) < 3:
            yield
        decoder.submit(ids(1, 20), new=2)
        while decoder.local == []:
            yield
        yield
        slack.append(decoder.local_turns.measured.gaps.slack)
        decoder.pause_generation(PauseGenerationReqInput(mode="retract"))
        decoder.now += 60.0
        decoder.continue_generation(ContinueGenerationReqInput())
        yield from until_idle(decoder)

    decoder.play(paused())
    gaps = decoder.gaps[True] + decoder.gaps[False]
    assert len(gaps) > 40 and max(gaps) < 1.0
    assert decoder.local_turns.measured.gaps.slack >= slack[0]
    finish(decoder)


def test_a_turn_whose_first_token_is_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a large chunk right behind the one that ends a turn: with overlap scheduling
    it is launched before the turn runs, and would delay its second token."""
    decoder = Timed(monkeypatch, 0.03)
    agree_on(decoder.local_turns, 0.015)
    sizes = recorded(decoder.local_turns)

    def two() -> Iterator[None]:
        decoder.submit(ids(1, 256), new=20)
        decoder.submit(ids(2, 300), new=20)
        yield from until_idle(decoder)

    decoder.play(two())
    assert sizes[:2] == [256, 96]
    finish(decoder)
