"""Turns that a decode server computes itself: chunks between decode steps, and every way out."""

from __future__ import annotations

import random
import time
from collections import Counter, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule, run_state_machine_as_test

from component.decode import kv
from component.decode.actions import Life
from component.decode.checks import check, check_idle, computed_tokens
from component.decode.decoder import Decoder
from component.decode.overlapped import Overlapped, random_talks
from component.decode.pair import Pair, RankGroup, ranks_reduce
from component.decode.rank_life import RankLife
from component.decode.steps import turn
from component.decode.test_state_machine import NUMBERS, DecodeServer
from sglang.srt.disaggregation.delta.decode.local_turns import LocalTurns, only_prefill_can
from sglang.srt.disaggregation.delta.decode.turn_choice import UNKNOWN, Limits
from sglang.srt.managers import scheduler_runtime_checker_mixin
from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams

HISTORY = [token % 50 for token in range(3, 83)]  # 80 tokens: 5 pages of 16
NEW = list(range(50))
CHUNK = 32


@pytest.fixture(
    params=[(1, 0), (16, 0), (16, 3), pytest.param((1, 3), marks=pytest.mark.nightly)],
    ids=["1", "16", "16-drafts", "1-drafts"],
)
def decoder(request: pytest.FixtureRequest) -> Decoder:
    """It holds the history; with and without a draft model."""
    page, steps = request.param
    decoder = Decoder(page, 1024, local=200, chunk=CHUNK, steps=steps)
    # With a draft model the slot of a text's last token is shared only with the token behind it.
    decoder.submit(HISTORY + NEW[: bool(steps)], new=1)
    decoder.drain()
    check_idle(decoder)
    return decoder


def test_a_turn_is_computed_here(decoder: Decoder) -> None:
    """Guards against a turn that is announced although decode computes it, and against KV, tree and
    pools that differ from those after a transfer."""
    req = decoder.submit(HISTORY + NEW)
    room = decoder.room(req)
    decoder.tick_queues()
    assert room.yielded and room.pages is None and room.cleared
    assert decoder.in_transfer == [] and decoder.local == [req]
    turn(decoder)
    assert req.output_ids == []
    turn(decoder)
    assert req.output_ids == [2]  # two chunks: 32 tokens, and the rest
    assert req.cached_tokens == req.cached_tokens_device == len(HISTORY)
    decoder.drain()
    check_idle(decoder)
    again = decoder.submit(req.origin_input_ids + req.output_ids)
    decoder.tick_queues()
    # The last token of an answer has no KV, and the one before no draft KV that others could use.
    held = len(HISTORY + NEW) + 7 - bool(decoder.steps)
    assert again.cache_protected_len == held // decoder.page_size * decoder.page_size


def test_a_full_hit_leaves_a_token_to_compute(decoder: Decoder) -> None:
    """Guards against a chunk of no tokens, and against shared pages that are written again."""
    req = decoder.submit(HISTORY)
    decoder.tick_queues()
    assert req.cache_protected_len == 80 - decoder.page_size
    decoder.drain()
    assert req.output_ids == [2] * 8
    check_idle(decoder)


def test_a_new_prompt(decoder: Decoder) -> None:
    """Guards against a turn without any history that is left out."""
    req = decoder.submit([49, 48, 47], new=3)
    decoder.drain()
    assert req.output_ids == [2] * 3 and req.cached_tokens == 0
    check_idle(decoder)


def test_long_turns_go_to_prefill(decoder: Decoder) -> None:
    """Guards against a decode server that computes what is longer than it was told."""
    req = decoder.submit(HISTORY + [7] * 201)
    decoder.tick_queues()
    assert decoder.in_transfer == [req] and decoder.local == []
    assert decoder.local_turns.metrics.turns["remote", "long"] == 1
    decoder.drain()
    check_idle(decoder)


def test_prefill_is_timed_to_the_first_token(decoder: Decoder) -> None:
    """Guards against a side that is timed to an earlier moment than the other, and against a
    request that was retracted and is timed again when it comes back."""
    now, seen = [0.0], list[tuple[int, float]]()
    turns = decoder.local_turns
    turns._clock = lambda: now[0]
    turns.measured.shown = lambda address, tokens, seconds: seen.append((tokens, seconds))
    reqs = [decoder.submit(HISTORY + [7] * 201), decoder.submit(HISTORY + [8] * 301)]
    decoder.tick_queues()
    now[0] = 5.0
    for req in reqs:
        decoder.deliver(req)
    decoder.tick_queues()
    assert decoder.in_transfer == [] and not seen
    now[0] = 7.0
    decoder.tick_batch()
    assert sorted(seconds for _, seconds in seen) == [7.0, 7.0]
    assert all(req.output_ids for req in reqs)
    decoder.retract()
    assert len(decoder.disagg_decode_prealloc_queue.retracted_queue) == 1
    decoder.drain()
    assert len(seen) == 2
    check_idle(decoder)


