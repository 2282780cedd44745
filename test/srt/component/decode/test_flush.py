"""Flushes, weight updates and the release of memory on a server with requests."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from component.decode.checks import check
from component.decode.decoder import Decoder
from component.decode.pair import Pair, ranks_reduce
from component.decode.stages import ANSWER, bring_to, options
from component.decode.steps import PROMPT, admit, finish, health_check, in_tree, serve, tick
from sglang.srt.disaggregation.delta.decode.tree import Retired
from sglang.srt.managers import scheduler_runtime_checker_mixin
from sglang.srt.managers.io_struct import (
    AbortReq,
    ContinueGenerationReqInput,
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
from sglang.srt.patchset import environment

RELEASE = ReleaseMemoryOccupationReqInput(tags=["kv_cache"])
RESUME = ResumeMemoryOccupationReqInput(tags=["kv_cache"])


@pytest.fixture(params=[1, 16])
def decoder(request: pytest.FixtureRequest) -> Decoder:
    """A decode server with room for all requests."""
    return Decoder(request.param, 1024)


def give_up(decoder: Decoder, count: int) -> list[Any]:
    """Abort transfers, all at once, while their prefill server is stopped."""
    reqs = admit(decoder, *([*PROMPT, number] for number in range(count)), new=4)
    assert decoder.in_transfer == reqs
    decoder.abort_request(AbortReq(abort_all=True))
    tick(decoder)
    assert decoder.held == reqs and decoder.is_fully_idle()
    return reqs


@pytest.mark.hazard("flush-while-held")
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
    """Guards against one of SGLang's four kinds of update that ends an idle server with held pages:
    SGLang asserts that the flush after it succeeds. An update that does not request a flush (one of
    many parts requests it with the last part) makes none."""
    serve(decoder, PROMPT)
    give_up(decoder, 2)
    name = f"update_weights_from_{call}"
    decoder.tp_worker = SimpleNamespace(is_hybrid_swa=False, **{name: lambda request: (True, "")})
    part, last = request_of(), request_of()
    part.flush_cache = False
    assert getattr(decoder, name)(part).success and in_tree(decoder, PROMPT) == 80
    assert getattr(decoder, name)(last).success and in_tree(decoder, PROMPT) == 0
    check(decoder)
    assert len(decoder.held) == 2
    decoder.tp_worker = SimpleNamespace(is_hybrid_swa=False, **{name: lambda request: (False, "")})
    assert not getattr(decoder, name)(last).success
    finish(decoder)


def test_listeners_are_told_once(decoder: Decoder) -> None:
    """Guards against an event for a page's removal after its tokens were stored again."""
    tree = decoder.tree_cache
    tree.enable_kv_cache_events = True
    serve(decoder, PROMPT)
    (req,) = give_up(decoder, 1)
    tree.take_events()
    decoder.update_weights()
    assert [type(event).__name__ for event in tree.take_events()][-1] == "AllBlocksCleared"
    assert isinstance(req.last_node.key.extra_key, Retired)
    decoder.submit(PROMPT, new=1)
    finish(decoder)
    assert {type(event).__name__ for event in tree.take_events()} == {"BlockStored"}
    tree.retire()
    kinds = [type(event).__name__ for event in tree.take_events()]
    assert kinds == ["BlockRemoved"] * (80 // decoder.page_size) + ["AllBlocksCleared"]


# ---- the release of memory ----


class Saver:
    """Records released and resumed memory."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def pause(self, tag: str) -> None:
        self.calls.append(f"release {tag}")

    def resume(self, tag: str) -> None:
        self.calls.append(f"resume {tag}")


def with_saver(decoder: Decoder) -> list[Any]:
    """Return the list of answers that the decoder sends from now on to release and resume calls."""
    decoder.memory_saver_adapter, decoder.offload_tags = Saver(), set()
    answers: list[Any] = []
    decoder.send_to_tokenizer = SimpleNamespace(
        send_output=lambda answer, request: answers.append(answer)
    )
    return answers


@pytest.mark.hazard("flush-while-held")
@pytest.mark.parametrize("then", ["prefill stops", "the bound passes", "resumed"])
def test_memory_is_released_when_nobody_can_write_to_it(
    decoder: Decoder, then: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against remote writes into released memory, against an assertion that ends the server,
    and against a caller that waits for ever. The answer is sent once, when memory is released, or
    when an impatient caller resumes before that."""
    give_up(decoder, 2)
    answers, calls = with_saver(decoder), ["release kv_cache", "resume kv_cache"]
    assert decoder.release_memory_occupation(RELEASE) is None
    tick(decoder, 3)
    assert answers == [] and decoder.memory_saver_adapter.calls == []
    if then == "prefill stops":
        for room in decoder.rooms[-2:]:
            decoder.write_late(room)
    elif then == "the bound passes":
        passed = replace(environment.QUARANTINE_TIMEOUT, default=0.0)
        monkeypatch.setattr(environment, "QUARANTINE_TIMEOUT", passed)
    else:
        calls = []
    if calls:
        tick(decoder, 3)
        assert decoder.offload_tags == {"kv_cache"} and len(answers) == 1
    assert decoder.resume_memory_occupation(RESUME) is not None
    assert decoder.offload_tags == set()
    finish(decoder)
    assert decoder.memory_saver_adapter.calls == calls
    assert [type(answer) for answer in answers] == [ReleaseMemoryOccupationReqOutput]


def test_memory_is_not_released_under_a_request_that_is_to_be_resumed(decoder: Decoder) -> None:
    """Guards against the end of the server: a retracted request gets its memory back in the next
    step, and writes its KV to it. On a paused server the request waits, and the release does
    not."""
    req = bring_to(decoder, "retracted")
    decoder.submitted[0].to_finish = FINISH_ABORT()
    for _ in range(2):  # the other one ends in a step that tried to resume
        decoder.tick_batch()
    assert decoder.is_fully_idle() and not decoder.held
    answers = with_saver(decoder)
    assert decoder.release_memory_occupation(RELEASE) is None and decoder.offload_tags == set()
    tick(decoder)
    assert req in decoder.waiting_queue and answers == []
    while decoder.waiting_queue or decoder.running_batch.reqs:
        decoder.tick_batch()
    assert req.finished() and len(req.output_ids) == ANSWER
    tick(decoder)
    assert decoder.offload_tags == {"kv_cache"} and len(answers) == 1


@pytest.mark.parametrize("all_leave", [False, True])
def test_memory_is_released_beside_requests_that_are_paused(
    decoder: Decoder, all_leave: bool
) -> None:
    """Guards against a trainer that pauses, releases memory, and waits for ever: retracted requests
    resume later, and requests without pages get none while memory is released, even if no request
    is retracted any more. An abort is answered."""
    req = bring_to(decoder, "running")
    late, gone = (decoder.submit([*PROMPT, number], new=4) for number in range(2))
    decoder.last_batch = None
    decoder.pause_generation(PauseGenerationReqInput(mode="retract"))
    tick(decoder)
    assert req in decoder.retracted and decoder.queued == [late, gone]
    with_saver(decoder)
    assert decoder.release_memory_occupation(RELEASE) is not None
    assert in_tree(decoder, PROMPT) == 0 and decoder.queued == [late, gone]
    for each in [req, decoder.submitted[0], gone] if all_leave else []:
        decoder.abort(each.rid)
    tick(decoder, 3)
    assert decoder.in_transfer == [] and (gone in decoder.queued) == (not all_leave)
    assert late in decoder.queued and decoder.mailbox.ends[gone.rid] == all_leave
    decoder.resume_memory_occupation(RESUME)
    decoder.continue_generation(ContinueGenerationReqInput())
    finish(decoder)
    assert len(late.output_ids) == 4 and (len(req.output_ids) == ANSWER) == (not all_leave)


def test_memory_is_released_in_parts(decoder: Decoder) -> None:
    """Guards against a trainer that releases memory in parts, and waits for ever: a request that
    arrives in between gets no pages before all memory is back; nor does one that waits for its
    grammar."""
    answers = with_saver(decoder)
    assert decoder.release_memory_occupation(RELEASE) is not None
    late = decoder.submit(PROMPT, new=4)
    tick(decoder, 3)
    assert decoder.queued == [late]
    more, compiling = ReleaseMemoryOccupationReqInput(tags=["cuda_graph"]), ["a request"]
    decoder.grammar_manager.grammar_queue = compiling
    assert decoder.release_memory_occupation(more) is not None and answers == []
    assert decoder.grammar_manager.grammar_queue is compiling
    decoder.grammar_manager.grammar_queue = []
    for tag in ("kv_cache", "cuda_graph"):
        assert decoder.queued == [late]
        decoder.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=[tag]))
        assert tag not in decoder.offload_tags
        tick(decoder)
    assert decoder.in_transfer == [late]
    finish(decoder)
    assert len(late.output_ids) == 4


