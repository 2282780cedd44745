"""Turns that a decode server computes itself: their choice, chunks and answers; and turns whose
prefill server is lost.

``test_stages`` has the events of such turns at each stage, and their leftovers.
"""

from __future__ import annotations

from typing import Any

import pytest

from benchmark.harness import without_engine
from component.decode.checks import check_idle
from component.decode.decoder import VOCABULARY, Decoder
from component.decode.overlapped import Ahead, Overlapped, random_talks
from component.decode.pair import Pair, RankGroup, ranks_reduce
from component.decode.peer import Room, Unasked
from component.decode.stages import fail_room, freeze
from component.decode.steps import PROMPT, admit, finish, ids, serve, tick, turn
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.decode import DecodeRequest
from sglang.srt.disaggregation.delta.metrics import REASONS
from sglang.srt.disaggregation.policy.chunk_times import UNKNOWN
from sglang.srt.disaggregation.policy.memory import page_floor
from sglang.srt.disaggregation.policy.pace import Limits
from sglang.srt.managers import scheduler as scheduler_module
from sglang.srt.sampling.sampling_params import SamplingParams

NEW = list(range(50))
CHUNK = 32


@pytest.fixture(
    params=[(1, 0), (16, 0), (16, 3), pytest.param((1, 3), marks=pytest.mark.nightly)],
    ids=["1", "16", "16-drafts", "1-drafts"],
)
def decoder(request: pytest.FixtureRequest) -> Decoder:
    """A decode server with the history in its tree; with and without a draft model."""
    page, steps = request.param
    decoder = Decoder(page, 1024, local=200, chunk=CHUNK, steps=steps)
    # With a draft model the slot of a text's last token is shared only with the token behind it.
    serve(decoder, PROMPT + NEW[: bool(steps)])
    return decoder


def test_a_turn_is_computed_here(decoder: Decoder) -> None:
    """Guards against a turn that is announced although decode computes it, and against KV, tree and
    pools that differ from those after a transfer."""
    req = decoder.submit(PROMPT + NEW)
    room = decoder.room(req)
    decoder.tick_queues()
    assert room.yielded and room.pages is None and room.cleared
    assert decoder.in_transfer == [] and decoder.local == [req]
    turn(decoder)
    assert req.output_ids == []
    turn(decoder)
    assert req.output_ids == [2]  # two chunks: 32 tokens, and the rest
    assert req.cached_tokens == req.cached_tokens_device == len(PROMPT)
    finish(decoder)
    (again,) = admit(decoder, req.origin_input_ids + req.output_ids)
    # An answer's last token has no KV, and the one before it no draft KV that can be shared.
    held = len(PROMPT + NEW) + 7 - bool(decoder.steps)
    assert again.cache_protected_len == page_floor(held, decoder.page_size)


@pytest.mark.parametrize(
    ("prompt", "prefix"), [(PROMPT, 80), ([49, 48, 47], 0)], ids=["full hit", "no history"]
)
def test_at_least_a_token_is_computed(decoder: Decoder, prompt: list[int], prefix: int) -> None:
    """Guards against a chunk of no tokens, against shared pages that are written again, and against
    a turn without history that is not computed here."""
    (req,) = admit(decoder, prompt, new=3)
    assert req.cache_protected_len == max(0, prefix - decoder.page_size)
    finish(decoder)
    assert req.output_ids == [2] * 3 and req.cached_tokens == req.delta.explanation.hit_tokens


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({}, "local short"),
        ({"bootstrap_host": "10.0.0.9"}, "remote not_shared"),  # it is a stock server
        ({"origin_input_ids": PROMPT + [7] * 201}, "remote long"),
        ({"return_logprob": True, "logprob_start_len": 80}, "local short"),
        ({"return_logprob": True, "logprob_start_len": 0}, "remote input_logprobs"),
        ({"return_hidden_states": True}, "remote hidden_states"),
        ({"return_routed_experts": True}, "remote routed_experts"),
        ({"session": object()}, "remote session"),
        ({"input_embeds": [[0.0]]}, "remote not_shared"),
        ({"sampling_params": SamplingParams(max_new_tokens=0)}, "remote no_output"),
    ],
)
def test_what_goes_to_prefill(changes: dict[str, Any], where: str) -> None:
    """Guards against an answer without data that only prefill sends, against a decode server that
    computes longer turns than configured, and against a prefill server that keeps waiting."""
    decoder = Decoder(16, 1024, local=200, chunk=CHUNK)
    decoder.kv_manager.stock_peers.add("10.0.0.9:8998")
    req = decoder.submit(PROMPT)
    assert all(hasattr(req, name) for name in changes)
    req.__dict__.update(changes)
    decoder.tick_queues()
    assert decoder.local_turns.telemetry.by("decode_turns") == {tuple(where.split()): 1}
    assert where.split()[1] in REASONS
    is_local = where.startswith("local")
    assert (req in decoder.local) == is_local == decoder.rooms[0].yielded


