"""Flushes, weight updates and the release of memory, with requests in every state."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from component.decode.checks import check, check_idle
from component.decode.decoder import Decoder
from component.decode.pair import Pair, ranks_reduce
from component.decode.test_exits import (
    PREFIXES,
    PROMPT,
    STAGES,
    bring_to,
    in_tree,
    step,
    warm,
)
from sglang.srt.disaggregation.delta.decode.prefix_tree import Retired
from sglang.srt.managers.io_struct import (
    AbortReq,
    ContinueGenerationReqInput,
    FlushCacheReqInput,
    PauseGenerationReqInput,
    ReleaseMemoryOccupationReqInput,
    ReleaseMemoryOccupationReqOutput,
    ResumeMemoryOccupationReqInput,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromIPCReqInput,
    UpdateWeightsFromTensorReqInput,
)
from sglang.srt.managers.schedule_batch import FINISH_ABORT

STAGES_HELD = [*STAGES, "held"]


@pytest.fixture(params=[1, 16])
def decoder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Decoder:
    """A decode server with room for everybody."""
    monkeypatch.setenv("SGLANG_DISAGGREGATION_DECODE_PREFIX_WAIT_TOKENS", "0")
    decoder = Decoder(request.param, 1024)
    decoder._pending_flush = decoder.tp_cpu_group = decoder.draft_worker = None
    return decoder


def bring(decoder: Decoder, stage: str) -> Any:
    """A request in ``stage``; held: its transfer was aborted, and prefill may still write."""
    req = bring_to(decoder, "transfer" if stage == "held" else stage)
    if stage == "held":
        step(decoder, lambda: decoder.abort(req.rid))
        step(decoder, decoder.tick_queues)
        assert req in decoder._deferred
    return req


def give_up(decoder: Decoder, count: int) -> list[Any]:
    """Transfers that are aborted, all at once, while their prefill server stands still."""
    reqs = [decoder.submit([*PROMPT, number], new=4) for number in range(count)]
    step(decoder, decoder.tick_queues)
    assert decoder.in_transfer == reqs
    step(decoder, lambda: decoder.abort_request(AbortReq(abort_all=True)))
    step(decoder, decoder.tick_queues)
    assert list(decoder._deferred) == reqs and decoder.is_fully_idle()
    return reqs


def taken(decoder: Decoder) -> int:
    """Tokens of the pool that are neither free nor evictable."""
    free = decoder.token_to_kv_pool_allocator.available_size()
    return decoder.max_total_num_tokens - int(free) - int(decoder.tree_cache.evictable_size())


@pytest.mark.hazard("flush-while-held")
@pytest.mark.parametrize("prefix", PREFIXES)
def test_new_weights_while_pages_are_held(decoder: Decoder, prefix: int) -> None:
    """Guards against the end of the server: SGLang asserts that the flush after an update
    succeeds. Held pages stay out of the pool until prefill has written the last of them."""
    warm(decoder, prefix)
    give_up(decoder, 6)
    before = taken(decoder)
    assert before > 0
    step(decoder, decoder.update_weights)
    assert taken(decoder) == before and len(decoder._deferred) == 6
    assert in_tree(decoder, PROMPT) == 0
    for room in decoder.rooms[-6:]:
        step(decoder, lambda room=room: decoder.write_late(room))
    step(decoder, decoder.tick_queues)
    assert taken(decoder) == 0 and not decoder._deferred
    check_idle(decoder)
    for expected in (0, 80):  # what was computed since is shared, as before
        req = decoder.submit(PROMPT, new=1)
        decoder.drain()
        assert req.finished() and decoder.rooms[-1].prefix_len == expected
    check_idle(decoder)


@pytest.mark.hazard("flush-while-held")
@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("stage", STAGES_HELD)
def test_nothing_of_old_weights_is_hit(decoder: Decoder, stage: str, prefix: int) -> None:
    """Guards against KV of old weights in the new tree, wherever a request was when they changed:
    not announced yet (prefill may have computed it), in transfer, waiting, running, retracted with
    a copy on the CPU, aborted with pages held. Each ends as if nothing had happened."""
    warm(decoder, prefix)
    req = bring(decoder, stage)
    step(decoder, decoder.update_weights)
    old = [PROMPT, [*PROMPT, *req.output_ids]]
    assert [in_tree(decoder, ids) for ids in old] == [0, 0]
    for _ in range(3):
        for entry in decoder.in_transfer:
            step(decoder, lambda entry=entry: decoder.deliver(entry))
        step(decoder, decoder.tick_queues)
        step(decoder, decoder.tick_batch)
    decoder.drain()
    assert stage == "held" or len(req.output_ids) == 30
    assert in_tree(decoder, [*PROMPT, *req.output_ids]) == 0
    check_idle(decoder)
    for expected in (0, 80):
        decoder.submit(PROMPT, new=1)
        decoder.drain()
        assert decoder.rooms[-1].prefix_len == expected
    check_idle(decoder)


def test_old_requests_do_not_match_what_is_new(decoder: Decoder) -> None:
    """Guards against an answer from KV of two versions of the weights: a request that prefill was
    sent before the update takes its whole prompt from there, and a retracted one its copy."""
    retracted = bring_to(decoder, "retracted")
    early = decoder.submit(PROMPT, new=4, ready=False)
    step(decoder, decoder.update_weights)
    decoder.submit(PROMPT, new=1)
    step(decoder, decoder.tick_queues)
    assert retracted.cache_protected_len == 0
    decoder.drain()
    assert in_tree(decoder, PROMPT) == 80
    room = decoder.rooms[decoder.submitted.index(early)]
    assert room.prefix_len == 0 and len(room.pages) == -(-80 // decoder.page_size)
    check_idle(decoder)


def test_nobody_waits_for_a_prefix_that_will_not_be_shared(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a request that waits for the transfer of an old one with the same prompt."""
    monkeypatch.setenv("SGLANG_DISAGGREGATION_DECODE_PREFIX_WAIT_TOKENS", "16")
    old = decoder.submit(PROMPT, new=4)
    step(decoder, decoder.tick_queues)
    waits = decoder.submit(PROMPT, new=4)
    step(decoder, decoder.tick_queues)
    assert decoder.in_transfer == [old] and decoder.queued == [waits]
    step(decoder, decoder.update_weights)
    new = decoder.submit(PROMPT, new=4)
    step(decoder, decoder.tick_queues)
    assert decoder.in_transfer == [old, waits, new]
    decoder.drain()
    check_idle(decoder)


