"""Turns whose prefill server is lost: which decode computes, and which fail, and how soon.

What such a loss leaves behind at each stage of a request is in ``test_stages``.
"""

from __future__ import annotations

from typing import Any

import pytest

from benchmark.harness import without_engine
from component.decode.checks import check_idle
from component.decode.decoder import VOCABULARY, Decoder
from component.decode.pair import Pair, RankGroup, ranks_reduce
from component.decode.peer import Room, Unasked
from component.decode.stages import fail_room, freeze
from component.decode.steps import PROMPT, admit, finish, serve, tick, turn
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.decode import DecodeRequest

NEW = list(range(40))
LOST = 100


@pytest.fixture(params=[1, 16])
def decoder(request: pytest.FixtureRequest) -> Decoder:
    """It holds the history, and leaves every turn to prefill as long as there is one."""
    decoder = Decoder(request.param, 1024, lost=LOST, chunk=32)
    serve(decoder, PROMPT)
    return decoder


@pytest.mark.parametrize("new", [NEW, []], ids=["delta", "full hit"])
def test_a_transfer_that_fails(decoder: Decoder, new: list[int]) -> None:
    """Guards against a turn that fails although decode could compute it, and against KV in pages
    that a lost prefill server may still write to."""
    (req,) = admit(decoder, PROMPT + new, new=8)
    room = decoder.room(req)
    lost = set(room.pages.tolist())
    freeze(decoder, req)
    turn(decoder)
    assert req.finished_reason is None and decoder.queued == [req]
    decoder.tick_queues()
    assert decoder.local == [req]
    row = decoder.req_to_token_pool.req_to_token[req.req_pool_idx, : req.kv_allocated_len]
    assert not lost & set((row // decoder.page_size).tolist())
    decoder.write_late(room)  # before the end of the turn, which must not see it
    finish(decoder)
    assert req.cached_tokens == (len(PROMPT) if new else 80 - decoder.page_size)
    assert req.output_ids == [2] * 8
    assert decoder.local_turns.metrics.turns["local", "transfer_failed"] == 1


@pytest.mark.parametrize("at", ["handshake", "in transfer", "in line"])
def test_new_talks_fail_by_name(decoder: Decoder, at: str) -> None:
    """Guards against a decode server that computes whole prompts, and against a request that waits
    for ever for a server that is lost, or for memory that it will not be given, with everybody
    behind it: what it had, or another one has, may still be written to for a while."""
    if at == "in line":
        admit(decoder, [7] * 600)
    (req,) = admit(decoder, [8] * 500, ready=at != "handshake")
    assert (req in decoder.in_transfer) == (at == "in transfer")
    freeze(decoder, req)
    turn(decoder, 2)
    (other,) = admit(decoder, [9] * 20, host="10.0.0.2")
    turn(decoder)
    reason = decoder.mailbox.reasons[req.rid]
    assert "--disaggregation-decode-fallback-prefill-tokens" in reason["message"]
    assert reason["status_code"] == 500
    assert other in decoder.in_transfer
    finish(decoder)
    assert ("local", "no_prefill") not in decoder.local_turns.metrics.turns


@pytest.mark.parametrize("lost", [LOST, 0], ids=["hidden states", "without the flag"])
def test_what_only_prefill_can(lost: int) -> None:
    """Guards against an answer without what the client asked for, and against turns that are
    computed here by a server that was not told to."""
    decoder = Decoder(16, 1024, local=10, lost=lost)
    req = decoder.submit(PROMPT)
    req.return_hidden_states = bool(lost)
    tick(decoder)
    fail_room(decoder, req)
    turn(decoder)
    assert req.finished() and decoder.mailbox.reasons[req.rid]["status_code"] == 500
    finish(decoder)


# ---- a server that cannot be reached ----


@pytest.fixture
def unreachable(decoder: Decoder) -> Decoder:
    """No prefill server answers; it is asked ten times."""
    decoder.kv_manager.servers = Unasked(asking=False)
    decoder.disagg_decode_prealloc_queue.__dict__["_max_ensure_retries"] = 10
    return decoder


def seconds(decoder: Decoder, count: int = 1) -> None:
    """So many pass, with a turn of the scheduler's loop in each."""
    for _ in range(count):
        decoder.now += 1.0
        turn(decoder)


def arrive(decoder: Decoder, prompt: list[int], new: int = 8) -> Any:
    """A request whose prefill server is not known yet."""
    return decoder.submit(prompt, new=new, ready=False, pending=True)


def test_a_server_that_cannot_be_reached(unreachable: Decoder) -> None:
    """Guards against a turn that waits until a server that it can do without was asked often."""
    req = arrive(unreachable, PROMPT + NEW)
    seconds(unreachable, 3)
    assert req.output_ids[:1] == [2]
    room = unreachable.rooms[-1]
    assert room.cleared and not room.yielded and not room.withdrawn  # nobody was there to be told
    finish(unreachable)
    assert unreachable.local_turns.metrics.turns["local", "no_prefill"] == 1


@pytest.mark.parametrize("before", [False, True])
def test_a_long_turn_has_attempts_of_its_own(unreachable: Decoder, before: bool) -> None:
    """Guards against a new talk that fails at once, since a server was asked for others before;
    and against one that waits for ever."""
    if before:
        arrive(unreachable, PROMPT + NEW, new=2)
        seconds(unreachable, 9)
    req = arrive(unreachable, [7] * (LOST + 1))
    seconds(unreachable, 5)
    assert not req.finished()
    seconds(unreachable, 11)
    assert req.finished() and unreachable.mailbox.ends[req.rid] == 1
    finish(unreachable)


def test_a_long_turn_waits_for_the_server(unreachable: Decoder) -> None:
    """Guards against a new talk that fails at the first attempt, where the server may come back;
    and against requests of other servers that wait behind it for memory that it does not take."""
    (held,) = admit(unreachable, [7] * 600)
    req = arrive(unreachable, [8] * 500)
    other = unreachable.submit([9] * 20, host="10.0.0.2")
    seconds(unreachable, 4)
    assert unreachable.in_transfer == [held, other]
    queue = unreachable.disagg_decode_prealloc_queue
    assert [entry.req for entry in queue.pending_reqs] == [req]
    room = unreachable.room(req)
    assert isinstance(room, Room) and not room.cleared
    room.state = KVPoll.WaitingForInput  # it came back, and the handshake is done
    queue.pending_reqs = []
    finish(unreachable)
    assert room.pages is not None and len(req.output_ids) == 8


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
        self.decoder.submit(PROMPT, new=1)
        self.manager = self.decoder.kv_manager
        self.manager.servers = Unasked(asking=False)
        queue = self.decoder.disagg_decode_prealloc_queue
        queue.__dict__["_max_ensure_retries"] = 10
        queue._create_receiver_and_enqueue = self._enqueue

    def _enqueue(self, req: Any) -> Any:
        room = NumberedRoom(self.manager.request_status, req.bootstrap_room)
        self.decoder.rooms.append(room)
        entry = DecodeRequest(req=req, kv_receiver=room)
        self.decoder.disagg_decode_prealloc_queue.queue.append(entry)
        return entry

    def arrive(self, number: int, room: int) -> Any:
        """A turn arrives, under the number ``room``."""
        req = without_engine.request(number, PROMPT + NEW, 2, VOCABULARY)
        req.bootstrap_host, req.bootstrap_room = "10.0.0.1", room
        req.disagg_prefill_dp_rank = 0
        self.decoder.init_req_max_new_tokens(req)
        self.decoder.submitted.append(req)
        self.decoder._add_request_to_queue(req)
        return req


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
            pair.run(lambda side: seconds(side.decoder, 6))
            assert all(req.finished() for req in reqs)
            pair.sides[0].manager.try_ensure_parallel_info = lambda address: True
            pair.run(lambda side: seconds(side.decoder))
            reqs = pair.run(lambda side: side.arrive(2, room=77))
            pair.run(lambda side: seconds(side.decoder, 6))
            assert [req.output_ids for req in reqs] == [[2, 2]] * 2
            pair.run(lambda side: check_idle(side.decoder))
        finally:
            pair.close()
    assert [side.manager.request_status for side in pair.sides] == [{}, {}]
