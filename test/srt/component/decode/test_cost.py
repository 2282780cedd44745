"""What an admission step costs: matches, walks and evictions are counted, not timed."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from component.decode.checks import check, check_idle
from component.decode.decoder import Decoder
from component.decode.steps import ids, tick
from sglang.srt.disaggregation.delta.decode import transfer_queue
from sglang.srt.disaggregation.delta.decode.admission import GrowthSum
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

pytestmark = pytest.mark.usefixtures("no_prefix_wait")


def run(decoder: Decoder, *prompts: list[int], new: int) -> list[Any]:
    """Requests that decode."""
    reqs = [decoder.submit(prompt, new=new) for prompt in prompts]
    tick(decoder)
    for req in reqs:
        decoder.deliver(req)
    tick(decoder)
    decoder.tick_batch()
    assert decoder.running_batch.reqs == reqs
    return reqs


def insert(decoder: Decoder, token_ids: list[int]) -> None:
    """Some other request's KV enters the tree: slots that nobody else owns."""
    tree, allocator = decoder.tree_cache, decoder.token_to_kv_pool_allocator
    slots = allocator.alloc(len(token_ids))
    params = InsertParams(key=RadixKey(token_ids, None), value=slots)
    allocator.free(slots[: tree.insert(params).prefix_len])


def test_one_match_for_each_admitted_and_one_more(matches: list[int]) -> None:
    """Guards against matching, in every step that admits somebody, eight who do not get in."""
    decoder = Decoder(16, 640)
    reqs = [decoder.submit(ids(start, 160), new=1) for start in range(1, 9)]
    tick(decoder)
    assert decoder.in_transfer == reqs[:3] and len(matches) == 4
    for req in reqs[:2]:
        decoder.abort(req.rid)
        decoder.room(req).writing = False
    matches.clear()
    for _ in range(4):
        tick(decoder)
    # The fourth was matched before.
    assert decoder.in_transfer == reqs[2:5] and len(matches) == 2
    decoder.drain()
    check_idle(decoder)


def test_an_insert_does_not_match_a_blocked_head_again(matches: list[int]) -> None:
    """Guards against a server that matches the head of its queue whenever anything enters the tree,
    which is in every step of a busy one."""
    decoder = Decoder(16, 640)
    run(decoder, ids(1, 400), new=100)
    blocked = decoder.submit(ids(2, 300), new=4)
    tick(decoder)
    matches.clear()
    for number in range(4):
        insert(decoder, ids(number + 10, 16))
        decoder.tick_queues()
    assert decoder.queued == [blocked] and matches == []


def test_a_longer_prefix_lets_a_blocked_head_in(matches: list[int]) -> None:
    """Guards against a head that is not tried again when another request's KV lands that it goes on
    with: as soon as it shares it, it needs less."""
    decoder = Decoder(16, 640)
    text = ids(2, 320)
    leader = decoder.submit(text, new=8)
    tick(decoder)
    head = decoder.submit([*text, *ids(5, 40)], new=4)
    for _ in range(5):
        tick(decoder)
    assert decoder.queued == [head] and len(matches) == 2
    decoder.deliver(leader)
    tick(decoder)
    tick(decoder)
    assert decoder.in_transfer == [head] and decoder.rooms[-1].prefix_len == 320
    decoder.drain()
    check_idle(decoder)


def test_who_cannot_finish_is_not_matched_in_every_step(matches: list[int]) -> None:
    """Guards against a head that is refused although tokens are free, and matched whenever a
    running request has generated a token."""
    decoder = Decoder(16, 640)
    run(decoder, ids(1, 100), new=300)
    entering = decoder.submit(ids(2, 150), new=100)
    tick(decoder)
    refused = decoder.submit(ids(3, 150), new=100)
    tick(decoder)
    assert decoder.in_transfer == [entering] and decoder.queued == [refused]
    assert decoder.decode_metrics.refusals == {"cannot_finish": 1}
    matches.clear()
    for _ in range(20):
        decoder.tick_batch()
        decoder.tick_queues()
        check(decoder)
    assert decoder.queued == [refused] and matches == []
    decoder.drain()
    check_idle(decoder)


class Counted(list[Any]):
    """A list that knows how often it was walked."""

    walks = 0

    def __iter__(self) -> Iterator[Any]:
        self.walks += 1
        return super().__iter__()


@pytest.mark.parametrize("fits", [False, True])
def test_no_walk_of_the_running_requests(fits: bool) -> None:
    """Guards against a step whose cost grows with the number of running requests, whether somebody
    gets in or not."""
    decoder = Decoder(16, 1024)
    run(decoder, *(ids(start, 60) for start in range(1, 6)), new=100)
    req = decoder.submit(ids(9, 60 if fits else 800), new=4)
    reqs = Counted(decoder.running_batch.reqs)
    decoder.running_batch.reqs = reqs
    decoder.tick_queues()
    assert decoder.in_transfer == ([req] if fits else []) and reqs.walks == 0


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


def test_pages_are_listed_for_the_log_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a list of Python numbers, as long as the prompt, that nobody reads."""
    monkeypatch.delenv("SGLANG_DISAGGREGATION_EVENT_LOG", raising=False)

    class Pages:
        """Has a length, and cannot be listed."""

        def __len__(self) -> int:
            return 3

    req = SimpleNamespace(origin_input_ids=[1] * 40, cache_protected_len=0)
    transfer_queue._count(req, Pages(), 10, 0.0)


def test_what_is_remembered_is_one_requests(matches: list[int]) -> None:
    """Guards against another prompt's prefix: clients name requests, and may use a name again, with
    another prompt, when the first one that had it was aborted or answered."""
    decoder = Decoder(16, 640)
    decoder.submit(ids(2, 64), new=1)
    decoder.drain()
    run(decoder, ids(1, 300), new=100)
    blocked = decoder.submit(ids(2, 400), new=4)
    tick(decoder)
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


def test_long_answers_are_counted_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a step that catches up on all steps of a long answer at once: where nobody
    came or went meanwhile, that stopped the server for 2.6 microseconds for each of its tokens."""
    made: list[int] = []
    original = GrowthSum.step
    monkeypatch.setattr(GrowthSum, "step", lambda growth: (made.append(1), original(growth))[1])
    decoder = Decoder(16, 640)
    run(decoder, ids(1, 60), new=100)
    for _ in range(60):
        decoder.tick_queues()  # not checked: a check would ask
        made.clear()
        decoder.tick_batch()
        decoder.tick_queues()
        assert len(made) == 1
    decoder.drain()
    check_idle(decoder)
