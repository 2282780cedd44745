"""A decode server's writes to the shared store."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from component.decode.actions import Life
from component.decode.checks import check_idle
from component.decode.offloading import Offloader
from component.decode.pair import Pair, ranks_reduce
from component.decode.steps import (
    PROMPT,
    admit,
    evict_all,
    finish,
    ids,
    in_tree,
    land,
    run,
    serve,
    tick,
    turn,
)
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.buffer_only.nodes import EVICTED, FLUSHED
from sglang.srt.mem_cache.radix_cache import RadixKey

PAGE = 16


@pytest.fixture(params=[0, 1], ids=["plain", "drafts"])
def decoder(request: pytest.FixtureRequest) -> Offloader:
    return Offloader(PAGE, 1024, steps=request.param)


def dropped(decoder: Offloader, reason: str) -> int:
    """Return the number of tokens that were dropped for ``reason``."""
    return int(decoder.tree_cache.buffer.backups.queue.dropped[reason])


def test_answers_are_written_and_prompts_are_not(decoder: Offloader) -> None:
    """Guards against a decode server that writes what prefill writes too, or that does not write
    its own answers."""
    serve(decoder, PROMPT, new=40)
    (text,) = decoder.finished_texts
    # With a draft model, a prompt's last pair ends with the answer's first token.
    sent = 4 if decoder.steps else 5
    assert decoder.stored(text) == [False] * sent + [True] * (7 - sent)
    serve(decoder, text, new=40)  # the next turn
    longer = decoder.finished_texts[1][:-1]  # the last token has no KV
    assert decoder.stored(longer) == [False] * sent + [True] * (9 - sent)


def test_a_turn_that_decode_computed_is_written() -> None:
    """Guards against a prefill server that recomputes a turn that decode has computed."""
    decoder = Offloader(PAGE, 1024, local=200, chunk=PAGE)
    serve(decoder, PROMPT, new=4)
    (text,) = decoder.finished_texts
    assert decoder.stored(text) == [True] * 5


@pytest.mark.parametrize("ending", ["warm-up", "failed", "aborted in transfer"])
def test_what_never_became_the_trees_is_not_written(ending: str) -> None:
    """Guards against KV in the store that was never computed, or not of the request's text."""
    decoder = Offloader(PAGE, 1024)
    if ending == "warm-up":
        serve(decoder, PROMPT, new=40, warm_up=True)
    else:
        (req,) = admit(decoder, PROMPT, new=40)
        if ending == "failed":
            decoder.room(req).state = KVPoll.Failed
        else:
            decoder.abort(req.rid)
        finish(decoder)
    decoder.written()
    assert not decoder.store.content and not decoder.store.asked("batch_set_v1")


def until_copied(decoder: Offloader, *prompts: list[int]) -> None:
    """Serve requests until their answers are copied to the staging buffer."""
    run(decoder, *prompts, new=40)
    while not decoder.copied:
        turn(decoder)


def test_a_node_is_evicted_while_it_is_copied(decoder: Offloader) -> None:
    """Guards against a stored page with KV of the next owner of its slots, and against locks that
    keep memory from requests."""
    decoder.copy_slowly()
    until_copied(decoder, PROMPT)
    decoder.tree_cache.match_prefix(MatchPrefixParams(key=RadixKey(PROMPT[:48], None)))  # a split
    assert decoder.tree_cache.protected_size() == 0
    evict_all(decoder)
    assert decoder.tree_cache.total_size() == 0 and not decoder.copied
    assert decoder.stored(decoder.finished_texts[0])[6]


@pytest.mark.hazard("radix-beside-hicache")
def test_an_abort_of_a_request_that_waits_for_its_place() -> None:
    """Guards against SGLang's call of a HiCache method that a decode server lacks."""
    decoder = Offloader(PAGE, 1024)
    decoder.max_running_requests = 1
    run(decoder, PROMPT, new=20)
    (waits,) = admit(decoder, ids(1, 40), new=20)
    land(decoder, waits)
    assert decoder.waiting_queue == [waits]
    decoder.abort(waits.rid)
    finish(decoder)


