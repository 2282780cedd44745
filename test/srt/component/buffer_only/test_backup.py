"""The write pipeline: what is written and when, and the effects of a failing store."""

from __future__ import annotations

from unittest import mock

import pytest

from component.buffer_only.cache import PAGE, Cache, prompt
from component.buffer_only.checks import check, nodes
from component.buffer_only.scenes import steps
from sglang.srt.mem_cache.buffer_only.namespaces import Namespace
from sglang.srt.mem_cache.buffer_only.nodes import EVICTED, REFUSED, UNCOVERED
from sglang.srt.mem_cache.buffer_only.stage import Direction

PROMPT = prompt(1, 5)
#: States of a write; the index is the number of steps after its start.
STATES = ("queued", "copying", "writing", "answered", "settled")


def writing(state: str, pages: int = 16) -> Cache:
    """Return a cache with a write of ``PROMPT`` in ``state``."""
    cache = Cache(pages=pages)
    cache.compute(PROMPT)
    for index in range(STATES.index(state)):
        cache.step(work=index == 3)
    return cache


def stored(cache: Cache) -> list[int]:
    """Return the stored tokens of every node."""
    return [node.stored for node in nodes(cache.tree)]


def all_stored(cache: Cache) -> bool:
    return all(node.storage_backed for node in nodes(cache.tree))


def keys_written(cache: Cache) -> list[str]:
    """Return the written keys in the order of the writes."""
    return [key for keys in cache.store.asked("batch_set_v1") for key in keys]


@pytest.mark.hazard("staging-pages", "copy-not-ordered")
@pytest.mark.parametrize(
    ("state", "locked", "staged"),
    [("queued", 0, 0), ("copying", 5, 5), ("writing", 0, 5), ("answered", 0, 5), ("settled", 0, 0)],
)
def test_locks_and_staging_pages_of_a_write(state: str, locked: int, staged: int):
    """Guards against a slow store that pins the device, which is locked only for the copy; against
    staging pages freed before the store's answer, which a zero-copy store would write with the next
    transfer's content; and against staging pages kept until the node's eviction."""
    cache = writing(state)
    assert cache.tree.protected_size() == locked * PAGE
    assert cache.stage.used(Direction.BACKUP) == staged
    assert cache.evict(100) == (5 - locked) * PAGE
    cache.settle()
    assert len(cache.store.content) == (0 if state == "queued" else 5)


@pytest.mark.hazard("split-while-under-way", "pending-writes")
@pytest.mark.parametrize("cut", [1, 2, 3, 4])
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("evicted", [False, True])
def test_a_split_in_each_state(cut: int, state: str, evicted: bool):
    """Guards against a split that loses pages of a node that is being written, or their state. If a
    half is evicted while it is queued, its front is still written, and the rest counts as
    dropped."""
    cache = writing(state)
    cache.match(PROMPT[: cut * PAGE])
    assert len(nodes(cache.tree)) == 2
    lost = cache.evict(1) if evicted and state == "queued" else 0
    check(cache)
    assert cache.buffer.backups.queue.dropped[EVICTED] == lost
    cache.settle()
    assert len(cache.store.content) == 5 - lost // PAGE and all_stored(cache)


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("refusing", [False, True])
def test_what_a_flush_drops_is_counted(state: str, refusing: bool):
    """Guards against KV that is neither in the store nor counted as dropped."""
    cache = writing(state)
    cache.store.refusing = refusing
    cache.flush()
    cache.settle()
    dropped = cache.buffer.backups.queue.dropped.total()
    assert len(cache.store.content) * PAGE + dropped == len(PROMPT)


@pytest.mark.hazard("pending-writes")
def test_evicted_and_inserted_again_while_being_written():
    """Guards against a first write's acknowledgement that is taken for the second node's."""
    cache = writing("writing")
    assert cache.evict(100) == 5 * PAGE
    cache.store.fail("batch_set_v1", call=2)
    cache.compute(PROMPT)
    cache.settle()
    assert stored(cache) == [0], "the second write failed"


@pytest.mark.hazard("pending-writes", "launch-per-node")
def test_each_node_is_queued_once_and_many_take_one_copy():
    """Guards against a launch for each node of each step, which would cost more than the copies.
    Each request that passes a node presents it again, with all nodes above it."""
    cache = Cache(pages=64)
    copies = count_copies(cache)
    for _ in range(2):
        for number in range(50):
            cache.compute(prompt(number % 10, 2))
        assert len(cache.buffer.backups.queue) == (0 if copies.call_count else 10)
        cache.step()
        assert copies.call_count == 1
    cache.settle()
    assert len(keys_written(cache)) == len(cache.store.content) == 20


