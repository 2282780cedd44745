"""Turns whose prefill server is lost are computed by decode, and nothing of a lost transfer is."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from benchmark.harness import without_engine
from component.decode.actions import Life
from component.decode.checks import check_idle
from component.decode.decoder import VOCABULARY, Decoder
from component.decode.pair import Pair, RankGroup, ranks_reduce
from component.decode.peer import Room, Unasked
from component.decode.rank_life import RankLife
from component.decode.steps import turn
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.decode import DecodeRequest
from sglang.srt.disaggregation.delta.decode.local_turns import LocalTurns
from sglang.srt.disaggregation.delta.decode.turn_choice import Limits
from sglang.srt.disaggregation.delta.decode.without_prefill import NoPrefill

HISTORY = [token % 50 for token in range(3, 83)]  # 80 tokens: 5 pages of 16
NEW = list(range(40))
LOST = 100


@pytest.fixture(params=[1, 16])
def decoder(request: pytest.FixtureRequest) -> Decoder:
    """It holds the history, and leaves every turn to prefill as long as there is one."""
    decoder = Decoder(request.param, 1024, lost=LOST, chunk=32)
    decoder.submit(HISTORY, new=1)
    deliver_all(decoder)
    check_idle(decoder)
    return decoder


def deliver_all(decoder: Decoder) -> None:
    decoder.drain()


def turns(decoder: Decoder) -> dict[tuple[str, str], int]:
    return dict(decoder.local_turns.metrics.turns)


def lose(room: Room) -> None:
    """The heartbeat gave the prefill server up."""
    room.failure = "lost prefill server"
    if room.state != KVPoll.Success:
        room.state = KVPoll.Failed


@pytest.mark.parametrize("new", [NEW, []], ids=["delta", "full hit"])
def test_a_transfer_that_fails(decoder: Decoder, new: list[int]) -> None:
    """Guards against a turn that fails although decode could compute it, against KV in pages that
    a lost prefill server may still write to, and against what both would leave behind."""
    req = decoder.submit(HISTORY + new)
    decoder.tick_queues()
    room = decoder.room(req)
    lost = set(room.pages.tolist())
    lose(room)
    turn(decoder)
    assert req.finished_reason is None and decoder.queued == [req]
    decoder.tick_queues()
    assert decoder.local == [req]
    row = decoder.req_to_token_pool.req_to_token[req.req_pool_idx, : req.kv_allocated_len]
    own = set((row // decoder.page_size).tolist())
    assert not own & lost
    decoder.write_late(room)  # before the end of the turn, which must not see it
    turn(decoder, 3)
    assert req.output_ids[:1] == [2]
    assert req.cached_tokens == (len(HISTORY) if new else 80 - decoder.page_size)
    decoder.drain()
    check_idle(decoder)
    assert req.output_ids == [2] * 8
    assert turns(decoder)["local", "transfer_failed"] == 1


def test_pages_come_back_when_prefill_cannot_write_any_more(decoder: Decoder) -> None:
    """Guards against pages that are freed with the turn, or never."""
    req = decoder.submit(HISTORY + NEW)
    decoder.tick_queues()
    room = decoder.room(req)
    lose(room)
    turn(decoder, 20)
    assert req.finished()
    (left,) = decoder.disagg_decode_transfer_queue.deferred
    assert left.entry.req is not req and left.entry.req.rid == req.rid
    decoder.write_late(room)
    turn(decoder)
    check_idle(decoder)


def fail_handshake(decoder: Decoder) -> Any:
    req = decoder.submit(HISTORY + NEW, ready=False)
    decoder.tick_queues()
    decoder.room(req).state = KVPoll.Failed
    return req


def fail_while_it_waits(decoder: Decoder) -> Any:
    allocator = decoder.req_to_metadata_buffer_idx_allocator
    free, allocator.free_slots = allocator.free_slots, type(allocator.free_slots)()
    req = decoder.submit(HISTORY + NEW)
    decoder.tick_queues()
    assert decoder.queued == [req]
    lose(decoder.room(req))
    decoder.tick_queues()
    assert decoder.queued == [req] and req.finished_reason is None
    allocator.free_slots = free
    return req


@pytest.mark.parametrize("fail", [fail_handshake, fail_while_it_waits])
def test_before_it_is_announced(decoder: Decoder, fail: Callable[[Decoder], Any]) -> None:
    """Guards against a turn that fails with a prefill server that it does not need."""
    req = fail(decoder)
    turn(decoder, 4)
    assert req.output_ids[:1] == [2]
    decoder.drain()
    check_idle(decoder)
    assert turns(decoder)["local", "no_prefill"] == 1
    assert all(room.cleared for room in decoder.rooms)


@pytest.mark.parametrize("is_announced", [False, True])
def test_new_talks_fail_by_name(decoder: Decoder, is_announced: bool) -> None:
    """Guards against a decode server that computes whole prompts, and against requests that wait
    for ever for a server that is lost."""
    req = decoder.submit([7] * (LOST + 1), ready=is_announced)
    decoder.tick_queues()
    lose(decoder.room(req))
    turn(decoder, 3)
    assert req.finished()
    reason = decoder.mailbox.reasons[req.rid]
    assert "--disaggregation-decode-fallback-prefill-tokens" in reason["message"]
    assert reason["status_code"] == 500
    decoder.drain()
    check_idle(decoder)
    assert ("local", "no_prefill") not in turns(decoder)


@pytest.mark.parametrize("at", ["in transfer", "in line"])
def test_new_talks_need_no_memory_to_fail(decoder: Decoder, at: str) -> None:
    """Guards against a request that waits for memory that it will not be given, with everybody
    behind it: what it had, or another one has, may still be written to for a while."""
    held = decoder.submit([7] * 600)
    decoder.tick_queues()
    if at == "in transfer":
        long = held
    else:
        long = decoder.submit([8] * 500)
        decoder.tick_queues()
        assert decoder.queued == [long]
    lose(decoder.room(long))
    turn(decoder, 2)
    other = decoder.submit([9] * 20, host="10.0.0.2")
    turn(decoder, 2)
    assert long.finished() and "fallback-prefill" in decoder.mailbox.reasons[long.rid]["message"]
    assert other in decoder.in_transfer
    decoder.drain()
    check_idle(decoder)


@pytest.mark.parametrize("at", ["handshake", "ready", "transfer", "saved"])
def test_clients_that_leave(decoder: Decoder, at: str) -> None:
    """Guards against an abort that is taken for a lost prefill server: nobody wants the answer."""
    req = decoder.submit(HISTORY + NEW, ready=at != "handshake")
    if at in ("transfer", "saved"):
        decoder.tick_queues()
    if at == "saved":
        lose(decoder.room(req))
        decoder.disagg_decode_transfer_queue.pop_transferred()
        assert isinstance(decoder.room(req), NoPrefill)
    decoder.abort(req.rid)
    turn(decoder, 2)
    assert req.finished() and req.output_ids == [] and decoder.local == []
    decoder.drain()
    check_idle(decoder)


def test_what_only_prefill_can(decoder: Decoder) -> None:
    """Guards against an answer without what the client asked for."""
    req = decoder.submit(HISTORY + NEW)
    req.return_hidden_states = True
    decoder.tick_queues()
    lose(decoder.room(req))
    turn(decoder)
    assert req.finished() and decoder.mailbox.reasons[req.rid]["status_code"] == 500
    decoder.drain()
    check_idle(decoder)


def test_without_the_flag() -> None:
    """Guards against turns that are computed here by a server that was not told to."""
    decoder = Decoder(16, 1024, local=10)
    req = decoder.submit(HISTORY)
    decoder.tick_queues()
    lose(decoder.room(req))
    turn(decoder)
    assert req.finished()
    decoder.drain()
    check_idle(decoder)


# ---- a server that cannot be reached ----


@pytest.fixture
def unreachable(decoder: Decoder) -> Decoder:
    """No prefill server answers; it is asked ten times. Each turn of the loop takes a second."""
    clock = SimpleNamespace(now=0.0)
    decoder.kv_manager.servers = Unasked(asking=False)
    queue, tick = decoder.disagg_decode_prealloc_queue, decoder.tick_queues
    queue.__dict__["_max_ensure_retries"] = 10
    queue.clock = lambda: clock.now

    def tick_later() -> None:
        clock.now += 1.0
        tick()

    decoder.__dict__["tick_queues"] = tick_later
    return decoder


def test_a_server_that_cannot_be_reached(unreachable: Decoder) -> None:
    """Guards against a turn that waits until a server that it can do without was asked often."""
    req = unreachable.submit(HISTORY + NEW, ready=False, pending=True)
    turn(unreachable, 3)
    assert req.output_ids[:1] == [2]
    room = unreachable.rooms[-1]
    assert room.cleared and not room.yielded and not room.withdrawn  # nobody was there to be told
    unreachable.drain()
    check_idle(unreachable)
    assert turns(unreachable)["local", "no_prefill"] == 1


def test_a_long_turn_has_attempts_of_its_own(unreachable: Decoder) -> None:
    """Guards against a new talk that fails at once, since a server was asked for others before."""
    unreachable.submit(HISTORY + NEW, ready=False, pending=True, new=2)
    turn(unreachable, 9)
    req = unreachable.submit([7] * (LOST + 1), ready=False, pending=True)
    turn(unreachable, 5)
    assert not req.finished()
    turn(unreachable, 11)
    assert req.finished()
    unreachable.drain()
    check_idle(unreachable)


def test_a_long_turn_waits_for_the_server(unreachable: Decoder) -> None:
    """Guards against a new talk that fails at the first attempt, where the server may come back."""
    req = unreachable.submit([7] * (LOST + 1), ready=False, pending=True)
    turn(unreachable, 4)
    queue = unreachable.disagg_decode_prealloc_queue
    assert [entry.req for entry in queue.pending_reqs] == [req]
    room = unreachable.room(req)
    assert isinstance(room, Room) and not room.cleared
    room.state = KVPoll.WaitingForInput  # it came back, and the handshake is done
    queue.pending_reqs = []
    unreachable.tick_queues()
    assert unreachable.in_transfer == [req]
    unreachable.drain()
    check_idle(unreachable)


def test_a_long_turn_that_waits_for_the_server_is_in_nobodys_way(unreachable: Decoder) -> None:
    """Guards against a server that does not answer, and keeps those of others waiting for memory
    that its request was not going to take."""
    held = unreachable.submit([7] * 600)
    unreachable.tick_queues()
    unreachable.submit([8] * 500, ready=False, pending=True)
    other = unreachable.submit([9] * 20, host="10.0.0.2")
    turn(unreachable, 3)
    assert unreachable.in_transfer == [held, other]
    unreachable.drain()
    check_idle(unreachable)


def test_a_long_turn_fails_when_it_was_asked_often_enough(unreachable: Decoder) -> None:
    """Guards against a new talk that waits for ever."""
    req = unreachable.submit([7] * (LOST + 1), ready=False, pending=True)
    turn(unreachable, 16)
    assert req.finished() and unreachable.mailbox.ends[req.rid] == 1
    unreachable.drain()
    check_idle(unreachable)


class NumberedRoom(Room):
    """Its number is in the manager's table until it is cleared, as a backend's receiver's is."""

    def __init__(self, rooms: dict[int, int], number: int) -> None:
        super().__init__()
        self._rooms, self._number = rooms, number
        rooms[number] = KVPoll.Bootstrapping

    def clear(self) -> None:
        super().clear()
        self._rooms.pop(self._number, None)


