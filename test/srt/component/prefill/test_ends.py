"""A request in flight ends on all ranks of a prefill server in one step, and only after each rank's
own writes have settled."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from component.decode.pair import Pair, ranks_reduce
from component.prefill.prefiller import Prefiller
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.delta.prefill.scheduler import DeltaPrefill
from sglang.srt.disaggregation.delta.prefill.stages import PrefillStages
from unit.delta.nixl.prefill_rank import TRANSFER_TIMEOUT_S

ROOM, TARGET = 7, [10, 11, 12]


class Server:
    """A prefill server with two ranks, over gloo."""

    def __init__(self, patch: pytest.MonkeyPatch, turn: Callable[[Prefiller], list[int]]) -> None:
        self.ranks = [Prefiller(patch) for _ in range(2)]
        self.pair = Pair(lambda rank, group: None, gloo=True)
        for rank, group in zip(self.ranks, self.pair.groups, strict=True):
            rank.attn_tp_cpu_group = group
        self.look = turn

    def prefill(self, room: int = ROOM, withdrawn: Sequence[int] = ()) -> list[Any]:
        """Compute a request on both ranks, and start its transfers; on the ranks ``withdrawn``
        decode gives it up first."""
        reqs = [rank.prefill(room, 11, TARGET) for rank in self.ranks]
        for number, rank in enumerate(self.ranks):
            if number in withdrawn:
                rank.rank.withdraw(room)
            rank.rank.pool.run()
            assert bool(rank.rank.agent.under_way(room=room)) == (number not in withdrawn)
        return reqs

    def turn(self) -> list[int]:
        """Run one step of both ranks; return the rooms that ended, equal on both."""
        ours, theirs = self.pair.call(lambda rank: self.look(self.ranks[rank]))
        assert ours == theirs
        assert self.ranks[0].free() == self.ranks[1].free(), "their next decisions would differ"
        return ours

    def tick(self, seconds: float = 0.25) -> None:
        """Advance the time, and let the workers check their transfers."""
        for rank in self.ranks:
            rank.rank.tick(seconds)

    def finish(self) -> None:
        """Settle all transfers, and check that nothing is left."""
        for rank in self.ranks:
            rank.rank.finish()
        self.turn()
        for rank in self.ranks:
            rank.check_idle()


@pytest.fixture(params=[Prefiller.turn, Prefiller.turn_of_a_stage], ids=["plain", "pipeline"])
def server(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with ranks_reduce():
        server = Server(monkeypatch, request.param)
        yield server
        server.pair.close()


#: Events of a room on one rank: decode gives it up before it is written, it is aborted while it is
#: written, it is written, or decode has received it.
WHAT = ("withdrawn", "aborted", "written", "delivered")


@pytest.mark.hazard("source-given-away", "abort-before-settled")
@pytest.mark.parametrize("second", WHAT)
@pytest.mark.parametrize("first", WHAT)
def test_a_room_on_two_ranks(server: Server, first: str, second: str) -> None:
    """Guards against one rank's end that frees the other rank's pages and metadata slot while they
    are read: decode would get a later request's content. And against ranks that free them in
    different steps, or never because one rank's part succeeded."""
    what = (first, second)
    reqs = server.prefill(withdrawn=[at for at in (0, 1) if what[at] == "withdrawn"])
    expected = [rank.expected(req, TARGET) for rank, req in zip(server.ranks, reqs, strict=True)]
    for rank, req, is_now in zip(server.ranks, reqs, what, strict=True):
        if is_now == "aborted":
            req.disagg_kv_sender.abort()
        elif is_now == "delivered":
            rank.rank.finish()
    fails = "withdrawn" in what or "aborted" in what
    for rank, req, is_now in zip(server.ranks, reqs, what, strict=True):
        if is_now not in ("aborted", "written"):
            continue
        for _ in range(2):
            server.tick()
            assert server.turn() == []
            for each in server.ranks:
                each.overwrite_what_is_free()
        assert rank.rank.sockets.stopped == [], "the room is still written"
        if "withdrawn" in what:
            assert req.disagg_kv_sender.is_stopped, "the rank was not notified"
        rank.rank.finish()
    assert server.turn() == [ROOM]
    for rank, req, is_now, theirs in zip(server.ranks, reqs, what, expected, strict=True):
        assert is_now == "withdrawn" or all(map(np.array_equal, rank.arrived(), theirs))
        assert rank.mailbox.ends[f"r{ROOM}"] == 1
        assert ("abort" in str(req.finished_reason.to_json())) == fails
        if fails and is_now != "delivered":
            assert TEXTS[is_now] in str(req.finished_reason.message)
    server.finish()


TEXTS = {
    "withdrawn": "decode cancelled it",
    "aborted": "aborted on the prefill server",
    "written": "another rank of this server",
}


def test_the_other_rank_never_settles(server: Server) -> None:
    """Guards against a request that is held for ever by one rank's hung writes, with a deadline."""
    server.prefill(withdrawn=[0])
    assert server.turn() == []
    server.tick(TRANSFER_TIMEOUT_S)
    server.tick()
    assert server.turn() == [ROOM]
    server.finish()


@pytest.mark.hazard("room-number-reused")
def test_a_second_request_of_its_number(server: Server) -> None:
    """Guards against a second request with the same number that ends the first: one rank had
    delivered all of the first and refused the second, the other took both for one, and ended
    both."""
    reqs = server.prefill()
    expected = [rank.expected(req, TARGET) for rank, req in zip(server.ranks, reqs, strict=True)]
    server.ranks[0].rank.finish()
    assert server.turn() == []
    second = [rank.rank.sender(ROOM) for rank in server.ranks]
    assert [sender.poll() for sender in second] == [KVPoll.Failed] * 2
    for sender in second:  # as SGLang's bootstrap queue does
        with pytest.raises(RuntimeError, match="still uses its number"):
            sender.failure_exception()
    server.ranks[1].rank.finish()
    assert server.turn() == [ROOM]
    assert not any("abort" in str(req.finished_reason.to_json()) for req in reqs)
    for rank, theirs in zip(server.ranks, expected, strict=True):
        assert all(map(np.array_equal, rank.arrived(), theirs))
    server.finish()


def test_a_step_costs_what_sglangs_does(server: Server) -> None:
    """Guards against a second reduction in every step without an ended request."""
    server.prefill()
    server.pair.collectives()
    server.look = Prefiller.turn
    server.turn()
    assert server.pair.collectives() == [2]
    server.finish()


@pytest.mark.nightly
def test_with_sglangs_own_queue_decode_gets_other_bytes(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a check that cannot fail: SGLang's own queue ends the request on both ranks,
    and decode gets the content of the next owner of its pages."""
    monkeypatch.delattr(DeltaPrefill, "process_disagg_prefill_inflight_queue")
    monkeypatch.delattr(PrefillStages, "get_rids")
    healthy, reqs = server.ranks[0], server.prefill(withdrawn=[1])
    expected = healthy.expected(reqs[0], TARGET)
    assert server.turn() == [ROOM] and healthy.rank.agent.under_way(room=ROOM)
    healthy.overwrite_what_is_free()
    healthy.rank.settle()
    assert not any(map(np.array_equal, healthy.arrived(), expected))
    server.finish()
