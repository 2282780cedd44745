"""Spec v2 (``SGLANG_ENABLE_SPEC_V2=1``): a step is launched before the last one's result is known.

``ahead`` has the device, which is as slow as it may be, and prefill is as fast as it can.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from component.decode.ahead import Ahead
from component.decode.checks import check_idle
from component.decode.overlapped import until_idle
from component.decode.steps import ids
from sglang.srt.disaggregation.delta.decode.scheduler import DisaggScheduler
from sglang.srt.disaggregation.delta.decode.speculation import step_tokens
from sglang.srt.disaggregation.delta.decode.transfer_queue import StepWrites
from sglang.srt.disaggregation.delta.pages import page_floor
from sglang.srt.managers import scheduler as scheduler_module
from sglang.srt.managers.schedule_batch import ScheduleBatch

pytestmark = pytest.mark.usefixtures("no_prefix_wait")

PAGES = [1, 2, 16]


def answers_are_right(decoder: Ahead) -> None:
    for req in decoder.submitted:
        new = req.sampling_params.max_new_tokens
        assert req.output_ids[:new] == [decoder.said(req, place) for place in range(new)]


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
    answers_are_right(decoder)
    check_idle(decoder)


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
    answers_are_right(decoder)
    check_idle(decoder)


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
    check_idle(decoder)


def one_ends_and_one_arrives(decoder: Ahead, room: int, prefix: int = 0) -> Iterator[None]:
    """A request ends while a step that it is part of is in flight; the next one gets its row, and
    all memory but ``room`` tokens. ``prefix``: so much it shares with the tree."""
    shared = ids(9, 80)
    decoder.submit(shared, new=1)
    yield from until_idle(decoder)
    ends = decoder.submit(ids(1, 40), new=9)
    while not ends.finished():
        yield
    assert [ends in batch.reqs for batch, _ in decoder.result_queue] == [True]
    told, at_once = decoder.told, decoder.at_once
    free = decoder.token_to_kv_pool_allocator.available_size() + decoder.tree_cache.evictable_size()
    late = decoder.submit([*shared[:prefix], *[8] * (int(free) - prefix - room)], new=2)
    rows = decoder.req_to_token_pool
    others, rows.free_slots = rows.free_slots[:-1], rows.free_slots[-1:]
    yield
    rows.free_slots += others
    assert late.kv_allocated_len > 0 and decoder.told == told + 1
    decoder.seen = decoder.at_once - at_once  # type: ignore[attr-defined]
    yield from until_idle(decoder)


#: What a late request's own answer wants free, and a page.
ROOM = 64


@pytest.mark.hazard("page-of-step-in-flight")
@pytest.mark.parametrize("page", PAGES)
def test_pages_of_the_step_in_flight_are_announced_after_it(page: int) -> None:
    """Guards against KV that prefill wrote and a step, launched earlier, writes over: the slots
    that a request held ahead of its text are free when it ends."""
    decoder = Ahead(page, 640, steps=3, reserve=page)
    decoder.play(one_ends_and_one_arrives(decoder, ROOM))
    assert decoder.seen == 0  # type: ignore[attr-defined]
    check_idle(decoder)


@pytest.mark.parametrize("page", PAGES)
def test_announced_at_once_they_are_written_over(
    page: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a script that shows nothing."""
    monkeypatch.setattr(StepWrites, "after", lambda self, pages, announce: announce())
    decoder = Ahead(page, 640, steps=3, reserve=page)
    with pytest.raises(AssertionError, match="hold other"):
        decoder.play(one_ends_and_one_arrives(decoder, ROOM))


@pytest.mark.hazard("row-of-step-in-flight")
@pytest.mark.parametrize("page", PAGES)
def test_a_row_is_given_away_when_the_step_in_flight_has_looked_into_it(page: int) -> None:
    """Guards against a step that writes into the prefix of whoever got the row of a request that
    has ended: it looks up on the device which slots it writes."""
    decoder = Ahead(page, 640, steps=3, reserve=page)
    decoder.play(one_ends_and_one_arrives(decoder, 200, prefix=79))
    check_idle(decoder)


@pytest.mark.parametrize("page", PAGES)
def test_given_away_at_once_the_prefix_is_written_over(
    page: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a script that shows nothing."""
    monkeypatch.setattr(StepWrites, "rows_are_free", lambda self: None)
    decoder = Ahead(page, 640, steps=3, reserve=page)
    with pytest.raises(AssertionError, match="hold other"):
        decoder.play(one_ends_and_one_arrives(decoder, 200, prefix=79))


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
    answers_are_right(decoder)
    check_idle(decoder)


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
    answers_are_right(decoder)
    check_idle(decoder)


def test_steps_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against accept lengths of requests that are counted in their last step, and in the
    one that was launched before that was known."""
    decoder = Ahead(16, 640, steps=3)
    counted: list[str] = []
    monkeypatch.setattr(decoder.decode_metrics, "speculated", lambda req: counted.append(req.rid))
    decoder.play(talk(decoder, chats=3, turns=1))
    assert sorted(counted) == sorted(req.rid for req in decoder.submitted)