class Unreached:
    """A rank of a decode server whose prefill server does not answer."""

    def __init__(self, rank: int, group: RankGroup) -> None:
        self.decoder = Decoder(16, 1024, lost=LOST, chunk=32, group=group)
        self.decoder.submit(HISTORY, new=1)
        self.manager, self._now = self.decoder.kv_manager, 0.0
        self.manager.servers = Unasked(asking=False)
        queue = self.decoder.disagg_decode_prealloc_queue
        queue.__dict__["_max_ensure_retries"] = 10
        queue.clock = lambda: self._now
        queue._create_receiver_and_enqueue = self._enqueue

    def _enqueue(self, req: Any) -> Any:
        room = NumberedRoom(self.manager.request_status, req.bootstrap_room)
        self.decoder.rooms.append(room)
        entry = DecodeRequest(req=req, kv_receiver=room)
        self.decoder.disagg_decode_prealloc_queue.queue.append(entry)
        return entry

    def arrive(self, number: int, room: int) -> Any:
        """A turn arrives, under the number ``room``."""
        req = without_engine.request(number, HISTORY + NEW, 2, VOCABULARY)
        req.bootstrap_host, req.bootstrap_room = "10.0.0.1", room
        req.disagg_prefill_dp_rank = 0
        self.decoder.init_req_max_new_tokens(req)
        self.decoder.submitted.append(req)
        self.decoder._add_request_to_queue(req)
        return req

    def second(self) -> None:
        """A second passes, with a turn of the scheduler's loop."""
        self._now += 1.0
        turn(self.decoder)


