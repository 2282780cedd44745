"""Prefill's half of a request that decode computes."""

from __future__ import annotations

from typing import Any  # Any: answers of SGLang

import pytest

from current.environment import MOONCAKE
from current.prefill import Prefill
from sglang.srt.disaggregation.lead.prefill_exit import ABORT, LOCAL_NOTICE

LEAD = {"SGLANG_DISAGGREGATION_DECODE_LOCAL_TOKENS": "512"}
ROOM = 78
PROMPT = list(range(100, 300))
backends = pytest.mark.parametrize(
    (),
    [
        pytest.param(marks=pytest.mark.server(mode="prefill", env=LEAD), id="nixl"),
        pytest.param(marks=pytest.mark.server(*MOONCAKE, mode="prefill", env=LEAD), id="mooncake"),
    ],
)
#: Finish reason of an answer without tokens and without an error.
EMPTY = {"type": "length", "length": 0}


def answers(prefill: Prefill, rid: str) -> list[Any]:
    """Return the finish reason of each answer to a client."""
    return [
        reason
        for output in prefill.outputs
        for answered, reason in zip(output.rids, output.finished_reasons, strict=True)
        if answered == rid
    ]


@backends
@pytest.mark.parametrize("early", [False, True])
def test_prefills_half_ends_with_an_empty_answer_and_no_error(
    prefill: Prefill, early: bool
) -> None:
    """Guards against an error of prefill's half, which a router returns to the client, whatever
    decode answers; also if decode's message arrives before the request."""
    room = ROOM + early
    message = [ABORT, str(room).encode(), LOCAL_NOTICE]
    if early:
        prefill.hear(message)
    rid = prefill.ask(PROMPT, 4, bootstrap_room=room, return_logprob=True)
    prefill.step(3)
    if not early:
        prefill.hear(message)
        prefill.step(2)
    assert prefill.ended(rid) and prefill.output(rid) == []
    assert answers(prefill, rid) == [EMPTY]
    assert prefill.is_idle()


@pytest.mark.server(mode="prefill", env=LEAD)
def test_a_released_request_ends_its_prefetch_from_a_store(
    prefill: Prefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against HiCache's tables, which grow with each request that SGLang's tree takes for
    served: a prefetch is counted when prefill computes its request, which never happens."""
    released: list[object] = []
    monkeypatch.setattr(prefill.scheduler.tree_cache, "release_aborted_request", released.append)
    rid = prefill.ask(PROMPT, 4, bootstrap_room=ROOM + 2)
    prefill.step(3)
    prefill.hear([ABORT, str(ROOM + 2).encode(), LOCAL_NOTICE])
    prefill.step(2)
    assert prefill.ended(rid)
    assert released == [prefill.requests[rid].cache_request_handle]


@pytest.mark.server(
    *("--optimistic-prefill-attempts", "2", "--chunked-prefill-size", "64"),
    mode="prefill",
    env=LEAD,
)
@pytest.mark.parametrize("steps", range(1, 8))
def test_a_request_that_prefill_computes_before_its_room_is_ready_is_released(
    prefill: Prefill, steps: int
) -> None:
    """Guards against an error, a leak or a late answer at each stage of such a request: queued,
    between two chunks, computed."""
    rid = prefill.ask(PROMPT, 4, bootstrap_room=ROOM + 10 + steps)
    prefill.step(steps)
    prefill.hear([ABORT, str(ROOM + 10 + steps).encode(), LOCAL_NOTICE])
    prefill.step(4)
    assert prefill.ended(rid) and not prefill.sent
    assert answers(prefill, rid) == [EMPTY]


@pytest.mark.server(mode="prefill", env=LEAD)
def test_the_number_of_a_released_room_can_be_used_again(prefill: Prefill) -> None:
    """Guards against messages for a released room (released, aborted) that end a new request under
    the same number. Decode sends such a request after a pause."""
    message = [ABORT, str(ROOM).encode(), LOCAL_NOTICE]
    rid = prefill.ask(PROMPT, 4, bootstrap_room=ROOM)
    prefill.step(3)
    prefill.hear(message)
    prefill.step(2)
    assert prefill.ended(rid)
    prefill.hear(message)
    prefill.hear_abort(ROOM)
    again = prefill.ask(PROMPT, 4, bootstrap_room=ROOM)
    prefill.step(5)
    assert not prefill.ended(again)
    prefill.abort(again)
    prefill.step(3)
    assert prefill.ended(again)


@pytest.mark.server(mode="prefill", env=LEAD)
def test_a_cached_prefix_that_is_being_sent_stays_until_its_forward_has_ended(
    prefill: Prefill,
) -> None:
    """Guards against a notice that frees pages of a request in a batch. Decode sends no notice once
    it has announced pages, so that only a wrong one arrives then; it ends the request as SGLang's
    own abort does."""
    first = prefill.ask(PROMPT, 4, bootstrap_room=ROOM + 3)
    prefill.step()
    prefill.announce(first)
    prefill.until(lambda: any(chunk.is_last_chunk for chunk in prefill.sent))
    prefill.transferred(first)
    prefill.until(lambda: prefill.ended(first))
    prefill.sent.clear()
    rid = prefill.ask([*PROMPT, *range(50)], 4, bootstrap_room=ROOM + 4)
    prefill.step()
    prefill.announce(rid)
    prefill.until(lambda: bool(prefill.sent))
    (early,) = prefill.sent
    assert not early.is_last_chunk and len(early.prefill_kv_indices) == len(PROMPT) // 16
    prefill.hear([ABORT, str(ROOM + 4).encode(), LOCAL_NOTICE])
    assert not prefill.ended(rid) and prefill.balance()["locked"] >= len(PROMPT) // 16 * 16
    prefill.until(lambda: prefill.ended(rid))
    assert prefill.sent[-1].is_last_chunk, "its forward has ended"
    assert prefill.requests[rid].finished_reason.to_json()["type"] == "abort"