@pytest.mark.parametrize("stage", ["taken", "between chunks"])
def test_a_turn_that_a_pause_holds(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against health checks that wait for the next batch while a pause holds all requests,
    after which the server would be taken for dead; against SGLang's idle check, which would take
    the pages of such a turn for leaked ones, and end the server; and against a release of memory
    that waits for ever."""
    decoder, checked = Decoder(16, 1024, **options(stage)), list[bool]()
    mixin = scheduler_runtime_checker_mixin.SchedulerRuntimeCheckerMixin
    monkeypatch.setattr(mixin, "self_check_during_idle", lambda self: checked.append(True))

    bring_to(decoder, stage)
    decoder.pause_generation(PauseGenerationReqInput(mode="retract"))
    tick(decoder)
    decoder.self_check_during_idle()
    assert decoder.local and not checked and health_check(decoder) == (1, 0)
    answers = with_saver(decoder)
    assert decoder.release_memory_occupation(RELEASE) is None  # chunks run for it
    for _ in range(60):
        decoder.tick_batch()
        decoder.tick_queues()
    assert decoder.offload_tags == {"kv_cache"} and len(answers) == 1
    decoder.self_check_during_idle()
    assert checked
    decoder.resume_memory_occupation(RESUME)
    decoder.continue_generation(ContinueGenerationReqInput())
    finish(decoder)


def test_ranks_release_memory_in_one_step() -> None:
    """Guards against a rank that waits in SGLang's barrier while another one still runs requests
    and enters another collective: with data parallel attention each rank has its own requests."""
    with ranks_reduce():
        pair = Pair(lambda rank, group: SimpleNamespace(decoder=Decoder(16, 1024)))
        both = first, second = [side.decoder for side in pair.sides]
        for decoder, group in zip(both, pair.groups, strict=True):
            decoder.tp_cpu_group = group
        bring_to(second, "running")
        answers = [with_saver(decoder) for decoder in both]
        try:
            told = pair.call(lambda rank: both[rank].release_memory_occupation(RELEASE))
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