def test_a_full_batch_is_no_time_of_prefills(decoder: Decoder) -> None:
    """Guards against a decode server that is full and takes its own queue for a slow prefill: it
    would compute more turns itself."""
    now, seen = [0.0], list[float]()
    turns = decoder.local_turns
    turns._clock = lambda: now[0]
    turns.measured.shown = lambda address, tokens, seconds: seen.append(seconds)
    decoder.max_running_requests = 1
    reqs = [decoder.submit(HISTORY + [token] * 201) for token in (7, 8)]
    decoder.tick_queues()
    for req in reqs:
        decoder.deliver(req)
    now[0] = 5.0
    decoder.tick_queues()
    turn(decoder)
    assert len(decoder.waiting_queue) == 1 and seen == [5.0] * 2
    now[0] = 60.0
    decoder.drain()
    assert len(seen) == 2 and all(req.output_ids for req in reqs)
    check_idle(decoder)


def test_prefill_servers_that_do_not_know(decoder: Decoder) -> None:
    """Guards against a prefill server that is left waiting."""
    decoder.kv_manager.stock_peers.add("10.0.0.9:8998")
    req = decoder.submit(HISTORY + NEW, host="10.0.0.9")
    decoder.tick_queues()
    assert decoder.in_transfer == [req] and not decoder.room(req).yielded
    decoder.drain()
    check_idle(decoder)


@pytest.mark.parametrize(("share", "steps"), [(1.0, 1), (0.5, 1), (0.25, 3)])
def test_decode_steps_between_two_chunks(decoder: Decoder, share: float, steps: int) -> None:
    """Guards against answers under way that stand still while a long turn is computed."""
    decoder.local_turns.pace._share = share
    # A chunk takes as long as a step.
    decoder.local_turns.measured.votes = lambda: [1000, 0, 1000, UNKNOWN]
    running = decoder.submit([3, 2, 1], new=40)
    turn(decoder, 2)
    long = decoder.submit(HISTORY + [9] * 150)
    had = len(running.output_ids)
    kinds = []
    while not long.output_ids:
        decoder.tick_queues()
        decoder.tick_batch()
        check(decoder)
        kinds.append(len(running.output_ids) - had)
        had = len(running.output_ids)
    chunks = [at for at, grown in enumerate(kinds) if grown == 0]
    assert len(chunks) == 5 + (decoder.page_size == 16 and bool(decoder.steps))  # of 32 tokens
    assert {later - at for at, later in zip(chunks, chunks[1:], strict=False)} == {steps + 1}
    decoder.drain()
    check_idle(decoder)


def test_no_more_than_may_run(decoder: Decoder) -> None:
    """Guards against a batch larger than what its buffers were made for."""
    decoder.max_running_requests = 2
    reqs = [decoder.submit([*HISTORY, n], new=5) for n in range(5)]
    while not all(req.finished() for req in reqs):
        turn(decoder)
        assert len(decoder.running_batch.reqs) <= 2
    decoder.drain()
    check_idle(decoder)


# ---- every way out, at every point ----

POINTS = ["queued", "between_chunks", "computed", "running"]


def bring_to(decoder: Decoder, point: str) -> Any:
    """A turn at ``point``, beside one that runs."""
    decoder.submit([3, 2, 1], new=60)
    turn(decoder, 2)
    req = decoder.submit(HISTORY + NEW, new=30)
    decoder.tick_queues()
    if point == "queued":
        return req
    while computed_tokens(decoder.local_turns, req, 0) == req.cache_protected_len:
        decoder.tick_batch()
    if point == "between_chunks":
        return req
    while not req.output_ids:
        decoder.tick_batch()
    if point == "running":
        decoder.tick_batch()
        assert req in decoder.running_batch.reqs
    return req


def abort(decoder: Decoder, req: Any) -> None:
    decoder.abort(req.rid)


def flush(decoder: Decoder, req: Any) -> None:
    assert not decoder.flush_cache()


def update_weights(decoder: Decoder, req: Any) -> None:
    decoder.update_weights()


