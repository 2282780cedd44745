"""Whether a request fits into the decode pool now, read from the scheduler's live queues."""

from __future__ import annotations

import logging
from typing import Any

import torch

from sglang.srt.disaggregation.decode_radix import admission
from sglang.srt.disaggregation.decode_radix.lease import PrefixLease
from sglang.srt.disaggregation.decode_radix.quarantine import held_requests
from sglang.srt.disaggregation.decode_radix.waiting import Refusal
from sglang.srt.disaggregation.delta.pages import page_ceil
from sglang.srt.disaggregation.delta.ranks import alone

logger = logging.getLogger(__name__)


class DecodeBudget:
    """Counts claims, evicts, and allocates for the prealloc queue.

    The queue is the owner of all state but one: why the head of the queue was refused. ``new``
    arguments are requests that got pages in this scheduler step and are in no queue yet.
    """

    def __init__(self, queue: Any) -> None:
        self._queue = queue
        self._scheduler = queue.scheduler
        self._tree = queue.tree_cache
        self._allocator = queue.token_to_kv_pool_allocator
        self._page: int = queue.token_to_kv_pool_allocator.page_size
        self._cap: int = queue.num_reserved_decode_tokens
        #: The cap of a request that does not run yet; at least a page, like the flag itself.
        self._entry_cap: int = max(self._cap // 2, self._page)
        self._blocked: admission.BlockedHead | None = None
        #: Tokens that this rank has and another one has not; zero while ranks are in step.
        self.surplus = 0

    def reserve(
        self, req: Any, lease: PrefixLease, length: int, new: list[Any], *, resumes: bool = False
    ) -> torch.Tensor | Refusal:
        """Slots for the tokens from the lease to ``length`` (1-D int64), or why there are none.

        Called with the lease held: locking takes the prefix out of what can be evicted, and a
        budget from before it would count the same tokens twice. A request that ``resumes`` must
        have room like a running one, or it would be retracted again at once.
        """
        pool = self.pool(new)
        cost = self.cost(req, lease.length, length, resumes=resumes)
        if cost > pool.free - self.surplus - pool.reserved:
            return Refusal(req.rid, "no_tokens", cost, pool)
        if not self._everyone_can_finish(req, lease, length, new):
            return Refusal(req.rid, "cannot_finish", cost, pool)
        needed = page_ceil(length, self._page) - lease.length
        slots = self._allocate(req, needed, length - lease.length)
        if slots is None:
            return Refusal(req.rid, "no_tokens", cost, pool, retry=True)
        return slots

    def cost(self, req: Any, prefix: int, length: int, *, resumes: bool = False) -> int:
        """What admitting ``req`` with ``length`` tokens takes beyond a locked ``prefix``."""
        claim = admission.Claim(length, final_length(req))
        if resumes:
            return admission.entry_cost(prefix, claim, self._cap, self._page)
        return admission.entry_cost(prefix, admission.entering(claim), self._entry_cap, self._page)

    def block(self, refusal: Refusal | None) -> None:
        """Remember who did not fit, once all leases of the step were given back.

        What its own lease kept from being evicted counts as free from now on, and is not.
        """
        self._blocked = None
        if refusal is None or refusal.retry or refusal.cost is None or refusal.pool is None:
            return
        pool = self.pool([])
        own = max(pool.free - refusal.pool.free, 0)
        self._blocked = admission.BlockedHead(
            refusal.rid, refusal.cost + own, pool, self._tree.inserts
        )

    def still_blocked(self, req: Any) -> bool:
        """Whether ``req`` was refused before and nothing changed that could help it."""
        blocked = self._blocked
        return blocked is not None and blocked.still_blocked(
            req.rid, self.pool([]), self._tree.inserts
        )

    def describe(self) -> str:
        """The pool in words, for a request that waits."""
        pool = self.pool([])
        evictable = self._tree.evictable_size()
        held = sum(private for _, _, private in self._holdings(self._held()))
        return (
            f"{pool.free - evictable} free, {evictable} evictable, {pool.protected} protected, "
            f"{pool.reserved} reserved, {held} held in quarantine"
        )

    def pool(self, new: list[Any]) -> admission.PoolState:
        """The pool as it is now."""
        return admission.PoolState(
            free=self._allocator.available_size() + self._tree.evictable_size(),
            protected=self._tree.protected_size(),
            reserved=admission.reserved(_claims(self._running()), self._cap, self._page)
            + admission.reserved(
                map(admission.entering, _claims(self._not_running(new))),
                self._entry_cap,
                self._page,
            ),
        )

    def _running(self) -> list[Any]:
        return [req for req in self._scheduler.running_batch.reqs if not req.finished()]

    def _not_running(self, new: list[Any]) -> list[Any]:
        """Requests that hold pages and cannot be retracted: in transfer, waiting, or new."""
        in_transfer = [decode_req.req for decode_req in self._queue.transfer_queue.queue]
        return [*in_transfer, *self._scheduler.waiting_queue, *new]

    def _held(self) -> list[Any]:
        """Aborted requests whose pages prefill may still write to. They need no more than that."""
        return list(held_requests(self._queue.transfer_queue))

    def _allocate(self, req: Any, needed: int, used: int) -> torch.Tensor | None:
        """``used`` slots of ``needed`` tokens of whole pages; evicts exactly what is missing."""
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        if needed == 0:
            return torch.empty(0, dtype=torch.int64, device=self._allocator.device)
        shortfall = needed - self._allocator.available_size()
        if shortfall > 0:
            self._tree.evict(EvictParams(num_tokens=shortfall))
        slots: torch.Tensor | None = self._allocator.alloc(needed)
        if slots is None:
            if not alone(self._queue.gloo_group):
                # Others may have got theirs. A wrong count is better found here than by a hang.
                raise RuntimeError(
                    f"request {req.rid}: the tree counts {self._tree.evictable_size()} evictable "
                    f"tokens but gave less than the {shortfall} asked for"
                )
            logger.warning(
                "request %s stays queued: %d tokens wanted, %d free after evicting, %d evictable",
                req.rid,
                needed,
                self._allocator.available_size(),
                self._tree.evictable_size(),
            )
            return None
        return slots[:used]

    def _everyone_can_finish(
        self, candidate: Any, lease: PrefixLease, length: int, new: list[Any]
    ) -> bool:
        """Whether every request could still end, the running ones but itself retracted.

        Requests that do not run yet cannot be retracted, so what they hold is out of reach of all
        others; and once one of them runs, it must find the memory for the rest of its answer.
        """
        running, entering = self._running(), self._not_running(new)
        if not running and not entering:
            return True  # the candidate will have the pool for itself
        page, total = self._page, self._queue.max_total_num_tokens
        holdings = self._holdings(entering)
        holdings.append(
            (candidate, path_tokens(self._tree, lease.node), page_ceil(length, page) - lease.length)
        )
        in_tree: dict[int, int] = {}
        pinned = 0
        for _, path, private in (*holdings, *self._holdings(self._held())):
            in_tree |= path
            pinned += private
        pinned += sum(in_tree.values())
        holdings += [(req, path_tokens(self._tree, req.last_node), 0) for req in running]
        for req, path, private in holdings:
            own = private + sum(tokens for node, tokens in path.items() if node in in_tree)
            if not admission.can_finish_alone(final_length(req), own, pinned, total, page):
                return False
        return True

    def _holdings(self, requests: list[Any]) -> list[tuple[Any, dict[int, int], int]]:
        """Each request with its shared nodes and its private tokens, in whole pages."""
        return [
            (
                req,
                path_tokens(self._tree, req.last_node),
                page_ceil(req.kv_allocated_len, self._page) - req.cache_protected_len,
            )
            for req in requests
        ]


def _claims(requests: list[Any]) -> list[admission.Claim]:
    return [admission.Claim(req.kv_allocated_len, final_length(req)) for req in requests]


def final_length(req: Any) -> int:
    """The longest that a request's KV can become, in tokens."""
    from sglang.srt.disaggregation.decode import CLIP_MAX_NEW_TOKEN

    new_tokens: int = min(req.sampling_params.max_new_tokens, CLIP_MAX_NEW_TOKEN)
    return len(req.origin_input_ids) + new_tokens


def path_tokens(tree: Any, node: Any) -> dict[int, int]:
    """The nodes from ``node`` up to the root, by id, with the tokens of each."""
    found = {}
    while node is not None and node is not tree.root_node:
        found[node.id] = len(node.key)
        node = node.parent
    return found