def test_two_updates_with_the_same_prompt_in_flight(decoder: Decoder) -> None:
    """Guards against nodes of two generations that meet, since their tokens are the same."""
    for expected in (0, 80):
        decoder.submit(PROMPT, new=1, extra_key="a")
        decoder.drain()
        assert decoder.rooms[-1].prefix_len == expected
    for _ in range(3):
        for extra_key in (None, "a"):
            decoder.submit(PROMPT, new=20, extra_key=extra_key)
        step(decoder, decoder.tick_queues)
        for req in decoder.in_transfer:
            decoder.deliver(req)
        step(decoder, decoder.tick_queues)
        step(decoder, decoder.tick_batch)
        step(decoder, decoder.update_weights)
    assert len(decoder.running_batch.reqs) == 6
    decoder.drain()
    check_idle(decoder)


@pytest.mark.parametrize(
    ("call", "request_of"),
    [
        ("disk", lambda: UpdateWeightFromDiskReqInput(model_path="new")),
        ("distributed", lambda: UpdateWeightsFromDistributedReqInput([], [], [])),
        ("tensor", lambda: UpdateWeightsFromTensorReqInput([])),
        ("ipc", lambda: UpdateWeightsFromIPCReqInput({})),
    ],
)
def test_every_kind_of_update(decoder: Decoder, call: str, request_of: Any) -> None:
    """Guards against one of SGLang's four ways that still ends the server; and a flush that was
    not asked for (an update in many parts asks with the last one) is not made."""
    warm(decoder, 80)
    give_up(decoder, 2)
    name = f"update_weights_from_{call}"
    decoder.tp_worker = SimpleNamespace(is_hybrid_swa=False, **{name: lambda request: (True, "")})
    part, last = request_of(), request_of()
    part.flush_cache = False
    assert getattr(decoder, name)(part).success and in_tree(decoder, PROMPT) == 80
    assert getattr(decoder, name)(last).success and in_tree(decoder, PROMPT) == 0
    check(decoder)
    decoder.tp_worker = SimpleNamespace(is_hybrid_swa=False, **{name: lambda request: (False, "")})
    assert not getattr(decoder, name)(last).success
    decoder.drain()
    check_idle(decoder)


