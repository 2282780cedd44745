"""Invariants of the pool, tree and tables of a decode server.

Tests check them after every step. With ``SGLANG_DISAGGREGATION_CHECK_INVARIANTS=1`` a server checks
them whenever it becomes idle, and ends with a list of the problems, like SGLang's strict memory
check. Called on the scheduler's thread; each rank checks its own state.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any  # Any: SGLang's allocator, of any kind

import torch
from typing_extensions import override

from sglang.srt.disaggregation.delta.decode.claims import private_tokens, upwards
from sglang.srt.disaggregation.delta.decode.tree import DecodeRadixTree, tree_nodes
from sglang.srt.disaggregation.delta.observability import STATS
from sglang.srt.disaggregation.delta.pages import RECURRENT

if TYPE_CHECKING:
    from sglang.srt.disaggregation.delta.manager import DeltaManager
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler
else:
    Scheduler = object

logger = logging.getLogger(__name__)

#: Seconds after which a room without a request is a leak. It may be announced before its request
#: arrives.
ROOMS_GRACE_S = 5.0


class InvariantError(AssertionError):
    """Memory or a table entry is leaked, owned twice, or counted wrong."""


def tree_problems(tree: DecodeRadixTree, holders: Iterable[Req]) -> list[str]:
    """Return the problems of a tree. ``holders``: requests that hold a lock on ``last_node``."""
    problems = []
    locks = Counter(node.id for req in holders for node in upwards(req.last_node))
    sizes, seen = [0, 0], set[int]()  # sizes: evictable and protected tokens
    for node in tree_nodes(tree):
        if len(node.key) != len(node.value):
            problems.append(f"node {node.id}: {len(node.key)} tokens, {len(node.value)} slots")
        if node.lock_ref != locks[node.id]:
            problems.append(f"node {node.id}: lock_ref {node.lock_ref}, {locks[node.id]} holders")
        slots = set(node.value.tolist())
        if len(slots) != len(node.value) or slots & seen:
            problems.append(f"node {node.id}: a slot is in the tree twice")
        seen |= slots
        sizes[bool(node.lock_ref)] += len(node.key)
    counted = [tree.evictable_size(), tree.protected_size()]
    if sizes != counted:
        problems.append(f"tree counts {counted} evictable and protected tokens, but holds {sizes}")
    return problems


def pool_problems(
    tree: DecodeRadixTree, allocator: Any, rows: torch.Tensor, holders: list[Req], total: int
) -> list[str]:
    """Check that every page is either free, in the tree, or private to one request. Return the
    problems.

    ``rows``: the request-to-slot table; ``total``: the pool's size in tokens.
    """
    page = allocator.page_size
    problems = []
    free = torch.cat([allocator.free_pages, allocator.release_pages]).tolist()
    in_tree = {slot // page for node in tree_nodes(tree) for slot in node.value.tolist()}
    private: list[int] = []
    for req in holders:
        row = rows[req.req_pool_idx, : req.kv_allocated_len].tolist()
        nodes = [*upwards(req.last_node)][::-1]
        shared = [slot for node in nodes for slot in node.value.tolist()]
        if row[: req.cache_protected_len] != shared:
            problems.append(f"request {req.rid}: its shared slots are not those of its tree path")
        if req.cache_protected_len % page:
            problems.append(
                f"request {req.rid}: protected length {req.cache_protected_len} ends inside a page"
            )
        private += {slot // page for slot in row[req.cache_protected_len :]}
    owned = [*free, *in_tree, *private]
    twice = sorted(number for number, count in Counter(owned).items() if count > 1)
    if twice:
        problems.append(f"pages owned twice: {twice[:10]}")
    counted = allocator.available_size(), tree.evictable_size(), tree.protected_size()
    parts = (*counted, private_tokens(holders, page))
    if sum(parts) != total:
        problems.append(
            f"free {parts[0]} + evictable {parts[1]} + protected {parts[2]} + private {parts[3]} "
            f"= {sum(parts)} tokens, not {total}"
        )
    return problems


def idle_problems(scheduler: Scheduler) -> list[str]:
    """Return the leaks of an idle prefill or decode server: locks, rows, slots, claims. Other trees
    of SGLang, such as the one with recurrent states, are left to its own memory check."""
    tree, allocator = scheduler.tree_cache, scheduler.token_to_kv_pool_allocator
    pool = scheduler.req_to_token_pool
    total = scheduler.max_total_num_tokens
    problems, is_plain = list[str](), hasattr(tree, "inserts")
    if is_plain:
        problems += tree_problems(tree, [])
        problems += pool_problems(tree, allocator, pool.req_to_token, [], total)
    claims = getattr(tree, "claims", None)
    holders = [*claims.holders()] if claims is not None else []
    if claims is not None and (holders or claims.pinned or claims.reserved):
        problems.append(
            f"{len(holders)} requests claim memory: {claims.pinned} tokens are pinned, "
            f"{claims.reserved} reserved"
        )
    metadata = scheduler.req_to_metadata_buffer_idx_allocator
    rows = pool.size + getattr(pool, "pre_alloc_size", 0)
    for kind, free, size in (
        ("request rows", pool.free_slots, rows),
        ("metadata slots", metadata.free_slots, metadata.size),
    ):
        if sorted(free) != list(range(size)):
            problems.append(f"{len(free)} of {size} {kind} are free, or some are listed twice")
    states = getattr(pool, RECURRENT, None) if is_plain else None
    if states is not None and sorted(states.free_slots.tolist()) != list(range(1, states.size + 1)):
        problems.append(f"state slots {states.free_slots.tolist()} are free, of {states.size}")
    return problems


def idle_rooms(manager: DeltaManager) -> list[str]:
    """Return the per-room tables of a transfer manager that are not empty. On an idle server they
    are leaks after ``ROOMS_GRACE_S``."""
    return [
        f"{name} still has rooms {sorted(rooms)[:10]}"
        for name, rooms in manager.open_rooms().items()
        if rooms
    ]


class BalancedScheduler(Scheduler):
    """Ends an idle prefill or decode server that has leaks. Only attached on servers with the
    variable (``when`` in ``patchset/table.py``)."""

    #: Counters at the last check: the next check is due when they change.
    _checked: tuple[object, ...] | None = None
    #: When rooms were first seen on the idle server (monotonic seconds).
    _leftover_since: float | None = None

    @override
    def self_check_during_idle(self) -> None:
        super().self_check_during_idle()
        if self.is_fully_idle() and getattr(self, "_nothing_waits", True):
            self.check_invariants()

    def check_invariants(self) -> None:
        """Check once after each change, because this runs in the idle loop and walks the whole
        tree.

        Raises:
            InvariantError: there is a leak.
        """
        queue = getattr(self, "disagg_decode_prealloc_queue", None) or getattr(
            self, "disagg_prefill_bootstrap_queue", None
        )
        if queue is None:
            return
        tree = getattr(self.tree_cache, "inserts", 0), getattr(self.tree_cache, "generation", 0)
        state = (sum(STATS.totals.values()), *tree)
        if state == self._checked:
            return
        rooms = idle_rooms(queue.kv_manager)
        since = self._leftover_since = (self._leftover_since or time.monotonic()) if rooms else None
        if since is not None and time.monotonic() - since < ROOMS_GRACE_S:
            return
        problems = rooms + idle_problems(self)
        if problems:
            raise InvariantError("; ".join(problems))
        self._checked = state
        logger.info("idle and balanced: all invariants hold")