def pause(mode: str) -> Callable[[Decoder, Any], None]:
    def do(decoder: Decoder, req: Any) -> None:
        decoder.pause_generation(PauseGenerationReqInput(mode=mode))
        turn(decoder, 3)
        decoder.update_weights()
        check(decoder)
        decoder.continue_generation(ContinueGenerationReqInput())

    return do


def retract(decoder: Decoder, req: Any) -> None:
    decoder.retract()


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize(
    "what", [abort, flush, update_weights, pause("in_place"), pause("retract"), retract]
)
def test_at_every_point(decoder: Decoder, point: str, what: Callable[..., None]) -> None:
    """Guards against pages, rows, locks and claims that an abort, a flush, weights, a pause or a
    retraction loses, and against answers that change or end twice."""
    req = bring_to(decoder, point)
    check(decoder)
    assert not decoder.is_fully_idle()
    what(decoder, req)
    check(decoder)
    decoder.drain()
    check_idle(decoder)
    if what is not abort:
        assert req.output_ids == [2] * 30


@pytest.mark.parametrize("point", POINTS[:3])
def test_the_idle_check_knows_of_turns(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    """Guards against SGLang's check of an idle server, which would take the pages of a turn that a
    pause holds for leaked ones, and end the server."""
    checked: list[bool] = []
    monkeypatch.setattr(
        scheduler_runtime_checker_mixin.SchedulerRuntimeCheckerMixin,
        "self_check_during_idle",
        lambda self: checked.append(True),
    )
    bring_to(decoder, point)
    decoder.self_check_during_idle()
    assert not checked
    decoder.drain()
    decoder.self_check_during_idle()
    assert checked


def test_memory_is_released_after_the_turns(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a release of memory that waits for ever for turns that a pause holds."""
    monkeypatch.setattr(Decoder, "release_when_idle", lambda self: None)
    bring_to(decoder, "queued")
    decoder.pause_generation(PauseGenerationReqInput(mode="retract"))
    turn(decoder, 2)
    assert decoder.local
    decoder._waiting_release = object()
    turn(decoder, 40)
    assert not decoder.local


# ---- overlap scheduling ----


class OverlappedTurns(Overlapped):
    """Chunks are written when the loop waits for their result, like decode steps."""

    def run_batch(self, batch: Any, *arguments: Any) -> Any:
        if not batch.forward_mode.is_extend():
            return super().run_batch(batch, *arguments)
        writes = self.chunk_writes(batch)
        result = self.chunk_result([2] * len(batch.reqs))
        batch.output_ids = result.next_token_ids

        def end_of_step() -> None:
            for slots, values in writes:
                kv.write(self.pool, slots, values)

        result.copy_done = SimpleNamespace(synchronize=end_of_step)
        return result


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("seed", range(4))
def test_overlapped(page: int, seed: int) -> None:
    """Guards against pages that are given back while a chunk in flight uses them, and against a
    request in two batches at once."""
    decoder = OverlappedTurns(page, 1024, local=30, chunk=16)
    decoder.result_queue = deque()
    decoder.play(random_talks(decoder, seed))
    check_idle(decoder)
    turns = decoder.local_turns.metrics.turns
    assert turns["local", "always"] > 10 and turns["remote", "long"] > 0


# ---- long lives ----


class LocalLife(Life):
    WEIGHTS: ClassVar[dict[str, float]] = Life.WEIGHTS | {"abort_local": 1, "batch": 44}

    def abort_local(self, number: int) -> None:
        self._abort(self.decoder.local, number)


@pytest.mark.parametrize(
    ("page", "tokens", "seed", "steps"),
    [(1, 600, 1, 0), (16, 1024, 2, 0), (64, 2048, 3, 0), (1, 600, 4, 3), (16, 1024, 5, 1)],
)
def test_random_life(no_prefix_wait: None, page: int, tokens: int, seed: int, steps: int) -> None:
    """Guards against any order of arrivals, chunks, evictions, retractions, failures and aborts
    that leaks a page or a lock, or lets a request read another one's KV."""
    life = LocalLife(Decoder(page, tokens, local=60, chunk=24, steps=steps), seed)
    life.run(1200, seed)
    turns = life.decoder.local_turns.metrics.turns
    assert turns["local", "always"] > 50 and turns["remote", "long"] > 10


class LocalServer(DecodeServer):
    """Any order of events, of which turns that are computed here are some."""

    def build(self, page: int, tokens: int, steps: int) -> list[Any]:
        decoder = Decoder(page, tokens, rows=6, local=60, lost=100, chunk=24, steps=steps)
        return [LocalLife(decoder)]

    @precondition(lambda self: self.decoder.local)
    @rule(number=NUMBERS, action=st.sampled_from(["batch", "abort_local", "pause_and_update"]))
    def local(self, number: int, action: str) -> None:
        self.take(action, number)

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "lives"):
            for (where, reason), count in self.decoder.local_turns.metrics.turns.items():
                self.taken.update({where: count, reason: count})


@pytest.mark.timeout(600)
def test_any_sequence_of_events(no_prefix_wait: None) -> None:
    """Guards against an order of events that nobody thought of."""
    LocalServer.taken = Counter()
    run_state_machine_as_test(
        LocalServer,
        settings=settings(
            max_examples=120, stateful_step_count=50, suppress_health_check=list(HealthCheck)
        ),
    )
    assert LocalServer.taken["steps"] > 4000
    # Enough of either kind for them to meet, and some that prefill failed.
    taken = LocalServer.taken
    assert taken["local"] > 100 and taken["long"] > 50 and taken["no_prefill"] > 0, taken


# ---- two ranks ----


class LocalRankLife(RankLife):
    WEIGHTS: ClassVar[dict[str, float]] = RankLife.WEIGHTS | {"abort_local": 1, "batch": 44}
    abort_local = LocalLife.abort_local


@pytest.mark.parametrize(("seed", "steps"), [(1, 0), (2, 0), (3, 3)])
def test_two_ranks(no_prefix_wait: None, seed: int, steps: int) -> None:
    """Guards against ranks that choose by what each has measured, and then run other batches."""

    def build(rank: int, group: RankGroup) -> LocalRankLife:
        policy = ("lru", "mru")[rank]
        decoder = Decoder(16, 640, policy=policy, group=group, steps=steps, local=60)
        limits = Limits(tokens=60, chunk=24, share=0.3)
        decoder.__dict__["local_turns"] = turns = LocalTurns(decoder, limits)
        # One rank is slower than the other, and each has a clock of its own.
        turns._clock = lambda: time.monotonic() * (1 + 2 * rank)
        return LocalRankLife(decoder, rank, seed)

    rng = random.Random(seed)
    with ranks_reduce():
        pair = Pair(build)
        try:
            for _ in range(500):
                (action,) = rng.choices(list(LocalRankLife.WEIGHTS), LocalRankLife.WEIGHTS.values())
                number = rng.getrandbits(30)
                pair.run(lambda life, name=action, bits=number: life.step(name, bits))
            pair.run(lambda life: life.decoder.drain())
            pair.run(lambda life: check_idle(life.decoder))
        finally:
            pair.close()
    ours, theirs = (life.decoder.local_turns for life in pair.sides)
    assert ours.metrics.turns == theirs.metrics.turns
    assert {where for where, _ in ours.metrics.turns} == {"local", "remote"}
    assert ours.measured.votes() != theirs.measured.votes(), "they measured the same"


# ---- who is left to prefill ----


def request(**changes: Any) -> Any:
    plain = {
        "return_logprob": False,
        "logprob_start_len": -1,
        "return_hidden_states": False,
        "return_routed_experts": False,
        "input_embeds": None,
        "multimodal_inputs": None,
        "session": None,
        "sampling_params": SimpleNamespace(max_new_tokens=8, n=1),
        "to_finish": None,
        "origin_input_ids": [1, 2, 3],
    }
    assert changes.keys() <= plain.keys()
    return SimpleNamespace(**plain | changes)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, None),
        ({"return_logprob": True, "logprob_start_len": 3}, None),
        ({"return_logprob": True, "logprob_start_len": 0}, "input_logprobs"),
        ({"return_hidden_states": True}, "hidden_states"),
        ({"return_routed_experts": True}, "routed_experts"),
        ({"input_embeds": [[0.0]]}, "embeddings"),
        ({"multimodal_inputs": object()}, "multimodal"),
        ({"session": object()}, "session"),
        ({"sampling_params": SimpleNamespace(max_new_tokens=0, n=2)}, "no_output"),
        ({"to_finish": object()}, "aborted"),
    ],
)
def test_only_prefill_can(changes: dict[str, Any], why: str | None) -> None:
    """Guards against an answer without what only prefill sends, and names that SGLang changed."""
    assert only_prefill_can(request(**changes)) == why
    real = Req("r", "", [1, 2, 3], SamplingParams())
    assert all(hasattr(real, name) for name in vars(request()))
