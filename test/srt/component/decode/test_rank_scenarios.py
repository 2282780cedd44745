"""What two ranks of one decode server reduce, and decide where they differ.

Rooms that fail, metadata that land and deadlines that pass on one of them are in
``test_random_lives``, with a control for each.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from component.decode.checks import check, check_idle
from component.decode.decoder import Decoder
from component.decode.pair import Pair, ranks_reduce
from component.decode.steps import ids, in_tree, run
from sglang.srt.disaggregation.delta.rank_agreement import RanksDiverged
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

#: Values of one admission step: two of the checksum, room for 64 states and offers, 6 of the pool.
ADMISSION = 2 + 64 + 64 + 6
PROMPT = [token % 50 for token in range(3, 163)]  # 160 tokens: 10 pages


class Server:
    """A decode server with two ranks. ``steps``: of a draft model."""

    def __init__(self, steps: int = 0) -> None:
        self.pair = Pair(
            lambda rank, group: SimpleNamespace(decoder=Decoder(16, 640, group=group, steps=steps))
        )
        self.decoders: list[Decoder] = [side.decoder for side in self.pair.sides]
        self.pair.collectives()

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

    def admit(self, token_ids: list[int], new: int = 4, **options: Any) -> int:
        """The same, and a step."""
        number = self.submit(token_ids, new=new, **options)
        self.tick()
        return number

    def rooms(self, number: int) -> list[Any]:
        return [decoder.rooms[number] for decoder in self.decoders]

    def deliver(self, number: int) -> None:
        self.each(lambda decoder: decoder.deliver(decoder.submitted[number]))

    def count(self, of: str) -> list[int]:
        """How many requests each rank has "in_transfer", "held" or in its "waiting_queue"."""
        return [len(getattr(decoder, of)) for decoder in self.decoders]

    def finish(self) -> None:
        """Everything ends, and nothing is left."""
        self.each(lambda decoder: decoder.drain())
        self.each(check_idle)

    def serve(self, token_ids: list[int]) -> None:
        """Serve a prompt to its end, so that both trees keep it."""
        self.submit(token_ids, new=1)
        self.finish()


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """Two ranks; a parameter is the number of draft steps."""
    with ranks_reduce():
        server = Server(getattr(request, "param", 0))
        yield server
        server.pair.close()


EITHER = pytest.mark.parametrize("rank", [0, 1])


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
    server.decoders[1].submitted[number].rid = "another"
    with pytest.raises(RanksDiverged, match="--disaggregation-decode-enable-radix-cache"):
        server.tick()


def test_retracted_requests_cost_one_more(server: Server) -> None:
    """Guards against a reduction for each retracted request."""
    server.each(lambda decoder: run(decoder, *(ids(start, 40) for start in (1, 2, 3)), steps=3))
    server.each(lambda decoder: decoder.retract())
    assert server.count("retracted") == [1, 1]
    server.pair.collectives()
    server.tick()
    assert server.pair.collectives() == [ADMISSION]
    server.finish()


@EITHER
def test_metadata_of_another_room_on_one_rank(server: Server, rank: int) -> None:
    """Guards against wrong metadata that only the rank that has them finds out about."""
    req = server.admit(PROMPT)
    server.deliver(req)
    wrong = server.decoders[rank]
    wrong.metadata.bootstrap_room[wrong.rooms[req].metadata_index, 0] = 4711
    server.tick()
    reasons = [
        str(decoder.mailbox.reasons[decoder.submitted[req].rid]) for decoder in server.decoders
    ]
    assert "metadata of room 4711" in reasons[rank]
    server.tick()
    assert server.count("held") == [0, 0]
    assert [decoder.tree_cache.total_size() for decoder in server.decoders] == [0, 0]
    server.finish()


@pytest.mark.hazard("ranks-disagree-on-prefix")
@pytest.mark.parametrize("server", [0, 1], ids=["", "drafts"], indirect=True)
@EITHER
def test_a_tree_that_forgot_more(server: Server, rank: int) -> None:
    """Guards against prefixes of different lengths, where prefill would write into wrong pages; and
    against a rank that keeps the longer one locked."""
    server.serve(PROMPT[:65])
    server.serve(PROMPT)
    server.decoders[rank].tree_cache.evict(EvictParams(num_tokens=32))
    left = in_tree(server.decoders[rank], PROMPT)
    assert left == 64 < in_tree(server.decoders[1 - rank], PROMPT)
    number = server.admit([*PROMPT, 1])
    assert [room.prefix_len for room in server.rooms(number)] == [left, left]
    server.finish()


@EITHER
def test_a_prefill_server_that_one_rank_does_not_know(server: Server, rank: int) -> None:
    """Guards against a prefix on one rank and none on the other, where one of them has not heard
    yet that the prefill server takes one."""
    server.serve(PROMPT)
    server.decoders[rank].kv_manager.stock_peers.add("10.0.0.1:8998")
    server.admit([*PROMPT, 1])
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
    assert server.count("in_transfer") == [1, 1]
    complaints = [line for line in caplog.messages if "pools of this server's ranks differ" in line]
    assert len(complaints) == 2  # one from each rank
    poor.free(lost)
    server.finish()
