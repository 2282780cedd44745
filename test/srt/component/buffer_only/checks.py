"""Checks after every step, and checks of an idle cache."""

from __future__ import annotations

from collections import Counter
from typing import Any

from component.buffer_only.books import check_books
from component.buffer_only.cache import PAGE, Cache
from sglang.srt.mem_cache.buffer_only.transfer_vote import BACKUP_SLOTS, FETCH_SLOTS, QUERY_SLOTS


def nodes(tree: Any) -> list[Any]:
    """Return all nodes but the root."""
    stack, visited = [tree.root_node], []
    while stack:
        node = stack.pop()
        visited.append(node)
        stack.extend(node.children.values())
    return visited[1:]


def path(node: Any) -> list[Any]:
    """Return the nodes from the first one below the root down to ``node``."""
    ancestors = []
    while node.parent is not None:
        ancestors.append(node)
        node = node.parent
    return ancestors[::-1]


def check(cache: Cache, content: bool = True) -> None:
    """Check that tree, device pool, locks, stage and queues agree with each other."""
    _check_tree(cache)
    _check_locks(cache)
    _check_stage(cache)
    _check_queue(cache)
    if content:
        _check_content(cache)


def check_idle(cache: Cache) -> None:
    """Check that no page, lock or call is left."""
    check(cache)
    assert not cache.buffer.busy
    prefetches = cache.buffer.prefetches
    assert not prefetches.calls.fetches and not prefetches.calls.queries
    assert not prefetches.calls.brought and not cache.buffer.backups.running
    assert cache.stage.used() == 0 and not cache.stage.allocated
    assert cache.tree.protected_size() == 0
    assert all(node.host_ref_counter == 0 for node in nodes(cache.tree))
    assert not (len(prefetches.line) or prefetches._to_ask)
    assert all(node.launched == node.stored for node in nodes(cache.tree))


def _check_tree(cache: Cache) -> None:
    tree, tree_nodes = cache.tree, nodes(cache.tree)
    for node in tree_nodes:
        assert node.value is not None and node.host_value is None
        assert len(node.value) == len(node.key) > 0 and len(node.key) % PAGE == 0
        assert len(node.hash_value) == len(node.key) // PAGE
        assert node.parent.children[tree.get_child_key_fn(node.key)] is node
        assert 0 <= node.stored <= node.launched <= len(node.key)
    evictable = sum(len(node.key) for node in tree_nodes if node.lock_ref == 0)
    protected = sum(len(node.key) for node in tree_nodes if node.lock_ref > 0)
    assert (tree.evictable_size(), tree.protected_size()) == (evictable, protected)
    assert cache.allocator.available_size() + evictable + protected == cache.device.size
    slots = [slot for node in tree_nodes for slot in node.value.tolist()]
    assert len(slots) == len(set(slots)), "a device slot in two nodes"


def loading_back(cache: Cache) -> list[Any]:
    """Return the copies to the device that have not ended, as far as the cache knows."""
    load_backs = cache.buffer.prefetches.load_backs
    launched = [load_back for _, copied in load_backs.copies.launches for load_back in copied]
    return [*launched, *(load_back for load_back, _ in load_backs.queued)]


def _check_locks(cache: Cache) -> None:
    locks: Counter[Any] = Counter()
    backups = cache.buffer.backups
    for load_back in loading_back(cache):
        locks.update(path(load_back.node))
    for _, copied in backups.copies.launches:
        for segment in (segment for backup in copied for segment in backup.segments):
            locks.update(path(segment.node))
    for node in nodes(cache.tree):
        assert node.lock_ref == locks[node], (node.lock_ref, locks[node])
        assert node.host_ref_counter == 0


def _check_stage(cache: Cache) -> None:
    prefetches, backups, stage = cache.buffer.prefetches, cache.buffer.backups, cache.stage
    check_books(stage)
    calls = prefetches.calls
    pieces = {piece for prefetch in prefetches.line for piece in prefetch.pieces}
    assert all(piece.staged or piece in calls.fetches for piece in pieces)
    staging = [piece.staging for piece in pieces.union(calls.fetches)] + cache.hogs
    staging += [staging for load_back in loading_back(cache) for staging in load_back.staging]
    staging += [backup.staging for backup in backups.running]
    assert len(staging) == len(set(staging)) and set(staging) == stage.allocated
    for direction, share in stage.shares.items():
        assert stage.used(direction) <= share.ceiling
    assert len(backups.running) <= BACKUP_SLOTS and len(prefetches.calls.queries) <= QUERY_SLOTS
    assert len(calls.fetches) <= FETCH_SLOTS
    for prefetch in prefetches.line:
        assert [p.start for p in prefetch.pieces] == sorted(p.start for p in prefetch.pieces)
        for piece in prefetch.pieces:
            assert len(piece.staging.pages) == len(piece.keys) > 0
    brought = [key for piece in pieces for key in piece.keys]
    assert set(calls.brought) <= set(brought)


def _check_queue(cache: Cache) -> None:
    queue = cache.buffer.backups.queue
    covered: Counter[Any] = Counter()
    for pending in queue:
        pieces = pending.pieces()
        assert sum(len(node.key) for node in pieces) == pending.tokens
        covered.update(pieces)
    assert all(count == 1 for count in covered.values()), "a node in two entries"
    for node in nodes(cache.tree):
        assert (node.pending is not None) == (node in covered)
    assert queue.tokens == sum(pending.tokens for pending in queue) <= cache.device.size


def _check_content(cache: Cache) -> None:
    loading = {load_back.node for load_back in loading_back(cache)}
    for node in nodes(cache.tree):
        if node.children or any(above in loading for above in path(node)):
            continue
        tokens = [token for above in path(node) for token in above.key.token_ids]
        slots = [slot for above in path(node) for slot in above.value.tolist()]
        cache.verify(tokens, slots, node.key.extra_key)


def end(cache: Cache) -> None:
    """Disconnect all clients and let the store answer; check that the cache is idle."""
    cache.slow = False
    cache.open_gates()
    cache.unhog()
    cache.buffer.prefetches.in_line([])
    cache.settle()
    check_idle(cache)
    assert not cache.store.disturbed, "a page was overwritten while the store read it"
