"""How much of a prompt the store has: the work of a query."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from sglang.srt.mem_cache.buffer_only.lanes import Job
from sglang.srt.mem_cache.buffer_only.namespaces import store_keys
from sglang.srt.mem_cache.buffer_only.page_store import BATCH_PAGES, PageStore


@dataclass
class Found:
    """Leading pages that the store has: their page hashes, and their keys."""

    hashes: list[str] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)


def search(
    store: PageStore,
    tokens: Sequence[Any],
    page_size: int,
    last_hash: str | None,
    extra_key: str | None,
    prefix_keys: Sequence[str] | None,
) -> Callable[[Job], int]:
    """The work of a job that looks for ``tokens``, whole pages, and leaves a :class:`Found`.

    Args:
        last_hash: page hash of the page before them; None at the start of a prompt.
        prefix_keys: keys of all pages before them, where the backend wants them.
    """

    def work(job: Job) -> int:
        found = job.found = Found()
        for hashes in _hashed_batches(tokens, last_hash, page_size):
            keys = store_keys(hashes, extra_key)
            before = None if prefix_keys is None else [*prefix_keys, *found.keys]
            good = store.leading_hits(keys, before, job)
            found.hashes.extend(hashes[:good])
            found.keys.extend(keys[:good])
            if good < len(hashes):
                break
        return len(found.keys)

    return work


def _hashed_batches(
    tokens: Sequence[Any], last_hash: str | None, page_size: int
) -> Iterator[list[str]]:
    """SGLang's page hashes of ``tokens``, a batch at a time: the store may know only the first."""
    from sglang.srt.mem_cache.hicache_storage import get_hash_str

    batch: list[str] = []
    for start in range(0, len(tokens), page_size):
        last_hash = get_hash_str(tokens[start : start + page_size], last_hash)
        batch.append(last_hash)
        if len(batch) == BATCH_PAGES:
            yield batch
            batch = []
    if batch:
        yield batch