def test_a_flush_that_somebody_asks_for(decoder: Decoder) -> None:
    """Guards against a flush that waits for a prefill server which stands still; against one that
    takes the tree from running requests; and against a refusal that does not say why."""
    warm(decoder, 80)
    running = bring_to(decoder, "running")
    answer = decoder.flush_cache_wrapped(FlushCacheReqInput())
    assert not answer.success and "2 running" in answer.message
    assert in_tree(decoder, PROMPT) == 80
    transfer = decoder.submit([1] * 40, new=1)
    step(decoder, decoder.tick_queues)
    assert "1 in transfer" in decoder.flush_cache_wrapped(FlushCacheReqInput()).message
    decoder.abort(transfer.rid)
    step(decoder, decoder.tick_queues)
    while not running.finished() or decoder.running_batch.reqs or decoder.last_batch:
        step(decoder, decoder.tick_batch)
    assert decoder._deferred and decoder.flush_cache_wrapped(FlushCacheReqInput()).success
    assert in_tree(decoder, PROMPT) == 0
    decoder.drain()
    check_idle(decoder)


class Saver:
    """Notes what memory was released and resumed."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []

    def pause(self, tag: str) -> None:
        self.calls.append(("release", tag))

    def resume(self, tag: str) -> None:
        self.calls.append(("resume", tag))


def with_saver(decoder: Decoder) -> list[Any]:
    """The answers that the decoder sends, as memory is released and resumed."""
    decoder.memory_saver_adapter, decoder.offload_tags = Saver(), set()
    answers: list[Any] = []
    decoder.send_to_tokenizer = SimpleNamespace(
        send_output=lambda answer, request: answers.append(answer)
    )
    return answers


@pytest.mark.hazard("flush-while-held")
def test_memory_is_released_when_nobody_can_write_to_it(decoder: Decoder) -> None:
    """Guards against remote writes that land in memory which was given away; and against an
    assertion that ends the server. The answer comes when it is done, once."""
    answers, saver = with_saver(decoder), decoder
    give_up(decoder, 2)
    answers.clear()
    request = ReleaseMemoryOccupationReqInput(tags=["kv_cache"])
    assert decoder.release_memory_occupation(request) is None
    for _ in range(3):
        step(decoder, decoder.tick_queues)
        assert answers == [] and saver.memory_saver_adapter.calls == []
    for room in decoder.rooms[-2:]:
        decoder.write_late(room)
    for _ in range(3):
        step(decoder, decoder.tick_queues)
    assert [type(answer) for answer in answers] == [ReleaseMemoryOccupationReqOutput]
    resumed = decoder.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=["kv_cache"]))
    assert resumed is not None and decoder.offload_tags == set()
    assert decoder.memory_saver_adapter.calls == [("release", "kv_cache"), ("resume", "kv_cache")]
    decoder.drain()
    check_idle(decoder)


def test_memory_is_not_released_under_a_request_that_is_to_be_resumed(decoder: Decoder) -> None:
    """Guards against the end of the server: a retracted request gets its memory back in the next
    step, and writes its KV to it. On a paused server it waits, and the release does not."""
    answers = with_saver(decoder)
    req = bring_to(decoder, "retracted")
    other = decoder.submitted[0]
    other.to_finish = FINISH_ABORT()
    for _ in range(2):  # it ends in a step that had tried to resume
        step(decoder, decoder.tick_batch)
    assert decoder.is_fully_idle() and not decoder._deferred
    answers.clear()
    request = ReleaseMemoryOccupationReqInput(tags=["kv_cache"])
    assert decoder.release_memory_occupation(request) is None and decoder.offload_tags == set()
    step(decoder, decoder.tick_queues)
    assert req in decoder.waiting_queue and answers == []
    while decoder.waiting_queue or decoder.running_batch.reqs:
        step(decoder, decoder.tick_batch)
    assert req.finished() and len(req.output_ids) == 30
    step(decoder, decoder.tick_queues)
    assert decoder.offload_tags == {"kv_cache"} and len(answers) == 1


def test_memory_is_released_beside_requests_that_are_paused(decoder: Decoder) -> None:
    """Guards against a trainer that pauses, releases memory, and waits for ever."""
    with_saver(decoder)
    req = bring_to(decoder, "running")
    decoder.last_batch = None
    decoder.pause_generation(PauseGenerationReqInput(mode="retract"))
    assert req in decoder.disagg_decode_prealloc_queue.retracted_queue
    request = ReleaseMemoryOccupationReqInput(tags=["kv_cache"])
    assert decoder.release_memory_occupation(request) is not None
    step(decoder, decoder.tick_queues)
    decoder.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=["kv_cache"]))
    decoder.continue_generation(ContinueGenerationReqInput())
    decoder.drain()
    assert req.finished() and len(req.output_ids) == 30
    check_idle(decoder)


def test_memory_is_released_beside_requests_that_never_had_any(decoder: Decoder) -> None:
    """Guards against a trainer that pauses, releases memory, and waits for ever: while a request
    is retracted, those that have no pages get none. Nor do they while memory is released, but an
    abort is answered; they are served when it is back."""
    answers = with_saver(decoder)
    req = bring_to(decoder, "running")
    late, gone = (decoder.submit([*PROMPT, number], new=4) for number in range(2))
    decoder.last_batch = None
    decoder.pause_generation(PauseGenerationReqInput(mode="retract"))
    step(decoder, decoder.tick_queues)
    assert decoder.queued == [late, gone]
    answers.clear()
    request = ReleaseMemoryOccupationReqInput(tags=["kv_cache"])
    assert decoder.release_memory_occupation(request) is not None
    assert in_tree(decoder, PROMPT) == 0 and decoder.queued == [late, gone]
    decoder.abort(req.rid)
    decoder.abort(decoder.submitted[0].rid)  # nobody is retracted any more
    decoder.abort(gone.rid)
    for _ in range(3):
        step(decoder, decoder.tick_queues)
    assert decoder.queued == [late] and decoder.in_transfer == []
    assert decoder.mailbox.ends[gone.rid] == 1
    decoder.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=["kv_cache"]))
    decoder.continue_generation(ContinueGenerationReqInput())
    decoder.drain()
    assert late.finished() and len(late.output_ids) == 4
    check_idle(decoder)


def test_ranks_release_memory_in_one_step() -> None:
    """Guards against a rank that waits in SGLang's barrier while another still runs its requests
    and asks for another collective: with data parallel attention each has its own."""
    with ranks_reduce():
        pair = Pair(lambda rank, group: SimpleNamespace(decoder=Decoder(16, 1024)))
        first, second = (side.decoder for side in pair.sides)
        for decoder, group in zip((first, second), pair.groups, strict=True):
            decoder.tp_cpu_group = group
        bring_to(second, "running")
        answers = [with_saver(decoder) for decoder in (first, second)]
        request = ReleaseMemoryOccupationReqInput(tags=["kv_cache"])
        both = (first, second)
        try:
            told = pair.call(lambda rank: both[rank].release_memory_occupation(request))
            assert told == [None, None]
            for _ in range(60):
                assert first.offload_tags == second.offload_tags == set()
                second.tick_batch()
                pair.call(lambda rank: both[rank].tick_queues())
                if any(answers[0]):
                    break
            assert first.offload_tags == second.offload_tags == {"kv_cache"}
        finally:
            pair.close()


def test_release_waits_no_longer_than_the_bound(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a release that waits for ever for a prefill server that stands still."""
    answers = with_saver(decoder)
    give_up(decoder, 1)
    answers.clear()
    decoder.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=["kv_cache"]))
    step(decoder, decoder.tick_queues)
    assert answers == []
    monkeypatch.setenv("SGLANG_DISAGGREGATION_QUARANTINE_TIMEOUT", "0")
    step(decoder, decoder.tick_queues)
    assert len(answers) == 1 and decoder.offload_tags == {"kv_cache"}


