"""Pages in and out of the store: their keys, the threads that wait for the store, and leading good
pages, whatever happens.

The client (``store_client``) neither raises nor hangs, and an overdue call says when it has let go
of its pages. What a job has found out is read by the scheduler thread, which alone decides what
follows from it.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any  # Any: tokens, or pairs of them; arguments of a call

from sglang.srt.mem_cache.buffer_only.images import images_before
from sglang.srt.mem_cache.buffer_only.namespaces import Namespace
from sglang.srt.mem_cache.buffer_only.settings import BATCH_PAGES

if TYPE_CHECKING:
    import torch

    from sglang.srt.mem_cache.buffer_only.store_client import Outcome, StoreClient
    from sglang.srt.mem_cache.radix_cache import TreeNode

logger = logging.getLogger(__name__)


def page_hashes(node: TreeNode, page_size: int) -> list[str]:
    """SGLang's page hashes of ``node``; computed now if it was inserted without."""
    from sglang.srt.mem_cache.radix_cache import compute_node_hash_values

    bare = [node]
    while bare[-1].hash_value is None and bare[-1].parent is not None:
        bare.append(bare[-1].parent)
    for above in reversed(bare):
        if above.hash_value is None:
            above.hash_value = compute_node_hash_values(above, page_size)
    return node.hash_value or []


class Job:
    """Pages asked of the store, in a row."""

    def __init__(self, work: Callable[[Job], int]) -> None:
        self._work = work
        #: What a query found, beside ``pages``.
        self.found: Found | None = None
        #: Why not all pages are good, where the store was at fault.
        self.fault: str | None = None
        #: Calls that were given up and may still use the staging pages.
        self.overdue_calls: list[Future[object]] = []
        #: How long the work took.
        self.seconds = 0.0
        #: Leading good pages; None until the job has ended.
        self.pages: int | None = None
        self._cancelled, self._ended = threading.Event(), threading.Event()

    @property
    def drained(self) -> bool:
        """Whether the job has ended and nothing of it uses the staging pages any more."""
        return self.pages is not None and all(call.done() for call in self.overdue_calls)

    def cancel(self) -> None:
        """Nobody waits for it any more: it ends at its next call of the store."""
        self._cancelled.set()

    @property
    def cancelled(self) -> bool:
        """Whether the job should end."""
        return self._cancelled.is_set()

    def run(self) -> None:
        """Do the work, on an I/O thread."""
        pages, began = 0, time.monotonic()
        try:
            pages = self._work(self)
        except Exception:
            self.fault = "internal"
            logger.exception(
                "HiCache buffer: an unexpected error in a job for the store; its pages count as "
                "missing, and their requests compute them. This is a defect: please report it"
            )
        finally:
            self.seconds = time.monotonic() - began
            self.pages = pages  # last: the scheduler looks at everything else after it
            self._ended.set()

    def wait(self, seconds: float) -> bool:
        """Whether the job has ended, at most so much later."""
        return self._ended.wait(max(0.0, seconds))


