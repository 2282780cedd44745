"""Every kind of KV pool: from one server's device through staging buffer and store to another's.

Device pools, host pools and the backend ``file`` are SGLang's, with the mixins of a server.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from component.buffer_only import backends
from component.buffer_only.backends import LAYERS, hashes, slots
from sglang.srt.managers import cache_controller
from sglang.srt.mem_cache import hiradix_cache as hosts
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.buffer_only.host_pool import staging_buffer
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool, NSATokenToKVPool
from sglang.srt.mem_cache.storage import StorageBackendFactory

BF16 = torch.bfloat16
FP8 = torch.float8_e4m3fn
PAGE = 64
PAGES = 6
#: Pages of the staging buffer.
STAGED = 4
TOKENS = PAGE * PAGES
#: Elements of a token's latent, and of its rotary part.
LATENT = 16
ROPE = 4
#: DSA stores a latent in fp8 with a scale for 128 of its elements, and the rotary part in bf16.
PACKED = LATENT + 4 + 2 * ROPE


def pools(kind: str, dtype: torch.dtype, layout: str, seed: int) -> tuple[Any, Any]:
    """Return a device pool with random content and its staging buffer."""
    device: Any
    if kind == "mha":
        device = MHATokenToKVPool(TOKENS, PAGE, dtype, 2, 8, LAYERS, "cpu", False)
        host_class = hosts.MHATokenToKVPoolHost
    elif kind == "mla":
        device = MLATokenToKVPool(TOKENS, PAGE, dtype, LATENT, ROPE, LAYERS, "cpu", False)
        host_class = hosts.MLATokenToKVPoolHost
    else:
        width = PACKED if dtype == FP8 else LATENT + ROPE
        device = NSATokenToKVPool(
            TOKENS, PAGE, LATENT, dtype, ROPE, LAYERS, "cpu", 128, False, kv_cache_dim=width
        )
        host_class = hosts.NSATokenToKVPoolHost
    generator = torch.Generator().manual_seed(seed)
    for buffer in buffers(device):
        view = buffer.view(torch.uint8)
        view.copy_(torch.randint(0, 256, view.shape, generator=generator, dtype=torch.uint8))
    with staging_buffer(STAGED):
        host = host_class(device, 2.0, 0, PAGE, layout)
    assert host.is_stage
    return device, host


def buffers(device: Any) -> list[torch.Tensor]:
    """Return all tensors of a device pool: of KV, and of the index."""
    index = getattr(device, "index_k_with_scale_buffer", [])
    if hasattr(device, "kv_buffer"):
        return [*device.kv_buffer, *index]
    return [*device.k_buffer, *device.v_buffer]


def page_bytes(device: Any, page: int) -> list[torch.Tensor]:
    """Return the bytes of ``page`` in each tensor. Rows are pages in an index, slots elsewhere."""
    return [
        buffer[page : page + 1].view(torch.uint8)
        if buffer.shape[0] < TOKENS
        else buffer[page * PAGE : (page + 1) * PAGE].view(torch.uint8)
        for buffer in buffers(device)
    ]


@pytest.mark.parametrize("layout", ["page_first_direct", "layer_first"])
@pytest.mark.parametrize("dtype", [BF16, FP8], ids=["bf16", "fp8"])
@pytest.mark.parametrize("kind", ["mha", "mla", "nsa"])
def test_the_other_server_has_every_byte(
    tmp_path: Path, kind: str, dtype: torch.dtype, layout: str
) -> None:
    """Guards against a latent, an index or scales that a copy or the store omits or puts into
    another page: the second server's device must get every byte of the first one's, and no other
    change."""
    ours, stage = pools(kind, dtype, layout, seed=1)
    theirs, their_stage = pools(kind, dtype, layout, seed=2)
    assert len(buffers(ours)) == LAYERS * (1 if kind == "mla" else 2)
    others = {page: [part.clone() for part in page_bytes(theirs, page)] for page in (0, 1, 3, 4, 6)}

    stage.backup_from_device_all_layer(ours, slots(2, 0), slots(3, 6), "direct")
    keys = hashes(2)
    # The first rank writes a latent, and all ranks read it.
    writer = backends.file(stage, tmp_path, rank=0, ranks=2)
    reader = backends.file(their_stage, tmp_path, rank=int(kind != "mha"), ranks=2)
    assert writer.batch_set_v1(keys, slots(2, 0)) == [True, True]
    assert reader.batch_exists(keys) == 2
    assert reader.batch_get_v1(keys, slots(1, 3)) == [True, True]
    for layer in range(LAYERS):
        their_stage.load_to_device_per_layer(theirs, slots(1, 3), slots(5, 2), layer, "direct")

    for source, target in ((3, 5), (6, 2)):
        pairs = zip(page_bytes(ours, source), page_bytes(theirs, target), strict=True)
        assert all(torch.equal(*pair) for pair in pairs)
    for page, before in others.items():
        assert all(map(torch.equal, page_bytes(theirs, page), before))


@pytest.mark.parametrize(
    ("ranks", "attention", "writes"),
    [((1, 2), None, False), ((0, 2), None, True), ((1, 2), (0, 1), True), ((3, 4), (1, 2), False)],
)
@pytest.mark.parametrize("kind", ["mha", "mla", "nsa"])
def test_one_rank_of_an_attention_group_writes_a_latent(
    kind: str, ranks: tuple[int, int], attention: tuple[int, int] | None, writes: bool
) -> None:
    """Guards against a latent that no rank writes, or that each one writes: the first of the ranks
    that hold the same latent does, also in each group of data parallel attention (``attention``:
    its rank and ranks). Heads are written by all ranks."""
    device, host = pools(kind, BF16, "page_first_direct", seed=1)
    rank, size = attention or (0, 1)
    names = {
        "get_tensor_model_parallel_rank": lambda: ranks[0],
        "get_tensor_model_parallel_world_size": lambda: ranks[1],
        "is_dp_attention_enabled": lambda: attention is not None,
        "get_attention_tp_rank": lambda: rank,
        "get_attention_tp_size": lambda: size,
        "get_attention_dp_rank": lambda: 0,
    }
    allocator = PagedTokenToKVPoolAllocator(TOKENS, PAGE, BF16, "cpu", device, False)
    with (
        staging_buffer(STAGED),
        mock.patch.multiple(cache_controller, **names),
        mock.patch.object(StorageBackendFactory, "create_backend"),
    ):
        controller = hosts.HiCacheController(
            allocator, host, PAGE, dist.group.WORLD, threading.Event(),
            io_backend="direct", storage_backend="file",
        )  # fmt: skip
    assert controller.backup_skip == (kind != "mha" and not writes)
