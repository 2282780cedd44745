"""Requests that decode computes itself: their clients are answered at once, and everything else
ends."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from component.prefill.prefiller import Prefiller
from sglang.srt.disaggregation.delta import wire
from sglang.srt.disaggregation.delta.prefill import yielded
from sglang.srt.disaggregation.delta.prefill.scheduler import DeltaScheduler
from sglang.srt.disaggregation.delta.prefill.yielded import (
    EndYielded,
    Frontend,
    RoomYielded,
    YieldingTokenizer,
)
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers import tokenizer_manager
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.tokenizer_manager import ReqState, TokenizerManager
from sglang.srt.observability.req_time_stats import APIServerReqTimeStats
from sglang.srt.sampling.sampling_params import SamplingParams
from unit.delta.fakes import Clock

ROOM = 7


class Tokenizer(TokenizerManager):  # type: ignore[misc]
    """SGLang's tokenizer manager, as patched, without a server."""

    def __init__(self, dp_attention: bool = False) -> None:
        self.rid_to_state: dict[str, Any] = {}
        self.asyncio_tasks: set[Any] = set()
        self.sent: list[Any] = []
        self.send_to_scheduler = SimpleNamespace(send_pyobj=self.sent.append)
        self.enable_metrics = False
        self.dump_requests_folder = self.crash_dump_folder = ""
        self.server_args = SimpleNamespace(
            enable_dp_attention=dp_attention,
            enable_lora=False,
            enable_trace=False,
            dp_size=1,
            incremental_streaming_output=False,
            skip_tokenizer_init=False,
            speculative_algorithm=None,
            tokenizer_worker_num=1,
            weight_version="default",
        )

    def arrive(self, room: int, *, sent: bool = True, **options: Any) -> Any:
        """Add a client's request; ``sent``: the schedulers have received it."""
        obj = GenerateReqInput(text="hello", rid=f"r{room}", bootstrap_room=room, **options)
        times = APIServerReqTimeStats(disagg_mode=DisaggregationMode.PREFILL)
        state = ReqState([], False, asyncio.Event(), obj, times)
        self.rid_to_state[obj.rid] = state
        if sent:
            self.send(state)
        return state

    def send(self, state: Any) -> None:
        state.time_stats.set_api_server_dispatch_finish_time()
        self.sent.append(state.obj)


def answer_of(state: Any) -> Any:
    (answer,) = state.out_list
    assert state.finished and state.event.is_set()
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
    assert answer["text"] == "" and answer["output_ids"] == []
    return answer


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stream": True},
        {"return_logprob": True, "top_logprobs_num": 2, "token_ids_logprob": [1]},
    ],
    ids=["plain", "streaming", "logprobs"],
)
@pytest.mark.parametrize("draft", [None, "EAGLE"])
def test_the_client_is_answered_at_once(options: dict[str, Any], draft: str | None) -> None:
    """Guards against an answer that waits for a scheduler in the middle of a step, against one with
    status 500, which a router passes to the client, against one whose drafts SGLang cannot count
    (the error ends the server), and against a request that never ends."""
    tokenizer = Tokenizer()
    tokenizer.server_args.speculative_algorithm = draft
    tokenizer.server_args.speculative_num_draft_tokens = 4
    state, other = tokenizer.arrive(ROOM, **options), tokenizer.arrive(ROOM + 1)
    tokenizer.take_yielded(RoomYielded(ROOM))
    meta = answer_of(state)["meta_info"]
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (0, 0, 0)
    assert "spec_accept_rate" not in meta
    if "return_logprob" in options:
        assert meta["output_token_logprobs"] == meta["output_top_logprobs"] == []
        assert meta["input_token_logprobs"] == []  # a load balancer prepends it to decode's
    assert [*tokenizer.rid_to_state] == [other.obj.rid] and not other.finished
    assert tokenizer.sent == [state.obj, other.obj, EndYielded(rid=state.obj.rid)]


@pytest.mark.parametrize(
    ("order", "is_answered"),
    [
        ("comes, is sent, told", True),
        ("comes, told, is sent", True),
        ("told, comes, is sent", True),
        # No request is sent to the schedulers during a weight update.
        ("comes, told, late, is sent", True),
        ("told, late, comes, is sent", False),
        ("comes, told, leaves", False),
    ],
)
def test_when_the_request_comes(
    monkeypatch: pytest.MonkeyPatch, order: str, is_answered: bool
) -> None:
    """Guards against a request that is ended on the schedulers before they have it, and then waits
    for its announcement until its deadline; against a client without an answer; against a number
    that ends another request much later; and against waiting for a request whose client left."""
    clock, tokenizer = Clock(), Tokenizer()
    monkeypatch.setattr(yielded, "time", SimpleNamespace(monotonic=clock))
    monkeypatch.setattr(yielded, "_FIRST_POLL_S", 0.0)

    async def play() -> Any:
        state = None
        for step in order.split(", "):
            if step == "comes":
                state = tokenizer.arrive(ROOM, sent=False)
            elif step == "told":
                tokenizer.take_yielded(RoomYielded(ROOM))
            elif step == "is sent":
                assert tokenizer.sent == []
                tokenizer.send(state)
            elif step == "late":
                clock.now += 3600
            else:
                tokenizer.rid_to_state.clear()
            for _ in range(5):
                await asyncio.sleep(0)
        await asyncio.gather(*tokenizer.asyncio_tasks)
        return state

    state = asyncio.run(play())
    if is_answered:
        answer_of(state)
        assert tokenizer.sent == [state.obj, EndYielded(rid=state.obj.rid)]
        assert tokenizer.rid_to_state == {}
    else:
        assert EndYielded(rid=state.obj.rid) not in tokenizer.sent and not state.finished