@pytest.mark.hazard("room-number-reused", "ranks-part-in-collective")
def test_a_number_that_comes_again() -> None:
    """The prefill server could not be reached, and later one rank's question is answered before the
    other's. Guards against a number that is in use on one rank and not on the other: only one of
    them refuses the next request of that number, and the server hangs."""
    with ranks_reduce():
        pair = Pair(Unreached)
        try:
            pair.run(lambda side: side.decoder.drain())
            reqs = pair.run(lambda side: side.arrive(1, room=77))
            for _ in range(6):
                pair.run(Unreached.second)
            assert all(req.finished() for req in reqs)
            pair.sides[0].manager.try_ensure_parallel_info = lambda address: True
            pair.run(Unreached.second)
            reqs = pair.run(lambda side: side.arrive(2, room=77))
            for _ in range(6):
                pair.run(Unreached.second)
            assert [req.output_ids for req in reqs] == [[2, 2]] * 2
            pair.run(lambda side: check_idle(side.decoder))
        finally:
            pair.close()
    assert [side.manager.request_status for side in pair.sides] == [{}, {}]


# ---- long lives ----


class LossyLife(Life):
    WEIGHTS: ClassVar[dict[str, float]] = Life.WEIGHTS | {
        "abort_local": 1,
        "batch": 40,
        "fail_handshake": 6,
        "fail_transfer": 10,
        "write_late": 6,
    }

    def abort_local(self, number: int) -> None:
        self._abort(self.decoder.local, number)


