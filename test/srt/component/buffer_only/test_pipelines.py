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
