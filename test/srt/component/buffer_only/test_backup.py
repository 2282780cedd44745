"""The write pipeline: what is written, when, and what a store that fails does to it."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest

from component.buffer_only.cache import PAGE, Cache, prompt
from component.buffer_only.checks import check, check_idle, nodes
from component.buffer_only.reaching import reach
from sglang.srt.mem_cache.buffer_only.backup_queue import EVICTED, FULL, REFUSED, UNCOVERED
from sglang.srt.mem_cache.buffer_only.namespaces import Namespace
from sglang.srt.mem_cache.buffer_only.prefetch import State
from sglang.srt.mem_cache.buffer_only.stage import Direction


def stored(cache: Cache) -> list[int]:
    """Stored tokens of every node, front to back."""
    return [node.stored for node in sorted(nodes(cache.tree), key=lambda x: x.hash_value[0])]


@pytest.mark.hazard("staging-pages")
def test_staging_pages_are_free_when_the_store_has_answered():
    """Freed at submission, a zero-copy store would write what the next transfer put there; freed
    at eviction of the node, they would starve the stage."""
    cache = Cache()
    cache.compute(prompt(1, 3))
    cache.step()
    assert (
        cache.stage.used(Direction.BACKUP) == 3
    )  # copied, and handed to the thread in the next step
    cache.step(work=False)
    assert cache.stage.used(Direction.BACKUP) == 3
    cache.step(work=False)
    assert cache.stage.used(Direction.BACKUP) == 3, "the thread has not written yet"
    cache.work()
    assert cache.stage.used(Direction.BACKUP) == 3, "freed off the scheduler thread"
    cache.step(work=False)
    assert cache.stage.used() == 0 and not cache.store.disturbed
    check_idle(cache)


@pytest.mark.hazard("copy-not-ordered")
def test_a_node_may_be_evicted_while_the_store_writes_it():
    """The lock is for the copy alone: a slow store must not pin the device pool."""
    cache = Cache()
    cache.compute(prompt(1, 3))
    cache.step(work=False)
    assert cache.tree.protected_size() == 3 * PAGE and cache.evict(100) == 0
    cache.step(work=False)
    assert cache.tree.protected_size() == 0 and cache.evict(100) == 3 * PAGE
    cache.settle()
    check_idle(cache)
    assert len(cache.store.content) == 3


@pytest.mark.hazard("back-pressure-deadlock")
def test_a_prompt_larger_than_the_stage_is_cut():
    """An oversize write at the head of the queue would block everything behind it for ever."""
    cache = Cache(pages=8)
    cache.compute(prompt(1, 20))
    cache.compute(prompt(2, 2))
    cache.settle()
    check_idle(cache)
    assert len(cache.store.content) == 22 and cache.stage.peak <= 8


@pytest.mark.hazard("launch-per-node")
def test_many_nodes_take_one_copy():
    """A launch for each node of each step would cost more than the copies."""
    cache = Cache(pages=64)
    launches = 0
    start_writing = cache.tree.cache_controller.start_writing

    def count() -> None:
        nonlocal launches
        launches += 1
        start_writing()

    cache.tree.cache_controller.start_writing = count
    for number in range(10):
        cache.compute(prompt(number, 2))
    cache.step()
    assert launches == 1 and len(cache.buffer.backups.queue) == 0
    cache.settle()
    assert len(cache.store.content) == 20


@pytest.mark.hazard("pending-writes")
def test_the_same_node_is_queued_once():
    """Each request that passes a node presents it, and all above it, again."""
    cache = Cache()
    tokens = prompt(1, 2)
    for _ in range(50):
        cache.compute(tokens)
    assert len(cache.buffer.backups.queue) == 1
    cache.step()
    for _ in range(50):
        cache.compute(tokens)
    assert len(cache.buffer.backups.queue) == 0
    cache.settle()
    sets = [keys for method, keys in cache.store.calls if method == "batch_set_v1"]
    assert len(sets) == 1


def test_the_queue_is_bounded_and_says_what_it_dropped():
    """A store slower than the device must not grow a list without end."""
    cache = Cache(tokens=12 * PAGE)
    gate = prompt(99, 4)
    for number in range(40):
        cache.compute(prompt(number, 4))
        check(cache)
    intents = cache.buffer.backups.queue
    assert intents.tokens <= 2 * 12 * PAGE
    assert intents.dropped[EVICTED] > 0, "what was evicted meanwhile is no longer queued"
    assert cache.compute(gate) == 0
    cache.settle()
    check_idle(cache)


@pytest.mark.hazard("pending-writes")
def test_the_bound_itself():
    """Nothing evicts, so that the bound is what drops; twice the device pool, in tokens."""
    cache = Cache()
    intents = cache.buffer.backups.queue
    assert intents.max_tokens == 2 * cache.device.size
    intents.max_tokens = 3 * PAGE
    cache.compute(prompt(1, 3))
    cache.compute(prompt(2, 2, base=prompt(1, 3)))
    assert len(intents) == 1 and intents.dropped[FULL] == 2 * PAGE
    check(cache)
    cache.settle()
    # Presented again, now there is room.
    cache.compute(prompt(2, 2, base=prompt(1, 3)))
    cache.settle()
    assert len(cache.store.content) == 5
    check_idle(cache)


@pytest.mark.hazard("children-without-parents")
def test_parents_are_written_before_children():
    """A page whose prefix is missing is out of reach of every query."""
    cache = Cache(pages=8, hicache_write_policy="write_through")
    base = prompt(1, 6)
    cache.compute(base[: 3 * PAGE], chunked=True)  # a chunk: presented with the next insert only
    cache.compute(base)
    cache.compute(prompt(2, 3, base=base))
    cache.settle()
    order = [key for method, keys in cache.store.calls if method == "batch_set_v1" for key in keys]
    assert order == cache.keys(prompt(2, 3, base=base))


@pytest.mark.hazard("children-without-parents")
def test_a_failed_parent_cancels_what_waits_below_it():
    """Written all the same, the child would be dead weight in the store; both are written when a
    request comes by again."""
    cache = Cache(pages=4)  # two pages of writes, one at a time
    base = prompt(1, 1)
    cache.store.fail("batch_set_v1")
    cache.compute(base)
    cache.step()
    cache.compute(prompt(2, 8, base=base))
    cache.settle()
    cache.now += 2.0  # until then the store, which took nothing, is not tried again
    cache.settle()
    assert cache.buffer.backups.queue.dropped[UNCOVERED] > 0
    assert not any(node.storage_backed for node in nodes(cache.tree) if len(node.key) > PAGE)
    check_idle(cache)
    cache.compute(prompt(2, 8, base=base))
    cache.settle()
    assert all(node.storage_backed for node in nodes(cache.tree))
    assert len(cache.store.content) == 9


@pytest.mark.hazard("partial-write-counts")
@pytest.mark.parametrize("good", [0, 1, 2])
def test_only_leading_durable_pages_count(good: int):
    """Page number ``good`` of three fails, the one after it is written: a node counts as stored
    only up to the hole, and is written again from there."""
    cache = Cache()
    cache.store.answer("batch_set_v1", lambda r: [at != good for at in range(len(r))])
    cache.compute(prompt(1, 3))
    cache.settle()
    (node,) = nodes(cache.tree)
    assert node.stored == good * PAGE and not node.storage_backed and not node.storage_ready
    check_idle(cache)
    cache.now += 2.0
    cache.compute(prompt(1, 3))
    cache.settle()
    assert node.storage_backed
    check_idle(cache)


@pytest.mark.hazard("split-while-under-way")
@pytest.mark.parametrize("cut", [1, 2, 3, 4])
@pytest.mark.parametrize("state", ["queued", "copying", "writing", "answered", "settled"])
def test_split_at_every_page_in_every_state(cut: int, state: str):
    """Whatever a split does to a node on its way, every page of the chain ends in the store, and
    both halves know it."""
    cache = Cache(pages=16)
    cache.compute(prompt(1, 5))
    steps = ["queued", "copying", "writing", "answered", "settled"].index(state)
    for at in range(steps):
        cache.step(work=at == 3)
    cache.match(prompt(1, 5)[: cut * PAGE])
    assert len(nodes(cache.tree)) == 2
    check(cache)
    cache.settle()
    assert len(cache.store.content) == 5 and all(n.storage_backed for n in nodes(cache.tree))
    check_idle(cache)


@pytest.mark.hazard("pending-writes")
def test_one_half_of_a_split_node_is_evicted_while_queued():
    """The front half must still be written, and what was lost must not be looked for."""
    cache = Cache(pages=16)
    cache.compute(prompt(1, 5))
    cache.match(prompt(1, 5)[: 2 * PAGE])
    assert cache.evict(1) == 3 * PAGE
    check(cache)
    assert cache.buffer.backups.queue.dropped[EVICTED] == 3 * PAGE
    cache.settle()
    assert len(cache.store.content) == 2
    check_idle(cache)


@pytest.mark.hazard("pending-writes")
def test_evicted_and_inserted_again_while_being_written():
    """The acknowledgement of the first writing must not be taken for that of the second node."""
    cache = Cache()
    tokens = prompt(1, 3)
    cache.compute(tokens)
    cache.step(work=False)
    cache.step(work=False)
    assert cache.evict(100) == 3 * PAGE
    cache.store.fail("batch_set_v1", call=2)
    cache.compute(tokens)
    cache.settle()
    assert stored(cache) == [0], "the second writing failed"
    check_idle(cache)


def test_nodes_that_wait_to_be_written_are_evicted_last():
    """A prefix seen for the first time would be lost if it went before those in the store."""
    cache = Cache()
    cache.compute(prompt(1, 2))
    cache.settle()
    cache.compute(prompt(2, 2))
    cache.compute(prompt(1, 2))  # newer than the one that waits
    cache.evict(2 * PAGE)
    assert cache.held_tokens(prompt(2, 2)) == 2 * PAGE and cache.held_tokens(prompt(1, 2)) == 0


@pytest.mark.hazard("tenants-meet-in-store")
def test_namespaces_have_keys_of_their_own():
    """Two tenants with the same prompt must never read each other's pages; nor may a request
    without a namespace read what a stock server has written under SGLang's own key, which could be
    that of an adapter or of a salted request."""
    cache = Cache()
    tokens = prompt(1, 3)
    keys = {}
    for extra_key in (None, "a", "b"):
        before = set(cache.store.content)
        cache.serve(f"rid {extra_key}", tokens, extra_key)
        cache.settle()
        keys[extra_key] = set(cache.store.content) - before
        check(cache)
    assert [len(found) for found in keys.values()] == [3, 3, 3]
    plain = cache.match(tokens).last_device_node
    assert not keys[None] & {*plain.hash_value, *plain.parent.hash_value}
    cache.flush()
    for extra_key in ("b", None, "a"):
        assert cache.serve(f"again {extra_key}", tokens, extra_key) == 2 * PAGE
    assert cache.serve("c", tokens, "c") == 0
    cache.settle()
    check_idle(cache)


@pytest.mark.hazard("stale-beliefs")
def test_the_store_is_cleared():
    """What was stored is not any more; a write under way does not bring the belief back."""
    cache = Cache()
    cache.compute(prompt(1, 2))
    cache.settle()
    cache.compute(prompt(2, 2))
    cache.step(work=False)
    cache.step()
    assert cache.tree.clear_storage_backend()
    cache.settle()
    assert not any(node.storage_backed for node in nodes(cache.tree))
    check_idle(cache)
    cache.compute(prompt(1, 2))
    cache.settle()
    assert (
        len(cache.store.content) >= 2 and cache.match(prompt(1, 2)).last_device_node.storage_ready
    )


@pytest.mark.hazard("stale-beliefs")
@pytest.mark.parametrize("state", [State.QUERYING, State.FETCHING, State.STAGED])
def test_the_store_is_cleared_under_a_read(state: State):
    """What was found before would enter the tree as stored, and never be written again."""
    cache = Cache()
    tokens = prompt(1, 6)
    cache.compute(tokens)
    cache.settle()
    cache.flush()
    cache.want("r", tokens)
    reach(cache, state)
    assert cache.tree.clear_storage_backend() and not cache.store.content
    check(cache)
    cache.settle()
    assert cache.tree.check_prefetch_progress("r") and not any(n.stored for n in nodes(cache.tree))
    cache.compute(tokens)
    cache.settle()
    assert len(cache.store.content) == 6
    check_idle(cache)


@pytest.mark.hazard("stale-beliefs")
@pytest.mark.parametrize("how", ["fails", "hangs"])
def test_a_store_that_cannot_be_cleared(how: str):
    """The scheduler does not wait for it for ever; what is known of the store is forgotten all the
    same, for other ranks may have cleared theirs."""
    cache = Cache()
    cache.compute(prompt(1, 2))
    cache.settle()
    cache.store.fail("clear") if how == "fails" else cache.store.hang("clear")
    assert not cache.tree.clear_storage_backend()
    assert not nodes(cache.tree)[0].storage_backed
    cache.let_go()
    cache.settle()
    check_idle(cache)


@pytest.mark.hazard("tenants-meet-in-store")
def test_new_weights_on_a_tree_that_was_not_emptied():
    """KV below a prefix of the old weights is neither's: written under the new weights' keys, every
    server that has them would read it. After a flush servers with the same weights meet."""
    old, new = Namespace.of({"weights": "old"}), Namespace.of({"weights": "new"})
    cache = Cache(pages=8)
    cache.buffer.use(old, "a")
    cache.compute(prompt(1, 3))
    cache.step(work=False)  # one that is being copied is still the old weights'
    cache.compute(prompt(2, 2))  # one that waits is not known to be
    cache.buffer.use(new, "b")
    cache.compute(prompt(3, 2, base=prompt(1, 3)))
    cache.settle()
    written = set(cache.store.content)
    assert len(written) == 7
    cache.flush()
    assert cache.serve("r", prompt(3, 2, base=prompt(1, 3))) == 0
    cache.settle()
    keys = set(cache.keys(prompt(3, 2, base=prompt(1, 3))))
    assert len(keys) == 5 and keys <= set(cache.store.content) and not keys & written
    other = Cache(store=cache.store)
    other.buffer.use(new, "c")
    assert other.serve("r", prompt(3, 2, base=prompt(1, 3))) == 4 * PAGE


def test_weights_that_are_not_known_yet():
    """Between two updates of some tensors each the weights are nobody's, flushed or not."""
    known = Namespace.of({"weights": "known"})
    cache = Cache()
    cache.buffer.use(known, "a")
    keys = []
    for nonce in ("b", "c"):
        cache.buffer.hide(nonce)
        cache.flush()
        cache.compute(prompt(1, 2))
        cache.settle()
        keys += cache.keys(prompt(1, 2))
    assert len(set(keys)) == 4 and set(keys) == set(cache.store.content)
    cache.flush()
    cache.buffer.use(known, "d")
    assert cache.serve("r", prompt(1, 3)) == 0
    assert not set(cache.keys(prompt(1, 3))) & set(keys)


