"""Turns that decode computes itself, with a draft model: that one goes over them too.

What is the same with and without one is in ``test_local_turns``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from component.decode.ahead import Ahead
from component.decode.checks import check, check_idle
from component.decode.decoder import Decoder
from component.decode.overlapped import random_talks, until_idle
from component.decode.steps import ids, turn
from component.decode.test_speculation import Texts
from sglang.srt.disaggregation.delta.decode.speculation import own_first_drafts
from sglang.srt.disaggregation.delta.pages import page_floor
from sglang.srt.managers import scheduler as scheduler_module
from sglang.srt.managers.overlap_utils import FutureMap
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

pytestmark = pytest.mark.usefixtures("no_prefix_wait")

PAGES = [1, 2, 16]


@pytest.mark.parametrize("chunk", [1, 7, 16, 33])
@pytest.mark.parametrize("page", PAGES)
def test_a_chunk_ends_anywhere(page: int, chunk: int) -> None:
    """Guards against a draft slot at the end of a chunk that keeps what the target would have said
    there, where the prompt goes on with another token; and against tokens counted twice as
    cached."""
    decoder = Decoder(page, 1024, local=200, chunk=chunk, steps=3)
    first = decoder.submit(ids(1, 75), new=9)
    decoder.drain()
    check_idle(decoder)
    text = first.origin_input_ids + first.output_ids
    held = page_floor(len(text) - 2, page)
    second = decoder.submit([*text, *ids(2, 41)], new=9)
    while not second.finished():
        turn(decoder)
        check(decoder)
    assert second.cached_tokens == second.cached_tokens_device == held
    # By that its drafts are counted among those of hits.
    assert [req.delta.hit_tokens for req in (first, second)] == [0, held]
    decoder.drain()
    check_idle(decoder)
    assert decoder.rooms and all(room.yielded for room in decoder.rooms)


@pytest.mark.parametrize("page", PAGES)
def test_retractions_change_no_answer(page: int) -> None:
    """Guards against a turn that was computed here, is retracted, and has nothing to draft from
    when it resumes: what prefill sends of others is on the request."""

    def answers(*, retract: bool) -> list[list[int]]:
        decoder = Decoder(page, 1024, local=200, chunk=16, steps=3)
        reqs = [decoder.submit(ids(number, 40), new=30) for number in (1, 2, 3)]
        said, retracted = Texts(), 0
        for step in range(120):
            decoder.tick_queues()
            if retract and step % 4 == 3:
                decoder.retract()
                retracted += len(decoder.disagg_decode_prealloc_queue.retracted_queue)
                if step % 8 == 7:
                    decoder.tree_cache.evict(EvictParams(num_tokens=10_000))
                check(decoder)
            decoder.tick_batch(said, lambda req: 1)
            check(decoder)
        check_idle(decoder)
        assert bool(retracted) == retract
        return [req.output_ids for req in reqs]

    assert answers(retract=True) == answers(retract=False)


class OnDevice:
    """A tensor that lies on a GPU, as far as a CPU can tell: only its copy can be read."""

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values

    def cpu(self) -> torch.Tensor:
        return self._values.clone()


def test_what_a_draft_starts_from_lies_on_the_host() -> None:
    """Guards against requests that resume together, one computed here and one from prefill: SGLang
    stacks their hidden states where they lie, and those of prefill lie on the host."""
    reqs = [SimpleNamespace(), SimpleNamespace()]
    start = {
        "topk_p": torch.tensor([[0.5], [0.25]]),
        "topk_index": torch.tensor([[3], [4]]),
        "hidden_states": torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
    }
    spec_info = SimpleNamespace(**{name: OnDevice(values) for name, values in start.items()})
    own_first_drafts(SimpleNamespace(reqs=reqs, spec_info=spec_info))
    for at, req in enumerate(reqs):
        assert req.output_topk_p.tolist() == start["topk_p"][at].tolist()
        assert req.output_topk_index.tolist() == start["topk_index"][at].tolist()
        assert req.hidden_states_tensor.tolist() == start["hidden_states"][at].tolist()


@pytest.mark.parametrize("page", PAGES)
def test_the_place_of_one_that_has_ended(page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a draft input that is cut twice: spec v1 takes who has ended out of it when
    it verifies, and SGLang's loop takes them out of the batch in its next turn."""
    decoder = Decoder(page, 1024, local=200, chunk=64, steps=3)
    decoder.max_running_requests = 3
    first, second = (decoder.submit(ids(number, 20), new=9 * number) for number in (1, 2))
    while not second.output_ids:
        turn(decoder)
    late = decoder.submit(ids(3, 20), new=9)
    while not late.output_ids:
        turn(decoder)
    decoder.max_running_requests = 2
    with monkeypatch.context() as patch:
        patch.setattr(ScheduleBatch, "filter_batch", lambda *_, **__: None)
        while not first.finished():
            decoder.tick_batch()
    assert decoder.running_batch.reqs == [first, second] and decoder.local == [late]
    turn(decoder)
    assert decoder.running_batch.reqs == [second, late]
    decoder.drain()
    assert [len(req.output_ids) for req in (first, second, late)] == [9, 18, 9]
    check_idle(decoder)


# ---- spec v2 ----


def answers_are_right(decoder: Ahead) -> None:
    for req in decoder.submitted:
        new = req.sampling_params.max_new_tokens
        said = [decoder.said(req, place) for place in range(new)]
        aborted = req.finished_reason is None or req.finished_reason.to_json()["type"] == "abort"
        assert aborted or req.output_ids[:new] == said


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("seed", [0, 1, pytest.param(2, marks=pytest.mark.nightly)])
def test_overlapped(page: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against pages, rows or lengths of a chunk that a step in flight uses, and against a
    first step that drafts from what is another request's; with retractions."""
    if seed:
        monkeypatch.setattr(scheduler_module, "TEST_RETRACT", True)
        monkeypatch.setattr(scheduler_module, "TEST_RETRACT_INTERVAL", 7)
    decoder = Ahead(page, 1536, steps=3, local=30, chunk=16)
    decoder.result_queue = deque()
    decoder.play(random_talks(decoder, seed))
    answers_are_right(decoder)
    check_idle(decoder)
    turns = decoder.local_turns.metrics.turns
    assert turns["local", "always"] > 10 and turns["remote", "long"] > 0


@pytest.mark.parametrize("page", PAGES)
def test_a_turn_that_waits_for_its_place(page: int) -> None:
    """Guards against a computed turn whose place in SGLang's ring of draft inputs is another step's
    by the time that it runs."""
    decoder = Ahead(page, 2048, steps=3, local=30, chunk=16)
    decoder.result_queue = deque()
    device = decoder.future_map.device
    decoder.future_map = FutureMap(4, 0, 1024, device, decoder.spec_algorithm)  # a ring of 12
    decoder.max_running_requests = 3

    def play() -> Iterator[None]:
        long = [decoder.submit(ids(number, 40), new=90) for number in (1, 2, 3)]
        while len(decoder.running_batch.reqs) < 2:
            yield
        decoder.max_running_requests = 5  # there is room for a chunk, and then there is none
        late = decoder.submit(ids(4, 9), new=9)
        while not late.output_ids:
            yield
            if decoder.local_turns._launched:
                decoder.max_running_requests = 3
        for _ in range(8):
            yield
            assert len(late.output_ids) == 1
        assert not any(req.finished() for req in long)
        decoder.max_running_requests = 5
        yield from until_idle(decoder)

    decoder.play(play())
    answers_are_right(decoder)
    check_idle(decoder)
