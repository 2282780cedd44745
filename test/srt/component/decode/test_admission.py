"""Admission on a small pool: order, eviction, waiting, and what a refused request costs."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from component.decode.checks import check, check_idle, holders
from component.decode.decoder import Decoder
from component.decode.steps import tick
from sglang.srt.disaggregation.delta.decode.prefix_tree import DecodeRadixTree
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

WAIT_TOKENS = "SGLANG_DISAGGREGATION_DECODE_PREFIX_WAIT_TOKENS"
WAIT_TIMEOUT = "SGLANG_DISAGGREGATION_DECODE_PREFIX_WAIT_TIMEOUT"


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting for an arriving prefix is on only where a test asks for it."""
    monkeypatch.setenv(WAIT_TOKENS, "0")


def ids(start: int, count: int) -> list[int]:
    """A text of its own for each ``start``."""
    return [(start * 7 + number * (start + 1)) % 50 for number in range(count)]


def serve(decoder: Decoder, *prompts: list[int], new: int = 1) -> None:
    """Serve prompts to their end, so that the tree keeps them."""
    for prompt in prompts:
        decoder.submit(prompt, new=new)
    decoder.drain()
    check_idle(decoder)


class Evictions:
    """Records how much each eviction was asked for, and gave."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[int] = []
        self.given: list[int] = []
        original = RadixCache.evict

        def evict(tree: Any, params: Any) -> Any:
            result = original(tree, params)
            self.asked.append(params.num_tokens)
            self.given.append(result.num_tokens_evicted)
            return result

        monkeypatch.setattr(RadixCache, "evict", evict)


@pytest.mark.parametrize("page", [1, 16])
def test_shared_prefixes_are_moved_and_stored_once(page: int) -> None:
    """Guards against a pool that fills with copies of one prefix: only the suffixes are taken."""
    decoder = Decoder(page, 640)
    prefix = ids(1, 320)
    serve(decoder, prefix)
    for number in range(8):
        decoder.submit([*prefix, *ids(number + 2, 16)], new=4)
    tick(decoder)
    assert len(decoder.in_transfer) == 8
    rooms = decoder.rooms[1:]
    assert {room.prefix_len for room in rooms} == {320}
    assert {len(room.pages) for room in rooms} == {16 // page}
    decoder.drain()
    check_idle(decoder)


@pytest.mark.hazard("admission-count")
@pytest.mark.parametrize("page", [1, 16])
def test_exactly_the_shortfall_is_evicted(monkeypatch: pytest.MonkeyPatch, page: int) -> None:
    """Guards against an allocation that fails although the tree could give way, and against one
    that throws out more than it needs."""
    decoder = Decoder(page, 640)
    serve(decoder, *(ids(number, 160) for number in (1, 2, 3)))
    free = decoder.token_to_kv_pool_allocator.available_size()
    assert 0 < free < 300
    evictions = Evictions(monkeypatch)
    decoder.submit(ids(9, 300), new=1)
    tick(decoder)
    needed = -(-300 // page) * page
    assert evictions.asked == [needed - free]
    assert len(decoder.rooms[-1].pages) == needed // page
    # Nothing is evicted for a request that fits as it is.
    decoder.submit(ids(1, 1), new=1)
    decoder.drain()
    check_idle(decoder)


def test_no_eviction_where_enough_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against an eviction of the whole demand, free pages or not."""
    decoder = Decoder(16, 640)
    serve(decoder, ids(1, 160))
    evictions = Evictions(monkeypatch)
    decoder.submit(ids(2, 160), new=1)
    tick(decoder)
    assert evictions.asked == [] and len(decoder.in_transfer) == 1


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
        for _ in range(3):
            tick(decoder)
            assert decoder.queued == [waiting] and holders(decoder) == []
    assert f"request {waiting.rid} stays queued" in caplog.text
    tick(decoder)
    assert decoder.in_transfer == [waiting]
    decoder.drain()
    check_idle(decoder)


def test_locked_tree_is_no_room(caplog: pytest.LogCaptureFixture) -> None:
    """Guards against a budget from before the lock: the candidate's own prefix is not evictable any
    more, so it must not be counted as free for its delta."""
    decoder = Decoder(16, 640)
    prefix = ids(1, 560)
    serve(decoder, prefix)
    # 560 of 640 tokens are its own prefix; the delta of 96 tokens does not fit beside it.
    refused = decoder.submit([*prefix, *ids(2, 90)], new=1)
    tick(decoder)
    assert decoder.queued == [refused] and decoder.tree_cache.protected_size() == 0
    assert "stays queued" not in caplog.text, "the budget refused it, not the allocator"
    fits = decoder.submit(ids(3, 64), new=1)
    decoder.abort(refused.rid)
    tick(decoder)
    assert decoder.in_transfer == [fits]