class Looked(dict[str, Any]):
    """Counts iterations over all requests."""

    times = 0

    def __iter__(self) -> Iterator[str]:
        self.times += 1
        return super().__iter__()

    def items(self) -> Any:
        self.times += 1
        return super().items()

    def values(self) -> Any:
        self.times += 1
        return super().values()


def test_a_thousand_rooms_of_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against unknown numbers that each search all requests again and again (1,000 of them
    took 28 % of the process that serves HTTP), and against more of them than a server can keep,
    which would block a room with a request."""
    monkeypatch.setattr(yielded, "_FIRST_POLL_S", 0.0)
    tokenizer = Tokenizer()
    tokenizer.rid_to_state = requests = Looked()

    async def play() -> Any:
        for room in range(5000):
            tokenizer.take_yielded(RoomYielded(10**6 + room))
        tokenizer.take_yielded(RoomYielded(ROOM))
        for _ in range(20):
            await asyncio.sleep(0)
        assert requests.times <= 25
        state = tokenizer.arrive(ROOM)
        while not state.finished:
            await asyncio.sleep(0)
        assert len(tokenizer.yielded_rooms.absent) <= 1024
        return state

    answer_of(asyncio.run(play()))


def test_data_parallel_attention_is_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a lost command that overtook its request."""
    monkeypatch.setattr(yielded, "_REPEAT_AFTER_S", 0.0)
    tokenizer = Tokenizer(dp_attention=True)

    async def play() -> None:
        tokenizer.arrive(ROOM)
        tokenizer.take_yielded(RoomYielded(ROOM))
        await asyncio.sleep(0.01)

    asyncio.run(play())
    assert tokenizer.sent[1:] == [EndYielded(rid="r7")] * 2


@pytest.mark.parametrize(
    ("tokenizers", "mode", "yields"), [(1, True, True), (2, True, False), (1, False, False)]
)
def test_who_says_that_it_answers(
    monkeypatch: pytest.MonkeyPatch, tokenizers: int, mode: bool, yields: bool
) -> None:
    """Guards against a prefill server that is notified while its clients wait: one with several
    tokenizers, because the tokenizer that has the request is unknown."""
    server = SimpleNamespace(yields=False) if mode else None
    monkeypatch.setattr(tokenizer_manager, "start_disagg_service", lambda args: server)
    tokenizer = Tokenizer()
    tokenizer.server_args = SimpleNamespace(
        disaggregation_mode="prefill" if mode else "null",
        language_only=False,
        tokenizer_worker_num=tokenizers,
    )
    monkeypatch.setattr(tokenizer_manager.TokenizerManager, "init_communicators", lambda *_: None)
    tokenizer.init_disaggregation()
    tokenizer.init_request_dispatcher()
    assert (server is not None and server.yields) == yields
    assert (RoomYielded in tokenizer._result_dispatcher._mapping) == yields
    assert isinstance(tokenizer, YieldingTokenizer)


def test_the_way_from_decode_to_the_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a message that is lost on its way; a rank without a tokenizer drops it."""
    manager = Prefiller(monkeypatch).rank.manager
    manager.decode_ranks.take(wire.ComputedByDecode(ROOM))
    with zmq.Context() as context, context.socket(zmq.PULL) as tokenizer:
        port = tokenizer.bind_to_random_port("tcp://127.0.0.1")
        manager.decode_ranks.on_computed = Frontend(f"tcp://127.0.0.1:{port}").yielded
        manager.decode_ranks.take(wire.ComputedByDecode(ROOM))
        assert tokenizer.poll(60_000) and tokenizer.recv_pyobj() == RoomYielded(ROOM)


# ---- on the schedulers ----


class Rank(DeltaScheduler, Prefiller):
    """A prefill rank with requests that are not announced yet."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__(patch)
        self.enable_hicache_storage = False
        self.queue = self.disagg_prefill_bootstrap_queue
        self.queue.queue = []
        self.grammar_manager = SimpleNamespace(grammar_queue=[])

    def request(self, room: int) -> Any:
        """Return a request that was broadcast to the ranks."""
        params = SamplingParams(max_new_tokens=1)
        return Req(f"r{room}", "", [1] * 9, params, bootstrap_room=room, vocab_size=64)

    def arrive(self, room: int) -> Any:
        """Add a request that waits for its announcement."""
        req = self.request(room)
        req.disagg_kv_sender = self.rank.sender(room)
        self.queue.queue.append(req)
        return req

    def end(self, rid: str) -> None:
        """Pass the tokenizer's command to the scheduler, as SGLang's dispatcher does."""
        self.abort_request(EndYielded(rid=rid))


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Rank:
    return Rank(monkeypatch)


def test_it_ends_without_work(rank: Rank) -> None:
    """Guards against a room that stays in a table, against a second answer to the client, and
    against a command that is taken for an abort, which ends all requests whose names begin with its
    id."""
    req, other = rank.arrive(ROOM), rank.arrive(10 * ROOM + 1)
    rank.end(req.rid)
    assert rank.queue.queue == [other] and rank.mailbox.ends == {}
    rank.end(req.rid)
    rank.end(other.rid)
    assert rank.queue.queue == [] and rank.rank.leftovers() == {}


def test_a_request_that_waits_for_its_grammar(rank: Rank) -> None:
    """Guards against a request that joins the queue after its end."""
    cancelled: list[str] = []
    req, other = (rank.request(room) for room in (ROOM, ROOM + 1))
    req.grammar = SimpleNamespace(cancel=lambda: cancelled.append("its own"))
    rank.grammar_manager.grammar_queue += [req, other]
    rank.end(req.rid)
    assert rank.grammar_manager.grammar_queue == [other] and cancelled == ["its own"]
