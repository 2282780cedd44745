"""Spec v2 (``SGLANG_ENABLE_SPEC_V2=1``): a step is launched before the last one's result is known.

``ahead`` has the device, which is as slow as it may be, and prefill is as fast as it can.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from component.decode.ahead import Ahead
from component.decode.overlapped import until_idle
from component.decode.steps import finish, ids
from sglang.srt.disaggregation.delta.decode.scheduler import DisaggScheduler
from sglang.srt.disaggregation.delta.decode.speculation import step_tokens
from sglang.srt.disaggregation.delta.pages import page_floor
from sglang.srt.managers import scheduler as scheduler_module
from sglang.srt.managers.schedule_batch import ScheduleBatch

PAGES = [1, 2, 16]


def talk(decoder: Ahead, chats: int, turns: int, new: int = 24) -> Iterator[None]:
    """Conversations whose turns go on from the answers before."""
    texts = [ids(number, 30 + 11 * number) for number in range(1, chats + 1)]
    for turn in range(turns):
        reqs = [decoder.submit(text, new=new) for text in texts]
        yield from until_idle(decoder)
        texts = [[*req.origin_input_ids, *req.output_ids[:new], *ids(turn + 3, 7)] for req in reqs]


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("page", PAGES)
def test_conversations(page: int, steps: int) -> None:
    """Guards against KV of either model that is not that of its tokens, in a request's slots or in
    the tree, and against memory that nobody owns."""
    decoder = Ahead(page, 4096, steps=steps)
    decoder.play(talk(decoder, chats=5, turns=4))
    decoder.answers_are_right()
    finish(decoder)


@pytest.mark.parametrize("page", PAGES)
def test_conversations_on_a_pool_that_evicts(page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same where every third step retracts some, and resumes them from the tree and from
    copies of both pools: what a step in flight accepts for them then is lost, and comes again."""
    monkeypatch.setattr(scheduler_module, "TEST_RETRACT", True)
    monkeypatch.setattr(scheduler_module, "TEST_RETRACT_INTERVAL", 3)
    retracted: list[Any] = []
    original = ScheduleBatch.retract_decode

    def retract(batch: ScheduleBatch, *args: Any) -> Any:
        found = original(batch, *args)
        retracted.extend(found[0])
        assert not found[2], "nobody is aborted for memory"
        return found

    monkeypatch.setattr(ScheduleBatch, "retract_decode", retract)
    decoder = Ahead(page, 1024, steps=3, reserve=64)
    decoder.play(talk(decoder, chats=5, turns=4, new=40))
    assert retracted
    decoder.answers_are_right()
    finish(decoder)


@pytest.mark.parametrize("page", PAGES)
def test_a_turn_hits_the_turn_before(page: int) -> None:
    """Guards against lengths that count what is allocated ahead of a text. Where the last step
    accepted more than was asked for, the slot of the last committed token is shared too."""
    decoder = Ahead(page, 4096, steps=3)

    def script() -> Iterator[None]:
        text, committed = ids(1, 37), 0
        for turn in range(4):
            req = decoder.submit(text, new=21)
            yield from until_idle(decoder)
            least, most = (page_floor(max(committed - by, 0), page) for by in (1, 0))
            assert least <= decoder.rooms[-1].prefix_len <= most
            committed = len(req.origin_input_ids) + 21 - 1
            text = [*req.origin_input_ids, *req.output_ids[:21], *ids(turn + 2, 11)]

    decoder.play(script())
    finish(decoder)


@pytest.mark.parametrize("steps", [1, 3, 15, 16])
@pytest.mark.parametrize("page", PAGES)
def test_what_a_step_takes_is_reserved(page: int, steps: int) -> None:
    """Guards against a budget that lets requests in which SGLang retracts, and aborts if they are
    alone: it asks for twice a step, beside the slots that a request holds ahead of its text."""
    decoder = Ahead(page, 4096, steps=steps, reserve=16)
    held = 2 * (steps + 1)

    def script() -> Iterator[None]:
        for number in range(1, 5):
            decoder.submit(ids(number, 30), new=10 * number)
        turns = until_idle(decoder)
        claims = decoder.disagg_decode_prealloc_queue._budget.claims
        for _ in turns:
            reqs = [req for req in decoder.running_batch.reqs if not req.finished()]
            for req in reqs:
                assert req.kv_allocated_len <= req.kv_committed_len + held
            batch = ScheduleBatch(
                reqs=reqs,
                token_to_kv_pool_allocator=decoder.token_to_kv_pool_allocator,
                spec_algorithm=decoder.spec_algorithm,
                enable_overlap=True,
            )
            asked = batch.new_tokens_required_next_decode()
            assert claims.reserved >= asked
            assert step_tokens(decoder, page) * len(reqs) == asked + held * len(reqs)
            yield

    decoder.play(script())
    decoder.answers_are_right()
    finish(decoder)


class Grammar:
    """One that allows everything, and keeps what it was told of."""

    finished, current_token = False, None

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def accept_token(self, token: int) -> None:
        self.tokens.append(token)
        self.current_token = token

    def is_terminated(self) -> bool:
        return False


class Constrained(Ahead):
    """Each step's drafts are masked by what the grammars know when it is launched."""

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
    """Guards against a mask of the tokens that were allowed a step ago: the answer would not be
    what the grammar says, and its request would be aborted. The others overlap again behind it."""
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


def test_steps_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against accept lengths of requests that are counted in their last step, and in the
    one that was launched before that was known."""
    decoder = Ahead(16, 640, steps=3)
    counted: list[str] = []
    monkeypatch.setattr(decoder.decode_metrics, "speculated", lambda req: counted.append(req.rid))
    decoder.play(talk(decoder, chats=3, turns=1))
    assert sorted(counted) == sorted(req.rid for req in decoder.submitted)
