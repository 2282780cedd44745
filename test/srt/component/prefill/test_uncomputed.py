"""Requests that prefill does not compute: SGLang refuses or aborts them before they are queued, or
decode gives them up while they wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from component.decode.pair import Pair, ranks_reduce
from component.prefill.prefiller import Prefiller
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.schedule_policy import SchedulePolicy
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.sampling.sampling_params import SamplingParams
from unit.delta.nixl.sides import PAGE

ROOM, OTHER = 7, 8
TOKENS = PAGE - 1


class Rank(Prefiller, Scheduler):  # type: ignore[misc]
    """A prefill rank with SGLang's queues in front of its batches, which are only recorded."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__(patch)
        self.server_args = SimpleNamespace(disaggregation_mode="prefill")
        self.disaggregation_mode = DisaggregationMode.PREFILL
        self.waiting_queue: list[Any] = []
        self.running_batch = SimpleNamespace(batch_is_full=False, reqs=[])
        self.return_health_check_ipcs = deque[Any]()
        self.model_config = SimpleNamespace(num_key_value_heads=1)
        self.grammar_manager = SimpleNamespace(abort_requests=lambda request: None)
        self.chunked_req = self.last_batch = self.cur_batch = None
        self.enable_hicache_storage = self.enable_priority_scheduling = False
        self.schedule_low_priority_values_first = False
        self.open_bootstrap_queue()

    def arrive(self, room: int, refused: str = "", priority: int | None = None) -> Any:
        """Queue a request; with a text ``refused``, SGLang has refused it before."""
        params = SamplingParams(max_new_tokens=1)
        req = Req(
            f"r{room}", "", [room] * TOKENS, params, bootstrap_room=room, priority=priority,
            bootstrap_host="10.0.0.1", vocab_size=64,
        )  # fmt: skip
        if refused:
            req.set_finish_with_abort(refused)
        self._add_request_to_queue(req)
        return req

    def get_new_batch_prefill(self) -> None:
        self.computed = [req.rid for req in self.waiting_queue]

    def maybe_prepare_mlp_sync_batch(self, batch: Any) -> Any:
        return batch

    def step(self) -> list[str]:
        """Run one turn of SGLang's loop; return the ids of the requests that it may compute."""
        queue = self.disagg_prefill_bootstrap_queue
        self.waiting_queue.extend(queue.pop_bootstrapped())
        self.get_next_disagg_prefill_batch_to_run()
        return self.computed

    def end(self) -> None:
        """End all requests uncomputed, and check that nothing is left."""
        for room in (ROOM, OTHER):
            self.rank.withdraw(room)
        self.step()
        assert self.step() == []
        self.check_idle()


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Rank:
    module = "sglang.srt.managers.schedule_batch.get_tensor_model_parallel_rank"
    monkeypatch.setattr(module, lambda: 0)
    return Rank(monkeypatch)


@pytest.mark.hazard("another-prompt-sent")
@pytest.mark.parametrize("announced", ["before", "after"])
def test_a_request_that_sglang_has_refused(rank: Rank, announced: str) -> None:
    """Guards against KV of the prompt [0], by which SGLang replaces a prompt that it refuses or
    aborts in its grammar queue: decode had as many pages for its own prompt, took the KV for that,
    and answered with status 200."""
    if announced == "before":
        rank.rank.announce(ROOM, [10])
    req = rank.arrive(ROOM, refused="Aborted by AbortReq.")
    if announced == "after":
        rank.rank.announce(ROOM, [10])
    assert rank.step() == []
    assert rank.mailbox.ends == {req.rid: 1}
    assert rank.mailbox.reasons[req.rid]["status_code"] == 400
    assert [told.room for told in rank.rank.sockets.stopped] == [ROOM]
    rank.check_idle()


@pytest.mark.hazard("another-prompt-sent")
@pytest.mark.parametrize("theirs", [TOKENS, TOKENS - 1, 0])
def test_prompts_of_another_length(rank: Rank, theirs: int) -> None:
    """Guards against prompts that differ within a page, for example if each server truncates a
    prompt by its own limit. 0: an older decode server, which does not report the length."""
    rank.rank.announce(ROOM, [10], prompt_tokens=theirs)
    req = rank.arrive(ROOM)
    goes = theirs in (TOKENS, 0)
    assert rank.step() == [req.rid] * goes
    rank.step()
    said = f"{theirs} tokens on decode, and {TOKENS} on prefill"
    assert (said in str(rank.mailbox.reasons.get(req.rid))) != goes
    rank.end()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[list[Rank], Pair]]:
    """Two ranks of one server, over gloo."""
    with ranks_reduce():
        ranks = [Rank(monkeypatch) for _ in range(2)]
        pair = Pair(lambda number, group: None, gloo=True)
        for one, group in zip(ranks, pair.groups, strict=True):
            one.attn_tp_cpu_group = group
        yield ranks, pair
        pair.close()