@pytest.mark.hazard("back-pressure-deadlock")
@pytest.mark.parametrize("way", [True, OSError("full")], ids=["refuses", "raises"])
def test_a_store_that_takes_nothing(way: bool | OSError):
    """Retried in every step, a prompt larger than the stage would be copied over and over, keep
    out all that is behind it, and the server from ever being idle; given up for good, nothing
    would be stored when the store is well again."""
    cache = Cache(pages=8, tokens=80 * PAGE)
    cache.store.refusing = way
    copies = count_copies(cache)
    cache.compute(prompt(1, 30))
    cache.compute(prompt(2, 2))
    for _ in range(400):  # six seconds
        cache.step()
        cache.now += 0.015
        check(cache, content=False)
    # One after 0, 1 and 3 s each.
    assert copies() <= 4 and cache.buffer.backups.queue.dropped[REFUSED] > 0
    for number in (3, 4):  # the first of them is the next that is tried
        cache.compute(prompt(number, 2))
        for _ in range(5):
            cache.step()
    assert len(cache.buffer.backups.queue) == 1 and not cache.buffer.busy, "it is in nobody's way"
    cache.store.refusing = False
    cache.now += 100.0
    cache.settle()
    cache.now += 100.0
    for tokens in (prompt(1, 30), prompt(2, 2), prompt(3, 2)):
        cache.compute(tokens)
    cache.settle()
    assert all(node.storage_backed for node in nodes(cache.tree))
    check_idle(cache)


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
    # After 0, 1/16, 3/16 s and so on, and then once in a second.
    assert 5 <= copies() <= 8 and len(cache.store.content) == copies()
    assert cache.buffer.backups.queue.dropped[REFUSED] == 0
    cache.store.takes = None
    cache.now += 0.5
    for _ in range(3):
        cache.step()
    before = copies()
    cache.settle(1000)
    assert copies() - before > 50 and cache.now < 4, "it is not waited for any more"
    check_idle(cache)