@pytest.mark.hazard("admission-count")
@pytest.mark.parametrize("page", [16])
def test_one_token_more_is_one_page_more(page: int) -> None:
    """Guards against costs that are not rounded up to pages: each of these requests seems to need
    one token, and takes a page."""
    decoder = Decoder(page, 640, rows=40)
    prefix = ids(1, 160)
    serve(decoder, prefix)
    for number in range(40):
        decoder.submit([*prefix, number % 50], new=1)
    tick(decoder)
    decoder.drain()
    check_idle(decoder)


def blocked_decoder() -> tuple[Decoder, Any, Any]:
    """A server whose pool is in use by one running request, and a request that does not fit."""
    decoder = Decoder(16, 640)
    running = decoder.submit(ids(1, 400), new=100)
    tick(decoder)
    decoder.deliver(running)
    tick(decoder)
    decoder.tick_batch()
    return decoder, running, decoder.submit(ids(2, 300), new=4)


def count_matches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the tree is asked to match from now on."""
    matches: list[Any] = []
    original = DecodeRadixTree.match_prefix

    def counted(tree: Any, params: Any) -> Any:
        matches.append(params)
        return original(tree, params)

    monkeypatch.setattr(DecodeRadixTree, "match_prefix", counted)
    return matches


@pytest.mark.hazard("starvation")
def test_blocked_head_is_not_matched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against matching a blocked prompt on every step: that costs its length each time, and
    keeps its prefix young in the eviction order by mere polling."""
    decoder, running, blocked = blocked_decoder()
    matches = count_matches(monkeypatch)
    for _ in range(100):
        decoder.tick_queues()
    assert decoder.queued == [blocked] and len(matches) == 1
    # While the running request generates, the pool changes but not for the better.
    for _ in range(20):
        decoder.tick_batch()
        decoder.tick_queues()
    assert decoder.queued == [blocked] and len(matches) == 1
    decoder.abort(running.rid)
    decoder.drain()
    assert len(blocked.output_ids) == 4
    check_idle(decoder)


@pytest.mark.hazard("starvation")
def test_nobody_overtakes_a_blocked_head() -> None:
    """Guards against small requests that starve a large one."""
    decoder, running, blocked = blocked_decoder()
    small = [decoder.submit(ids(number, 16), new=1) for number in (3, 4)]
    for _ in range(5):
        tick(decoder)
    assert decoder.queued == [blocked, *small]
    decoder.abort(running.rid)
    for _ in range(3):
        decoder.tick_batch()
        tick(decoder)
    assert decoder.in_transfer[0] is blocked
    decoder.drain()
    check_idle(decoder)


def test_a_head_that_left_unblocks_the_others() -> None:
    """Guards against a queue that stays blocked on behalf of a request that was aborted."""
    decoder, running, blocked = blocked_decoder()
    small = decoder.submit(ids(3, 16), new=1)
    tick(decoder)
    decoder.abort(blocked.rid)
    tick(decoder)
    assert decoder.in_transfer == [small] and decoder.mailbox.ends[blocked.rid] == 1
    decoder.abort(running.rid)
    decoder.drain()
    check_idle(decoder)


def test_handshakes_do_not_block_others() -> None:
    """Guards against a request whose prefill server is slow holding up everybody."""
    decoder = Decoder(16, 640)
    slow = decoder.submit(ids(1, 32), ready=False)
    ready = decoder.submit(ids(2, 32))
    tick(decoder)
    assert decoder.queued == [slow] and decoder.in_transfer == [ready]


class Clock:
    """Time that stands still until a test moves it."""

    def __init__(self, decoder: Decoder) -> None:
        self.now = 1000.0
        # Only the queue's clock: the tree's eviction order goes on.
        decoder.disagg_decode_prealloc_queue.clock = lambda: self.now


def burst(monkeypatch: pytest.MonkeyPatch) -> tuple[Decoder, list[Any], Clock]:
    """Three requests with one new prefix arrive together."""
    monkeypatch.setenv(WAIT_TOKENS, "64")
    monkeypatch.setenv(WAIT_TIMEOUT, "30")
    decoder = Decoder(16, 1024)
    clock = Clock(decoder)
    reqs = [decoder.submit([*ids(1, 160), *ids(n, 20)], new=2) for n in (2, 3, 4)]
    return decoder, reqs, clock


