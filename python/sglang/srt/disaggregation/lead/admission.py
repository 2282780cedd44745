"""Admission by what each request can still generate, in SGLang 0.5.23's own prealloc queue.

Stock keeps ``--num-reserved-decode-tokens`` free for every queued or running request. Here a
running request reserves what it can still generate, at most that number, and an admitted one that
does not run yet half of it (arithmetic: ``policy.memory``). So more requests run, and if they
are too many, one is retracted. One rule keeps that safe: a request is admitted only if every
request could still end afterwards. The rule replaces stock's, which counts a shared prefix once for
each running request, and so expects more memory from retractions than they free.

**Resume.** Stock allocates the whole text of a retracted request again, although other requests may
hold the same prefix. Here its prompt is matched and locked first, like a new request's, and only
the part after the match is allocated and copied back from the CPU. Shared pages are not written,
because running requests read them. A request with windows in a pool of their own, an index or
states resumes as in stock (``has_token_copies``).

Contract: scheduler thread, no lock. All inputs are equal on all ranks, as stock's are, and so are
the decisions.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple  # Any: SGLang's objects

from sglang.srt.disaggregation.delta.pages import load_private
from sglang.srt.disaggregation.policy.memory import (
    Claim,
    entering,
    expected_length,
    final_length,
    growth,
    page_ceil,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sglang.srt.disaggregation.lead.attach import Function, Wraps

#: More than any pool has.
NEVER = 1 << 60


class Totals(NamedTuple):
    """Sums over admitted requests that do not run yet.

    ``number``: of these requests; ``reserve``: tokens they may take before a request is retracted;
    ``need``: largest number of tokens that one of them needs to end; ``own``: tokens they hold that
    the tree does not share."""

    number: int = 0
    reserve: int = 0
    need: int = 0
    own: int = 0


class ResumeLease:
    """The lock on the prefix of one retracted request that may resume in this call of SGLang's
    (``RemainingAdmission.step``)."""

    def __init__(self, queue: Any, req: Any) -> None:
        before = queue.tree_cache.evictable_size()
        self.req, self._tree = req, queue.tree_cache
        self.prefix = queue._match_prefix_and_lock(req).prefix_indices
        #: Tokens that need no allocation: the prefix without the part that counted as free before.
        self.saved: int = len(self.prefix) - (before - self._tree.evictable_size())

    def release(self) -> None:
        """Undo the match, because the request does not resume now."""
        self._tree.unlock(self.req.lock)
        self.req.lock = self.req.last_node = None
        self.req.prefix_len = 0


class RemainingAdmission:
    """Admission of one prealloc queue (``queue.lead_admission``). All numbers are tokens."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue
        self._page: int = queue.token_to_kv_pool_allocator.page_size
        #: Tokens behind its text that a request takes for each speculative step.
        self._step = draft_tokens(queue.scheduler)
        #: Largest reserve of a running request.
        self._cap: int = max(queue.num_reserved_decode_tokens, self._step)
        #: Largest reserve of a request that does not run yet.
        self._entry_cap = max(self._cap // 2, self._page, self._step)
        pool = queue.token_to_kv_pool_allocator.get_kvcache()
        #: True if a retracted request resumes with the prefix that the tree holds.
        self._shares = has_token_copies(pool)
        #: Leases by request id while retracted requests may resume, else None.
        self.leases: dict[str, ResumeLease] | None = None
        self._begin()

    def _begin(self) -> None:
        self._of_running: tuple[int, int] | None = None
        #: Counted requests that have pages and do not run yet, without local turns, because these
        #: may come and go within a step.
        self._counted: list[Any] = []
        #: Requests that were admitted since.
        self._new: list[Any] = []
        self._of_counted: Totals | None = None

    @contextmanager
    def step(self, *, resuming: bool = False) -> Iterator[None]:
        """Keep the sums during one admitting call of SGLang's, in which the running batch does not
        change."""
        self._begin()
        self.leases = {} if resuming else None
        try:
            yield
        finally:
            for lease in (self.leases or {}).values():
                lease.release()
            self.leases = None
            self._begin()

    def admitted(self, req: Any) -> None:
        """Note that ``req`` has its pages."""
        self._new.append(req)

    def _entering(self) -> Totals:
        """Return the sums over admitted requests that do not run yet and cannot be retracted. Each
        request of SGLang's queues is counted once a step, because there may be hundreds."""
        if self._of_counted is None:
            scheduler, transfers = self._queue.scheduler, self._queue.transfer_queue.queue
            transferred = [entry.req for entry in transfers]
            self._of_counted = Totals()
            self._new = [*transferred, *scheduler.waiting_queue, *self._new]
        self._of_counted = self._add(self._of_counted, self._new)
        self._counted += self._new
        self._new = []
        return self._add(self._of_counted, self._turns())

    def _turns(self) -> list[Any]:
        turns = getattr(self._queue.scheduler, "lead_turns", None)
        return [] if turns is None else turns.reqs

    def _add(self, totals: Totals, reqs: list[Any]) -> Totals:
        number, reserve, need, own = totals
        for req in reqs:
            length = taken(req)
            reserve += self.entry_reserve(req, length)
            need = max(need, self._expected(req, length) - page_ceil(length, self._page))
            own += self._own(req)
        return Totals(number + len(reqs), reserve, need, own)

    def _own(self, req: Any) -> int:
        return page_ceil(taken(req), self._page) - int(req.kv.cache_protected_len)

    def reserved(self) -> int:
        """Return the tokens that admitted requests may take before one is retracted."""
        return self._running()[0] + self._entering().reserve

    def _running(self) -> tuple[int, int]:
        """Return the reserve of the running requests, and the final length of the longest one.

        Counted once a step, as by ``growth`` but without a ``Claim``, as there may be hundreds.
        """
        if self._of_running is None:
            page, cap, pool = self._page, self._cap, self._queue.max_total_num_tokens
            reserve = longest = 0
            for req in self._queue.scheduler.running_batch.reqs:
                now = req.kv.kv_allocated_len
                final = max(min(final_length(req, self._step), pool), now)
                reserve += page_ceil(min(final, now + cap), page) - page_ceil(now, page)
                longest = max(longest, final)
            self._of_running = reserve, page_ceil(longest, page)
        return self._of_running

    def entry_reserve(self, req: Any, allocated: int) -> int:
        """Return the reserve of a request with ``allocated`` tokens until it runs."""
        claim = entering(self._claim(req, allocated), self._step)
        return growth(claim, self._entry_cap, self._page)

    def resume_cost(self, req: Any) -> int:
        """Return the cost of resuming a retracted request, with the reserve of a running one:
        otherwise it would be retracted again at once."""
        length = self._queue._pre_alloc_fill_len(req)
        own, saved = page_ceil(length, self._page), 0
        if self.leases is not None:
            if self._shares:
                lease = self.leases[req.rid] = ResumeLease(self._queue, req)
                saved = lease.saved
            if not self.everyone_can_end(req, own - req.prefix_len):
                return NEVER
        return own - saved + growth(self._claim(req, length), self._cap, self._page)

    def everyone_can_end(self, req: Any, private: int) -> bool:
        """Return True if every request could still end after ``req`` was admitted with ``private``
        tokens beyond its locked prefix, if need be with all other running requests retracted.

        A request that does not run cannot be retracted, so its memory is not available to others;
        and once it runs, it needs memory for the rest of its answer.
        """
        queue, running = self._queue, self._queue.scheduler.running_batch.reqs
        entering = self._entering()
        if not running and not entering.number:
            return True  # it will have the pool for itself
        length = queue._pre_alloc_fill_len(req)
        need = max(entering.need, self._expected(req, length) - page_ceil(length, self._page))
        released = [entry[0].req for entry in queue.transfer_queue._deferred_releases]
        room: int = queue.max_total_num_tokens - private - entering.own
        room -= sum(map(self._own, released))
        if max(need, self._running()[1]) <= room - queue.tree_cache.protected_size():
            return True  # even if all that is locked in the tree had to stay
        pinned = self._tree_tokens([*self._counted, *self._turns(), *released, req])
        room -= sum(pinned.values())
        # Some running requests share pages with requests that stay.
        return need <= room and all(
            length - sum(pinned.get(node, 0) for node in self._tree_tokens([each])) <= room
            for each in running
            if (length := self._expected(each, each.kv.kv_allocated_len)) > room
        )

    def _tree_tokens(self, reqs: Sequence[Any]) -> dict[int, int]:
        """Return the tree nodes that these requests have locked, with their tokens."""
        nodes = [req.lock.node for req in reqs if req.lock is not None]
        paths = self._queue.tree_cache.tree_core.collect_path_info(nodes)
        return {each.node_id: each.path_end - each.path_start for path in paths for each in path}

    def _claim(self, req: Any, allocated: int) -> Claim:
        # Cap at the pool size: a request that waits for more would wait for ever.
        final = final_length(req, self._step)
        return Claim(allocated, min(final, self._queue.max_total_num_tokens))

    def _expected(self, req: Any, allocated: int) -> int:
        length = expected_length(req, allocated, self._step)
        return page_ceil(min(length, self._queue.max_total_num_tokens), self._page)


def taken(req: Any) -> int:
    """Return the tokens that a request has, or takes in this step (a local turn)."""
    return int(req.kv.kv_allocated_len or req.extend_end or 0)


def has_token_copies(pool: Any) -> bool:
    """Return True if the CPU copy of a request in ``pool`` has only KV of tokens, so that a part of
    it can be copied back. Windows, states and indices have other forms."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

    copy = type(pool).get_cpu_copy
    return copy in (MHATokenToKVPool.get_cpu_copy, MLATokenToKVPool.get_cpu_copy)


def draft_tokens(scheduler: Any) -> int:
    """Return the tokens beyond its text that SGLang allocates for a running request: for the
    current speculative step and the next one; 0 without speculation."""
    from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode

    return 0 if scheduler.spec_algorithm.is_none() else int(get_alloc_reserve_per_decode())


def load_kv_cache(stock: Function, self: Any, rows: Any, allocator: Any) -> None:
    """Copy back only the KV after the shared prefix (wraps ``Req.load_kv_cache``)."""
    shared = self.kv.cache_protected_len
    if not shared:
        stock(rows, allocator)
        return
    slots = rows.req_to_token[self.kv.req_pool_idx, shared : self.seqlen - 1]
    backup, self.kv.retraction_backup = self.kv.retraction_backup, None
    chunk = allocator.get_kvcache().cpu_offloading_chunk_size
    load_private(backup.cpu_tensors, chunk, shared, slots, allocator.load_cpu_copy)


def install(wrap: Wraps) -> None:
    """See ``attach``."""
    from sglang.srt.disaggregation.decode import DecodePreallocQueue
    from sglang.srt.managers.schedule_batch import Req

    def of(queue: Any) -> RemainingAdmission:
        found: RemainingAdmission | None = getattr(queue, "lead_admission", None)
        if found is None:
            found = queue.lead_admission = RemainingAdmission(queue)
        return found

    @wrap(
        DecodePreallocQueue,
        "_active_reserved_tokens",
        "(self, n_active=None, extra_reserved_reqs=0)",
    )
    def _active_reserved_tokens(stock: Function, self: Any, *counts: Any, **more: Any) -> int:
        # The number is used only while requests are queued.
        return of(self).reserved() if self.queue or self.retracted_queue else 0

    @wrap(DecodePreallocQueue, "_need_space_for_single_req", "(self, retractable_tokens=None)")
    def _need_space_for_single_req(stock: Function, self: Any, retractable: Any = None) -> int:
        return 0  # everyone_can_end says it

    @wrap(
        DecodePreallocQueue,
        "_required_admission_tokens",
        "(self, req, allocated_tokens, prefix_len, retractable_tokens)",
    )
    def _required_admission_tokens(
        stock: Function, self: Any, req: Any, allocated: int, prefix: int, retractable: int
    ) -> int:
        admission = of(self)
        if not admission.everyone_can_end(req, allocated):
            return NEVER
        return allocated + admission.entry_reserve(req, self._pre_alloc_fill_len(req))

    @wrap(DecodePreallocQueue, "_prealloc_required_tokens", "(self, req)")
    def _prealloc_required_tokens(stock: Function, self: Any, req: Any) -> tuple[int, int]:
        return of(self).resume_cost(req), stock(req)[1]

    @wrap(
        DecodePreallocQueue,
        "_pre_alloc",
        "(self, req, prefix_indices=None, prefix_len=None, total_prefix_len=None)",
    )
    def _pre_alloc(stock: Function, self: Any, req: Any, *prefix: Any, **more: Any) -> Any:
        lease = (of(self).leases or {}).pop(req.rid, None)
        if lease is None:
            slots = stock(req, *prefix, **more)
        else:
            slots = stock(req, lease.prefix, len(lease.prefix))
            req.kv.cache_protected_len = len(lease.prefix)
        of(self).admitted(req)
        return slots

    @wrap(
        DecodePreallocQueue,
        "pop_preallocated",
        "(self, rids_to_check=None, pp_good_rids=None, pp_bad_rids=None)",
    )
    def pop_preallocated(stock: Function, self: Any, *args: Any, **kwargs: Any) -> Any:
        with of(self).step():
            return stock(*args, **kwargs)

    @wrap(DecodePreallocQueue, "resume_retracted_reqs", "(self, rids_to_check=None)")
    def resume_retracted_reqs(stock: Function, self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.retracted_queue:
            return stock(*args, **kwargs)
        with of(self).step(resuming=True):
            return stock(*args, **kwargs)

    wrap(Req, "load_kv_cache", "(self, req_to_token_pool, token_to_kv_pool_allocator)")(
        load_kv_cache
    )
