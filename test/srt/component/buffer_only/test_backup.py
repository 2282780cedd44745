"""The write pipeline: what is written, when, and what a store that fails does to it."""

from __future__ import annotations

from unittest import mock

import pytest

from component.buffer_only.cache import PAGE, Cache, prompt
from component.buffer_only.checks import check, nodes
from component.buffer_only.scenes import steps
from sglang.srt.mem_cache.buffer_only.namespaces import Namespace
from sglang.srt.mem_cache.buffer_only.nodes import EVICTED, REFUSED, UNCOVERED
from sglang.srt.mem_cache.buffer_only.staging import Direction

PROMPT = prompt(1, 5)
#: What the next step of a write is, after so many steps.
STATES = ("queued", "copying", "writing", "answered", "settled")


def writing(state: str, pages: int = 16) -> Cache:
    """A cache whose write of ``PROMPT`` is in ``state``."""
    cache = Cache(pages=pages)
    cache.compute(PROMPT)
    for at in range(STATES.index(state)):
        cache.step(work=at == 3)
    return cache


def stored(cache: Cache) -> list[int]:
    """Stored tokens of every node."""
    return [node.stored for node in nodes(cache.tree)]


def all_stored(cache: Cache) -> bool:
    return all(node.storage_backed for node in nodes(cache.tree))


def keys_written(cache: Cache) -> list[str]:
    """In the order of the writes."""
    return [key for keys in cache.store.asked("batch_set_v1") for key in keys]


@pytest.mark.hazard("staging-pages", "copy-not-ordered")
@pytest.mark.parametrize(
    ("state", "locked", "staged"),
    [("queued", 0, 0), ("copying", 5, 5), ("writing", 0, 5), ("answered", 0, 5), ("settled", 0, 0)],
)
def test_what_a_write_holds(state: str, locked: int, staged: int):
    """The device is locked for the copy alone: a slow store must not pin it. Staging pages are free
    when the store has answered: freed before, a zero-copy store would write what the next transfer
    put there; freed at eviction of the node, they would starve the stage."""
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
    """Whatever a split does to a node on its way, every page of the chain ends in the store, and
    both halves know it; of a half that is evicted while it waits the front is still written, and
    what was lost is not looked for."""
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
    """The acknowledgement of the first writing must not be taken for that of the second node."""
    cache = writing("writing")
    assert cache.evict(100) == 5 * PAGE
    cache.store.fail("batch_set_v1", call=2)
    cache.compute(PROMPT)
    cache.settle()
    assert stored(cache) == [0], "the second writing failed"


@pytest.mark.hazard("pending-writes", "launch-per-node")
def test_each_node_is_queued_once_and_many_take_one_copy():
    """Each request that passes a node presents it, and all above it, again; a launch for each node
    of each step would cost more than the copies."""
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
    """A page whose prefix is missing is out of reach of every query. A prompt larger than the stage
    is cut: at the head of the queue, it would block everything behind it for ever."""
    cache = Cache(pages=8)
    base = prompt(1, 20)
    tokens = prompt(2, 3, base=base)
    cache.compute(base[: 3 * PAGE], chunked=True)  # a chunk: presented with the next insert only
    cache.compute(base)
    cache.compute(tokens)
    cache.settle()
    assert keys_written(cache) == cache.keys(tokens) and cache.stage.peak <= 8


@pytest.mark.hazard("children-without-parents")
def test_a_failed_parent_cancels_what_waits_below_it():
    """Written all the same, the child would be dead weight in the store; both are written when a
    request comes by again."""
    cache = Cache(pages=4)  # two pages of writes, one at a time
    base, tokens = prompt(1, 1), prompt(2, 8, base=prompt(1, 1))
    cache.store.fail("batch_set_v1")
    cache.compute(base)
    cache.step()
    cache.compute(tokens)
    cache.settle()
    cache.now += 2.0  # until then the store, which took nothing, is not tried again
    cache.settle()
    assert cache.buffer.backups.queue.dropped[UNCOVERED] > 0
    assert not any(node.storage_backed for node in nodes(cache.tree) if len(node.key) > PAGE)
    cache.compute(tokens)
    cache.settle()
    assert all_stored(cache) and len(cache.store.content) == 9


@pytest.mark.hazard("partial-write-counts")
@pytest.mark.parametrize("good", [0, 1, 3])
def test_only_leading_durable_pages_count(good: int):
    """Page number ``good`` of five fails, the one after it is written: a node counts as stored
    only up to the hole, and is written again from there."""
    cache = Cache()
    cache.store.answer("batch_set_v1", lambda r: [at != good for at in range(len(r))])
    cache.compute(PROMPT)
    cache.settle()
    (node,) = nodes(cache.tree)
    assert node.stored == node.launched == good * PAGE and not node.storage_backed
    # Of the first backup, which has four pages; the fifth page is in the store, out of reach.
    assert cache.buffer.backups.queue.dropped[REFUSED] == (4 - good) * PAGE
    cache.now += 2.0
    cache.compute(PROMPT)
    cache.settle()
    assert node.storage_backed and len(keys_written(cache)) == 5 + 5 - good