@pytest.mark.parametrize(("page", "tokens", "seed"), [(1, 600, 1), (16, 1024, 2), (64, 2048, 3)])
def test_random_life(no_prefix_wait: None, page: int, tokens: int, seed: int) -> None:
    """Guards against any order of arrivals, lost servers, late writes, evictions and aborts that
    leaks a page or a lock, or lets a request read another one's KV."""
    life = LossyLife(Decoder(page, tokens, local=20, lost=60, chunk=24), seed)
    life.run(1200, seed)
    counted = life.decoder.local_turns.metrics.turns
    for reason in ("transfer_failed", "no_prefill"):
        assert counted["local", reason] > 2, counted


class LossyRankLife(RankLife):
    WEIGHTS: ClassVar[dict[str, float]] = RankLife.WEIGHTS | {
        "batch": 40,
        "fail_handshake": 4,
        "fail_transfer": 6,
    }


@pytest.mark.parametrize("seed", [1, 2])
def test_two_ranks(no_prefix_wait: None, seed: int) -> None:
    """Guards against ranks of which one saves a request that the other fails: one may know of the
    loss before the other does."""

    def build(rank: int, group: RankGroup) -> LossyRankLife:
        decoder = Decoder(16, 640, policy=("lru", "mru")[rank], group=group, local=20, lost=60)
        limits = Limits(tokens=20, chunk=24, always=True, when_lost=60)
        decoder.__dict__["local_turns"] = LocalTurns(decoder, limits)
        return LossyRankLife(decoder, rank, seed)

    rng = random.Random(seed)
    with ranks_reduce():
        pair = Pair(build)
        try:
            names, weights = list(LossyRankLife.WEIGHTS), list(LossyRankLife.WEIGHTS.values())
            for _ in range(500):
                (action,) = rng.choices(names, weights)
                number = rng.getrandbits(30)
                pair.run(lambda life, name=action, bits=number: life.step(name, bits))
            pair.run(lambda life: life.decoder.drain())
            pair.run(lambda life: check_idle(life.decoder))
        finally:
            pair.close()
    ours, theirs = (life.decoder.local_turns.metrics.turns for life in pair.sides)
    assert ours == theirs and ours["local", "transfer_failed"] > 0
