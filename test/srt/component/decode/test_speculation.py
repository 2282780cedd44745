"""A decode server with a draft model (EAGLE, top-k 1): lengths, budget and both pools.

Spec v1; and spec v2 (``SGLANG_ENABLE_SPEC_V2=1``), in which a step is launched before the last
one's result is known: ``Ahead`` has the slowest possible device, and the fastest possible prefill.
After every step, ``checks`` and ``drafting`` verify that a step's tokens are reserved, and that a
request drafts from its own start.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from component.decode.checks import check
from component.decode.decoder import Decoder
from component.decode.overlapped import Ahead, until_idle
from component.decode.steps import admit, finish, ids, run, serve, tick, turn
from sglang.srt.disaggregation.delta.decode import speculation
from sglang.srt.disaggregation.delta.decode.scheduler import DisaggScheduler
from sglang.srt.disaggregation.policy import chunks
from sglang.srt.disaggregation.policy.memory import page_floor
from sglang.srt.managers import scheduler as scheduler_module
from sglang.srt.managers.schedule_batch import ScheduleBatch

PAGES = [1, 2, 16]


@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("page", PAGES)
def test_a_turn_hits_the_turn_before(page: int, steps: int) -> None:
    """Guards against a next turn that moves the previous answer, and against lengths that are off
    by one: with a draft model a text of n tokens shares n-1 slots, and each turn hits whole pages
    of all but the last committed token."""
    decoder = Decoder(page, 4096, steps=steps)
    text, committed = ids(1, 37), 0
    for number in range(5):
        (req,) = serve(decoder, text, new=10)
        assert req.delta.explanation.hit_tokens == max(page_floor(committed - bool(steps), page), 0)
        committed = len(req.origin_input_ids) + len(req.output_ids) - 1
        text = [*req.origin_input_ids, *req.output_ids, *ids(number + 2, 11)]


def test_the_start_of_a_draft_is_the_requests_own() -> None:
    """Guards against views into a metadata slot: another room reuses the slot before a request that
    waits for a place in the batch has run."""
    decoder = Decoder(16, 2048, steps=1)
    decoder.max_running_requests = 1
    run(decoder, *(ids(number, 30) for number in range(1, 5)), new=20)
    assert len(decoder.waiting_queue) == 3
    # Their metadata slots are free, and get other rooms' metadata.
    metadata = decoder.metadata
    starts = metadata.output_hidden_states, metadata.output_topk_p, metadata.output_topk_index
    for buffer in starts:
        buffer.fill_(7)
    check(decoder)
    finish(decoder)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("steps", [1, 3, 7, 15, 16])
def test_a_step_takes_what_sglang_asks_for(page: int, steps: int, overlap: bool) -> None:
    """Guards against a budget that admits requests which SGLang retracts in their first step, or
    aborts if they are alone; with spec v2 in addition to the slots that a request holds ahead."""
    decoder = Decoder(page, 1024, steps=steps)
    decoder.enable_overlap = overlap
    batch = ScheduleBatch(
        reqs=[object()],
        token_to_kv_pool_allocator=decoder.token_to_kv_pool_allocator,
        spec_algorithm=decoder.spec_algorithm,
        enable_overlap=overlap,
    )
    ahead = 2 * (steps + 1) if overlap else 0
    assert speculation.step_tokens(decoder, page) - ahead == batch.new_tokens_required_next_decode()


@pytest.mark.parametrize("page", PAGES)
def test_who_was_admitted_is_not_aborted_for_memory(page: int) -> None:
    """Guards against the same over whole answers: many requests on a small pool all end."""
    decoder = Decoder(page, 640, steps=3, reserve=16)
    reqs = serve(decoder, *(ids(number, 60) for number in range(1, 9)), new=60)
    assert [len(req.output_ids) for req in reqs] == [60] * 8


@pytest.mark.parametrize("page", PAGES)
def test_a_text_as_long_as_the_pool_is_admitted(page: int) -> None:
    """Guards against a request that waits for ever for a step's room behind the end of the pool,
    and blocks all others: SGLang limits prompt and answer by the pool."""
    decoder = Decoder(page, 640, steps=3)
    longest, behind = decoder.submit(ids(1, 637), new=3), decoder.submit(ids(2, 40), new=4)
    finish(decoder)
    assert longest.output_ids and len(behind.output_ids) == 4


def test_who_is_let_in_finds_room_for_the_first_step() -> None:
    """Guards against requests that reserve half of their first step, as of their answers: the pool
    fills up, and the first batch retracts some of them, or aborts them."""
    decoder = Decoder(16, 640, steps=3)
    # Four pages each; the last one has room for half of a step and the answer.
    reqs = admit(decoder, *(ids(number, 55) for number in range(1, 13)), new=2)
    tick(decoder)
    assert len(decoder.in_transfer) == 8  # five pages each
    finish(decoder)
    assert [(len(req.output_ids), req.retraction_count) for req in reqs] == [(2, 0)] * 12


@pytest.mark.parametrize(
    ("unlike", "told"),
    [
        ({"page_size": 2, "size": 640}, "differ in page size"),
        ({"get_state_buf_infos": lambda: None}, "per-request state"),
    ],
)
def test_pools_of_other_slots_are_refused(unlike: dict[str, Any], told: str) -> None:
    """Guards against a draft model with other pages than the target's, and so misplaced KV."""
    decoder = Decoder(16, 640, steps=1)
    speculation.check_draft_pool(decoder.pool, decoder.draft_pool)
    with pytest.raises(ValueError, match=told):
        speculation.check_draft_pool(decoder.pool, SimpleNamespace(**unlike))


