"""One request after the other through stage and store."""

from __future__ import annotations

from component.buffer_only.cache import PAGE, Cache, prompt
from component.buffer_only.checks import check_idle, nodes


def test_written_flushed_and_read_back():
    """The plain way: what a request computed is in the store, and a flush loses nothing of it."""
    cache = Cache()
    tokens = prompt(1, 5)
    assert cache.serve("a", tokens) == 0
    cache.settle()
    check_idle(cache)
    assert len(cache.store.content) == 5 and all(n.storage_backed for n in nodes(cache.tree))
    cache.flush()
    # The last token is always computed, so its page is not fetched.
    assert cache.serve("b", tokens) == 4 * PAGE
    assert cache.tree.pop_prefetch_loaded_tokens("b") == 4 * PAGE
    cache.settle()
    check_idle(cache)


def test_evicted_node_by_node_and_read_back():
    """A node without device KV is gone, a leaf as well as what is above it: nothing can match,
    load or count what neither device nor host has. The store has it, and a request gets it all."""
    cache = Cache(pages=32)
    base, tokens = prompt(1, 4), prompt(2, 3, base=prompt(1, 4))
    cache.compute(base)
    cache.compute(tokens)
    cache.settle()
    for gone, held in [(3, 4), (4, 0)]:
        assert cache.evict(1) == gone * PAGE
        match = cache.match(tokens)
        assert len(match.device_indices) == held * PAGE and match.host_hit_length == 0
        check_idle(cache)
    assert nodes(cache.tree) == [] and len(cache.store.content) == 7
    assert cache.serve("r", tokens) == 6 * PAGE
    cache.settle()
    check_idle(cache)
