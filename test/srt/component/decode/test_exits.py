"""Ends and resumptions that the table of stages does not show: sharing and order."""

from __future__ import annotations

from typing import Any

import pytest

from component.decode import stages
from component.decode.decoder import Decoder
from component.decode.steps import (
    PROMPT,
    admit,
    evict_all,
    finish,
    ids,
    in_tree,
    land,
    retract,
    run,
    serve,
    tick,
    turn,
)
from sglang.srt.constrained.base_grammar_backend import BaseGrammarObject
from sglang.srt.constrained.reasoner_grammar_backend import ReasonerGrammarObject
from sglang.srt.disaggregation.delta.decode.scheduler import DisaggScheduler
from sglang.srt.managers.io_struct import AbortReq


@pytest.fixture(params=[1, 16])
def decoder(request: pytest.FixtureRequest) -> Decoder:
    """A decode server with room for all requests."""
    return Decoder(request.param, 1024)


# ---- insertions into the tree ----


@pytest.mark.hazard("bad-kv-in-tree", "receivers-without-prefix")
def test_warm_up_leaves_nothing(decoder: Decoder) -> None:
    """Guards against the KV of a warm-up or health request, which is garbage, in an answer to a
    prompt that begins with the same tokens; whether the request ends, or is aborted before it
    runs."""
    serve(decoder, PROMPT, new=4, warm_up=True)
    (req,) = admit(decoder, PROMPT, new=4, warm_up=True)
    assert decoder.waiting_queue == [req]
    decoder.abort(req.rid)
    assert decoder.tree_cache.total_size() == 0 and decoder.mailbox.ends[req.rid] == 1
    admit(decoder, PROMPT, new=4)
    assert decoder.rooms[-1].prefix_len == 0
    finish(decoder)


# ---- retracted requests ----


@pytest.mark.hazard("retracted-without-node", "retraction-of-shared-pages")
@pytest.mark.parametrize("evicted", [False, True])
def test_a_retracted_request_shares_what_the_tree_still_has(
    decoder: Decoder, evicted: bool
) -> None:
    """Guards against a resumed request that allocates memory for tokens in the tree. It is
    retracted twice, so that the first retraction's nodes must not disturb the second."""
    req = stages.bring_to(decoder, "retracted")
    for count in (1, 2):
        assert req.retraction_count == count
        held = len(req.origin_input_ids) + len(req.output_ids) - 1
        if evicted:
            evict_all(decoder)
        shared = in_tree(decoder, (req.origin_input_ids + req.output_ids)[:held])
        assert (shared == 0) == evicted
        tick(decoder)
        assert req in decoder.waiting_queue and req.cache_protected_len == shared
        turn(decoder, 3)
        decoder.retract()
    decoder.abort(req.rid)
    finish(decoder)


@pytest.mark.parametrize("case", ["retracted", "resumed", "as stock"])
def test_tokens_come_before_the_end(
    decoder: Decoder, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against an end that overtakes the tokens of a retracted request, the last of which may
    still be with the detokenizer: the client would wait for ever, as it does in stock."""
    req, direct = stages.bring_to(decoder, "retracted"), list[Any]()
    req.send_token_offset = 3
    if case == "resumed":
        tick(decoder)
        assert req in decoder.waiting_queue
    owner = super(DisaggScheduler, decoder) if case == "as stock" else decoder
    with monkeypatch.context() as patch:
        patch.setattr(decoder.mailbox, "send_output", lambda *message: direct.append(message))
        owner.abort_request(AbortReq(rid=req.rid))
    assert len(direct) == (case == "as stock")
    if not direct:
        assert decoder.mailbox.reasons[req.rid]["type"] == "abort"
        finish(decoder)


def crowded() -> tuple[Decoder, Any, Any, Any]:
    """Return a server with a retracted request that cannot resume, because a transfer took the
    memory, and a request that waits for admission behind both."""
    decoder = Decoder(16, 640)
    run(decoder, ids(1, 100), ids(2, 100), steps=3)
    transfer, waiting = admit(decoder, ids(3, 336), ids(4, 300))
    assert decoder.in_transfer == [transfer] and decoder.queued == [waiting]
    for _ in range(35):
        decoder.tick_batch()
    retracted = retract(decoder)
    tick(decoder)
    assert decoder.retracted == [retracted]
    return decoder, retracted, transfer, waiting


@pytest.mark.hazard("retraction-of-shared-pages")
@pytest.mark.parametrize("what", ["lands", "is given up"])
def test_a_transfer_is_seen_while_a_request_waits_to_be_resumed(what: str) -> None:
    """Guards against a server that polls no transfer any more, as stock does: if the missing memory
    is the transfer's, no request would make progress, and no client would be answered."""
    decoder, retracted, transfer, waiting = crowded()
    if what == "lands":
        land(decoder, transfer)
        assert transfer in decoder.waiting_queue
    else:
        room = decoder.room(transfer)
        for gone in (waiting, transfer):
            decoder.abort(gone.rid)
            tick(decoder)
            assert decoder.mailbox.ends[gone.rid] == 1
        assert decoder.retracted == [retracted]
        decoder.write_late(room)
        tick(decoder, 2)
        assert decoder.retracted == []
    finish(decoder)
    assert len(retracted.output_ids) == 100


class Accepting(BaseGrammarObject):  # type: ignore[misc]
    """A grammar that does not report its last token, as those of llguidance and outlines."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[int] = []

    def accept_token(self, token: int) -> None:
        self.taken.append(token)


@pytest.mark.parametrize("reasons", [False, True])
def test_a_grammar_takes_each_token_once(reasons: bool) -> None:
    """Guards against a grammar that accepts the last token again when a retracted request resumes:
    it then allows other tokens than it should, or ends the request with an error."""
    decoder = Decoder(16, 640)
    reqs = [decoder.submit(ids(number, 100), new=20) for number in (1, 2)]
    grammars = [Accepting() for _ in reqs]
    for req, grammar in zip(reqs, grammars, strict=True):
        req.grammar = grammar
        if reasons:
            req.grammar = ReasonerGrammarObject(grammar, think_end_id=9)
            req.grammar.maybe_init_reasoning(False)
    tick(decoder)
    land(decoder, *reqs)
    for _ in range(3):
        decoder.tick_batch()
    retract(decoder)
    finish(decoder)
    assert [grammar.taken for grammar in grammars] == [req.output_ids for req in reqs]
