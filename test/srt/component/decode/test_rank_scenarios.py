"""One difference between two ranks at a time: what they decide, and with how many collectives."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from component.decode.checks import check, check_idle
from component.decode.decoder import Decoder
from component.decode.pair import Pair, ranks_reduce
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.delta.rank_agreement import RanksDiverged
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

WAIT_TOKENS = "SGLANG_DISAGGREGATION_DECODE_PREFIX_WAIT_TOKENS"
WAIT_TIMEOUT = "SGLANG_DISAGGREGATION_DECODE_PREFIX_WAIT_TIMEOUT"
TIMEOUT = "SGLANG_DISAGGREGATION_DECODE_ADMISSION_TIMEOUT"
#: Values of one admission step: two of the checksum, room for 64 states and offers, 6 of the pool.
ADMISSION = 2 + 64 + 64 + 6
PROMPT = [token % 50 for token in range(3, 163)]  # 160 tokens: 10 pages


def ids(start: int, count: int) -> list[int]:
    """A text of its own for each ``start``."""
    return [(start * 7 + number * (start + 1)) % 50 for number in range(count)]


class Server:
    """A decode server with two ranks."""

    def __init__(self) -> None:
        self.pair = Pair(self._build)
        self.decoders: list[Decoder] = [side.decoder for side in self.pair.sides]
        self.pair.collectives()

    @staticmethod
    def _build(rank: int, group: Any) -> Any:
        side = SimpleNamespace(decoder=Decoder(16, 640, group=group), time=0.0)
        side.decoder.disagg_decode_prealloc_queue.clock = lambda: side.time
        return side

    def each(self, action: Any) -> list[Any]:
        """Call ``action`` with each rank's decoder, and check both."""

        def checked(side: Any) -> Any:
            result = action(side.decoder)
            check(side.decoder)
            return result

        return self.pair.run(checked)

    def submit(self, token_ids: list[int], **options: Any) -> int:
        """A request arrives at both ranks; its number."""
        self.each(lambda decoder: decoder.submit(token_ids, **options))
        return len(self.decoders[0].submitted) - 1

    def tick(self) -> None:
        self.each(lambda decoder: decoder.tick_queues())

    def req(self, rank: int, number: int) -> Any:
        return self.decoders[rank].submitted[number]

    def room(self, rank: int, number: int) -> Any:
        return self.decoders[rank].rooms[number]

    def ends(self, number: int) -> list[int]:
        """How often each rank answered the client."""
        return [decoder.mailbox.ends[decoder.submitted[number].rid] for decoder in self.decoders]

    def finish(self) -> None:
        """Everything ends, and nothing is left."""
        self.each(lambda decoder: decoder.drain())
        self.each(check_idle)

    def serve(self, token_ids: list[int]) -> None:
        """Serve a prompt to its end, so that both trees keep it."""
        self.submit(token_ids, new=1)
        self.finish()

    def fill(self) -> int:
        """A request whose transfer takes nearly the whole pool."""
        filler = self.submit(ids(9, 600), new=1)
        self.tick()
        assert [len(decoder.in_transfer) for decoder in self.decoders] == [1, 1]
        return filler


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """Two ranks; nobody waits for a prefix unless a test asks for it."""
    monkeypatch.setenv(WAIT_TOKENS, "0")
    with ranks_reduce():
        server = Server()
        yield server
        server.pair.close()


def test_an_idle_step_has_no_collective(server: Server) -> None:
    """Guards against a server that spends its idle time, or every decode step, in reductions."""
    server.serve(PROMPT)
    server.pair.collectives()
    server.tick()
    assert server.pair.collectives() == []


def test_one_reduction_admits_many(server: Server) -> None:
    """Guards against a collective for each request: twenty are handshaken, admitted, refused and
    polled with one reduction for each of these three, and one is all that a waiting queue costs."""
    server.serve(PROMPT)
    server.pair.collectives()
    for number in range(20):
        server.submit([*PROMPT, number], new=2)
    server.tick()
    queued = len(server.decoders[0].queued)
    assert queued == 12
    assert server.pair.collectives() == [20, ADMISSION, 8], "handshakes, admission, transfers"
    server.tick()
    assert server.pair.collectives() == [ADMISSION, 16]
    server.finish()


