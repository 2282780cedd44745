"""Turns that a decode server computes itself: which, in which chunks, and with which answers.

What happens to one that is under way is in ``test_stages``.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from component.decode.ahead import Ahead
from component.decode.decoder import Decoder
from component.decode.overlapped import Overlapped, random_talks
from component.decode.stages import bring_to, options
from component.decode.steps import PROMPT, admit, finish, land, serve, turn
from sglang.srt.disaggregation.delta.decode.local_turns import only_prefill_can
from sglang.srt.disaggregation.delta.decode.turn_choice import UNKNOWN
from sglang.srt.disaggregation.delta.pages import page_floor
from sglang.srt.managers import scheduler as scheduler_module
from sglang.srt.managers import scheduler_runtime_checker_mixin
from sglang.srt.managers.io_struct import PauseGenerationReqInput
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams

NEW = list(range(50))
CHUNK = 32


@pytest.fixture(
    params=[(1, 0), (16, 0), (16, 3), pytest.param((1, 3), marks=pytest.mark.nightly)],
    ids=["1", "16", "16-drafts", "1-drafts"],
)
def decoder(request: pytest.FixtureRequest) -> Decoder:
    """It holds the history; with and without a draft model."""
    page, steps = request.param
    decoder = Decoder(page, 1024, local=200, chunk=CHUNK, steps=steps)
    # With a draft model the slot of a text's last token is shared only with the token behind it.
    serve(decoder, PROMPT + NEW[: bool(steps)])
    return decoder


def test_a_turn_is_computed_here(decoder: Decoder) -> None:
    """Guards against a turn that is announced although decode computes it, and against KV, tree and
    pools that differ from those after a transfer."""
    req = decoder.submit(PROMPT + NEW)
    room = decoder.room(req)
    decoder.tick_queues()
    assert room.yielded and room.pages is None and room.cleared
    assert decoder.in_transfer == [] and decoder.local == [req]
    turn(decoder)
    assert req.output_ids == []
    turn(decoder)
    assert req.output_ids == [2]  # two chunks: 32 tokens, and the rest
    assert req.cached_tokens == req.cached_tokens_device == len(PROMPT)
    finish(decoder)
    (again,) = admit(decoder, req.origin_input_ids + req.output_ids)
    # The last token of an answer has no KV, and the one before no draft KV that others could use.
    held = len(PROMPT + NEW) + 7 - bool(decoder.steps)
    assert again.cache_protected_len == page_floor(held, decoder.page_size)


@pytest.mark.parametrize(
    ("prompt", "prefix"), [(PROMPT, 80), ([49, 48, 47], 0)], ids=["full hit", "no history"]
)
def test_at_least_a_token_is_computed(decoder: Decoder, prompt: list[int], prefix: int) -> None:
    """Guards against a chunk of no tokens, against shared pages that are written again, and against
    a turn without any history that is left out."""
    (req,) = admit(decoder, prompt, new=3)
    assert req.cache_protected_len == max(0, prefix - decoder.page_size)
    finish(decoder)
    assert req.output_ids == [2] * 3 and req.cached_tokens == req.delta.hit_tokens


def test_what_goes_to_prefill(decoder: Decoder) -> None:
    """Guards against a decode server that computes what is longer than it was told, and against a
    prefill server that is left waiting since it does not know that decode may."""
    decoder.kv_manager.stock_peers.add("10.0.0.9:8998")
    stock = decoder.submit(PROMPT + NEW, host="10.0.0.9")
    (long,) = admit(decoder, PROMPT + [7] * 201)
    assert decoder.in_transfer == [stock, long] and decoder.local == []
    assert not decoder.room(stock).yielded
    assert decoder.local_turns.metrics.turns["remote", "long"] == 1
    finish(decoder)


def timed(decoder: Decoder) -> list[float]:
    """The seconds that prefill was measured to take, from now on; the clock is ``decoder.now``."""
    seen: list[float] = []
    turns = decoder.local_turns
    turns._clock = lambda: decoder.now
    turns.measured.shown = lambda address, tokens, seconds: seen.append(seconds)
    return seen


def test_prefill_is_timed_to_the_first_token(decoder: Decoder) -> None:
    """Guards against a side that is timed to an earlier moment than the other, and against a
    request that was retracted and is timed again when it comes back."""
    seen = timed(decoder)
    reqs = admit(decoder, PROMPT + [7] * 201, PROMPT + [8] * 301, new=8)
    decoder.now = 5.0
    land(decoder)
    assert decoder.in_transfer == [] and not seen
    decoder.now = 7.0
    decoder.tick_batch()
    assert seen == [7.0, 7.0] and all(req.output_ids for req in reqs)
    decoder.retract()
    assert len(decoder.retracted) == 1
    finish(decoder)
    assert len(seen) == 2


def test_a_full_batch_is_no_time_of_prefills(decoder: Decoder) -> None:
    """Guards against a decode server that is full and takes its own queue for a slow prefill: it
    would compute more turns itself."""
    seen = timed(decoder)
    decoder.max_running_requests = 1
    admit(decoder, *(PROMPT + [token] * 201 for token in (7, 8)))
    for req in decoder.in_transfer:
        decoder.deliver(req)
    decoder.now = 5.0
    turn(decoder)
    assert len(decoder.waiting_queue) == 1 and seen == [5.0] * 2
    decoder.now = 60.0
    finish(decoder)
    assert len(seen) == 2


@pytest.mark.parametrize(("share", "steps"), [(1.0, 1), (0.5, 1), (0.25, 3)])
def test_decode_steps_between_two_chunks(decoder: Decoder, share: float, steps: int) -> None:
    """Guards against answers under way that stand still while a long turn is computed."""
    decoder.local_turns.pace._share = share
    # A chunk takes as long as a step.
    decoder.local_turns.measured.votes = lambda: [1000, 0, 1000, UNKNOWN]
    running = decoder.submit([3, 2, 1], new=40)
    turn(decoder, 2)
    long = decoder.submit(PROMPT + [9] * 150)
    lengths = [len(running.output_ids)]
    while not long.output_ids:
        turn(decoder)
        lengths.append(len(running.output_ids))
    chunks = [at for at in range(1, len(lengths)) if lengths[at] == lengths[at - 1]]
    assert len(chunks) == 5 + (decoder.page_size == 16 and bool(decoder.steps))  # of 32 tokens
    assert {later - at for at, later in zip(chunks, chunks[1:], strict=False)} == {steps + 1}
    finish(decoder)


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("chunk", [1, 7, 33])
def test_a_chunk_ends_anywhere(page: int, chunk: int) -> None:
    """Guards against a draft slot at the end of a chunk that keeps what the target would have said
    there, where the prompt goes on with another token; and against tokens counted twice as
    cached."""
    decoder = Decoder(page, 1024, local=200, chunk=chunk, steps=3)
    (first,) = serve(decoder, PROMPT[:75], new=9)
    text = first.origin_input_ids + first.output_ids
    held = page_floor(len(text) - 2, page)
    second = decoder.submit([*text, *NEW[:41]], new=9)
    while not second.finished():
        turn(decoder)
    assert second.cached_tokens == second.cached_tokens_device == held
    # By that its drafts are counted among those of hits.
    assert [req.delta.hit_tokens for req in (first, second)] == [0, held]
    finish(decoder)
    assert all(room.yielded for room in decoder.rooms)


@pytest.mark.parametrize("stage", ["taken", "between chunks", "computed"])
def test_the_idle_check_knows_of_turns(monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    """Guards against SGLang's check of an idle server, which would take the pages of a turn that a
    pause holds for leaked ones, and end the server."""
    decoder, checked = Decoder(16, 1024, **options(stage)), list[bool]()
    mixin = scheduler_runtime_checker_mixin.SchedulerRuntimeCheckerMixin
    monkeypatch.setattr(mixin, "self_check_during_idle", lambda self: checked.append(True))
    bring_to(decoder, stage)
    decoder.self_check_during_idle()
    assert not checked
    finish(decoder)
    decoder.self_check_during_idle()
    assert checked


def test_memory_is_released_after_the_turns(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a release of memory that waits for ever for turns that a pause holds."""
    monkeypatch.setattr(Decoder, "release_when_idle", lambda self: None)
    bring_to(decoder, "taken")
    decoder.pause_generation(PauseGenerationReqInput(mode="retract"))
    turn(decoder, 2)
    assert decoder.local
    decoder._waiting_release = object()
    turn(decoder, 40)
    assert not decoder.local


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("steps", [0, 3])
def test_overlapped(page: int, seed: int, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against pages, rows or lengths of a chunk that are another's while it is in flight,
    against a request in two batches at once, and against a first step that drafts from what is
    another request's; with retractions, where there is a draft model."""
    if seed and steps:
        monkeypatch.setattr(scheduler_module, "TEST_RETRACT", True)
        monkeypatch.setattr(scheduler_module, "TEST_RETRACT_INTERVAL", 7)
    size: dict[str, Any] = {"local": 30, "chunk": 16}
    decoder = Ahead(page, 1536, steps=3, **size) if steps else Overlapped(page, 1024, **size)
    decoder.play(random_talks(decoder, seed))
    if isinstance(decoder, Ahead):
        decoder.answers_are_right()
    finish(decoder)
    turns = decoder.local_turns.metrics.turns
    assert turns["local", "always"] > 10 and turns["remote", "long"] > 0


def request(**changes: Any) -> Any:
    plain = {
        "return_logprob": False,
        "logprob_start_len": -1,
        "return_hidden_states": False,
        "return_routed_experts": False,
        "input_embeds": None,
        "multimodal_inputs": None,
        "session": None,
        "sampling_params": SimpleNamespace(max_new_tokens=8, n=1),
        "to_finish": None,
        "origin_input_ids": [1, 2, 3],
    }
    assert changes.keys() <= plain.keys()
    return SimpleNamespace(**plain | changes)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, None),
        ({"return_logprob": True, "logprob_start_len": 3}, None),
        ({"return_logprob": True, "logprob_start_len": 0}, "input_logprobs"),
        ({"return_hidden_states": True}, "hidden_states"),
        ({"return_routed_experts": True}, "routed_experts"),
        ({"input_embeds": [[0.0]]}, "embeddings"),
        ({"multimodal_inputs": object()}, "multimodal"),
        ({"session": object()}, "session"),
        ({"sampling_params": SimpleNamespace(max_new_tokens=0, n=2)}, "no_output"),
        ({"to_finish": object()}, "aborted"),
    ],
)
def test_only_prefill_can(changes: dict[str, Any], why: str | None) -> None:
    """Guards against an answer without what only prefill sends, and names that SGLang changed."""
    assert only_prefill_can(request(**changes)) == why
    real = Req("r", "", [1, 2, 3], SamplingParams())
    assert all(hasattr(real, name) for name in vars(request()))