def test_a_burst_moves_its_prefix_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against moving one new prefix once for each request of a burst."""
    decoder, reqs, _ = burst(monkeypatch)
    other = decoder.submit(ids(9, 80), new=2)
    for _ in range(3):
        tick(decoder)
        assert decoder.in_transfer == [reqs[0], other], "others pass, followers wait"
    decoder.deliver(reqs[0])
    tick(decoder)
    tick(decoder)
    assert decoder.in_transfer == [other, reqs[1], reqs[2]]
    assert [len(room.pages) for room in decoder.rooms] == [12, 2, 2, 5]
    decoder.drain()
    check_idle(decoder)


def test_copies_of_a_prompt_hold_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against copies that are matched, or tried in the place of those behind them: 32 of
    each prompt, of which the first one is moved."""
    monkeypatch.setenv(WAIT_TOKENS, "64")
    decoder = Decoder(16, 4096)
    leaders = []
    for prompt in range(4):
        copies = [decoder.submit(ids(prompt, 160), new=2) for _ in range(32)]
        leaders.append(copies[0])
    matches = count_matches(monkeypatch)
    decoder.tick_queues()
    assert decoder.in_transfer == leaders and len(matches) == len(leaders)
    decoder.tick_queues()
    assert len(matches) == len(leaders) and decoder.decode_metrics.refusals == {
        "prefix_arriving": 4 * 31
    }


def test_nobody_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against followers that hang with the one they wait for."""
    decoder, reqs, clock = burst(monkeypatch)
    tick(decoder)
    clock.now += 29.9
    tick(decoder)
    assert decoder.in_transfer == reqs[:1]
    clock.now += 0.2
    tick(decoder)  # the ranks agree that they waited enough
    tick(decoder)
    assert decoder.in_transfer == reqs
    assert [room.prefix_len for room in decoder.rooms] == [0, 0, 0]
    decoder.drain()
    check_idle(decoder)


def test_a_failed_leader_is_succeeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against followers that wait for a prefix which never comes."""
    decoder, reqs, _ = burst(monkeypatch)
    tick(decoder)
    decoder.abort(reqs[0].rid)
    tick(decoder)
    tick(decoder)
    assert decoder.in_transfer == [reqs[1]] and decoder.queued == [reqs[2]]
    decoder.drain()
    assert [len(room.pages) for room in decoder.rooms] == [12, 12, 2]
    check_idle(decoder)


@pytest.mark.hazard("matched-twice")
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("page", [1, 16])
def test_concurrent_equal_prompts_end_as_one_copy(page: int, first: int) -> None:
    """Guards against two copies of one prompt, both missed and both moved, where one leaks or is
    freed twice; whichever arrives first."""
    decoder = Decoder(page, 640)
    prompt = ids(1, 70)
    reqs = [decoder.submit(prompt, new=3) for _ in range(2)]
    tick(decoder)
    assert decoder.in_transfer == reqs
    decoder.deliver(reqs[first])
    tick(decoder)
    decoder.tick_batch()
    check(decoder)
    decoder.deliver(reqs[1 - first])
    tick(decoder)
    for _ in range(5):
        decoder.tick_batch()
        check(decoder)
    assert decoder.tree_cache.total_size() == (70 + 2) // page * page
    check_idle(decoder)


def test_a_stock_prefill_server_is_served_as_today(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a prefix, or a frame, for a prefill server that does not understand it."""
    decoder = Decoder(16, 640)
    prompt = ids(1, 96)
    serve(decoder, prompt)
    decoder.kv_manager.stock_peers.add("10.0.0.2:8998")
    stock = decoder.submit([*prompt, 1, 2], new=2, host="10.0.0.2")
    patched = decoder.submit([*prompt, 1, 2], new=2)
    tick(decoder)
    old, new = decoder.rooms[-2:]
    assert (old.announced, old.prefix_len, len(old.pages)) == (False, 0, 7)
    assert (new.announced, new.prefix_len, len(new.pages)) == (True, 96, 1)
    decoder.drain()
    assert stock.output_ids == patched.output_ids
    # What a stock server sent is shared all the same, without a second copy.
    match = decoder.tree_cache.match_prefix(MatchPrefixParams(key=RadixKey(prompt, None)))
    assert len(match.device_indices) == 96
    check_idle(decoder)


def test_a_cold_prompt_is_announced_too() -> None:
    """Guards against prefix 0 meaning "no frame": prefill checks the page count of the frame."""
    decoder = Decoder(16, 640)
    decoder.submit(ids(1, 40))
    tick(decoder)
    (room,) = decoder.rooms
    assert (room.announced, room.prefix_len, len(room.pages)) == (True, 0, 3)


def test_requests_in_transfer_leave_room_for_one_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Entering requests reserve little, and cannot be retracted while they are in transfer: if they
    were let in until the pool is full, the running one would be aborted for lack of memory."""
    decoder = Decoder(16, 640, reserve=512)
    first = decoder.submit(ids(1, 100), new=200)
    others = [decoder.submit(ids(start, 200), new=200) for start in (2, 3)]
    tick(decoder)
    assert decoder.in_transfer == [first, others[0]]
    decoder.deliver(first)
    for _ in range(210):
        tick(decoder)
        decoder.tick_batch()
        check(decoder)
    assert len(first.output_ids) == 200
    assert first.finished_reason.to_json()["type"] == "length"
    for req in others:
        if req in decoder.in_transfer:
            decoder.deliver(req)
    decoder.drain()
    check_idle(decoder)