# ---- beside local turns ----


def test_the_place_of_one_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a draft input that is cut twice: spec v1 removes ended requests from it when
    it verifies, and SGLang's loop removes them from the batch in its next turn."""
    decoder = Decoder(16, 1024, local=200, chunk=64, steps=3)
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
    finish(decoder)
    assert [len(req.output_ids) for req in (first, second, late)] == [9, 18, 9]


class OnDevice:
    """Stands for a tensor on a GPU: only its copy can be read."""

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values

    def cpu(self) -> torch.Tensor:
        return self._values.clone()


def test_what_a_draft_starts_from_lies_on_the_host() -> None:
    """Guards against requests that resume together, one computed here and one from prefill: SGLang
    stacks their hidden states on their device, and those from prefill are on the host."""
    req = SimpleNamespace()
    fields = {"topk_p": 0.5, "topk_index": 3, "hidden_states": 1.0}
    start = {name: OnDevice(torch.tensor([[value]])) for name, value in fields.items()}
    chunks.own_first_drafts(SimpleNamespace(reqs=[req], spec_info=SimpleNamespace(**start)))
    kept = req.output_topk_p, req.output_topk_index, req.hidden_states_tensor
    assert [each.tolist() for each in kept] == [[0.5], [3], [1.0]]


# ---- spec v2 ----


def talk(decoder: Ahead, chats: int, turns: int, new: int) -> Iterator[None]:
    """Run conversations whose turns continue the previous answers, and hit all slots but that of
    the last committed token, including tokens that the last step accepted beyond the limit."""
    texts = [ids(number, 30 + 11 * number) for number in range(1, chats + 1)]
    committed = [0] * chats
    for number in range(turns):
        reqs = [decoder.submit(text, new=new) for text in texts]
        yield from until_idle(decoder)
        if decoder.max_total_num_tokens > 2048:  # in a smaller pool some pages were evicted
            for req, held in zip(reqs, committed, strict=True):
                least, most = (page_floor(max(held - by, 0), decoder.page_size) for by in (1, 0))
                assert least <= req.delta.explanation.hit_tokens <= most
        committed = [len(req.origin_input_ids) + new - 1 for req in reqs]
        texts = [
            [*req.origin_input_ids, *req.output_ids[:new], *ids(number + 3, 7)] for req in reqs
        ]


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("page", PAGES)
def test_conversations(page: int, steps: int) -> None:
    """Guards against KV of either model that is not that of its tokens, in a request's slots or in
    the tree, against pages without an owner, and against lengths that count slots allocated ahead
    of a text."""
    decoder = Ahead(page, 4096, steps=steps)
    decoder.play(talk(decoder, chats=5, turns=4, new=24))
    decoder.answers_are_right()
    finish(decoder)


@pytest.mark.parametrize("page", PAGES)
def test_conversations_on_a_pool_that_evicts(page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against the same while every third step retracts some requests, which resume from the
    tree and from copies of both pools: tokens that a step in flight accepts for them are lost, and
    come again."""
    monkeypatch.setattr(scheduler_module, "TEST_RETRACT", True)
    monkeypatch.setattr(scheduler_module, "TEST_RETRACT_INTERVAL", 3)
    decoder = Ahead(page, 1024, steps=3, reserve=64)
    decoder.play(talk(decoder, chats=5, turns=4, new=40))
    assert any(req.retraction_count for req in decoder.submitted)
    ends = {req.finished_reason.to_json()["type"] for req in decoder.submitted}
    assert ends == {"length"}, "no request is aborted for memory"
    decoder.answers_are_right()
    finish(decoder)


class Grammar:
    """A grammar that allows everything, and records its tokens."""

    finished, current_token = False, None

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def accept_token(self, token: int) -> None:
        self.tokens.append(token)
        self.current_token = token

    def is_terminated(self) -> bool:
        return False


class Constrained(Ahead):
    """Masks each step's drafts by the grammars' state at its launch."""

    behind = 0

    def launch(self, batch: ScheduleBatch) -> Any:
        result = super().launch(batch)
        for req in batch.reqs:
            if req.grammar is not None and not req.finished():
                known = len(req.origin_input_ids) + len(req.grammar.tokens)
                self.behind += known != len(self._texts[req.rid])
        return result


@pytest.mark.parametrize("attached", [True, False], ids=["as attached", "in SGLang's loop"])
def test_a_grammar_knows_all_tokens_of_the_steps_before(
    attached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a mask from a step ago: the answer would violate the grammar, and its request
    would be aborted. Steps of other requests overlap again after it."""
    if not attached:
        monkeypatch.delattr(DisaggScheduler, "run_batch")
    decoder = Constrained(16, 640, steps=3)

    def script() -> Iterator[None]:
        constrained, free = decoder.submit(ids(1, 30), new=20), decoder.submit(ids(2, 30), new=60)
        constrained.grammar = Grammar()
        yield from until_idle(decoder)
        assert constrained.grammar.tokens[:20] == constrained.output_ids[:20]
        assert len(free.output_ids) >= 60

    decoder.play(script())
    assert bool(decoder.behind) != attached
    decoder.answers_are_right()
    finish(decoder)