def test_resumed_before_it_was_released(decoder: Decoder) -> None:
    """Guards against a crash on memory that was never released, and a caller that waits for ever:
    whoever lost patience with a release resumes."""
    answers = with_saver(decoder)
    give_up(decoder, 1)
    answers.clear()
    decoder.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=["kv_cache"]))
    assert decoder.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=["kv_cache"]))
    assert len(answers) == 1 and decoder.memory_saver_adapter.calls == []
    decoder.drain()
    assert decoder.memory_saver_adapter.calls == [] and len(answers) == 1
    check_idle(decoder)


def test_listeners_are_told_once(decoder: Decoder) -> None:
    """Guards against a router that is told of a page's end when its tokens were stored again."""
    tree = decoder.tree_cache
    tree.enable_kv_cache_events = True
    warm(decoder, 80)
    (req,) = give_up(decoder, 1)
    tree.take_events()
    decoder.update_weights()
    assert [type(event).__name__ for event in tree.take_events()][-1] == "AllBlocksCleared"
    assert isinstance(req.last_node.key.extra_key, Retired)
    warm(decoder, 80)
    assert {type(event).__name__ for event in tree.take_events()} == {"BlockStored"}
    decoder.drain()
    tree.retire()
    kinds = [type(event).__name__ for event in tree.take_events()]
    pages = 80 // decoder.page_size
    assert kinds == ["BlockRemoved"] * pages + ["AllBlocksCleared"]
    check_idle(decoder)
