"""Recurrent state on a decode server: one state slot a request, moved whole, never shared.

SGLang's own pools. Each state holds the tag of its request's text, and the checks of ``checks.py``
compare it after every step (``recurrent.problems``).
"""

from __future__ import annotations

from typing import Any

import pytest

from component.decode import recurrent, stages
from component.decode.decoder import Decoder
from component.decode.steps import (
    PROMPT,
    admit,
    finish,
    ids,
    in_tree,
    land,
    poison_free_slots,
    run,
    serve,
    tick,
    turn,
)
from sglang.srt.disaggregation.decode import HybridMambaDecodeReqToTokenPool
from sglang.srt.disaggregation.delta.decode.request import record_of
from sglang.srt.disaggregation.delta.metrics import REFUSALS

PAGES = pytest.mark.parametrize("page", [1, 16])


@pytest.mark.hazard("full-hit-without-state")
@PAGES
def test_a_full_hit_moves_the_state_alone(page: int) -> None:
    """Guards against a request with a full hit that starts from an empty state: the tree has only
    the KV of a prompt. Each hit of a prefix moves a state as well."""
    decoder = Decoder(page, 1024, states=12)
    serve(decoder, PROMPT)
    poison_free_slots(decoder)
    whole, more = admit(decoder, PROMPT, [*PROMPT, 3, 4, 5], new=8)
    rooms = decoder.room(whole), decoder.room(more)
    assert [len(room.pages) for room in rooms] == [0, -(-3 // page)]
    slots = [recurrent.slot_of(decoder.req_to_token_pool, req) for req in (whole, more)]
    assert [room.state_pages.tolist() for room in rooms] == [[slot] for slot in slots]
    land(decoder)
    turn(decoder, 3)
    finish(decoder)


@PAGES
def test_a_request_waits_for_a_state_slot(page: int) -> None:
    """Guards against an assertion of SGLang's, which ends the server, if there are more rows than
    state slots; and against a row without an entry in the table of slots."""
    decoder = Decoder(page, 1024, states=2)
    first, second = run(decoder, ids(1, 20), ids(2, 20), new=30)
    (third,) = admit(decoder, ids(3, 20), new=4)
    assert decoder.queued == [third]
    assert record_of(third).wait.refusal.reason == "no_state_slot" in REFUSALS
    decoder.abort(first.rid)
    turn(decoder, 2)
    assert decoder.in_transfer == [third] and second in decoder.running_batch.reqs
    finish(decoder)


def test_stock_has_rows_without_a_state_slot() -> None:
    """Guards against a needless protection: SGLang's own rows fail in that case."""
    rows, _, _ = recurrent.build(1024, 16, rows=12, states=2)
    assert rows.available_size() == rows.mamba_pool.size == 2
    rows.pre_alloc_size = 8  # as SGLang makes them
    HybridMambaDecodeReqToTokenPool.clear(rows)
    reqs = [Decoder(16, 1024, states=2).submit(ids(number, 20)) for number in range(3)]
    with pytest.raises((AssertionError, IndexError)):
        for req in reqs:
            rows.alloc([req])


@pytest.mark.hazard("state-slot-freed-under-write")
@PAGES
def test_an_aborted_transfer_keeps_its_state_slot(page: int) -> None:
    """Guards against a state slot that is reused while prefill may still write to it: the next
    request would continue from a state of another text."""
    decoder = Decoder(page, 1024, states=2)
    (aborted,) = admit(decoder, ids(1, 40))
    room = decoder.room(aborted)
    decoder.abort(aborted.rid)
    tick(decoder)
    assert decoder.held == [aborted]
    one, waiting = admit(decoder, ids(2, 40), ids(3, 40), new=8)
    assert decoder.in_transfer == [one] and decoder.queued == [waiting]
    assert room.state_pages.tolist() != decoder.room(one).state_pages.tolist()
    land(decoder, one)
    turn(decoder, 2)
    decoder.write_late(room)
    turn(decoder, 2)
    assert waiting in decoder.in_transfer
    finish(decoder)


@pytest.mark.hazard("retracted-state-lost")
@pytest.mark.parametrize("keeps", [True, False])
@PAGES
def test_a_retracted_request_continues_from_its_own_state(page: int, keeps: bool) -> None:
    """Guards against a resumed request with an empty state or another request's. The control drops
    the copy, and the checks detect it."""
    decoder = Decoder(page, 1024, states=12)
    req = stages.bring_to(decoder, "retracted")
    poison_free_slots(decoder)
    if keeps:
        assert record_of(req).state_copy
        turn(decoder, 3)
        assert req in decoder.running_batch.reqs and record_of(req).state_copy is None
        finish(decoder)
        return
    record_of(req).state_copy = None
    with pytest.raises(AssertionError, match="its state is not that of its text"):
        turn(decoder)


@pytest.mark.hazard("retracted-state-lost")
def test_stock_cannot_retract() -> None:
    """Guards against a needless protection: SGLang's decode server ends at the first retraction
    with such a model, because its pool has no copy."""
    decoder = Decoder(16, 1024, states=12)
    run(decoder, ids(1, 40), ids(2, 40), steps=2)
    for name in ("get_cpu_copy", "load_cpu_copy", "cpu_offloading_chunk_size"):
        decoder.pool.__dict__.pop(name)
    with pytest.raises(NotImplementedError):
        decoder.retract()


@PAGES
def test_a_state_is_of_one_text(page: int) -> None:
    """Guards against states that requests with one prefix share: each continues with its own
    tokens, while the KV of the prefix is shared."""
    decoder = Decoder(page, 1024, states=12)
    serve(decoder, PROMPT)
    reqs = run(decoder, [*PROMPT, 1], [*PROMPT, 2], [*PROMPT, 1], new=12, steps=4)
    assert in_tree(decoder, PROMPT) == len(PROMPT)
    slots = {recurrent.slot_of(decoder.req_to_token_pool, req) for req in reqs}
    states: dict[Any, Any] = {s: recurrent.read(decoder.req_to_token_pool, s) for s in slots}
    assert len(slots) == 3 and len(set(states.values())) == 2
    finish(decoder)
