"""SGLang's host pools of every kind, small, in CPU memory, with content that tells pages apart."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from sglang.srt.mem_cache import memory_pool_host as hosts
from sglang.srt.mem_cache.buffer_only import page_parts
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool, NSATokenToKVPool

LAYERS, PAGES = 3, 6
#: The only page size that NSA's pool takes.
PAGE = 64

KINDS = ("mha", "mla", "nsa")
LAYOUTS = ("layer_first", "page_first", "page_first_direct")
#: What goes through a real store: kind, layout and page size. Others differ in bytes alone.
THROUGH_MOONCAKE = [
    ("nsa", "page_first", PAGE),
    ("nsa", "page_first_direct", PAGE),
    ("mha", "page_first_direct", 1),
    ("mla", "page_first_direct", 16),
]


def host_pool(kind: str, layout: str, stage: bool = True, heads: int = 2, page: int = PAGE) -> Any:
    """A host pool of at least 6 pages for a device pool of half of them."""
    size = PAGES // 2 * page
    if kind == "mha":
        device = MHATokenToKVPool(size, page, torch.float16, heads, 8, LAYERS, "cpu", False)
        host = hosts.MHATokenToKVPoolHost(device, 2.0, 0, page, layout)
    elif kind == "mla":
        device = MLATokenToKVPool(size, page, torch.bfloat16, 16, 4, LAYERS, "cpu", False)
        host = hosts.MLATokenToKVPoolHost(device, 2.0, 0, page, layout)
    else:
        device = NSATokenToKVPool(
            size, page, 16, torch.bfloat16, 4, LAYERS, "cpu", 128, False, kv_cache_dim=20
        )
        host = hosts.NSATokenToKVPoolHost(device, 2.0, 0, page, layout)
    host.is_stage = stage
    fill(host)
    return host


def fill(pool: Any, seed: int = 0) -> None:
    """Random bytes everywhere."""
    rng = np.random.default_rng(seed)
    for tensor in page_parts.tensors(pool):
        content = rng.integers(0, 256, tensor.numel() * tensor.element_size(), np.uint8)
        tensor.view(torch.uint8).view(-1).copy_(torch.from_numpy(content))


def slots(*pages: int, page: int = PAGE) -> torch.Tensor:
    """Host slots of pages, as HiCache passes them."""
    return torch.cat([torch.arange(p * page, (p + 1) * page) for p in pages])


def content(pool: Any, page: int) -> bytes:
    """All bytes of a page, of all its parts."""
    value = page_parts.Value("", page_parts.describe(pool))
    found: bytes = value.gather(page).numpy().tobytes()
    return found


def hashes(count: int) -> list[str]:
    """Page keys."""
    return [f"{number:064x}" for number in range(1, count + 1)]
