"""The bound on inter-token latency, on SGLang's own loop: chunks beside running requests.

``unit/policy/test_itl.py`` has the size of a chunk, and the effect of a breach.
"""

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
from sglang.srt.disaggregation.policy.pace import STEPS_BEFORE_BREACH, Limits
from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput

PAGE = 16
#: Seconds: constant and slope per token of a chunk's duration, and duration of a decode step.
CONSTANT, SLOPE, STEP = 0.005, 0.0001, 0.01
BREACHES = "decode_itl_breaches"


def costs(slack: float) -> tuple[int, ...]:
    """Return the agreed costs if chunks may take ``slack``."""
    return (int(CONSTANT * 1e6), int(SLOPE * 1e9), int(STEP * 1e6), int(slack * 1e6))


def bound(seconds: float | None = 0.1, **options: Any) -> Limits:
    return Limits(400, 256, **options, max_itl=seconds, page=PAGE)


@pytest.mark.parametrize(
    ("slack", "sizes", "way"),
    [
        (0.05, [256, 44], "beside another"),
        (0.02, [144, 144, 12], "beside another"),  # 150 tokens fit, in whole pages
        (0.0115, [64, 64, 64, 64, 44], "beside another"),
        (0.001, [256, 44], "alone"),
        (0.02, [144, 144, 12], "without prefill"),
        (0.001, [64, 64, 64, 64, 44], "without prefill"),  # one gap in a hundred each
    ],
)
def test_chunks(slack: float, sizes: list[int], way: str) -> None:
    """Guards against a chunk that delays running requests beyond the bound, also after the loss of
    a turn's prefill server; against small chunks without a running request; and against an accepted
    turn that waits for ever, or fails, because no chunk fits."""
    limits = bound(when_lost=400)
    decoder = Decoder(PAGE, 4096, limits=limits, costs=costs(slack))
    running = [decoder.submit([3, 2, 1], new=900)] if way != "alone" else []
    turn(decoder, 2)
    decoder.chunks.clear()
    (req,) = admit(decoder, ids(1, 300), ready=way != "without prefill")
    if way == "without prefill":
        fail_room(decoder, req)
    steps = []
    while not req.output_ids:
        launched = len(decoder.chunks)
        turn(decoder)
        steps += [len(each.output_ids) for each in running if len(decoder.chunks) > launched]
    assert decoder.chunks == sizes
    apart = STEPS_BEFORE_BREACH if slack == 0.001 else 1
    assert all(b - a >= apart for a, b in zip(steps, steps[1:], strict=False))
    decoder.abort("")
    finish(decoder)


@pytest.mark.parametrize(
    ("slack", "where"), [(0.002, ("remote", "itl")), (0.0115, ("local", "short"))]
)
def test_what_does_not_fit_goes_to_prefill(slack: float, where: tuple[str, str]) -> None:
    """Guards against a turn that is computed here although none of its chunks fits."""
    decoder = Decoder(PAGE, 4096, limits=bound(), costs=costs(slack))
    turns = decoder.local_turns
    decoder.submit([3, 2, 1], new=60)
    turn(decoder, 2)
    before = turns.telemetry.by("decode_turns")
    (req,) = admit(decoder, ids(1, 300))
    after = turns.telemetry.by("decode_turns")
    assert {each: n - before[each] for each, n in after.items() if n > before[each]} == {where: 1}
    assert (req in decoder.in_transfer) == (where[0] == "remote")
    finish(decoder)


def test_what_fits_is_agreed_on_while_a_turn_is_under_way() -> None:
    """Guards against a turn that keeps the limit of the last arrival until the next one (a chunk of
    64 tokens in a hundred gaps, although all would fit by then), and against ranks with chunks of
    different sizes."""

    def build(rank: int, group: RankGroup) -> SimpleNamespace:
        decoder = Decoder(PAGE, 4096, group=group, limits=bound(), costs=costs(0.0115))
        return SimpleNamespace(decoder=decoder, rank=rank)

    def begin(side: SimpleNamespace) -> None:
        side.running = side.decoder.submit([3, 2, 1], new=60)
        turn(side.decoder, 2)
        side.decoder.chunks.clear()
        side.decoder.submit(ids(1, 300))
        turn(side.decoder)
        side.decoder.costs = costs(0.001)
        turn(side.decoder, 5)

    def go_on(side: SimpleNamespace) -> None:
        side.decoder.costs = costs((0.02, 0.05)[side.rank])
        turn(side.decoder, 20)
        assert side.decoder.chunks == [64, 144, 92] and not side.running.finished()
        finish(side.decoder)

    with ranks_reduce():
        pair = Pair(build)
        pair.run(begin)
        pair.run(go_on)
        pair.close()


