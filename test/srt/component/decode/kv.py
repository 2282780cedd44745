"""A real KV pool whose slots say what they hold: the tag of the tokens up to theirs."""

from __future__ import annotations

from typing import Any

import torch

from benchmark.harness import without_engine

_MODULUS = 2**61 - 1
GARBAGE = -1


def tags(
    token_ids: list[int], extra_key: str | None, start: int = 0, weights: int = 0
) -> list[int]:
    """A number for each token that depends on all tokens before it, as its KV does.

    ``start`` is the tag of the token before the first one, or 0; ``weights`` says which version of
    them computed it.
    """
    tag = start or 7 + sum(ord(char) for char in extra_key or "") + 5003 * weights
    found = []
    for token in token_ids:
        tag = (tag * 1_000_003 + token + 1) % _MODULUS
        found.append(tag)
    return found


def build_pool(tokens: int, page: int) -> tuple[Any, Any]:
    """A pool for ``tokens`` tokens and its allocator, on the CPU."""
    pool, allocator = without_engine.build_pool(tokens, page, torch.int64, layers=2)
    pool.cpu_offloading_chunk_size = 24  # small, and no multiple of the page: many borders
    return pool, allocator


def write(pool: Any, slots: torch.Tensor, values: list[int]) -> None:
    """Put tags into slots, in every layer."""
    content = torch.tensor(values, dtype=torch.int64).view(-1, 1, 1)
    for layer in range(pool.layer_num):
        pool.k_buffer[layer][slots] = content + layer
        pool.v_buffer[layer][slots] = -content - layer


def read(pool: Any, slots: torch.Tensor) -> list[int]:
    """The tags in slots; garbage where keys, values and layers do not agree."""
    slots = slots.to(torch.int64)
    keys = torch.stack([pool.k_buffer[n][slots, 0, 0] - n for n in range(pool.layer_num)])
    values = torch.stack([-pool.v_buffer[n][slots, 0, 0] - n for n in range(pool.layer_num)])
    same = (keys == keys[0]).all(0) & (values == keys[0]).all(0)
    return torch.where(same, keys[0], GARBAGE).tolist()
