"""HiCache's host pools on a CPU: construction, and KV copied there and back."""

import os

import torch

from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.memory_pool_host import MHATokenToKVPoolHost, MLATokenToKVPoolHost

LAYERS, PAGES = 3, 12


def device_pool(kind: str, page_size: int):
    """Return a pool of ``PAGES`` pages with random content, and its buffers."""
    size = PAGES * page_size
    if kind == "mha":
        pool = MHATokenToKVPool(size, page_size, torch.float32, 2, 8, LAYERS, "cpu", False)
        buffers = pool.k_buffer + pool.v_buffer
    else:
        pool = MLATokenToKVPool(size, page_size, torch.float32, 16, 4, LAYERS, "cpu", False)
        buffers = pool.kv_buffer
    for buffer in buffers:
        buffer.normal_()
    return pool, buffers


def check(kind: str, layout: str, page_size: int) -> None:
    """Back up two pages, and load them to two other pages of the device."""
    pool, buffers = device_pool(kind, page_size)
    host_class = {"mha": MHATokenToKVPoolHost, "mla": MLATokenToKVPoolHost}[kind]
    host = host_class(pool, 2.0, 0, page_size, layout)
    assert not host.pin_memory

    def slots(*pages: int) -> torch.Tensor:
        return torch.cat([torch.arange(p * page_size, (p + 1) * page_size) for p in pages])

    source, target = slots(3, 7), slots(9, 1)
    expected = [b.clone() for b in buffers]
    for buffer in expected:
        buffer[target] = buffer[source]

    host.alloc(page_size)  # so that host and device pages differ
    held = host.alloc(2 * page_size)
    host.backup_from_device_all_layer(pool, held, source, "direct")
    for layer in range(LAYERS):
        host.load_to_device_per_layer(pool, held, target, layer, "direct")
    assert all(map(torch.equal, buffers, expected)), (kind, layout, page_size)

    # A storage backend writes and reads whole pages of the host pool.
    page = host.get_data_page(held[0], flat=True).clone()
    assert page.numel() == host.get_dummy_flat_data_page().numel()
    free = host.alloc(page_size)
    host.set_from_flat_data_page(int(free[0]), page)
    assert torch.equal(host.get_data_page(free[0], flat=True), page)


for pool_kind in ("mha", "mla"):
    for page in (1, 16, 64):
        check(pool_kind, "layer_first", page)
        check(pool_kind, "page_first_direct", page)
print("CHECKED", flush=True)
os._exit(0)
