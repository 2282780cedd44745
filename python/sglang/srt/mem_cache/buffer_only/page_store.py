"""The store addressed by prompt pages: their keys, and calls in batches.

Contract: the scheduler thread changes ``namespace`` and calls ``search``, which copies it; jobs'
threads run ``call`` and the work that ``search`` returns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any  # Any: tokens

from sglang.srt.mem_cache.buffer_only.jobs import Job
from sglang.srt.mem_cache.buffer_only.namespaces import Namespace
from sglang.srt.mem_cache.buffer_only.nodes import hashes_of, images_before
from sglang.srt.mem_cache.buffer_only.settings import BATCH_PAGES
from sglang.srt.mem_cache.buffer_only.store_client import CallOutcome, StoreClient

if TYPE_CHECKING:
    import torch


@dataclass(eq=False)
class PageStore:
    """A store addressed by prompt pages: makes their keys and calls its client in batches.

    ``prefix_keys`` are the keys of all pages before the first one, for backends that place pages by
    prefix; None for other backends.
    """

    client: StoreClient
    page_size: int
    #: Maximum pages of a read or write.
    batch_pages: int = BATCH_PAGES
    #: Current namespace; requests use sub-namespaces of it.
    namespace: Namespace = Namespace.of({})  # noqa: RUF009

    def keys(
        self,
        hashes: Sequence[str],
        extra_key: str | None,
        begin: int = 0,
        namespace: Namespace | None = None,
    ) -> list[str]:
        """Return the keys of pages by SGLang's page hashes, for a request with ``extra_key``.

        Args:
            begin: index of the first page in the prompt.
            namespace: the store's namespace when the transfer was started; default: the current.
        """
        scope, keys = (namespace or self.namespace).within(extra_key), list[str]()
        if not getattr(extra_key, "images", ()):
            return scope.keys(hashes)
        for page, page_hash in enumerate(hashes, begin + 1):
            images = images_before(extra_key, page * self.page_size)
            keys += scope.within(images, b"images").keys([page_hash])
        return keys

    def call(
        self,
        job: Job,
        call: Callable[..., CallOutcome],
        keys: Sequence[str],
        prefix_keys: Sequence[str] | None,
        slots: torch.Tensor | None = None,
    ) -> int:
        """Run ``call`` (the client's ``query``, ``read`` or ``write``) batch by batch, until one is
        incomplete or the job is cancelled. Return the number of leading good pages.

        Args:
            slots: host slots of the pages, page by page; None for a query.
        """
        from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo

        page, done = self.page_size, 0
        max_batch = BATCH_PAGES if slots is None else self.batch_pages
        while done < len(keys) and not job.cancelled:
            batch = list(keys[done : done + max_batch])
            # A new list for each call, because some backends extend it.
            earlier_keys = None if prefix_keys is None else [*prefix_keys, *keys[:done]]
            part = () if slots is None else (slots[done * page : (done + len(batch)) * page],)
            outcome = call(batch, *part, HiCacheStorageExtraInfo(prefix_keys=earlier_keys))
            done += outcome.pages
            if outcome.overdue is not None:
                job.overdue_calls.append(outcome.overdue)
            if outcome.pages < len(batch):
                job.fault = None if outcome.fault is None else outcome.fault.value
                break
        return done

    def search(
        self,
        tokens: Sequence[Any],
        last_hash: str | None,
        extra_key: str | None,
        begin: int,
        prefix_keys: Sequence[str] | None,
        first_pages: int = BATCH_PAGES,
    ) -> Callable[[Job], int]:
        """Return the work of a job that queries ``tokens`` (whole pages) and fills ``Job.found``.

        Args:
            last_hash: hash of the page before ``tokens``; None at the start of a prompt.
            begin: number of pages before ``tokens`` in the prompt.
            first_pages: pages of the first query. It is small, because most prompts are misses and
                their other pages then need no hash.
        """
        namespace, page = self.namespace, self.page_size

        def work(job: Job) -> int:
            found_hashes, found_keys = job.found
            last, start, pages = last_hash, 0, min(first_pages, BATCH_PAGES)
            while start < len(tokens):
                stop = start + pages * page
                hashes = hashes_of(tokens[start:stop], last, page)
                keys = self.keys(hashes, extra_key, begin + len(found_keys), namespace)
                earlier_keys = None if prefix_keys is None else [*prefix_keys, *found_keys]
                good = self.call(job, self.client.query, keys, earlier_keys)
                found_hashes += hashes[:good]
                found_keys += keys[:good]
                if good < len(hashes):
                    break
                last, start, pages = hashes[-1], stop, BATCH_PAGES
            return len(found_keys)

        return work
