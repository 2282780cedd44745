"""SGLang's own KV pools in CPU memory, as bytes: page contents and their changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from sglang.srt.disaggregation.delta.pages import (
    INDEX_TYPE,
    RECURRENT_TYPE,
    heads_of,
    index_buffers,
)
from sglang.srt.mem_cache.memory_pool import (
    HybridLinearKVPool,
    MambaPool,
    MHATokenToKVPool,
    MLATokenToKVPool,
    NSATokenToKVPool,
)

PAGES = 40
LAYERS = 3
HEAD_DIM = 8

Pages = list[int]

#: Prefill ranks, decode ranks and KV heads of the model: slices both ways, and replicas on either
#: side or both.
RANK_LAYOUTS = [
    (prefill, decode, heads)
    for prefill, decode in ((1, 2), (2, 1), (1, 4), (4, 2))
    for heads in (1, 2, 4)
]


def mha(
    page: int, dtype: torch.dtype = torch.float32, heads: int = 2, v_dim: int = HEAD_DIM
) -> Any:
    """Return a pool with separate keys and values; ``v_dim``: elements of a value head."""
    return MHATokenToKVPool(
        (PAGES - 1) * page, page, dtype, heads, HEAD_DIM, LAYERS, "cpu", False, v_head_dim=v_dim
    )


def mla(page: int, dtype: torch.dtype) -> Any:
    """Return a pool with one latent buffer a layer. 20 elements a token: no power of two."""
    return MLATokenToKVPool((PAGES - 1) * page, page, dtype, 16, 4, LAYERS, "cpu", False)


def nsa(page: int) -> Any:
    """Return a latent pool with a sparse attention's index, which SGLang has for pages of 64."""
    size, width = (PAGES - 1) * page, {"index_head_dim": 128, "kv_cache_dim": 20}
    return NSATokenToKVPool(
        size, page, 16, torch.bfloat16, 4, LAYERS, "cpu", enable_memory_saver=False, **width
    )


def recurrent(page: int, latent: bool) -> Any:
    """Return two layers of KV, by head or latent (Kimi-Linear), and three layers with state: the
    window of one convolution or of three, and the recurrence's matrix; ``PAGES`` state slots."""
    shape = {"conv": [(6, 3), (5, 3), (7, 3)] if latent else [(10, 3)], "temporal": (2, 3, 5)}
    dtype = SimpleNamespace(conv=torch.bfloat16, temporal=torch.float32)
    states = MambaPool(
        size=PAGES - 1,
        spec_state_size=0,
        cache_params=SimpleNamespace(shape=SimpleNamespace(**shape), dtype=dtype),
        mamba_layer_ids=[0, 2, 4],
        device="cpu",
    )
    widths: dict[str, Any] = {"use_mla": latent, "kv_lora_rank": 16, "qk_rope_head_dim": 4}
    return HybridLinearKVPool(
        (PAGES - 1) * page, torch.bfloat16, page, 2, HEAD_DIM, [1, 3], False, "cpu", states,
        **widths if latent else {},
    )  # fmt: skip


