"""What a decode server writes to the shared store, and what it never does."""

from __future__ import annotations

from typing import Any

import pytest

from component.decode.actions import Life
from component.decode.checks import check_idle
from component.decode.offloading import Offloader
from component.decode.steps import PROMPT, admit, finish, ids, in_tree, run, serve, turn
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.buffer_only.nodes import EVICTED, FLUSHED

PAGE = 16


@pytest.fixture(params=[0, 1], ids=["plain", "drafts"])
def decoder(request: pytest.FixtureRequest) -> Offloader:
    return Offloader(PAGE, 1024, steps=request.param)


def dropped(decoder: Offloader, reason: str) -> int:
    """Tokens that were not written."""
    return int(decoder.tree_cache.buffer.backups.queue.dropped[reason])


def test_answers_are_written_and_prompts_are_not(decoder: Offloader) -> None:
    """Guards against a decode server that writes what prefill writes too, or not what it alone
    has."""
    serve(decoder, PROMPT, new=40)
    (text,) = decoder.finished_texts
    # Of a draft model's pairs the last one of a prompt ends with the answer's first token.
    sent = 4 if decoder.steps else 5
    assert decoder.stored(text) == [False] * sent + [True] * (7 - sent)
    serve(decoder, text, new=40)  # the next turn
    longer = decoder.finished_texts[1][:-1]  # the last token has no KV
    assert decoder.stored(longer) == [False] * sent + [True] * (9 - sent)


def test_a_turn_that_decode_computed_is_written() -> None:
    """Guards against a prefill server that computes again what decode has computed."""
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
    assert not decoder.store.content and not decoder.store.asked("batch_set_v1")


def test_a_prompt_that_prefill_did_not_write_is_written_when_it_is_used_again() -> None:
    """Guards against answers that nobody can find, because the store lacks what is before them."""
    decoder = Offloader(PAGE, 1024)
    serve(decoder, PROMPT, new=40)
    (text,) = decoder.finished_texts
    for _ in range(3):  # looked up, found to be missing, and written
        decoder.tree_cache.buffer.context.now_ms += 20_000
        serve(decoder, text, new=2)
        decoder.written()
    assert decoder.stored(text[:112]) == [True] * 7


def until_copied(decoder: Offloader, *prompts: list[int]) -> None:
    """Requests end, and their answers are copied to the staging buffer."""
    run(decoder, *prompts, new=40)
    while not decoder.copied:
        turn(decoder)


def test_memory_is_found_while_nodes_are_copied(decoder: Offloader) -> None:
    """Guards against a request that is retracted, or refused, because copies to the staging buffer
    hold the pages that it needs."""
    until_copied(decoder, PROMPT)
    assert decoder.tree_cache.protected_size() > 0
    decoder.tree_cache.evict(EvictParams(num_tokens=decoder.tree_cache.total_size()))
    assert decoder.tree_cache.total_size() == 0 and not decoder.copied
    finish(decoder)
    assert decoder.stored(decoder.finished_texts[0])[6]


def test_new_weights_while_answers_are_written(decoder: Offloader) -> None:
    """Guards against KV of old weights under keys of the new ones, and the reverse."""
    run(decoder, ids(1, 60), new=100)
    until_copied(decoder, PROMPT)
    decoder.update_weights()
    assert dropped(decoder, FLUSHED) and not decoder.copied
    finish(decoder)  # computed by both weights: in no tree
    assert not decoder.store.content
    serve(decoder, PROMPT, new=40)
    assert decoder.stored(decoder.finished_texts[-1])[6]


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


def test_what_waits_is_evicted_last_and_counted() -> None:
    """Guards against answers that are lost although other KV could have been evicted, or lost
    without a count."""
    decoder = Offloader(PAGE, 640, staging=1)
    serve(decoder, ids(3, 80), new=1)
    run(decoder, PROMPT, new=40)
    while decoder.running_batch.reqs:
        turn(decoder)
    tree = decoder.tree_cache
    tree.evict(EvictParams(num_tokens=1))
    assert in_tree(decoder, PROMPT) == 80 and not in_tree(decoder, ids(3, 80))
    tree.evict(EvictParams(num_tokens=tree.evictable_size()))
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
    weights in which a lock of a copy stays, or a page in the store holds another text's KV."""
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