def test_a_burst_beyond_the_places() -> None:
    """Guards against turns that wait here for a place in the running batch while prefill could
    compute them."""
    decoder = Decoder(16, 4096, rows=4, local=200, chunk=CHUNK)
    for seed in range(6):
        decoder.submit(ids(seed, 40), new=2)
    decoder.tick_queues()
    made = {("local", "short"): 4, ("remote", "no_place"): 2}
    assert decoder.local_turns.telemetry.by("decode_turns") == made
    decoder.abort("")
    finish(decoder)


def test_decode_steps_between_two_chunks() -> None:
    """Guards against running answers that stall while a long turn is computed."""
    limits = Limits(200, CHUNK, share=0.25)
    # A chunk takes as long as a step.
    decoder = Decoder(16, 1024, limits=limits, costs=(1000, 0, 1000, UNKNOWN))
    running = decoder.submit([3, 2, 1], new=40)
    turn(decoder, 2)
    long, lengths = decoder.submit([9] * 150), [len(running.output_ids)]
    while not long.output_ids:
        turn(decoder)
        lengths.append(len(running.output_ids))
    chunks = [at for at in range(1, len(lengths)) if lengths[at] == lengths[at - 1]]
    assert len(chunks) == 5  # of 32 tokens
    assert {later - at for at, later in zip(chunks, chunks[1:], strict=False)} == {3 + 1}
    finish(decoder)


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("steps", [0, 3])
def test_overlapped(page: int, seed: int, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against pages, rows or lengths of a chunk in flight that belong to another request,
    against a request in two batches at once, and against a first step that drafts from another
    request's start; with retractions, if there is a draft model."""
    if seed and steps:
        monkeypatch.setattr(scheduler_module, "TEST_RETRACT", True)
        monkeypatch.setattr(scheduler_module, "TEST_RETRACT_INTERVAL", 7)
    size: dict[str, Any] = {"local": 30, "chunk": 16}
    decoder = Ahead(page, 1536, steps=3, **size) if steps else Overlapped(page, 1024, **size)
    decoder.play(random_talks(decoder, seed))
    if isinstance(decoder, Ahead):
        decoder.answers_are_right()
    finish(decoder)
    turns = decoder.local_turns.telemetry.by("decode_turns")
    assert turns["local", "short"] > 10 and turns["remote", "long"] > 0


def test_a_pool_that_retracts_beside_a_step_in_flight() -> None:
    """Guards against a copy of a retracted request without the writes of the step in flight:
    SGLang's copies to the CPU wait for the device, and so must the rig's."""
    decoder = Overlapped(16, 352, rows=12, reserve=16, local=60, chunk=24)
    decoder.play(random_talks(decoder, 4))
    assert sum(req.retraction_count for req in decoder.submitted) > 0
    finish(decoder)


# ---- the prefill server is lost ----

LOST = 100


@pytest.fixture
def remote() -> Decoder:
    """A decode server with the history, which leaves every turn to prefill until that is lost."""
    decoder = Decoder(16, 1024, lost=LOST, chunk=32)
    serve(decoder, PROMPT)
    return decoder


@pytest.mark.parametrize("at", ["handshake", "in transfer", "in line"])
def test_new_talks_fail_by_name(remote: Decoder, at: str) -> None:
    """Guards against a decode server that computes whole prompts, and against a request that waits
    for ever for a lost server, or for memory that it will not get, and blocks all others: pages of
    lost transfers may still be written to for a while."""
    if at == "in line":
        admit(remote, [7] * 600)
    (req,) = admit(remote, [8] * 500, ready=at != "handshake")
    assert (req in remote.in_transfer) == (at == "in transfer")
    freeze(remote, req)
    turn(remote, 2)
    (other,) = admit(remote, [9] * 20, host="10.0.0.2")
    turn(remote)
    reason = remote.mailbox.reasons[req.rid]
    assert "--disaggregation-decode-fallback-prefill-tokens" in reason["message"]
    assert reason["status_code"] == 500
    assert other in remote.in_transfer
    finish(remote)
    assert ("local", "no_prefill") not in remote.local_turns.telemetry.by("decode_turns")


@pytest.mark.parametrize("lost", [LOST, 0], ids=["hidden states", "without the flag"])
def test_what_only_prefill_can(lost: int) -> None:
    """Guards against an answer without requested data, and against turns that are computed here by
    a server without the flag."""
    decoder = Decoder(16, 1024, local=10, lost=lost)
    req = decoder.submit(PROMPT)
    req.return_hidden_states = bool(lost)
    tick(decoder)
    fail_room(decoder, req)
    turn(decoder)
    assert req.finished() and decoder.mailbox.reasons[req.rid]["status_code"] == 500
    finish(decoder)


def test_a_turn_without_prefill_is_retracted() -> None:
    """Guards against a request that decode computes after the loss of its prefill server and that
    never resumes: no request is admitted while it waits."""
    decoder = Decoder(16, 1024, lost=LOST, chunk=32)
    alone = [decoder.submit(ids(seed, 40), new=60) for seed in (1, 2)]
    for req in alone:
        fail_room(decoder, req)
    turn(decoder, 12)
    decoder.retract()
    assert decoder.retracted
    other = decoder.submit(ids(3, 40), new=2)
    turn(decoder, 20)
    assert not decoder.retracted and other in decoder.in_transfer
    finish(decoder)


# ---- a server that cannot be reached ----


@pytest.fixture
def unreachable() -> Decoder:
    """A decode server without an answering prefill server, after ten queries."""
    decoder = Decoder(16, 1024, lost=LOST, chunk=32)
    decoder.kv_manager.servers = Unasked(asking=False)
    decoder.disagg_decode_prealloc_queue.__dict__["_max_ensure_retries"] = 10
    serve(decoder, PROMPT)
    return decoder


def seconds(decoder: Decoder, count: int = 1) -> None:
    """Let ``count`` seconds pass, with a turn of the scheduler's loop in each."""
    for _ in range(count):
        decoder.now += 1.0
        turn(decoder)


def arrive(decoder: Decoder, prompt: list[int], new: int = 8) -> Any:
    """Submit a request whose prefill server is not known yet."""
    return decoder.submit(prompt, new=new, ready=False, pending=True)


@pytest.mark.parametrize("before", [False, True])
def test_a_server_that_cannot_be_reached(unreachable: Decoder, before: bool) -> None:
    """Guards against a turn that waits for many queries to a server that it does not need; and
    against a new talk that fails at once, because the server was queried for others before, or
    waits for ever."""
    if before:
        req = arrive(unreachable, PROMPT + NEW)
        seconds(unreachable, 9)
        assert req.output_ids == [2] * 8
        room = unreachable.rooms[-1]
        assert room.cleared and not (room.yielded or room.withdrawn)  # no server to notify
    req = arrive(unreachable, [7] * (LOST + 1))
    seconds(unreachable, 5)
    assert not req.finished()
    seconds(unreachable, 11)
    assert req.finished() and unreachable.mailbox.ends[req.rid] == 1
    finish(unreachable)
    assert unreachable.local_turns.telemetry.by("decode_turns")["local", "no_prefill"] == before


def test_a_long_turn_waits_for_the_server(unreachable: Decoder) -> None:
    """Guards against a new talk that fails at the first attempt although the server may come back,
    and against requests of other servers that wait behind it for memory that it does not need."""
    (held,) = admit(unreachable, [7] * 600)
    req = arrive(unreachable, [8] * 500)
    other = unreachable.submit([9] * 20, host="10.0.0.2")
    seconds(unreachable, 4)
    assert unreachable.in_transfer == [held, other] and not unreachable.room(req).cleared
    unreachable.room(req).state = KVPoll.WaitingForInput  # it came back, the handshake is done
    unreachable.disagg_decode_prealloc_queue.pending_reqs = []
    finish(unreachable)
    assert len(req.output_ids) == 8


class NumberedRoom(Room):
    """A room with an entry in the manager's table until it is cleared, as real receivers have."""

    def __init__(self, rooms: dict[int, int], number: int) -> None:
        super().__init__()
        self._rooms, self._number = rooms, number
        rooms[number] = KVPoll.Bootstrapping

    def clear(self) -> None:
        super().clear()
        self._rooms.pop(self._number, None)


class Unreached:
    """A rank of a decode server without an answering prefill server."""

    def __init__(self, rank: int, group: RankGroup) -> None:
        self.decoder = Decoder(16, 1024, lost=LOST, chunk=32, group=group)
        self.decoder.submit(PROMPT, new=1)
        self.manager = self.decoder.kv_manager
        self.manager.servers = Unasked(asking=False)
        queue = self.decoder.disagg_decode_prealloc_queue
        queue._create_receiver_and_enqueue = self._enqueue

    def _enqueue(self, req: Any) -> Any:
        room = NumberedRoom(self.manager.request_status, req.bootstrap_room)
        self.decoder.rooms.append(room)
        entry = DecodeRequest(req=req, kv_receiver=room)
        self.decoder.disagg_decode_prealloc_queue.queue.append(entry)
        return entry

    def arrive(self, number: int, room: int) -> Any:
        """Submit a turn with the room number ``room``."""
        req = without_engine.request(number, PROMPT + NEW, 2, VOCABULARY)
        req.bootstrap_host, req.bootstrap_room = "10.0.0.1", room
        req.disagg_prefill_dp_rank = 0
        self.decoder.init_req_max_new_tokens(req)
        self.decoder.submitted.append(req)
        self.decoder._add_request_to_queue(req)
        return req


@pytest.mark.hazard("room-number-reused", "ranks-part-in-collective")
def test_a_number_that_comes_again() -> None:
    """Guards against a room number that is in use on one rank and not on the other, because one
    rank's query to the lost prefill server is answered first: only one rank refuses the next
    request with that number, and the server hangs."""
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