@pytest.mark.hazard("ranks-disagree-on-prefix")
def test_ranks_whose_trees_differ_write_on() -> None:
    """Guards against ranks that end the server because they write different pages. If one rank
    learns of a prefill server's failure first, their trees have different leaves."""
    first, second = ids(1, 96), ids(2, 96)
    with ranks_reduce():
        pair = Pair(lambda rank, group: SimpleNamespace(decoder=Offloader(PAGE, 640, group=group)))

        def each(action: Callable[[Offloader], Any]) -> None:
            pair.run(lambda side: action(side.decoder))

        try:
            decoders = [side.decoder for side in pair.sides]
            for text in (first, second):
                each(lambda one, text=text: serve(one, text, new=1))  # type: ignore[misc]
            each(lambda one: run(one, ids(9, 360), new=8))
            each(lambda one: one.submit(ids(8, 300), new=1))  # no room
            each(lambda one: one.submit([*first, 1], new=1))
            each(lambda one: tick(one, 2))
            each(lambda one: [one.tick_batch() for _ in range(10)])
            for decoder in decoders:
                decoder.rooms[-1].state = KVPoll.Failed
                each(tick)
            each(lambda one: one.drain())
            assert len({in_tree(one, first) for one in decoders}) == 2, "the trees are equal"
            for number in range(10, 40):
                each(lambda one, n=number: serve(one, ids(n, 96), new=20))  # type: ignore[misc]
            each(lambda one: one.written())
            assert all(not one.copied and one.store.content for one in decoders)
        finally:
            pair.close()


def test_new_weights_while_answers_are_written(decoder: Offloader) -> None:
    """Guards against KV of old weights under keys of the new ones, and the reverse."""
    run(decoder, ids(1, 60), new=100)
    until_copied(decoder, PROMPT)
    decoder.update_weights()
    assert dropped(decoder, FLUSHED) and not decoder.copied
    finish(decoder)  # computed with both weights, so in no tree
    decoder.written()
    assert not decoder.store.content
    serve(decoder, PROMPT, new=40)
    assert decoder.stored(decoder.finished_texts[-1])[6]


def test_a_flush_names_no_keys() -> None:
    """Guards against a rank that waits for the other one to hash its weights: a flush that waits
    ends by each rank's own clock. After an update without a flush, keys stay private to this
    server."""
    decoder = Offloader(PAGE, 1024)
    store = decoder.tree_cache.buffer.context.store
    shared = store.namespace
    decoder.update_weights_from_disk(
        UpdateWeightFromDiskReqInput(model_path="new", flush_cache=False)
    )
    own = store.namespace
    assert own != shared and decoder.flush_cache() and store.namespace == own
    decoder.update_weights()
    assert store.namespace not in (own, shared)


@pytest.mark.parametrize("trouble", ["fails", "hangs", "refuses"])
def test_a_store_in_trouble_costs_nothing_but_its_pages(
    monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    """Guards against requests that wait for the store, and a server that never becomes idle."""
    monkeypatch.setenv("SGLANG_HICACHE_STORE_DEADLINE", "0.1")
    decoder = Offloader(PAGE, 640)
    if trouble == "fails":
        decoder.store.fail("batch_set_v1")
    elif trouble == "refuses":
        decoder.store.refusing = True
    gate = decoder.store.hang("batch_set_v1") if trouble == "hangs" else None
    serve(decoder, PROMPT, ids(1, 60), ids(2, 60), new=40)
    check_idle(decoder)
    if gate is not None:
        gate.open()


def test_what_is_evicted_before_it_is_copied_is_counted() -> None:
    """Guards against answers that are lost without a count."""
    decoder = Offloader(PAGE, 640, staging=1)
    run(decoder, PROMPT, new=40)
    while decoder.running_batch.reqs:
        turn(decoder)
    evict_all(decoder)
    assert dropped(decoder, EVICTED) > 0
    finish(decoder)


@pytest.mark.parametrize(
    ("seed", "options"),
    [
        (1, {}),
        (2, {"steps": 1}),
        (3, {"local": 60, "chunk": 24}),
        (4, {"staging": 2}),
        pytest.param(5, {"local": 60, "chunk": 24, "steps": 1}, marks=pytest.mark.nightly),
    ],
)
def test_a_random_life_with_writes(seed: int, options: dict[str, Any]) -> None:
    """Guards against any order of arrivals, evictions, retractions, failures, aborts and new
    weights in which a copy's lock stays, or a page in the store holds another text's KV."""
    decoder = Offloader(PAGE, 1024, **options)
    life = Life(decoder, seed, flush=0, pause_and_update=0, batch=44)
    life.run(800, seed)
    decoder.written()
    texts = [(req.origin_input_ids + req.output_ids, req.extra_key) for req in decoder.submitted]
    expected = dict[str, list[int]]()
    for weights in decoder.namespaces:
        for tokens, extra_key in texts:
            expected |= decoder.pages_of(tokens, extra_key, weights)
    assert len(decoder.store.content) > 20
    assert {key: decoder.content(key) for key in decoder.store.content}.items() <= expected.items()
    assert not decoder.store.disturbed
