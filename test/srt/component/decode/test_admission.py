"""Admission on a small pool: order, eviction, waiting, and what is reserved for who runs."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from component.decode.checks import check
from component.decode.decoder import Decoder
from component.decode.steps import admit, finish, ids, land, run, serve, tick, turn
from sglang.srt.disaggregation import decode
from sglang.srt.mem_cache.radix_cache import RadixCache

WAIT_TOKENS = "SGLANG_DISAGGREGATION_DECODE_PREFIX_WAIT_TOKENS"
WAIT_TIMEOUT = "SGLANG_DISAGGREGATION_DECODE_PREFIX_WAIT_TIMEOUT"


# ---- what is announced ----


@pytest.mark.parametrize("page", [1, 16])
def test_shared_prefixes_are_moved_and_stored_once(page: int) -> None:
    """Guards against a pool that fills with copies of one prefix: only the suffixes are taken.
    There are more than one step can try."""
    decoder = Decoder(page, 640)
    prefix = ids(1, 320)
    serve(decoder, prefix)
    reqs = admit(decoder, *([*prefix, *ids(number + 2, 16)] for number in range(10)), new=4)
    assert decoder.in_transfer == reqs[:8]
    tick(decoder)
    assert decoder.in_transfer == reqs
    rooms = decoder.rooms[1:]
    assert {(room.prefix_len, len(room.pages)) for room in rooms} == {(320, 16 // page)}
    finish(decoder)


def test_a_stock_prefill_server_is_served_as_today() -> None:
    """Guards against a prefix, or a frame, for a prefill server that does not understand it; and
    against prefix 0 meaning "no frame": prefill checks the page count of the frame."""
    decoder = Decoder(16, 640)
    prompt = ids(1, 96)
    decoder.kv_manager.stock_peers.add("10.0.0.2:8998")
    admit(decoder, prompt)
    admit(decoder, prompt, host="10.0.0.2")
    finish(decoder)
    stock = decoder.submit([*prompt, 1, 2], new=2, host="10.0.0.2")
    (patched,) = admit(decoder, [*prompt, 1, 2], new=2)
    found = [(room.announced, room.prefix_len, len(room.pages)) for room in decoder.rooms]
    assert found == [(True, 0, 6), (False, 0, 6), (False, 0, 7), (True, 96, 1)]
    finish(decoder)
    assert stock.output_ids == patched.output_ids


@pytest.mark.hazard("matched-twice")
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("page", [1, 16])
def test_concurrent_equal_prompts_end_as_one_copy(page: int, first: int) -> None:
    """Guards against two copies of one prompt, both missed and both moved, where one leaks or is
    freed twice; whichever arrives first."""
    decoder = Decoder(page, 640)
    reqs = admit(decoder, ids(1, 70), ids(1, 70), new=3)
    assert decoder.in_transfer == reqs
    for req in (reqs[first], reqs[1 - first]):
        land(decoder, req)
        decoder.tick_batch()
        check(decoder)
    finish(decoder)
    assert decoder.tree_cache.total_size() == (70 + 2) // page * page


def test_a_turn_is_sent_the_index_of_its_delta() -> None:
    """Guards against an index that is not announced, or of pages that the tree holds."""
    decoder = Decoder(64, 1024, sparse=True)
    (first,) = serve(decoder, ids(1, 150), new=50)
    assert decoder.rooms[-1].state_pages.tolist() == decoder.rooms[-1].pages.tolist()
    admit(decoder, [*first.origin_input_ids, *first.output_ids, *ids(2, 30)])
    room = decoder.rooms[-1]
    assert room.prefix_len == 192 and len(room.state_pages) == 1
    finish(decoder)


def test_of_a_full_hit_no_index_is_announced() -> None:
    """Guards against a list of no pages: prefill sends nothing for it, and SGLang's decode would
    wait for that."""
    decoder = Decoder(64, 1024, sparse=True)
    for _ in range(2):
        serve(decoder, ids(1, 128))
    assert len(decoder.rooms[-1].pages) == 0 and decoder.rooms[-1].state_pages is None


# ---- memory ----


@pytest.mark.hazard("admission-count")
@pytest.mark.parametrize("page", [1, 16])
def test_exactly_the_shortfall_is_evicted(monkeypatch: pytest.MonkeyPatch, page: int) -> None:
    """Guards against an allocation that fails although the tree could give way, and against one
    that throws out more than it needs, or anything where enough is free."""
    decoder = Decoder(page, 640)
    serve(decoder, *(ids(number, 160) for number in (1, 2, 3)))
    free = decoder.token_to_kv_pool_allocator.available_size()
    assert 100 < free < 300
    asked, evict = [], RadixCache.evict

    def note(tree: Any, params: Any) -> Any:
        asked.append(params.num_tokens)
        return evict(tree, params)

    monkeypatch.setattr(RadixCache, "evict", note)
    admit(decoder, ids(8, 30))
    assert asked == []
    free -= -(-30 // page) * page
    admit(decoder, ids(9, 300))
    needed = -(-300 // page) * page
    assert asked == [needed - free]
    assert len(decoder.rooms[-1].pages) == needed // page
    finish(decoder)


@pytest.mark.hazard("admission-count")
def test_eviction_that_gives_less_than_asked(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against a scheduler that ends because somebody else holds what the tree counted as
    evictable: the request waits, and is admitted when the pages are back."""
    decoder = Decoder(16, 640)
    serve(decoder, ids(1, 300), ids(2, 300))
    waiting = decoder.submit(ids(9, 320), new=1)
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(RadixCache, "evict", lambda tree, params: None)
        tick(decoder, 3)
        assert decoder.queued == [waiting] and decoder.in_transfer == []
    assert f"request {waiting.rid} stays queued" in caplog.text
    tick(decoder)
    assert decoder.in_transfer == [waiting]
    finish(decoder)