@pytest.mark.hazard("children-without-parents", "back-pressure-deadlock")
def test_parents_are_written_before_children():
    """Guards against pages that no query can reach because their prefix is missing, and against a
    prompt larger than the stage that blocks the queue for ever: it is cut."""
    cache = Cache(pages=8)
    base = prompt(1, 20)
    tokens = prompt(2, 3, base=base)
    cache.compute(base[: 3 * PAGE], chunked=True)  # a chunk, presented only with the next insert
    cache.compute(base)
    cache.compute(tokens)
    cache.settle()
    assert keys_written(cache) == cache.keys(tokens) and cache.stage.peak <= 8


@pytest.mark.hazard("children-without-parents")
def test_a_failed_parent_cancels_its_queued_children():
    """Guards against a child that is stored without its parent, where no query can reach it. Both
    are written when a request uses them again."""
    cache = Cache(pages=4)  # two pages of writes, one at a time
    base, tokens = prompt(1, 1), prompt(2, 8, base=prompt(1, 1))
    cache.store.fail("batch_set_v1")
    cache.compute(base)
    cache.step()
    cache.compute(tokens)
    cache.settle()
    cache.now += 2.0  # until then the store, which refused a write, is not retried
    cache.settle()
    assert cache.buffer.backups.queue.dropped[UNCOVERED] > 0
    assert not any(node.storage_backed for node in nodes(cache.tree) if len(node.key) > PAGE)
    cache.compute(tokens)
    cache.settle()
    assert all_stored(cache) and len(cache.store.content) == 9


@pytest.mark.hazard("partial-write-counts")
@pytest.mark.parametrize("good", [0, 1, 3])
def test_only_leading_durable_pages_count(good: int):
    """Guards against a node that counts as stored beyond a hole: page number ``good`` of five
    fails, later ones are written, and the node is written again from the hole."""
    cache = Cache()
    cache.store.answer("batch_set_v1", lambda r: [index != good for index in range(len(r))])
    cache.compute(PROMPT)
    cache.settle()
    (node,) = nodes(cache.tree)
    assert node.stored == node.launched == good * PAGE and not node.storage_backed
    # The first backup has four pages; the fifth page is in the store, but out of reach.
    assert cache.buffer.backups.queue.dropped[REFUSED] == (4 - good) * PAGE
    cache.now += 2.0
    cache.compute(PROMPT)
    cache.settle()
    assert node.storage_backed and len(keys_written(cache)) == 5 + 5 - good


def test_nodes_queued_for_a_write_are_evicted_last():
    """Guards against the loss of a new prefix that is evicted before those in the store."""
    cache = Cache()
    cache.compute(prompt(1, 2))
    cache.settle()
    cache.compute(prompt(2, 2))
    cache.compute(prompt(1, 2))  # newer than the queued one
    cache.evict(2 * PAGE)
    assert cache.held_tokens(prompt(2, 2)) == 2 * PAGE and cache.held_tokens(prompt(1, 2)) == 0


# ---- keys of namespaces and weights ----


