"""Admission on a small pool: order, eviction, waiting, and the reserve for running requests."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from component.decode import kv
from component.decode.checks import check
from component.decode.decoder import Decoder
from component.decode.steps import admit, finish, ids, land, run, serve, tick, turn
from sglang.srt.disaggregation import decode
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

# ---- announcements ----


@pytest.mark.parametrize("page", [1, 16])
def test_shared_prefixes_are_moved_and_stored_once(page: int) -> None:
    """Guards against a pool that fills with copies of one prefix: only the suffixes are allocated.
    There are more requests than one step can try."""
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
    against prefix 0 sent as "no frame": prefill checks the page count of the frame."""
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


def test_a_turn_is_sent_the_index_of_its_delta() -> None:
    """Guards against an index that is not announced, or for pages that the tree holds; and, for a
    full hit, against an empty list: prefill sends nothing for it, and SGLang's decode would
    wait."""
    decoder = Decoder(64, 1024, sparse=True)
    (first,) = serve(decoder, ids(1, 150), new=50)
    text = [*first.origin_input_ids, *first.output_ids]
    admit(decoder, [*text, *ids(2, 30)])
    serve(decoder, text[:192])
    first_turn, delta, full_hit = decoder.rooms
    assert [len(room.pages) for room in decoder.rooms] == [3, 1, 0]
    assert len(first_turn.state_pages) == 3 and len(delta.state_pages) == 1
    assert delta.prefix_len == 192 and full_hit.state_pages is None


# ---- memory ----


@pytest.mark.hazard("admission-count")
@pytest.mark.parametrize("page", [1, 16])
def test_exactly_the_shortfall_is_evicted(monkeypatch: pytest.MonkeyPatch, page: int) -> None:
    """Guards against an allocation that fails although the tree could evict, and against an
    eviction of more than is needed, or of anything while enough is free."""
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
    """Guards against a scheduler that ends because pages that the tree counted as evictable are
    held elsewhere: the request waits, and is admitted when the pages are back."""
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
    """Guards against a budget from before the lock: the candidate's own prefix is no longer
    evictable, so it must not be counted as free for its delta."""
    decoder = Decoder(16, 640)
    prefix = ids(1, 560)
    serve(decoder, prefix)
    # The request's prefix takes 560 of 640 tokens; its delta of 96 tokens does not fit.
    (refused,) = admit(decoder, [*prefix, *ids(2, 90)])
    assert decoder.queued == [refused] and decoder.tree_cache.protected_size() == 0
    assert "stays queued" not in caplog.text, "the budget refused it, not the allocator"
    decoder.abort(refused.rid)
    (fits,) = admit(decoder, ids(3, 64))
    assert decoder.in_transfer == [fits]


# ---- order ----


def blocked_decoder() -> tuple[Decoder, Any, Any]:
    """Return a server with a pool in use by one request, and a request that does not fit."""
    decoder = Decoder(16, 640)
    (running,) = run(decoder, ids(1, 400))
    return decoder, running, decoder.submit(ids(2, 300), new=4)


def insert(decoder: Decoder, token_ids: list[int]) -> None:
    """Insert another request's KV into the tree, in slots without another owner."""
    tree, allocator = decoder.tree_cache, decoder.token_to_kv_pool_allocator
    slots = allocator.alloc(len(token_ids))
    kv.write(decoder.pool, slots, kv.tags(token_ids, None))
    params = InsertParams(key=RadixKey(token_ids, None), value=slots)
    allocator.free(slots[: tree.insert(params).prefix_len])


def lacks_memory() -> tuple[Decoder, list[Any]]:
    decoder, _, blocked = blocked_decoder()
    return decoder, [blocked]


def shares_what_it_could_evict() -> tuple[Decoder, list[Any]]:
    """Return requests with prefixes that look like free memory once their leases are released."""
    decoder = Decoder(16, 640)
    serve(decoder, ids(1, 160))
    run(decoder, ids(2, 400))
    return decoder, [decoder.submit([*ids(1, 160), *ids(n, 100)], new=4) for n in (3, 4, 5)]


def cannot_finish() -> tuple[Decoder, list[Any]]:
    """Return a server with free tokens, but too few for the end of all answers."""
    decoder = Decoder(16, 640)
    run(decoder, ids(1, 100), new=300)
    admit(decoder, ids(2, 150), new=100)
    return decoder, [decoder.submit(ids(3, 150), new=100)]


@pytest.mark.hazard("step-per-waiting-request")
def test_one_match_for_each_place_that_is_freed(matches: list[int]) -> None:
    """Guards against a vote in which earlier candidates do not count: with answers that limit the
    pool, each freed place would cost a match of each of the next candidates, in vain."""
    decoder = Decoder(16, 13312, rows=60)
    contexts = [[number, *ids(number + 1, 575)] for number in range(22)]
    for context in contexts:
        serve(decoder, context)
    for context in contexts:
        decoder.submit([*context, *ids(20, 16)], new=6000)
    tick(decoder, 3)
    admitted = len(decoder.in_transfer)
    assert 0 < admitted < 20
    for _ in range(4):
        matches.clear()
        decoder.abort(decoder.in_transfer[0].rid)
        for room in decoder.rooms:
            room.writing = False
        tick(decoder, 3)
        assert len(decoder.in_transfer) == admitted and len(matches) <= 2
    decoder.abort("")