def test_locked_tree_is_no_room(caplog: pytest.LogCaptureFixture) -> None:
    """Guards against a budget from before the lock: the candidate's own prefix is not evictable any
    more, so it must not be counted as free for its delta."""
    decoder = Decoder(16, 640)
    prefix = ids(1, 560)
    serve(decoder, prefix)
    # 560 of 640 tokens are its own prefix; the delta of 96 tokens does not fit beside it.
    (refused,) = admit(decoder, [*prefix, *ids(2, 90)])
    assert decoder.queued == [refused] and decoder.tree_cache.protected_size() == 0
    assert "stays queued" not in caplog.text, "the budget refused it, not the allocator"
    decoder.abort(refused.rid)
    (fits,) = admit(decoder, ids(3, 64))
    assert decoder.in_transfer == [fits]


@pytest.mark.hazard("admission-count")
def test_one_token_more_is_one_page_more() -> None:
    """Guards against costs that are not rounded up to pages: each of these requests seems to need
    one token, and takes a page."""
    decoder = Decoder(16, 640, rows=40)
    prefix = ids(1, 160)
    serve(decoder, prefix)
    admit(decoder, *([*prefix, number % 50] for number in range(40)))
    finish(decoder)


# ---- order ----


def blocked_decoder() -> tuple[Decoder, Any, Any]:
    """A server whose pool is in use by one running request, and a request that does not fit."""
    decoder = Decoder(16, 640)
    (running,) = run(decoder, ids(1, 400))
    return decoder, running, decoder.submit(ids(2, 300), new=4)


@pytest.mark.hazard("starvation")
def test_blocked_head_is_not_matched_again(matches: list[int]) -> None:
    """Guards against matching a blocked prompt on every step: that costs its length each time, and
    keeps its prefix young in the eviction order by mere polling."""
    decoder, running, blocked = blocked_decoder()
    matches.clear()
    for _ in range(20):
        decoder.tick_queues()
    # While the running request generates, the pool changes but not for the better.
    for _ in range(20):
        decoder.tick_batch()
        decoder.tick_queues()
    assert decoder.queued == [blocked] and len(matches) == 1
    decoder.abort(running.rid)
    finish(decoder)
    assert len(blocked.output_ids) == 4


@pytest.mark.hazard("starvation")
@pytest.mark.parametrize("leaves", ["the running one", "the head"])
def test_nobody_overtakes_a_blocked_head(leaves: str) -> None:
    """Guards against small requests that starve a large one, and against a queue that stays blocked
    on behalf of one that was aborted. A slow handshake blocks nobody."""
    decoder, running, blocked = blocked_decoder()
    slow = decoder.submit(ids(5, 32), ready=False)
    small = [decoder.submit(ids(number, 16), new=1) for number in (3, 4)]
    tick(decoder, 5)
    assert decoder.queued == [blocked, slow, *small]
    if leaves == "the head":
        decoder.abort(blocked.rid)
        tick(decoder)
        assert decoder.in_transfer == small and decoder.queued == [slow]
    decoder.abort(running.rid)
    for _ in range(3):
        decoder.tick_batch()
        tick(decoder)
    assert decoder.in_transfer[0] is (blocked if leaves != "the head" else small[0])
    finish(decoder)


def test_those_behind_let_go_for_the_first(matches: list[int]) -> None:
    """Guards against a request that does not fit because others behind it, tried in the same step,
    hold the memory that could be evicted; and against locks that the step leaves behind."""
    decoder = Decoder(16, 640)
    serve(decoder, ids(1, 160), ids(2, 160))
    matches.clear()
    large, *others = admit(decoder, ids(3, 480), *([*ids(start, 160), 1] for start in (1, 2)))
    assert matches == [480, 161]
    assert decoder.in_transfer == [large] and decoder.queued == others
    finish(decoder)