def test_nodes_that_wait_to_be_written_are_evicted_last():
    """A prefix seen for the first time would be lost if it went before those in the store."""
    cache = Cache()
    cache.compute(prompt(1, 2))
    cache.settle()
    cache.compute(prompt(2, 2))
    cache.compute(prompt(1, 2))  # newer than the one that waits
    cache.evict(2 * PAGE)
    assert cache.held_tokens(prompt(2, 2)) == 2 * PAGE and cache.held_tokens(prompt(1, 2)) == 0


# ---- whose keys ----


@pytest.mark.hazard("tenants-meet-in-store")
def test_namespaces_have_keys_of_their_own():
    """Two tenants with the same prompt must never read each other's pages; nor may a request
    without a namespace read what a stock server has written under SGLang's own key, which could be
    that of an adapter or of a salted request."""
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
    """KV below a prefix of the old weights is neither's: written under the new weights' keys, every
    server that has them would read it. After a flush servers with the same weights meet."""
    old, new = Namespace.of({"weights": "old"}), Namespace.of({"weights": "new"})
    tokens = prompt(3, 2, base=prompt(1, 3))
    cache = Cache(pages=8)
    cache.buffer.use(old, "a")
    cache.compute(prompt(1, 3))
    cache.step(work=False)  # one that is being copied is still the old weights'
    cache.compute(prompt(2, 2))  # one that waits is not known to be
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
    """What was stored is not any more; a write under way does not bring the belief back. Where the
    store cannot be cleared the scheduler does not wait for it for ever, and what is known of it is
    forgotten all the same: other ranks may have cleared theirs."""
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
    cache.let_go()
    cache.settle()
    assert stored(cache) == [0, 0]
    cache.now += 2.0
    steps(cache, 2)
    cache.compute(prompt(1, 2))
    cache.settle()
    assert set(cache.keys(prompt(1, 2))) <= set(cache.store.content)
    assert cache.match(prompt(1, 2)).last_device_node.storage_backed


# ---- a store that takes little ----


@pytest.mark.hazard("back-pressure-deadlock")
@pytest.mark.parametrize("way", [True, OSError("full")], ids=["refuses", "raises"])
def test_a_store_that_takes_nothing(way: bool | OSError):
    """Retried in every step, a prompt larger than the stage would be copied over and over, keep
    out all that is behind it, and the server from ever being idle; given up for good, nothing
    would be stored when the store is well again."""
    prompts = [prompt(1, 30), prompt(2, 2), prompt(3, 2)]
    cache = Cache(pages=8, tokens=80 * PAGE)
    cache.store.refusing = way
    copies = count_copies(cache)
    for tokens in prompts[:2]:
        cache.compute(tokens)
    for _ in range(400):  # six seconds: one after 0, 1 and 3 s each
        steps(cache, 1)
        cache.now += 0.015
    dropped = cache.buffer.backups.queue.dropped
    assert copies.call_count <= 4 and dropped[REFUSED] == 32 * PAGE, "each token once"
    for number in (3, 4):  # the first of them is the next that is tried
        cache.compute(prompt(number, 2))
        steps(cache, 5)
    assert len(cache.buffer.backups.queue) == 1 and not cache.buffer.busy, "it is in nobody's way"
    cache.store.refusing = False
    for _ in range(2):
        cache.now += 100.0
        cache.settle()
    for tokens in prompts:
        cache.compute(tokens)
    cache.settle()
    assert all_stored(cache)


def test_a_store_that_takes_a_part_of_each_backup():
    """Tried in every step, half of what is copied would be copied for nothing; what it takes is
    stored, and it has all again as soon as it takes all again."""
    cache = Cache(pages=8, tokens=2000 * PAGE)
    cache.store.takes = 1
    copies = count_copies(cache)
    for number in range(200):  # three seconds, one prompt of two pages each
        cache.compute(prompt(number, 2))
        cache.step()
        cache.now += 0.015
    # Once in a second.
    assert 3 <= copies.call_count <= 4 and len(cache.store.content) == copies.call_count
    assert cache.buffer.backups.queue.dropped[REFUSED] == copies.call_count * PAGE
    cache.store.takes = None
    cache.now += 1.0
    before = copies.call_count
    cache.settle(1000)
    assert copies.call_count - before > 50 and cache.now < 5, "it is not waited for any more"


def test_no_copy_for_a_store_that_is_down():
    """What waits stays until the store answers a probe, which comes without any request."""
    cache = Cache()
    cache.store.hang("batch_exists")
    cache.client.query(["f" * 64])
    copies = count_copies(cache)
    cache.compute(prompt(1, 3))
    steps(cache, 20)
    assert not cache.client.up and copies.call_count == 0 and not cache.buffer.busy
    cache.let_go()
    cache.now += 2.0
    steps(cache, 3)
    cache.settle()
    assert cache.client.up and len(cache.store.content) == 3


def count_copies(cache: Cache) -> mock.Mock:
    """Is called instead of each copy to the stage from now on, and makes it."""
    copier = cache.buffer.context.copier
    copier.to_staging = mock.Mock(side_effect=copier.to_staging)
    return copier.to_staging