def test_another_request_on_one_rank_ends_the_server(server: Server) -> None:
    """Guards against ranks that go on with different requests in one place: each would put its own
    into pages that the others have given to another one."""
    number = server.submit(PROMPT, new=1)
    server.req(1, number).rid = "another"
    with pytest.raises(RanksDiverged, match="--disaggregation-decode-enable-radix-cache"):
        server.tick()


def test_retracted_requests_cost_one_more(server: Server) -> None:
    """Guards against a reduction for each retracted request."""
    for start in (1, 2, 3):
        server.submit(ids(start, 40), new=40)
    server.tick()
    server.each(lambda decoder: [decoder.deliver(req) for req in decoder.submitted])
    server.tick()
    for _ in range(3):
        server.each(lambda decoder: decoder.tick_batch())
    server.each(lambda decoder: decoder.retract())
    assert len(server.decoders[0].disagg_decode_prealloc_queue.retracted_queue) == 1
    server.pair.collectives()
    server.tick()
    assert server.pair.collectives() == [ADMISSION]
    server.finish()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_heartbeat_fails_a_waiting_room_on_one_rank(server: Server, rank: int) -> None:
    """Guards against a room that one rank answers as failed while the other keeps it queued: from
    then on they would reduce lists of different lengths."""
    filler = server.fill()
    waiting = server.submit(PROMPT, new=4)
    server.tick()
    server.room(rank, waiting).state = KVPoll.Failed
    server.tick()
    assert server.ends(waiting) == [1, 1] and server.ends(filler) == [0, 0]
    rooms = [server.room(side, waiting) for side in (0, 1)]
    assert [len(room.withdrawn) for room in rooms] == [1, 1]
    assert [room.clears for room in rooms] == [1, 1] and rooms[0].pages is None
    server.finish()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_heartbeat_fails_a_transfer_on_one_rank(server: Server, rank: int) -> None:
    """Guards against one rank that gives up what the other commits: both give it up, and keep its
    pages until both are quiet."""
    req = server.submit(PROMPT, new=4)
    server.tick()
    server.each(lambda decoder: decoder.deliver(decoder.submitted[req]))
    server.room(rank, req).state = KVPoll.Failed
    server.room(rank, req).writing = True
    server.tick()
    assert server.ends(req) == [1, 1]
    for _ in range(3):
        server.tick()
        assert [len(d.disagg_decode_transfer_queue.deferred) for d in server.decoders] == [1, 1]
    server.decoders[rank].write_late(server.room(rank, req))
    server.tick()
    assert [len(d.disagg_decode_transfer_queue.deferred) for d in server.decoders] == [0, 0]
    server.finish()


@pytest.mark.hazard("ranks-commit-apart")
@pytest.mark.parametrize("rank", [0, 1])
def test_metadata_land_a_step_later_on_one_rank(server: Server, rank: int) -> None:
    """Guards against a rank that runs a request while the other one still waits for its first
    token: "not yet" must be known before the ranks agree that the transfer is complete."""
    req = server.submit(PROMPT, new=4)
    server.tick()
    late = server.decoders[rank]
    server.each(
        lambda decoder: decoder.deliver(decoder.submitted[req], metadata=decoder is not late)
    )
    for _ in range(3):
        server.tick()
        assert [len(decoder.in_transfer) for decoder in server.decoders] == [1, 1]
    late.deliver(late.submitted[req])
    server.tick()
    assert [len(decoder.waiting_queue) for decoder in server.decoders] == [1, 1]
    server.finish()


