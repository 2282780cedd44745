"""A decode server whose pool has an index of sparse attention (DSA) beside its KV.

The index of each token is where its KV is, in the tree and in requests, however it came there.
"""

from __future__ import annotations

import pytest

from component.decode.actions import Life
from component.decode.checks import check, check_idle
from component.decode.decoder import Decoder
from component.decode.steps import ids, poison_free_slots, tick, turn
from component.decode.test_local_turns import LocalLife
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

pytestmark = pytest.mark.usefixtures("no_prefix_wait")

PAGE = 64  # SGLang's pool has no other


def test_a_turn_is_sent_the_index_of_its_delta() -> None:
    """Guards against an index that is not announced, or of pages that the tree holds."""
    decoder = Decoder(PAGE, 1024, sparse=True)
    first = decoder.submit(ids(1, 150), new=50)
    decoder.drain()
    check_idle(decoder)
    assert decoder.rooms[-1].state_pages.tolist() == decoder.rooms[-1].pages.tolist()
    decoder.submit([*first.origin_input_ids, *first.output_ids, *ids(2, 30)], new=5)
    tick(decoder)
    room = decoder.rooms[-1]
    assert room.prefix_len == 192 and len(room.state_pages) == 1
    decoder.drain()
    check_idle(decoder)


def test_of_a_full_hit_no_index_is_announced() -> None:
    """Guards against a list of no pages: prefill sends nothing for it, and SGLang's decode would
    wait for that."""
    decoder = Decoder(PAGE, 1024, sparse=True)
    for _ in range(2):
        decoder.submit(ids(1, 128), new=1)
        decoder.drain()
    assert len(decoder.rooms[-1].pages) == 0 and decoder.rooms[-1].state_pages is None
    check_idle(decoder)


@pytest.mark.parametrize("evict", [False, True], ids=["tree kept", "tree evicted"])
def test_a_retracted_request_keeps_its_index(evict: bool) -> None:
    """Guards against a resumed request that selects tokens by the index of another text, and puts
    that into the tree: SGLang's CPU copy of a retracted request leaves the index out."""
    decoder = Decoder(PAGE, 1024, sparse=True)
    reqs = [decoder.submit(ids(number, 150), new=90) for number in (1, 2)]
    tick(decoder)
    for req in reqs:
        decoder.deliver(req)
    tick(decoder)
    for _ in range(60):
        decoder.tick_batch()
        check(decoder)
    decoder.retract()
    check(decoder)
    (retracted,) = decoder.disagg_decode_prealloc_queue.retracted_queue
    if evict:
        decoder.tree_cache.evict(EvictParams(num_tokens=10_000))
    poison_free_slots(decoder)
    tick(decoder)
    assert retracted in decoder.waiting_queue
    assert retracted.delta.index_copy is None
    decoder.drain()
    assert len(retracted.output_ids) == 90
    check_idle(decoder)


def test_an_aborted_retracted_request_drops_the_copy() -> None:
    """Guards against an index that stays in memory for as long as anybody knows the request."""
    decoder = Decoder(PAGE, 1024, sparse=True)
    reqs = [decoder.submit(ids(number, 150), new=90) for number in (1, 2)]
    tick(decoder)
    for req in reqs:
        decoder.deliver(req)
    turn(decoder)
    decoder.retract()
    (retracted,) = decoder.disagg_decode_prealloc_queue.retracted_queue
    assert retracted.delta.index_copy is not None
    decoder.abort(retracted.rid)
    assert retracted.delta.index_copy is None
    decoder.drain()
    check_idle(decoder)


@pytest.mark.parametrize("seed", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_random_life(seed: int) -> None:
    """Guards against any order of events after which somebody reads another text's index."""
    life = Life(Decoder(PAGE, 1536, sparse=True), seed)
    life.run(1000, seed)
    assert life.seen["hits"] and life.seen["full_hits"] and life.seen["resumed"]


def test_random_life_with_turns_computed_here() -> None:
    """The same where decode computes some turns itself, over the index of what the tree holds."""
    life = LocalLife(Decoder(PAGE, 2048, sparse=True, local=60, chunk=64), 3)
    life.run(1000, 3)
    assert life.decoder.local_turns.metrics.turns["local", "always"] > 50
