"""An admitted request gets its row, and prefill is told which pages to fill.

Requests whose prefill rank is not connected yet: no step waits, and no request for ever.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from sglang.srt.disaggregation.delta.decode.eligibility import is_fake
from sglang.srt.disaggregation.delta.decode.prefix_tree import PrefixLease
from sglang.srt.disaggregation.delta.decode.transfer_queue import take_slot
from sglang.srt.disaggregation.delta.event_log import Admitted, event_log, now
from sglang.srt.disaggregation.delta.metrics import STATS

logger = logging.getLogger(__name__)


def bootstrap_addr(req: Any) -> str:
    """The prefill server of a request, as "host:port"."""
    return _address(req.bootstrap_host, req.bootstrap_port)


@lru_cache(maxsize=1024)  # parsing costs more than the rest of an admission step
def _address(host: str, port: int) -> str:
    from sglang.srt.utils.network import NetworkAddress

    address: str = NetworkAddress(host, port).to_host_port_str()
    return address


def bind(rows: Any, req: Any, lease: PrefixLease, slots: torch.Tensor) -> None:
    """Write the request's row and make it the owner of its slots and of the lock.

    ``slots`` (1-D int64) follow the lease's. The caller knows that a row is free.
    """
    length = lease.length + len(slots)
    row = rows.alloc([req])
    assert row is not None, "a free row was checked before"
    rows.write((req.req_pool_idx, slice(0, lease.length)), lease.indices)
    rows.write((req.req_pool_idx, slice(lease.length, length)), slots)
    req.kv_allocated_len = req.kv_committed_len = length
    req.fill_ids = req.origin_input_ids + req.output_ids
    lease.hand_over(req)
    req.set_extend_input_len(len(req.fill_ids) - lease.length)


def announce(queue: Any, decode_req: Any, slots: torch.Tensor) -> None:
    """Tell prefill which pages to fill; from here on they belong to the transfer.

    Later in the same turn of the loop where the step in flight may write to them.
    """
    req, manager = decode_req.req, queue.kv_manager
    index = take_slot(queue.req_to_metadata_buffer_idx_allocator, queue.metadata_buffers)
    decode_req.metadata_buffer_index = index
    # Page ids on the device first: one in ``page`` indices crosses to the host.
    page: int = queue.token_to_kv_pool_allocator.page_size
    pages = (slots[::page] // page).to(torch.int32).cpu().numpy()
    req.time_stats.set_decode_transfer_queue_entry_time()

    def tell() -> None:
        if req.finished_reason is not None:
            return  # given up meanwhile: prefill was told that no announcement comes
        at = now()  # prefill may have logged that it knows before the next line is over
        if is_fake(req) or not manager.peer_takes_delta(bootstrap_addr(req)):
            decode_req.kv_receiver.send_metadata(pages, index, None)
        else:
            decode_req.kv_receiver.announce(pages, index, req.cache_protected_len)
        if not is_fake(req):
            _count(req, pages, sum(manager.kv_args.kv_item_lens), at)

    queue.step_writes.after(pages, tell)


def _count(req: Any, pages: Any, page_bytes: int, at: float) -> None:
    prompt = len(req.origin_input_ids)
    STATS.add("decode_prefix_prompt_tokens", prompt)
    STATS.add("decode_prefix_hit_tokens", req.cache_protected_len)
    STATS.add("kv_transfer_requested_bytes", len(pages) * page_bytes)
    log = event_log("decode")
    if log is not None:
        log.write(
            Admitted(
                at=at,
                room=req.bootstrap_room,
                rid=req.rid,
                prompt_tokens=prompt,
                prefix_tokens=req.cache_protected_len,
                pages=pages.tolist(),
            )
        )


_DEADLINE = "SGLANG_DISAGGREGATION_WAITING_TIMEOUT"


@dataclass
class _Attempts:
    """How often a server could not be asked for its topology, and when it is asked again."""

    failed: int = 0
    again_at: float = 0.0


class Handshakes:
    """One for each prealloc queue. Called in every step by the scheduler's thread.

    A request passes three questions: the topology of its prefill server, the data-parallel rank
    that serves it, and where the ranks listen that write to this one. All are asked in the
    background (``delta.prefill_servers``, ``delta.connections``).
    """

    def __init__(self, queue: Any) -> None:
        self._queue = queue
        self._attempts: dict[str, _Attempts] = {}

    def advance(self) -> None:
        """Initialise the receivers of ``pending_reqs`` that are ready; drop those that failed."""
        pending: dict[str, list[Any]] = {}
        for entry in self._queue.pending_reqs:
            if entry.kv_receiver.conclude_state is None:  # else who polls it answers
                pending.setdefault(bootstrap_addr(entry.req), []).append(entry)
        waiting = []
        for address, entries in pending.items():
            waiting += self._advance(address, self._in_time(address, entries))
        self._queue.pending_reqs = waiting
        for address in self._attempts.keys() - pending.keys():
            del self._attempts[address]  # whoever asked went away

    def _in_time(self, address: str, entries: list[Any]) -> list[Any]:
        """Fail those that have waited for longer than a transfer may take."""
        allowed = self._queue.kv_manager.waiting_timeout
        now, left = self._queue.clock(), []
        for entry in entries:
            since = entry.__dict__.setdefault("handshake_since", now)
            if now - since < allowed:
                left.append(entry)
                continue
            entry.kv_receiver.fail_handshake(
                f"prefill {address} did not say within {allowed} s "
                f"{entry.__dict__.get('handshake_wants', 'who it is')} ({_DEADLINE})"
            )
        return left

    def _advance(self, address: str, entries: list[Any]) -> list[Any]:
        """Those of ``entries`` that are still not ready."""
        known = self._is_known(address)
        if known is None:
            for entry in entries:
                entry.kv_receiver.abort()
            return []
        if not known:
            return entries
        ranks = {id(entry): self._queue.prefill_dp_rank(entry.req) for entry in entries}
        rooms = [entry.req.bootstrap_room for entry in entries if ranks[id(entry)] is None]
        found = self._queue.kv_manager.servers.connections.dp_ranks(address, rooms) if rooms else {}
        waiting = []
        for entry in entries:
            rank = ranks[id(entry)]
            if rank is None:
                rank = found.get(entry.req.bootstrap_room)
            if rank is None:
                entry.handshake_wants = "which of its data-parallel ranks serves the request"
            elif not entry.kv_receiver.is_ready(rank):
                entry.handshake_wants = f"where its ranks listen (data-parallel rank {rank})"
            else:
                entry.kv_receiver.init(rank)
                continue
            waiting.append(entry)
        return waiting

    def _is_known(self, address: str) -> bool | None:
        """Whether the server's topology is known; None where it was asked for too often."""
        queue = self._queue
        attempts = self._attempts.setdefault(address, _Attempts())
        if queue.clock() < attempts.again_at:
            return False
        if queue.kv_manager.try_ensure_parallel_info(address):
            del self._attempts[address]
            return True
        if queue.kv_manager.servers.is_asking(address):
            return False
        attempts.failed += 1
        attempts.again_at = queue.clock() + queue._ensure_retry_interval
        if attempts.failed < queue._max_ensure_retries:
            return False
        logger.error("prefill server %s: no answer in %d attempts", address, attempts.failed)
        del self._attempts[address]
        return None