@pytest.mark.parametrize("rank", [0, 1])
def test_metadata_of_another_room_on_one_rank(server: Server, rank: int) -> None:
    """Guards against wrong metadata that only the rank that has them finds out about."""
    req = server.submit(PROMPT, new=4)
    server.tick()
    server.each(lambda decoder: decoder.deliver(decoder.submitted[req]))
    wrong = server.decoders[rank]
    wrong.metadata.bootstrap_room[wrong.rooms[req].metadata_index, 0] = 4711
    server.tick()
    assert server.ends(req) == [1, 1]
    reasons = [str(decoder.mailbox.reasons[server.req(0, req).rid]) for decoder in server.decoders]
    assert "metadata of room 4711" in reasons[rank]
    server.tick()
    assert [len(d.disagg_decode_transfer_queue.deferred) for d in server.decoders] == [0, 0]
    assert [decoder.tree_cache.total_size() for decoder in server.decoders] == [0, 0]
    server.finish()


@pytest.mark.parametrize("rank", [0, 1])
def test_the_admission_deadline_passes_on_one_rank(
    server: Server, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """Guards against clocks that decide: one rank's deadline is the deadline of all."""
    monkeypatch.setenv(TIMEOUT, "30")
    server.fill()
    waiting = server.submit(PROMPT, new=4)
    server.tick()
    server.pair.sides[rank].time += 29.9
    server.tick()
    assert server.ends(waiting) == [0, 0]
    server.pair.sides[rank].time += 0.1
    server.tick()
    assert server.ends(waiting) == [1, 1]
    assert [len(server.room(side, waiting).withdrawn) for side in (0, 1)] == [1, 1]
    server.finish()


@pytest.mark.parametrize("rank", [0, 1])
def test_waiting_for_a_prefix_ends_on_one_rank(
    server: Server, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """Guards against a rank that admits a follower which the other one lets wait."""
    monkeypatch.setenv(WAIT_TOKENS, "64")
    monkeypatch.setenv(WAIT_TIMEOUT, "30")
    server.submit(PROMPT, new=4)
    follower = server.submit([*PROMPT, 1], new=4)
    server.tick()
    server.pair.sides[rank].time += 30
    server.tick()  # they agree that it waited enough
    assert [room.pages for room in (server.room(0, follower), server.room(1, follower))] == [
        None
    ] * 2
    server.tick()
    assert [len(decoder.in_transfer) for decoder in server.decoders] == [2, 2]
    server.finish()


@pytest.mark.hazard("ranks-disagree-on-prefix")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_tree_that_forgot_more(server: Server, rank: int) -> None:
    """Guards against prefixes of different lengths, where prefill would write into wrong pages; and
    against a rank that keeps the longer one locked."""
    server.serve(PROMPT[:64])
    server.serve(PROMPT)
    server.decoders[rank].tree_cache.evict(EvictParams(num_tokens=32))
    left = server.decoders[rank].tree_cache.total_size()
    assert 0 < left < 160
    server.submit([*PROMPT, 1], new=4)
    server.tick()
    assert [decoder.rooms[-1].prefix_len for decoder in server.decoders] == [left, left]
    server.finish()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_prefill_server_that_one_rank_does_not_know(server: Server, rank: int) -> None:
    """Guards against a prefix on one rank and none on the other, where one of them has not heard
    yet that the prefill server takes one."""
    server.serve(PROMPT)
    server.decoders[rank].kv_manager.stock_peers.add("10.0.0.1:8998")
    server.submit([*PROMPT, 1], new=4)
    server.tick()
    rooms = [decoder.rooms[-1] for decoder in server.decoders]
    assert [(room.prefix_len, len(room.pages)) for room in rooms] == [(0, 11), (0, 11)]
    server.finish()


def test_pools_that_differ_go_by_the_smallest(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against ranks that part because one of them lost pages: the one with less decides, and
    the log says so, once."""
    poor = server.decoders[1].token_to_kv_pool_allocator
    lost = poor.alloc(320)
    for start in (1, 2):
        for decoder in server.decoders:
            decoder.submit(ids(start, 200), new=4)
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            server.pair.call(lambda rank: server.decoders[rank].tick_queues())
    assert [len(decoder.in_transfer) for decoder in server.decoders] == [1, 1]
    complaints = [line for line in caplog.messages if "pools of this server's ranks differ" in line]
    assert len(complaints) == 2  # one from each rank
    poor.free(lost)
    server.finish()