#: Pool name -> function that makes the pool for a page size.
POOLS: dict[str, Callable[[int], Any]] = {
    "mla_bfloat16": lambda page: mla(page, torch.bfloat16),
    "mla_fp8_e4m3": lambda page: mla(page, torch.float8_e4m3fn),
    "mha_fp8_e4m3": lambda page: mha(page, torch.float8_e4m3fn),
    "mha_fp8_e5m2": lambda page: mha(page, torch.float8_e5m2),
    "nsa_bfloat16": nsa,
    "recurrent": lambda page: recurrent(page, latent=False),
    "recurrent_latent": lambda page: recurrent(page, latent=True),
    "mha_short_values": lambda page: mha(page, torch.float16, v_dim=HEAD_DIM // 2),
}

#: Each pool with its tested page sizes.
CASES = [(name, page) for name in POOLS for page in ((64,) if name.startswith("nsa") else (1, 16))]


def is_mla(pool: Any) -> bool:
    """Return True if a pool has one buffer a layer."""
    return isinstance(getattr(pool, "full_kv_pool", pool), MLATokenToKVPool)


def has_states(pool: Any) -> bool:
    """Return True if a pool has slots of recurrent state."""
    return isinstance(pool, HybridLinearKVPool)


def as_bytes(pool: Any) -> list[np.ndarray]:
    """Return every buffer of a pool as (page, its bytes): views, in the order of registration,
    without recurrent state."""
    kv = getattr(pool, "full_kv_pool", pool)
    tensors = kv.kv_buffer if is_mla(kv) else [*kv.k_buffer, *kv.v_buffer]
    return _as_bytes([*tensors, *index_buffers(pool)])


def states_as_bytes(pool: Any) -> list[np.ndarray]:
    """Return every buffer of recurrent state as (slot, its bytes), one a layer, if any."""
    if not has_states(pool):
        return []
    cache = pool.mamba_pool.mamba_cache
    return _as_bytes([layer for part in (*cache.conv, cache.temporal) for layer in part])


def _as_bytes(tensors: Iterable[torch.Tensor]) -> list[np.ndarray]:
    return [tensor.view(torch.uint8).reshape(PAGES, -1).numpy() for tensor in tensors]


def fill(pool: Any, seed: int) -> None:
    """Fill all pages with random bytes, including free ones."""
    rng = np.random.default_rng(seed)
    for buffer in (*as_bytes(pool), *states_as_bytes(pool)):
        buffer[:] = rng.integers(0, 256, buffer.shape, np.uint8)


def snapshot(pool: Any) -> list[np.ndarray]:
    """Return a copy of all bytes of a pool."""
    return [buffer.copy() for buffer in (*as_bytes(pool), *states_as_bytes(pool))]


def assert_arrived(
    before: list[np.ndarray],
    decode: Any,
    prefill: Any,
    source: Pages,
    target: Pages,
    states: tuple[int, int] = (0, 0),
) -> None:
    """Check that ``target`` pages of decode hold ``source`` pages of prefill, and that no other
    page changed; likewise for slots of recurrent state (``states``: prefill's and decode's)."""
    kv = zip(before, as_bytes(decode), as_bytes(prefill), strict=False)
    for was, ours, theirs in kv:
        was[target] = theirs[source]
        assert np.array_equal(ours, was)
    rest = before[len(as_bytes(decode)) :]
    for was, ours, theirs in zip(
        rest, states_as_bytes(decode), states_as_bytes(prefill), strict=True
    ):
        was[states[1]] = theirs[states[0]]
        assert np.array_equal(ours, was)


def kv_args(pool: Any, **changes: Any) -> dict[str, Any]:
    """Return the pool's description that a scheduler passes to its transfer manager."""
    pointers, lengths, item_lens = pool.get_contiguous_buf_infos()
    heads = 1 if is_mla(pool) else pool.head_num
    state = RECURRENT_TYPE if has_states(pool) else INDEX_TYPE
    args = {
        "kv_data_ptrs": pointers,
        "kv_data_lens": lengths,
        "kv_item_lens": item_lens,
        "page_size": pool.page_size,
        "kv_head_num": heads,
        "total_kv_head_num": heads,
    }
    if index_buffers(pool) or has_states(pool):
        names = "state_data_ptrs", "state_data_lens", "state_item_lens"
        args |= dict(zip(names, pool.get_state_buf_infos(), strict=True)) | {"state_type": state}
    return args | changes


def rank_pools(size: int, total: int, page: int, seed: int, v_dim: int = HEAD_DIM) -> list[Any]:
    """Return a pool for each of ``size`` ranks of a model with ``total`` KV heads.

    Replicas of a head are equal, and ranks of another ``size`` with the same seed hold the same KV.
    """
    rng = np.random.default_rng(seed)
    sides = [
        rng.integers(0, 256, (LAYERS, PAGES, page, total, dim * 4), np.uint8)
        for dim in (HEAD_DIM, v_dim)
    ]
    pools = []
    for rank in range(size):
        held = heads_of(rank, size, total)
        pool = mha(page, heads=len(held), v_dim=v_dim)
        whole = [layer[..., held, :].reshape(PAGES, -1) for side in sides for layer in side]
        for buffer, content in zip(as_bytes(pool), whole, strict=True):
            buffer[:] = content
        pools.append(pool)
    return pools


def scattered(seed: int, count: int) -> tuple[Pages, Pages]:
    """Return source and destination pages of a request: a run of three on both sides, then any
    order.

    Excludes page 0, which no request owns.
    """
    rng = np.random.default_rng(seed)

    def pages() -> Pages:
        start = int(rng.integers(1, PAGES - 2))
        run = [start, start + 1, start + 2]
        rest = [int(page) for page in rng.permutation(np.arange(1, PAGES)) if page not in run]
        return (run + rest)[:count]

    return pages(), pages()
