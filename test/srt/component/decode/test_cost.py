"""What an admission step costs: matches, walks and evictions are counted, not timed."""

from __future__ import annotations

from typing import Any

import pytest

from component.decode.checks import check
from component.decode.decoder import Decoder
from component.decode.steps import admit, finish, ids, land, run, serve, tick
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey


def insert(decoder: Decoder, token_ids: list[int]) -> None:
    """Some other request's KV enters the tree: slots that nobody else owns."""
    tree, allocator = decoder.tree_cache, decoder.token_to_kv_pool_allocator
    slots = allocator.alloc(len(token_ids))
    params = InsertParams(key=RadixKey(token_ids, None), value=slots)
    allocator.free(slots[: tree.insert(params).prefix_len])


def test_one_match_for_each_admitted_and_one_more(matches: list[int]) -> None:
    """Guards against matching, in every step that admits somebody, eight who do not get in."""
    decoder = Decoder(16, 640)
    reqs = admit(decoder, *(ids(start, 160) for start in range(1, 9)))
    assert decoder.in_transfer == reqs[:3] and len(matches) == 4
    for req in reqs[:2]:
        decoder.abort(req.rid)
        decoder.room(req).writing = False
    matches.clear()
    tick(decoder, 4)
    # The fourth was matched before.
    assert decoder.in_transfer == reqs[2:5] and len(matches) == 2
    finish(decoder)


def test_an_insert_does_not_match_a_blocked_head_again(matches: list[int]) -> None:
    """Guards against a server that matches the head of its queue whenever anything enters the tree,
    which is in every step of a busy one."""
    decoder = Decoder(16, 640)
    run(decoder, ids(1, 400), new=100)
    (blocked,) = admit(decoder, ids(2, 300), new=4)
    matches.clear()
    for number in range(4):
        insert(decoder, ids(number + 10, 16))
        decoder.tick_queues()
    assert decoder.queued == [blocked] and matches == []


@pytest.mark.parametrize("steps", [0, 1])
def test_a_longer_prefix_lets_a_blocked_head_in(matches: list[int], steps: int) -> None:
    """Guards against a head that is not tried again when another request's KV lands that it goes on
    with: as soon as it shares it, it needs less. With a draft model it is found by pairs."""
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


def test_who_cannot_finish_is_not_matched_in_every_step(matches: list[int]) -> None:
    """Guards against a head that is refused although tokens are free, and matched whenever a
    running request has generated a token."""
    decoder = Decoder(16, 640)
    run(decoder, ids(1, 100), new=300)
    (entering,) = admit(decoder, ids(2, 150), new=100)
    (refused,) = admit(decoder, ids(3, 150), new=100)
    assert decoder.in_transfer == [entering] and decoder.queued == [refused]
    assert decoder.decode_metrics.refusals == {"cannot_finish": 1}
    matches.clear()
    for _ in range(20):
        decoder.tick_batch()
        decoder.tick_queues()
        check(decoder)
    assert decoder.queued == [refused] and matches == []
    finish(decoder)


def test_small_evictions_take_a_little_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a full pool on which every decode step evicts for itself, and so looks at all
    leaves of the tree."""
    asked: list[int] = []
    original = RadixCache.evict

    def evict(tree: Any, params: Any) -> Any:
        asked.append(params.num_tokens)
        return original(tree, params)

    decoder = Decoder(1, 2048)
    run(decoder, ids(30, 40), new=500)
    for number in range(500):
        insert(decoder, [100 + number, 1, 2, 3])
    assert decoder.token_to_kv_pool_allocator.available_size() < 8
    monkeypatch.setattr(RadixCache, "evict", evict)
    for _ in range(320):
        decoder.tick_batch()
    # One of 128 parts of the pool at a time, and no more than that.
    assert 15 <= len(asked) <= 20 and set(asked) == {16}


def test_what_is_remembered_is_one_requests(matches: list[int]) -> None:
    """Guards against another prompt's prefix: clients name requests, and may use a name again, with
    another prompt, when the first one that had it was aborted or answered."""
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
