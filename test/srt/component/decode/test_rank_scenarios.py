"""Reductions of two ranks of one decode server, and decisions if they differ.

``test_random_lives`` has rooms that fail, metadata that arrive and deadlines that pass on one rank,
with a control for each.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from component.decode.checks import check
from component.decode.decoder import Decoder
from component.decode.pair import Pair, ranks_reduce
from component.decode.steps import admit, ids, in_tree, run, serve
from sglang.srt.disaggregation.delta.rank_agreement import RanksDiverged
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

#: Values of one admission step: two of the checksum, room for 64 states and offers, 4 of the pool.
ADMISSION = 2 + 64 + 64 + 4
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

    def admit(self, *prompts: list[int], new: int = 4) -> None:
        """Submit requests on both ranks, and run a step."""
        self.each(lambda decoder: admit(decoder, *prompts, new=new))

    def last_rooms(self) -> list[Any]:
        return [decoder.rooms[-1] for decoder in self.decoders]

    def serve(self, *prompts: list[int]) -> None:
        """Serve prompts to their end, so that only both trees keep them."""
        self.each(lambda decoder: serve(decoder, *prompts))
        self.pair.collectives()


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """Two ranks; a parameter is the number of draft steps."""
    with ranks_reduce():
        server = Server(getattr(request, "param", 0))
        yield server
        server.pair.close()


EITHER = pytest.mark.parametrize("rank", [0, 1])


def test_reductions_of_a_step(server: Server) -> None:
    """Guards against a server that spends its idle time in reductions, and against a collective for
    each request: twenty are handshaken, admitted, refused and polled with one reduction for each of
    these three. A waiting queue, or retracted requests, cost one."""

    def step() -> list[int]:
        server.each(lambda decoder: decoder.tick_queues())
        return server.pair.collectives()

    server.serve(PROMPT)
    assert step() == []
    server.admit(*([*PROMPT, number] for number in range(20)), new=2)
    assert [len(decoder.queued) for decoder in server.decoders] == [12, 12]
    assert server.pair.collectives() == [20, ADMISSION, 8], "handshakes, admission, transfers"
    assert step() == [ADMISSION, 16]
    server.serve()
    server.each(lambda decoder: run(decoder, *(ids(start, 40) for start in (1, 2, 3)), steps=3))
    server.each(lambda decoder: decoder.retract())
    assert [len(decoder.retracted) for decoder in server.decoders] == [1, 1]
    server.pair.collectives()
    assert step() == [ADMISSION]
    server.serve()


def test_another_request_on_one_rank_ends_the_server(server: Server) -> None:
    """Guards against ranks that continue with different requests at one place: each would write its
    own request's KV into pages that the others gave to another one."""
    server.each(lambda decoder: decoder.submit(PROMPT))
    server.decoders[1].submitted[0].rid = "another"
    with pytest.raises(RanksDiverged, match="--disaggregation-decode-enable-radix-cache"):
        server.each(lambda decoder: decoder.tick_queues())


@EITHER
def test_metadata_of_another_room_on_one_rank(server: Server, rank: int) -> None:
    """Guards against another request's first token in an answer, and against wrong metadata that
    only one rank detects."""
    server.admit(PROMPT)
    server.each(lambda decoder: decoder.deliver(decoder.submitted[0]))
    wrong, (room, _) = server.decoders[rank], server.last_rooms()
    wrong.metadata.bootstrap_room[room.metadata_index, 0] = 4711
    server.each(lambda decoder: decoder.tick_queues())
    (req,) = wrong.submitted
    reason = wrong.mailbox.reasons[req.rid]["message"]
    assert f"metadata slot {room.metadata_index} holds the metadata of room 4711" in reason
    server.each(lambda decoder: decoder.tick_queues())
    for decoder in server.decoders:
        assert decoder.submitted[0].output_ids == [] == decoder.held
        assert decoder.tree_cache.total_size() == 0
    server.serve()


@pytest.mark.hazard("ranks-disagree-on-prefix")
@pytest.mark.parametrize("server", [0, 1], ids=["", "drafts"], indirect=True)
@EITHER
def test_a_tree_that_forgot_more(server: Server, rank: int) -> None:
    """Guards against prefixes of different lengths, with which prefill would write into wrong
    pages; and against a rank that keeps the longer one locked."""
    server.serve(PROMPT[:65])
    server.serve(PROMPT)
    server.decoders[rank].tree_cache.evict(EvictParams(num_tokens=32))
    left = in_tree(server.decoders[rank], PROMPT)
    assert left == 64 < in_tree(server.decoders[1 - rank], PROMPT)
    server.admit([*PROMPT, 1])
    assert [room.prefix_len for room in server.last_rooms()] == [left, left]
    server.serve()


@EITHER
def test_a_prefill_server_that_one_rank_does_not_know(server: Server, rank: int) -> None:
    """Guards against a prefix on one rank and none on the other, if one of them does not know yet
    that the prefill server accepts one."""
    server.serve(PROMPT)
    server.decoders[rank].kv_manager.stock_peers.add("10.0.0.1:8998")
    server.admit([*PROMPT, 1])
    found = [(room.prefix_len, len(room.pages)) for room in server.last_rooms()]
    assert found == [(0, 11), (0, 11)]
    server.serve()


def test_pools_that_differ_go_by_the_smallest(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against ranks that diverge because one of them lost pages: the smaller pool decides,
    and the log reports it once."""
    poor = server.decoders[1].token_to_kv_pool_allocator
    lost = poor.alloc(320)
    for decoder in server.decoders:
        for start in (1, 2):
            decoder.submit(ids(start, 200), new=4)
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            server.pair.call(lambda rank: server.decoders[rank].tick_queues())
    assert [len(decoder.in_transfer) for decoder in server.decoders] == [1, 1]
    complaints = [line for line in caplog.messages if "pools of this server's ranks differ" in line]
    assert len(complaints) == 2  # one from each rank
    poor.free(lost)
    server.serve()
