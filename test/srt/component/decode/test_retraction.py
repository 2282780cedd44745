"""While requests wait to get their memory back, and when a pause takes it from them."""

from __future__ import annotations

from typing import Any

import pytest

from component.decode.checks import check, check_idle
from component.decode.decoder import Decoder
from sglang.srt.constrained.base_grammar_backend import BaseGrammarObject
from sglang.srt.constrained.reasoner_grammar_backend import ReasonerGrammarObject
from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

PROMPT = [token % 50 for token in range(3, 83)]  # 80 tokens: 5 pages of 16


def ids(start: int, count: int) -> list[int]:
    """A text of its own for each ``start``."""
    return [(start * 7 + number * (start + 1)) % 50 for number in range(count)]


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for an arriving prefix here."""
    monkeypatch.setenv("SGLANG_DISAGGREGATION_DECODE_PREFIX_WAIT_TOKENS", "0")


def tick(decoder: Decoder) -> None:
    """One admission step, checked."""
    decoder.tick_queues()
    check(decoder)


def run(decoder: Decoder, *prompts: list[int], new: int = 100) -> list[Any]:
    """Requests that run."""
    reqs = [decoder.submit(prompt, new=new) for prompt in prompts]
    start(decoder, reqs)
    assert decoder.running_batch.reqs == reqs
    return reqs


def start(decoder: Decoder, reqs: list[Any]) -> None:
    """Admits, delivers and runs what was submitted, for three steps."""
    tick(decoder)
    for req in reqs:
        decoder.deliver(req)
    tick(decoder)
    for _ in range(3):
        decoder.tick_batch()


def crowded() -> tuple[Decoder, Any, Any, Any]:
    """One request that was retracted and cannot come back, since a transfer took the memory; a
    request that waits for admission stands behind both."""
    decoder = Decoder(16, 640)
    run(decoder, ids(1, 100), ids(2, 100))
    transfer = decoder.submit(ids(3, 336), new=1)
    waiting = decoder.submit(ids(4, 300), new=1)
    tick(decoder)
    assert decoder.in_transfer == [transfer] and decoder.queued == [waiting]
    for _ in range(35):
        decoder.tick_batch()
    decoder.retract()
    tick(decoder)
    (retracted,) = decoder.disagg_decode_prealloc_queue.retracted_queue
    return decoder, retracted, transfer, waiting


@pytest.mark.hazard("retraction-of-shared-pages")
def test_a_transfer_lands_while_a_request_waits_to_be_resumed() -> None:
    """Guards against a server that looks at no transfer any more: if what is missing is the
    transfer's memory, nobody would ever get on."""
    decoder, retracted, transfer, _ = crowded()
    decoder.deliver(transfer)
    tick(decoder)
    assert transfer in decoder.waiting_queue and decoder.in_transfer == []
    decoder.drain()
    assert len(retracted.output_ids) == 100
    check_idle(decoder)


def test_held_pages_come_back_while_a_request_waits_to_be_resumed() -> None:
    """Guards against pages of an aborted transfer that stay taken for ever, and a client
    that is not answered, because stock looks at nothing while somebody waits to be resumed."""
    decoder, retracted, transfer, _ = crowded()
    decoder.abort(transfer.rid)
    tick(decoder)
    assert decoder.mailbox.ends[transfer.rid] == 1
    assert decoder.disagg_decode_prealloc_queue.retracted_queue == [retracted]
    decoder.write_late(decoder.room(transfer))
    tick(decoder)
    tick(decoder)
    assert decoder.disagg_decode_prealloc_queue.retracted_queue == []
    decoder.drain()
    check_idle(decoder)


def test_an_abort_is_answered_while_a_request_waits_to_be_resumed() -> None:
    """Guards against a client in the prealloc queue that learns of its abort much later."""
    decoder, _, _, waiting = crowded()
    decoder.abort(waiting.rid)
    tick(decoder)
    assert decoder.mailbox.ends[waiting.rid] == 1 and decoder.queued == []
    assert len(decoder.rooms[-1].withdrawn) == 1
    decoder.drain()
    check_idle(decoder)


@pytest.mark.parametrize("evict", [False, True], ids=["tree kept", "tree evicted"])
@pytest.mark.parametrize("prefix", [0, 32, 80])
@pytest.mark.parametrize("page", [1, 16])
def test_a_pause_that_retracts(page: int, prefix: int, evict: bool) -> None:
    """Guards against a pause in the mode "retract" that asks prefill for KV which it gave away long
    ago: the requests stay out until the pause ends, and then continue from their copies, whatever
    the tree still shares with them."""
    decoder = Decoder(page, 1024)
    if prefix:
        decoder.submit(PROMPT[:prefix], new=1)
        decoder.drain()
    reqs = run(decoder, PROMPT, ids(2, 50), new=30)
    before = [list(req.output_ids) for req in reqs]
    announced = len(decoder.rooms)
    decoder.pause_generation(PauseGenerationReqInput(mode="retract"))
    check(decoder)
    assert decoder.running_batch.is_empty() and decoder.tree_cache.protected_size() == 0
    assert decoder.disagg_decode_prealloc_queue.retracted_queue == reqs
    assert not decoder._nothing_waits
    if evict:
        decoder.tree_cache.evict(EvictParams(num_tokens=10_000))
    for _ in range(3):
        tick(decoder)
        decoder.tick_batch()
        assert [req.output_ids for req in reqs] == before
    decoder.continue_generation(ContinueGenerationReqInput())
    decoder.drain()
    assert [len(req.output_ids) for req in reqs] == [30, 30]
    assert [req.output_ids[: len(start)] for req, start in zip(reqs, before, strict=True)] == before
    assert len(decoder.rooms) == announced and decoder.queued == []
    check_idle(decoder)


def test_abort_during_a_pause() -> None:
    """Guards against a request that a pause retracted and that nobody can abort any more."""
    decoder = Decoder(16, 1024)
    first, second = run(decoder, PROMPT, ids(2, 50), new=30)
    decoder.pause_generation(PauseGenerationReqInput(mode="retract"))
    decoder.abort(first.rid)
    tick(decoder)
    assert decoder.mailbox.ends[first.rid] == 1 and not hasattr(first, "kv_cache_cpu")
    decoder.continue_generation(ContinueGenerationReqInput())
    decoder.drain()
    assert len(second.output_ids) == 30
    check_idle(decoder)


# ---- grammars ----


class Accepting(BaseGrammarObject):  # type: ignore[misc]
    """As those of llguidance and outlines: it does not say what it took last."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[int] = []

    def accept_token(self, token: int) -> None:
        self.taken.append(token)


@pytest.mark.parametrize("reasons", [False, True])
def test_a_grammar_takes_each_token_once(reasons: bool) -> None:
    """Guards against a grammar that takes the last token again when a retracted request is back:
    it then allows other tokens than it should, or ends the request with an error."""
    decoder = Decoder(16, 640)
    reqs = [decoder.submit(ids(number, 100), new=20) for number in (1, 2)]
    grammars = [Accepting() for _ in reqs]
    for req, grammar in zip(reqs, grammars, strict=True):
        req.grammar = grammar
        if reasons:
            req.grammar = ReasonerGrammarObject(grammar, think_end_id=9)
            req.grammar.maybe_init_reasoning(False)
    start(decoder, reqs)
    decoder.retract()
    assert decoder.disagg_decode_prealloc_queue.retracted_queue
    decoder.drain()
    assert [grammar.taken for grammar in grammars] == [req.output_ids for req in reqs]
    check_idle(decoder)
