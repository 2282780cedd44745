"""A request in flight ends on all ranks of a prefill server in one step, and not before each rank's
own writes have settled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
    """Two ranks, over gloo."""

    def __init__(self, patch: pytest.MonkeyPatch, turn: Callable[[Prefiller], list[int]]) -> None:
        self.ranks = [Prefiller(patch) for _ in range(2)]
        self.pair = Pair(lambda rank, group: None, gloo=True)
        for rank, group in zip(self.ranks, self.pair.groups, strict=True):
            rank.attn_tp_cpu_group = group
        self._turn = turn

    def prefill(self, room: int = ROOM, failing: int | None = None) -> list[Any]:
        """A request is computed on both ranks, and its transfers are under way; except on the rank
        ``failing``, whose decode rank gives it up first."""
        reqs = [rank.prefill(room, 11, TARGET) for rank in self.ranks]
        for number, rank in enumerate(self.ranks):
            if number == failing:
                rank.rank.withdraw(room)
            rank.rank.pool.run()
            assert bool(rank.rank.agent.under_way(room=room)) == (number != failing)
        return reqs

    def turn(self) -> list[int]:
        """One step of both; the rooms that ended, which are the same."""
        ours, theirs = self.pair.call(lambda rank: self._turn(self.ranks[rank]))
        assert ours == theirs
        assert self.ranks[0].free() == self.ranks[1].free(), "their next decisions would differ"
        return ours

    def tick(self, seconds: float = 0.25) -> None:
        """Time passes, and the workers look."""
        for rank in self.ranks:
            rank.rank.tick(seconds)

    def finish(self) -> None:
        """Everything settles, and nothing is left."""
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


@pytest.mark.hazard("source-given-away")
@pytest.mark.parametrize("failing", [0, 1])
def test_a_room_fails_on_one_rank(server: Server, failing: int) -> None:
    """Guards against one rank's failure freeing the other rank's pages and metadata slot while they
    are read: whoever takes them would be in what decode gets. And against ranks that free them in
    different steps."""
    reqs = server.prefill(failing=failing)
    healthy = server.ranks[1 - failing]
    expected = healthy.expected(reqs[1 - failing], TARGET)
    for _ in range(3):
        server.tick()
        assert server.turn() == []
        for rank in server.ranks:
            rank.overwrite_what_is_free()
    assert healthy.rank.sockets.stopped == [], "it is still written"
    assert healthy.disagg_prefill_inflight_queue[0].disagg_kv_sender.is_stopped, "it was not told"
    healthy.rank.settle()
    assert all(map(np.array_equal, healthy.arrived(), expected))
    server.tick()
    assert server.turn() == [ROOM]
    texts = [str(req.finished_reason.message) for req in reqs]
    assert "decode cancelled it" in texts[failing]
    assert "another rank of this server" in texts[1 - failing]
    assert [rank.mailbox.ends[f"r{ROOM}"] for rank in server.ranks] == [1, 1]
    server.finish()


def test_the_other_rank_never_settles(server: Server) -> None:
    """Guards against a request that is held for ever because one rank's writes hang: their deadline
    bounds it."""
    server.prefill(failing=0)
    assert server.turn() == []
    server.tick(TRANSFER_TIMEOUT_S)
    server.tick()
    assert server.turn() == [ROOM]
    server.finish()


def test_aborted(server: Server) -> None:
    """Guards against an aborted request that is freed on both ranks when the first has settled."""
    reqs = server.prefill()
    for req in reqs:
        req.disagg_kv_sender.abort()
    for rank in server.ranks:
        assert server.turn() == []
        rank.rank.finish()
    assert server.turn() == [ROOM]
    server.finish()


def test_one_rank_had_delivered_everything(server: Server) -> None:
    """Guards against a room that never ends because one rank's part was a success."""
    server.prefill(failing=1)
    server.ranks[0].rank.finish()
    assert server.turn() == [ROOM]
    server.finish()


@pytest.mark.hazard("room-number-reused")
def test_a_second_request_of_its_number(server: Server) -> None:
    """Guards against a second request of a number that ends the first: one rank had delivered all
    of the first and refused the second, the other took both for one, and ended them together."""
    reqs = server.prefill()
    expected = [rank.expected(req, TARGET) for rank, req in zip(server.ranks, reqs, strict=True)]
    server.ranks[0].rank.finish()
    assert server.turn() == []
    second = [rank.rank.sender(ROOM) for rank in server.ranks]
    assert [sender.poll() for sender in second] == [KVPoll.Failed] * 2
    for sender in second:  # what SGLang's bootstrap queue does with it
        with pytest.raises(RuntimeError, match="still uses its number"):
            sender.failure_exception()
    server.ranks[1].rank.finish()
    assert server.turn() == [ROOM]
    assert not any("abort" in str(req.finished_reason.to_json()) for req in reqs)
    for rank, theirs in zip(server.ranks, expected, strict=True):
        assert all(map(np.array_equal, rank.arrived(), theirs))
    server.finish()


def test_success(server: Server) -> None:
    """Guards against a request that ends before all ranks have delivered, and against one that
    waits for others."""
    reqs = server.prefill()
    server.prefill(ROOM + 1)
    expected = [rank.expected(req, TARGET) for rank, req in zip(server.ranks, reqs, strict=True)]
    for rank in server.ranks:
        assert server.turn() == []
        for handle in rank.rank.agent.under_way(room=ROOM):
            rank.rank.agent.settle(handle)
        rank.rank.tick(0.25)
    for rank, theirs in zip(server.ranks, expected, strict=True):
        assert all(map(np.array_equal, rank.arrived(), theirs))
    assert server.turn() == [ROOM]
    server.finish()


def test_a_step_costs_what_sglangs_does(server: Server) -> None:
    """Guards against a second reduction in every step of a server where nothing ends."""
    server.prefill()
    server.pair.collectives()
    server._turn = Prefiller.turn
    server.turn()
    assert server.pair.collectives() == [2]
    server.finish()


@pytest.mark.nightly
def test_with_sglangs_own_queue_decode_gets_other_bytes(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a check that cannot fail: SGLang's own queue ends the request on both ranks,
    and what takes its pages is what decode gets."""
    monkeypatch.delattr(DeltaPrefill, "process_disagg_prefill_inflight_queue")
    monkeypatch.delattr(PrefillStages, "get_rids")
    healthy, reqs = server.ranks[0], server.prefill(failing=1)
    expected = healthy.expected(reqs[0], TARGET)
    assert server.turn() == [ROOM] and healthy.rank.agent.under_way(room=ROOM)
    healthy.overwrite_what_is_free()
    healthy.rank.settle()
    assert not any(map(np.array_equal, healthy.arrived(), expected))
    server.finish()