@pytest.mark.hazard("dead-prompt-computed")
@pytest.mark.parametrize("where", [(0,), (1,), (0, 1)])
def test_decode_gives_up_a_request_that_waits(
    server: tuple[list[Rank], Pair], where: tuple[int, ...]
) -> None:
    """Guards against prompts that are computed for no client, before living ones; and against ranks
    with different batches, because decode's message reached one of them first."""
    ranks, pair = server

    def step() -> list[str]:
        first, second = pair.call(lambda number: ranks[number].step())
        assert first == second
        return list(first)

    for one in ranks:
        for room, page in ((ROOM, 10), (OTHER, 11)):
            one.arrive(room)
            one.rank.announce(room, [page])
    assert step() == ["r7", "r8"]
    for number in where:
        ranks[number].rank.withdraw(ROOM)
    step()
    assert step() == ["r8"]
    assert step() == ["r8"]
    for one in ranks:
        assert one.mailbox.ends == {"r7": 1}
        one.rank.withdraw(OTHER)
    step()
    assert step() == []
    for one in ranks:
        one.check_idle()


@pytest.mark.hazard("dead-prompt-computed")
def test_decode_gives_up_a_request_at_the_end_of_a_long_queue(
    server: tuple[list[Rank], Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against requests that end only when they would be computed next, which may be never
    under others of a higher priority; and against ranks that check different parts of the queue."""
    monkeypatch.setattr("sglang.srt.disaggregation.delta.prefill.scheduler.CHECKED", 1)
    ranks, pair = server
    for one in ranks:
        for room in (ROOM, OTHER, 9, 10):
            one.arrive(room)
            one.rank.announce(room, [room])
    ended = []
    for last in (10, 9):
        pair.call(lambda number: ranks[number].step())
        for one in ranks:
            one.rank.withdraw(last)
        for _ in range(4):
            first, second = pair.call(lambda number: ranks[number].step())
            assert first == second
        ended += [f"r{last}"]
        assert all(one.mailbox.ends == dict.fromkeys(ended, 1) for one in ranks)
    for one in ranks:
        for room in (ROOM, OTHER):
            one.rank.withdraw(room)
    for _ in range(3):
        pair.call(lambda number: ranks[number].step())
    for one in ranks:
        one.check_idle()


@pytest.mark.parametrize(("rid", "ended"), [("r7", {"r7"}), ("", {"r7", "r8"}), ("x", set())])
def test_a_client_leaves_while_its_request_waits(rank: Rank, rid: str, ended: set[str]) -> None:
    """Guards against a room that stays in prefill's tables, and a decode server that waits for it,
    if the abort finds the request in the waiting queue; and against ending another request."""
    for room, page in ((ROOM, 10), (OTHER, 11)):
        rank.arrive(room)
        rank.rank.announce(room, [page])
    assert rank.step() == ["r7", "r8"]
    rank.abort_request(AbortReq(rid=rid, abort_all=not rid))
    assert rank.step() == [name for name in ("r7", "r8") if name not in ended]
    assert rank.mailbox.ends == dict.fromkeys(sorted(ended), 1)
    assert {f"r{told.room}" for told in rank.rank.sockets.stopped} == ended
    rank.end()


@pytest.mark.parametrize("low_first", [False, True])
def test_requests_without_a_priority(rank: Rank, low_first: bool) -> None:
    """Guards against a server with priority scheduling and no default priority that ends with the
    first request without one, a warm-up: such requests come last, as on SGLang's other servers."""
    rank.enable_priority_scheduling, rank.schedule_low_priority_values_first = True, low_first
    for room, page, priority in ((ROOM, 10, None), (OTHER, 11, 1)):
        rank.arrive(room, priority=priority)
        rank.rank.announce(room, [page])
    rank.step()
    policy: Any = SchedulePolicy.__new__(SchedulePolicy)
    policy._sort_by_priority_and_fcfs(rank.waiting_queue, 1 if low_first else -1)
    assert [req.rid for req in rank.waiting_queue] == ["r8", "r7"]
    rank.end()


def test_health_of_a_server_that_cannot_begin(rank: Rank) -> None:
    """Guards against a server that is restarted because decode ranks hang: requests wait for memory
    that transfers own, and no batch result answers SGLang's health checks."""
    rank.rank.announce(ROOM, [10])
    rank.arrive(ROOM)
    answers: list[Any] = []
    rank.send_to_tokenizer = SimpleNamespace(send_output=answers.append)
    assert rank.step() == ["r7"] and answers == []
    rank.return_health_check_ipcs.append(None)
    rank.last_batch = SimpleNamespace(forward_mode=ForwardMode.DECODE)
    rank.step()
    assert answers == [], "the batch's result answers"
    rank.last_batch = None
    rank.step()
    assert len(answers) == 1
    rank.end()