@pytest.mark.hazard("lost-lock")
def test_a_step_that_admits_nobody_leaves_no_lock(matches: list[int]) -> None:
    """Guards against leases of a step that end with their requests still queued; and against a head
    whose own prefix looks like free memory once its lease is given back: it would be matched and
    refused on every step while others run."""
    decoder = Decoder(16, 640)
    serve(decoder, ids(1, 160))
    run(decoder, ids(2, 400))
    matches.clear()
    blocked = [decoder.submit([*ids(1, 160), *ids(start, 100)], new=4) for start in (3, 4, 5)]
    protected = decoder.tree_cache.protected_size()
    for _ in range(30):
        turn(decoder)
        assert decoder.tree_cache.protected_size() == protected
    assert decoder.queued == blocked and matches == [260]
    finish(decoder)
    assert [len(req.output_ids) for req in blocked] == [4] * 3


# ---- a prefix that is just arriving ----


def burst(monkeypatch: pytest.MonkeyPatch) -> tuple[Decoder, list[Any]]:
    """Three requests with one new prefix arrive together."""
    monkeypatch.setenv(WAIT_TOKENS, "64")
    monkeypatch.setenv(WAIT_TIMEOUT, "30")
    decoder = Decoder(16, 1024)
    return decoder, [decoder.submit([*ids(1, 160), *ids(n, 20)], new=2) for n in (2, 3, 4)]


def test_a_burst_moves_its_prefix_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against moving one new prefix once for each request of a burst."""
    decoder, reqs = burst(monkeypatch)
    other = decoder.submit(ids(9, 80), new=2)
    for _ in range(3):
        tick(decoder)
        assert decoder.in_transfer == [reqs[0], other], "others pass, followers wait"
    land(decoder, reqs[0])
    tick(decoder)
    assert decoder.in_transfer == [other, reqs[1], reqs[2]]
    assert [len(room.pages) for room in decoder.rooms] == [12, 2, 2, 5]
    finish(decoder)


def test_copies_of_a_prompt_hold_up_nobody(
    monkeypatch: pytest.MonkeyPatch, matches: list[int]
) -> None:
    """Guards against copies that are matched, or tried in the place of those behind them: 32 of
    each prompt, of which the first one is moved."""
    monkeypatch.setenv(WAIT_TOKENS, "64")
    decoder = Decoder(16, 4096)
    reqs = [decoder.submit(ids(number // 32, 160), new=2) for number in range(4 * 32)]
    for _ in range(2):
        decoder.tick_queues()
        assert decoder.in_transfer == reqs[::32] and len(matches) == 4
    assert decoder.decode_metrics.refusals == {"prefix_arriving": 4 * 31}


@pytest.mark.parametrize("what", ["takes too long", "fails"])
def test_nobody_waits_for_ever(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against followers that hang with the one they wait for."""
    decoder, reqs = burst(monkeypatch)
    tick(decoder)
    if what == "fails":
        decoder.abort(reqs[0].rid)
        tick(decoder, 2)
        assert decoder.in_transfer == [reqs[1]] and decoder.queued == [reqs[2]]
    else:
        decoder.now = 29.9
        tick(decoder)
        assert decoder.in_transfer == reqs[:1]
        decoder.now = 30.1
        tick(decoder, 2)  # the ranks agree that they waited enough
        assert decoder.in_transfer == reqs
    finish(decoder)
    pages = [len(room.pages) for room in decoder.rooms]
    assert pages == ([12, 12, 2] if what == "fails" else [12] * 3)


# ---- who runs ----


def test_requests_in_transfer_leave_room_for_one_that_runs() -> None:
    """Entering requests reserve little, and cannot be retracted while they are in transfer: if they
    were let in until the pool is full, the running one would be aborted for lack of memory."""
    decoder = Decoder(16, 640, reserve=512)
    first, *others = admit(decoder, ids(1, 100), ids(2, 200), ids(3, 200), new=200)
    assert decoder.in_transfer == [first, others[0]]
    decoder.deliver(first)
    turn(decoder, 205)
    assert len(first.output_ids) == 200
    assert first.finished_reason.to_json()["type"] == "length"
    finish(decoder)


#: SGLang's estimate is 4,096 tokens, beside 512 that are reserved; here both are an eighth or less.
ESTIMATE, RESERVE, ANSWER = 128, 64, 512


def test_long_answers_are_seldom_retracted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a reserve of nothing for a request that has generated more than SGLang's
    estimate of an answer: its next tokens would be given to others, and it would be retracted."""
    monkeypatch.setattr(decode, "CLIP_MAX_NEW_TOKEN", ESTIMATE)
    decoder = Decoder(16, 1024, reserve=RESERVE)
    (req,) = run(decoder, ids(1, 64), new=ANSWER)
    claims = decoder.disagg_decode_prealloc_queue._budget.claims
    while not req.finished():
        left = 64 + ANSWER - req.kv_allocated_len
        assert min(left, RESERVE) - 16 < claims.reserved <= RESERVE
        decoder.tick_batch()
    finish(decoder)
    decoder = Decoder(16, 2048, reserve=RESERVE)
    reqs = serve(decoder, *(ids(start, 48) for start in range(12)), new=ANSWER)
    assert all(len(req.output_ids) == ANSWER for req in reqs)
    assert sum(req.retraction_count for req in reqs) <= 20