@pytest.mark.hazard("tenants-meet-in-store")
def test_namespaces_have_separate_keys():
    """Guards against tenants with the same prompt that read each other's pages, and against a
    request without a namespace that reads a stock server's pages under SGLang's own key, which
    could be those of an adapter or of a salted request."""
    cache, hits = Cache(), []
    tokens = prompt(1, 3)
    for extra_key in (None, "a", "b", "b", None, "a", "c"):
        cache.flush()
        hits.append(cache.serve(f"for {extra_key}", tokens, extra_key) // PAGE)
        cache.settle()
    assert hits == [0, 0, 0, 2, 2, 2, 0] and len(cache.store.content) == 4 * 3
    (node,) = nodes(cache.tree)
    assert not set(node.hash_value) & set(cache.store.content)


@pytest.mark.hazard("tenants-meet-in-store")
def test_new_weights_on_a_tree_that_was_not_emptied():
    """Guards against KV below a prefix of the old weights that is written under the new weights'
    keys: it belongs to neither. After a flush, servers with the same weights share pages."""
    old, new = Namespace.of({"weights": "old"}), Namespace.of({"weights": "new"})
    tokens = prompt(3, 2, base=prompt(1, 3))
    cache = Cache(pages=8)
    cache.buffer.use(old, "a")
    cache.compute(prompt(1, 3))
    cache.step(work=False)  # a running copy still belongs to the old weights
    cache.compute(prompt(2, 2))  # a queued write may belong to either
    cache.buffer.use(new, "b")
    cache.compute(tokens)
    cache.settle()
    written = set(cache.store.content)
    assert len(written) == 7
    cache.flush()
    assert cache.serve("r", tokens) == 0
    cache.settle()
    assert len(cache.store.content) == 7 + 5
    other = Cache(store=cache.store)
    other.buffer.use(new, "f")
    assert other.serve("r", tokens) == 4 * PAGE


@pytest.mark.hazard("stale-beliefs")
@pytest.mark.parametrize("how", ["works", "fails", "hangs"])
def test_the_store_is_cleared(how: str):
    """Guards against nodes that still count as stored, also because of a write that ends later. If
    the store cannot be cleared, the scheduler does not wait for ever, and nodes still count as not
    stored, because other ranks may have cleared their stores."""
    cache = Cache()
    cache.compute(prompt(1, 2))
    cache.settle()
    cache.compute(prompt(2, 2))
    cache.step(work=False)
    cache.step()
    if how != "works":
        (cache.store.fail if how == "fails" else cache.store.hang)("clear")
    assert cache.tree.clear_storage_backend() is (how == "works")
    assert stored(cache) == [0, 0]
    cache.open_gates()
    cache.settle()
    assert stored(cache) == [0, 0]
    cache.now += 2.0
    steps(cache, 2)
    cache.compute(prompt(1, 2))
    cache.settle()
    assert set(cache.keys(prompt(1, 2))) <= set(cache.store.content)
    assert cache.match(prompt(1, 2)).last_device_node.storage_backed


# ---- a store that refuses pages ----


@pytest.mark.hazard("back-pressure-deadlock")
@pytest.mark.parametrize("way", [True, OSError("full")], ids=["refuses", "raises"])
def test_a_store_that_takes_nothing(way: bool | OSError):
    """Guards against writes that are retried in every step: a prompt larger than the stage would be
    copied again and again, block those behind it, and keep the server busy; and against writes that
    are given up for good, so that a recovered store gets nothing."""
    prompts = [prompt(1, 30), prompt(2, 2), prompt(3, 2)]
    cache = Cache(pages=8, tokens=80 * PAGE)
    cache.store.refusing = way
    copies = count_copies(cache)
    for tokens in prompts[:2]:
        cache.compute(tokens)
    for _ in range(400):  # six seconds: one attempt after 0, 1 and 3 s each
        steps(cache, 1)
        cache.now += 0.015
    dropped = cache.buffer.backups.queue.dropped
    assert copies.call_count <= 4 and dropped[REFUSED] == 32 * PAGE, "each token once"
    for number in (3, 4):  # the first of them is tried next
        cache.compute(prompt(number, 2))
        steps(cache, 5)
    assert len(cache.buffer.backups.queue) == 1 and not cache.buffer.busy, (
        "it does not block the idle state"
    )
    cache.store.refusing = False
    for _ in range(2):
        cache.now += 100.0
        cache.settle()
    for tokens in prompts:
        cache.compute(tokens)
    cache.settle()
    assert all_stored(cache)


def test_a_store_that_takes_a_part_of_each_backup():
    """Guards against attempts in every step, which would copy half of the pages for nothing. Stored
    pages count, and the store gets everything as soon as it accepts everything again."""
    cache = Cache(pages=8, tokens=2000 * PAGE)
    cache.store.takes = 1
    copies = count_copies(cache)
    for number in range(200):  # three seconds, one prompt of two pages a step
        cache.compute(prompt(number, 2))
        cache.step()
        cache.now += 0.015
    # One attempt a second.
    assert 3 <= copies.call_count <= 4 and len(cache.store.content) == copies.call_count
    assert cache.buffer.backups.queue.dropped[REFUSED] == copies.call_count * PAGE
    cache.store.takes = None
    cache.now += 1.0
    before = copies.call_count
    cache.settle(1000)
    assert copies.call_count - before > 50 and cache.now < 5, "the store is not throttled any more"


def test_no_copy_for_a_store_that_is_down():
    """Guards against copies for a store that is down. Writes stay queued until a probe succeeds."""
    cache = Cache()
    cache.store.hang("batch_exists")
    cache.client.query(["f" * 64])
    copies = count_copies(cache)
    cache.compute(prompt(1, 3))
    steps(cache, 20)
    assert not cache.client.up and copies.call_count == 0 and not cache.buffer.busy
    cache.open_gates()
    cache.now += 2.0
    steps(cache, 3)
    cache.settle()
    assert cache.client.up and len(cache.store.content) == 3


def count_copies(cache: Cache) -> mock.Mock:
    """Return a mock that counts, and makes, each copy to the stage from now on."""
    copier = cache.buffer.context.copier
    copier.to_stage = mock.Mock(side_effect=copier.to_stage)
    return copier.to_stage