class IOThreads:
    """Daemon threads that run jobs in the order of their submission, and never end because of
    one."""

    def __init__(self, name: str, threads: int = 1) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"hicache-{name}-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, work: Callable[[Job], int]) -> Job:
        """Run ``work`` when a thread has time for it."""
        job = Job(work)
        self._jobs.put(job)
        return job

    def wait(self, jobs: Iterable[Job], seconds: float) -> bool:
        """Whether all of ``jobs`` have ended, at most ``seconds`` later."""
        end = time.monotonic() + seconds
        return all(job.wait(end - time.monotonic()) for job in jobs)

    def close(self, until: float) -> bool:
        """End after the jobs that are queued; False if a thread runs on at ``until``, of
        ``time.monotonic``."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.run()


class PageStore:
    """One store, behind its client. A call moves at most ``batch_pages`` pages.

    ``prefix_keys``, where given, are the keys of all pages before the first one, for backends that
    place a page by them.
    """

    def __init__(
        self,
        client: StoreClient,
        page_size: int,
        batch_pages: int = BATCH_PAGES,
        namespace: Namespace = Namespace.of({}),  # noqa: B008
    ) -> None:
        self.client = client
        #: Of all keys that are made now; requests have parts of it.
        self.namespace = namespace
        self._page_size, self.batch_pages = page_size, batch_pages

    def keys(
        self,
        hashes: Sequence[str],
        extra_key: str | None,
        begin: int = 0,
        namespace: Namespace | None = None,
    ) -> list[str]:
        """Keys of pages, given SGLang's page hashes, of a request with ``extra_key``: those from
        page ``begin`` of its prompt on. ``namespace``: the store's when the request came."""
        own, keys = (namespace or self.namespace).within(extra_key), list[str]()
        if not getattr(extra_key, "images", ()):
            return own.keys(hashes)
        for page, page_hash in enumerate(hashes, begin + 1):
            images = images_before(extra_key, page * self._page_size)
            keys += own.within(images, b"images").keys([page_hash])
        return keys

    def path_keys(self, node: TreeNode) -> list[str]:
        """Keys of all pages up to the end of ``node``, in the order of the prompt."""
        extra_key, hashes = node.key.extra_key, list[str]()
        while node.parent is not None:
            hashes[:0] = page_hashes(node, self._page_size)
            node = node.parent
        return self.keys(hashes, extra_key)

    def query(self, keys: Sequence[str], prefix_keys: Sequence[str] | None, job: Job) -> int:
        """How many of ``keys`` are in the store, up to the first that is not."""
        return self._by_batches(self.client.query, BATCH_PAGES, keys, prefix_keys, job)

    def read(
        self, keys: Sequence[str], slots: torch.Tensor, prefix_keys: Sequence[str] | None, job: Job
    ) -> int:
        """Read pages into the host slots ``slots``, a page after the other; leading pages read."""
        return self._by_batches(self.client.read, self.batch_pages, keys, prefix_keys, job, slots)

    def write(
        self, keys: Sequence[str], slots: torch.Tensor, prefix_keys: Sequence[str] | None, job: Job
    ) -> int:
        """Write pages from the host slots ``slots``; leading pages that are durable."""
        return self._by_batches(self.client.write, self.batch_pages, keys, prefix_keys, job, slots)

    def _by_batches(
        self,
        call: Callable[..., Outcome],
        batch_pages: int,
        keys: Sequence[str],
        prefix_keys: Sequence[str] | None,
        job: Job,
        slots: torch.Tensor | None = None,
    ) -> int:
        """Call the store batch by batch, until one is not wholly good or nobody wants more."""
        from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo

        done = 0
        while done < len(keys) and not job.cancelled:
            batch = list(keys[done : done + batch_pages])
            # A list of its own for each call: backends are known to extend what they are given.
            before = None if prefix_keys is None else [*prefix_keys, *keys[:done]]
            arguments: list[Any] = [batch]
            if slots is not None:
                page = self._page_size
                arguments.append(slots[done * page : (done + len(batch)) * page])
            outcome = call(*arguments, HiCacheStorageExtraInfo(prefix_keys=before))
            done += outcome.pages
            if outcome.overdue is not None:
                job.overdue_calls.append(outcome.overdue.returned)
            if outcome.pages < len(batch):
                job.fault = None if outcome.fault is None else outcome.fault.value
                break
        return done


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
    begin: int,
    prefix_keys: Sequence[str] | None,
    first_pages: int = BATCH_PAGES,
) -> Callable[[Job], int]:
    """The work of a job that looks for ``tokens``, whole pages, and leaves a :class:`Found`.

    Args:
        last_hash: page hash of the page before them; None at the start of a prompt.
        begin: pages of the prompt before them.
        prefix_keys: keys of all pages before them, where the backend wants them.
        first_pages: that the store is asked for first. Of most prompts it has nothing: the rest
            need not be hashed to know that.
    """

    namespace = store.namespace

    def work(job: Job) -> int:
        found = job.found = Found()
        for hashes in _hashed_batches(tokens, last_hash, page_size, first_pages):
            at = begin + len(found.keys)
            keys = store.keys(hashes, extra_key, at, namespace)
            before = None if prefix_keys is None else [*prefix_keys, *found.keys]
            good = store.query(keys, before, job)
            found.hashes.extend(hashes[:good])
            found.keys.extend(keys[:good])
            if good < len(hashes):
                break
        return len(found.keys)

    return work


def hashes_of(tokens: Sequence[Any], last_hash: str | None, page_size: int) -> list[str]:
    """SGLang's page hashes of ``tokens``, whole pages, behind a page with ``last_hash``."""
    from sglang.srt.mem_cache.hicache_storage import get_hash_str

    found: list[str] = []
    for start in range(0, len(tokens), page_size):
        last_hash = get_hash_str(tokens[start : start + page_size], last_hash)
        found.append(last_hash)
    return found


def _hashed_batches(
    tokens: Sequence[Any], last_hash: str | None, page_size: int, first_pages: int
) -> Iterator[list[str]]:
    """The same, a batch at a time: the store may know only the first, or nothing of it."""
    start, pages = 0, min(first_pages, BATCH_PAGES)
    while start < len(tokens):
        stop = start + pages * page_size
        batch = hashes_of(tokens[start:stop], last_hash, page_size)
        last_hash, start, pages = batch[-1], stop, BATCH_PAGES
        yield batch
