"""Pipeline stages of a prefill server run the same requests, even if a room fails on one of them;
and a stage only sends computed pages."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from component.prefill.prefiller import Prefiller
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.delta.prefill.stages import PrefillStages
from unit.delta.nixl.sides import PAGE

ROOM, OTHER, TARGET = 7, 8, [10, 11, 12]


class Stage(Prefiller):
    """One stage, with SGLang's bootstrap queue."""

    def __init__(self, patch: pytest.MonkeyPatch, is_first: bool) -> None:
        super().__init__(patch)
        self.pp_group = SimpleNamespace(is_first_rank=is_first)
        self.waiting_queue: list[Any] = []
        self.enable_hicache_storage = False
        self.open_bootstrap_queue()

    def arrive(self, room: int) -> None:
        """Queue a request, and announce it to this stage."""
        self.disagg_prefill_bootstrap_queue.queue.append(self.request(room, 11))
        self.rank.announce(room, TARGET if room == ROOM else [20, 21, 22])

    def looks(self) -> tuple[set[str], set[str]]:
        """Return the ids of the queue that are ready, and those that failed, on this stage."""
        ready, failed = self.get_rids(
            self.disagg_prefill_bootstrap_queue.queue, True, [KVPoll.WaitingForInput],
            [KVPoll.Failed],
        )  # fmt: skip
        return set(ready), set(failed)

    def ended(self) -> set[str]:
        """Return the ids of the requests in flight that have ended on this stage."""
        queue = self.disagg_prefill_inflight_queue
        return set(self.get_rids(queue, True, [KVPoll.Success, KVPoll.Failed]))

    @property
    def runs(self) -> list[str]:
        """The requests of the stage's next batch."""
        return sorted(req.rid for req in self.waiting_queue)

    def run(self) -> None:
        """Compute, send and end these requests."""
        for req in self.waiting_queue:
            self.compute(req)
        self.waiting_queue = []
        self.rank.finish()


class Server:
    """Two stages that exchange messages as SGLang's do: ids that are ready on both, and ids that
    failed on one. Each stage then admits requests after the one before it, and passes on the
    ids."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.stages = [Stage(patch, is_first=True), Stage(patch, is_first=False)]
        for stage in self.stages:
            stage.arrive(ROOM)
            stage.arrive(OTHER)

    def take_in(
        self,
        before: Callable[[Server], None] = lambda _: None,
        between: Callable[[Server], None] = lambda _: None,
    ) -> None:
        """Run one round, with actions ``before`` it and ``between`` the stages."""
        looks = [stage.looks() for stage in self.stages]
        ids = [
            sorted(set.intersection(*(ready for ready, _ in looks))),
            sorted(set.union(*(failed for _, failed in looks))),
        ]
        before(self)
        for number, stage in enumerate(self.stages):
            ids = stage.process_bootstrapped_queue(ids)
            if number == 0:
                between(self)

    def withdraw(self, *stages: int) -> None:
        """Withdraw one of the two requests; decode's message has reached these stages."""
        for number in stages:
            self.stages[number].rank.withdraw(ROOM)

    def finish(self) -> None:
        """End the running requests on both stages, and check that nothing is left."""
        for stage in self.stages:
            stage.run()
        both = sorted(set.intersection(*(stage.ended() for stage in self.stages)))
        for stage in self.stages:
            stage.process_disagg_prefill_inflight_queue(both)
            assert stage.disagg_prefill_bootstrap_queue.queue == []
            stage.check_idle()


WHERE = [(0,), (1,), (0, 1)]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    return Server(monkeypatch)


def test_all_is_well(server: Server) -> None:
    """Guards against stages that admit no request."""
    server.take_in()
    assert [stage.runs for stage in server.stages] == [["r7", "r8"]] * 2
    server.finish()


@pytest.mark.hazard("stages-part")
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("when", ["first", "before", "between", "after"])
def test_a_room_is_withdrawn(server: Server, when: str, where: tuple[int, ...]) -> None:
    """Guards against a stage that runs a request which another one has dropped, because the room
    failed only there or between their checks: their next batches differ, and the server ends. And
    against a request that stays in one stage's queue for ever, and one that is computed although
    the first stage knew before that its client has left."""
    if when == "after":
        server.take_in()
        server.withdraw(*where)
        server.take_in()
        assert all(("r7" in stage.runs) == (0 not in where) for stage in server.stages)
    elif when == "first":
        server.withdraw(*where)
        server.take_in()
    else:
        server.take_in(**{when: lambda server: server.withdraw(*where)})
    first, second = (stage.runs for stage in server.stages)
    assert first == second and "r8" in first
    server.withdraw(0, 1)
    server.finish()


@pytest.mark.nightly
def test_sglangs_own_stages_part(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a check that cannot fail."""
    monkeypatch.delattr(PrefillStages, "process_bootstrapped_queue")
    server.take_in(between=lambda server: server.withdraw(0, 1))
    assert [stage.runs for stage in server.stages] == [["r7", "r8"], ["r8"]]


@pytest.mark.hazard("sent-before-written")
def test_a_chunk_is_sent_when_its_step_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a last stage that runs ahead (``--pp-async-batch-depth``), and sends a chunk
    in the turn after its launch: decode would get the pages' previous content."""
    stage, order = Stage(monkeypatch, is_first=False), list[str]()
    stage.arrive(ROOM)
    (req,) = stage.disagg_prefill_bootstrap_queue.queue
    req.disagg_kv_sender.init(3, 0)
    stage.launch_event = SimpleNamespace(synchronize=lambda: order.append("computed"))
    monkeypatch.setattr(req.disagg_kv_sender, "send", lambda *_: order.append("sent"))
    stage.req_to_token_pool.alloc([req])
    req.fill_ids = req.origin_input_ids[: 2 * PAGE]
    stage.send_kv_chunk(req)
    assert order == ["computed", "sent"]
