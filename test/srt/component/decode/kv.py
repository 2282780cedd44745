"""A real KV pool in which each slot holds a tag of all tokens up to its own."""

from __future__ import annotations

from typing import Any

import torch

from benchmark.harness import without_engine
from sglang.srt.disaggregation.delta.pages import INDEX
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

_MODULUS = 2**61 - 1
GARBAGE = -1
#: Tokens of a chunk of a CPU copy: few, and no multiple of a page, for many boundaries.
OFFLOADED_CHUNK = 24


def tags(
    token_ids: list[int], extra_key: str | None, start: int = 0, weights: int = 0
) -> list[int]:
    """Return a number for each token that depends on all tokens before it, as its KV does.

    ``start`` is the tag of the token before the first one, or 0; ``weights`` is the version of the
    weights.
    """
    tag = start or 7 + sum(ord(char) for char in extra_key or "") + 5003 * weights
    found = []
    for token in token_ids:
        tag = (tag * 1_000_003 + token + 1) % _MODULUS
        found.append(tag)
    return found


def build_pool(
    tokens: int, page: int, *, latent: bool = False, sparse: bool = False
) -> tuple[Any, Any]:
    """Return a pool for ``tokens`` tokens and its allocator, on the CPU; ``latent``: of an MLA
    model, ``sparse``: of one with an index."""
    pool, allocator = without_engine.build_pool(
        tokens, page, torch.int64, layers=2, latent=latent, sparse=sparse
    )
    pool.cpu_offloading_chunk_size = OFFLOADED_CHUNK
    return pool, allocator


def write(pool: Any, slots: torch.Tensor, values: list[int], *, index: bool = True) -> None:
    """Write tags into slots, in every layer; ``index``: also into the index, if there is one."""
    content = torch.tensor(values, dtype=torch.int64)
    for layer, (first, second) in enumerate(_halves(pool)):
        first[slots], second[slots] = content + layer, -content - layer
    if index:
        write_index(pool, slots, values)


def write_index(pool: Any, slots: torch.Tensor, values: list[int]) -> None:
    """Write tags into only the index of slots."""
    content = torch.tensor(values, dtype=torch.int64)
    for layer, part in enumerate(_index(pool)):
        part[slots // pool.page_size, slots % pool.page_size] = content + layer


def read(pool: Any, slots: torch.Tensor) -> list[int]:
    """Return the tags in slots; garbage if keys, values and layers do not agree."""
    slots = slots.to(torch.int64)
    both = [
        (first[slots] - n, -second[slots] - n) for n, (first, second) in enumerate(_halves(pool))
    ]
    keys, values = (torch.stack(half) for half in zip(*both, strict=True))
    same = (keys == keys[0]).all(0) & (values == keys[0]).all(0)
    for layer, part in enumerate(_index(pool)):
        same &= part[slots // pool.page_size, slots % pool.page_size] - layer == keys[0]
    return torch.where(same, keys[0], GARBAGE).tolist()


def _halves(pool: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return for each layer two numbers a slot: key and value, or latent part and rope part."""
    pool = getattr(pool, "full_kv_pool", pool)  # for a model with recurrent state
    if isinstance(pool, MLATokenToKVPool):
        return [(buffer[:, 0, 0], buffer[:, 0, 1]) for buffer in pool.kv_buffer]
    pairs = zip(pool.k_buffer, pool.v_buffer, strict=True)
    return [(keys[:, 0, 0], values[:, 0, 0]) for keys, values in pairs]


def _index(pool: Any) -> list[torch.Tensor]:
    """Return for each layer a number a token (pages, tokens of a page), in the first of a token's
    bytes; no layers if the pool has no index."""
    parts = []
    for buffer in getattr(pool, INDEX, ()):
        tokens = buffer[:, : pool.page_size * pool.index_head_dim]
        parts.append(tokens.view(torch.int64).view(len(buffer), pool.page_size, -1)[:, :, 0])
    return parts