def test_what_waits_for_a_store_that_takes_a_part_is_not_forgotten():
    """It takes more soon: a flush that may wait would throw away what waits meanwhile. For one
    that takes nothing, or is down, nobody waits."""
    cache = Cache(pages=8)
    cache.store.takes = 1
    for number in range(4):
        cache.compute(prompt(number, 2))
    for _ in range(5):
        cache.step()
    assert cache.buffer.backups.queue and not cache.buffer.backups.running
    assert cache.buffer.busy and cache.now == 0
    cache.store.takes = 0
    cache.now += 0.07
    for _ in range(5):
        cache.step()
    assert cache.buffer.backups.queue and not cache.buffer.busy
    cache.store.takes = None
    cache.now += 2.0
    cache.settle()
    assert not cache.buffer.backups.queue
    check_idle(cache)


def test_no_copy_for_a_store_that_is_down():
    """What waits stays until the store answers a probe, which comes without any request."""
    cache = Cache()
    gate = cache.store.hang("batch_exists")
    cache.client.query(["f" * 64])
    assert gate.waiting and not cache.client.up
    copies = count_copies(cache)
    cache.compute(prompt(1, 3))
    for _ in range(20):
        cache.step()
    assert copies() == 0 and not cache.buffer.busy
    cache.let_go()
    cache.now += 2.0
    for _ in range(3):
        cache.step()
    assert cache.client.up
    cache.settle()
    assert len(cache.store.content) == 3
    check_idle(cache)


def count_copies(cache: Cache) -> Callable[[], int]:
    """How many copies to the stage there have been since."""
    copier = cache.buffer.context.copier
    with_count = mock.Mock(side_effect=copier.to_stage)
    copier.to_stage = with_count
    return lambda: with_count.call_count
