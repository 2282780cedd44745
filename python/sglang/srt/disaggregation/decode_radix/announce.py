"""An admitted request gets its row, and prefill is told which pages to fill."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from sglang.srt.disaggregation.decode_radix.eligibility import is_fake
from sglang.srt.disaggregation.decode_radix.lease import PrefixLease
from sglang.srt.disaggregation.decode_radix.metadata import take_slot
from sglang.srt.disaggregation.delta.events import Admitted, event_log, now
from sglang.srt.disaggregation.delta.stats import STATS


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