# ---- with a clock ----


class Timed(Overlapped):
    """A decode scheduler with a clock that only steps advance."""

    def __init__(self, max_itl: float | None) -> None:
        super().__init__(PAGE, 8192, rows=24, limits=bound(max_itl), costs=None)
        #: Seconds between two tokens of a request with a chunk in between.
        self.gaps: list[float] = []
        self._told: dict[str, float] = {}
        self._chunk_before = False
        self.breaches = self.telemetry.totals[BREACHES,]

    def run_batch(self, batch: Any, *arguments: Any) -> Any:
        if batch.forward_mode.is_extend():
            self.now += CONSTANT + SLOPE * batch.extend_num_tokens
        elif batch.forward_mode.is_decode():
            self.now += STEP
        return super().run_batch(batch, *arguments)

    def process_batch_result(self, batch: Any, result: Any) -> None:
        super().process_batch_result(batch, result)
        if batch.forward_mode.is_extend():
            self._chunk_before = True
        elif batch.forward_mode.is_decode():
            told = {req.rid: self.now for req in batch.reqs if not req.finished()}
            waited = [at - self._told[rid] for rid, at in told.items() if rid in self._told]
            if self._chunk_before and waited:
                self.gaps.append(max(waited))
            self._told, self._chunk_before = told, False

    def new_breaches(self) -> int:
        """Return the number of breaches counted since the last call."""
        return int(self.telemetry.totals[BREACHES,] - self.breaches)


def busy(decoder: Timed, turns: int) -> Iterator[None]:
    """Run ``turns`` turns of 300 tokens, one after another, beside two running requests."""
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
def test_gaps_of_running_requests(max_itl: float | None) -> None:
    """Guards against a bound that is not kept, and against one that is kept by computing nothing.
    Without a bound, chunks have their full size."""
    decoder = Timed(max_itl)
    decoder.play(busy(decoder, 30))
    finish(decoder)
    assert len(decoder.gaps) > 30
    if max_itl is None:
        assert max(decoder.chunks) == 256 and decoder.new_breaches() == 0
        return
    assert 0.6 * max_itl < sorted(decoder.gaps)[-3]
    passed = sum(gap > max_itl for gap in decoder.gaps)
    assert passed == decoder.new_breaches() <= 0.01 * len(decoder.gaps) + 1


@pytest.mark.parametrize("what", ["a pause", "the end"])
def test_what_is_no_gap(what: str) -> None:
    """Guards against a pause, or the time after an answer's end (with overlap scheduling one more
    step of it is in flight), that counts as a token's latency: a breach would be reported, and all
    later chunks would be smaller."""
    decoder = Timed(0.03)

    def script() -> Iterator[None]:
        running = decoder.submit([3, 2, 1], new=60 if what == "a pause" else 5)
        while not running.finished() and len(running.output_ids) < 20:
            yield
        if what == "a pause":
            decoder.submit(ids(1, 20), new=2)
            while not decoder.chunks:  # a chunk is in flight now
                yield
            decoder.pause_generation(PauseGenerationReqInput(mode="retract"))
            decoder.now += 60.0
            decoder.continue_generation(ContinueGenerationReqInput())
        else:
            yield from until_idle(decoder)
            decoder.now += 60.0
            decoder.submit(ids(1, 20), new=5)
        yield from until_idle(decoder)

    decoder.play(script())
    assert decoder.new_breaches() == 0
    finish(decoder)


def test_a_turn_whose_first_token_is_on_its_way() -> None:
    """Guards against a large chunk right behind the one that ends a turn: with overlap scheduling
    it is launched before the turn runs, and would delay its second token."""
    decoder = Timed(0.03)
    decoder.costs = costs(0.015)

    def two() -> Iterator[None]:
        decoder.submit(ids(1, 256), new=20)
        decoder.submit(ids(2, 300), new=20)
        yield from until_idle(decoder)

    decoder.play(two())
    assert decoder.chunks[:2] == [256, 96]
    finish(decoder)