@pytest.mark.hazard("starvation", "lost-lock")
@pytest.mark.parametrize(
    ("why", "reason"),
    [
        (lacks_memory, "no_tokens"),
        (shares_what_it_could_evict, "no_tokens"),
        (cannot_finish, "cannot_finish"),
    ],
)
def test_a_blocked_head_is_matched_once(
    why: Callable[[], tuple[Decoder, list[Any]]], reason: str, matches: list[int]
) -> None:
    """Guards against matching a blocked prompt on every step, or whenever a token is generated or
    anything enters the tree: that costs its length each time, and its prefix stays young in the
    eviction order; against leases of a step that end while their requests are still queued; and
    against a counter of refusals that counts steps."""
    decoder, blocked = why()
    matches.clear()
    protected = decoder.tree_cache.protected_size()
    for number in range(30):
        tick(decoder)
        if number % 3 == 1:
            decoder.tick_batch()
        elif number % 3 == 2 and number < 12 and why is lacks_memory:
            insert(decoder, ids(number + 10, 16))
        assert decoder.tree_cache.protected_size() == protected
    assert decoder.queued == blocked and len(matches) == 1
    assert decoder.telemetry.by("decode_admission_refused")[reason,] == 1
    finish(decoder)
    assert all(len(req.output_ids) == req.sampling_params.max_new_tokens for req in blocked)


@pytest.mark.hazard("starvation")
@pytest.mark.parametrize("leaves", ["the running one", "the head"])
def test_nobody_overtakes_a_blocked_head(leaves: str) -> None:
    """Guards against small requests that starve a large one, and against a queue that stays blocked
    by an aborted request. A slow handshake blocks no other request."""
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
    """Guards against a request that does not fit because requests behind it, tried in the same
    step, lock the memory that could be evicted; and against locks that stay after the step."""
    decoder = Decoder(16, 640)
    serve(decoder, ids(1, 160), ids(2, 160))
    matches.clear()
    large, *others = admit(decoder, ids(3, 480), *([*ids(start, 160), 1] for start in (1, 2)))
    assert matches == [480, 161]
    assert decoder.in_transfer == [large] and decoder.queued == others
    finish(decoder)


@pytest.mark.parametrize("steps", [0, 1])
def test_a_longer_prefix_lets_a_blocked_head_in(matches: list[int], steps: int) -> None:
    """Guards against a head that is not retried when another request's KV extends its prefix in the
    tree: it then needs less. With a draft model the prefix is found by pairs."""
    decoder = Decoder(16, 640, steps=steps)
    text = ids(2, 321)
    (leader,) = admit(decoder, text, new=8)
    head = decoder.submit([*text, *ids(5, 40)], new=4)
    tick(decoder, 5)
    assert decoder.queued == [head] and len(matches) == 2
    land(decoder, leader)
    tick(decoder)
    assert decoder.in_transfer == [head] and decoder.rooms[-1].prefix_len == 320
    finish(decoder)


def test_what_is_remembered_is_one_requests(matches: list[int]) -> None:
    """Guards against another prompt's prefix: clients may use a request id again, with another
    prompt, after the first request with that id was aborted or answered."""
    decoder = Decoder(16, 640)
    serve(decoder, ids(2, 64))
    run(decoder, ids(1, 300))
    (blocked,) = admit(decoder, ids(2, 400), new=4)
    assert decoder.queued == [blocked]
    decoder.abort(blocked.rid)
    tick(decoder)
    again = decoder.submit(ids(3, 80), new=4)
    again.rid = blocked.rid
    matches.clear()
    tick(decoder)
    assert decoder.in_transfer == [again] and matches == [80]
    assert decoder.rooms[-1].prefix_len == 0
    decoder.drain()
    assert decoder.mailbox.ends[again.rid] == 2
    check(decoder)


# ---- an arriving prefix ----


@pytest.mark.parametrize("options", [{}, {"local": 400}], ids=["received", "computed here"])
def test_a_burst_keeps_its_place_and_frees_its_copies(options: dict[str, Any]) -> None:
    """Guards against a request that waits for another one's transfer of the same prefix and loses
    its place in prefill's queue by that; and against copies of the prefix that stay in the pool:
    each is freed when its transfer is committed."""
    decoder = Decoder(16, 2048, **options)
    prefix = ids(1, 288)
    reqs = admit(decoder, *([*prefix, *ids(number, 20)] for number in (2, 3, 4)), new=2)
    assert decoder.in_transfer + decoder.local == reqs
    pool = decoder.token_to_kv_pool_allocator
    assert pool.available_size() == 2048 - 3 * 320
    if not options:
        land(decoder)
        assert pool.available_size() == 2048 - 288 - 3 * 32
    finish(decoder)
    assert decoder.tree_cache.total_size() == 288 + 3 * 16


# ---- running requests ----


def test_requests_in_transfer_leave_room_for_one_that_runs() -> None:
    """Guards against running requests that are aborted for lack of memory: entering requests
    reserve little and cannot be retracted in transfer, so they may not fill the pool."""
    decoder = Decoder(16, 640, reserve=512)
    first, *others = admit(decoder, ids(1, 100), ids(2, 200), ids(3, 200), new=200)
    assert decoder.in_transfer == [first, others[0]]
    decoder.deliver(first)
    turn(decoder, 205)
    assert len(first.output_ids) == 200
    assert first.finished_reason.to_json()["type"] == "length"
    finish(decoder)


def test_long_answers_are_seldom_retracted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against an empty reserve for a request that has generated more than SGLang's estimate
    of an answer, after which it would be retracted. The estimate is 4,096 tokens, and 512 are
    reserved; here both are less."""
    monkeypatch.setattr(decode, "CLIP_MAX_NEW_TOKEN", 128)
    decoder = Decoder(16, 2048, reserve=64)
    reqs = serve(decoder, *(ids(start, 48) for start in range(12)), new=512)
    assert [len(req.output_ids) for req in reqs] == [512] * 12
    assert sum(req.retraction_count for req in reqs) <= 20
