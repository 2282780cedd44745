"""Bringing back a retracted request's KV: every token at its place, shared pages untouched."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang.srt.disaggregation.delta.decode.retraction import restore_private, without_leading

LAYERS, CHUNK = 2, 4


def cpu_copy(length: int, pairs: bool) -> list[list[Any]]:
    """A CPU copy as SGLang keeps it; each token's value is its position, and its layer's sign."""
    copy: list[list[Any]] = []
    for layer in range(LAYERS):
        tokens = torch.arange(length) + 1000 * layer
        chunks = list(torch.split(tokens, CHUNK)) if length else []
        copy.append([[chunk, -chunk] for chunk in chunks] if pairs else chunks)
    return copy


def positions(copy: list[list[Any]], pairs: bool) -> list[list[int]]:
    """The tokens of each layer of a copy, in order."""
    found = []
    for layer in copy:
        if pairs:
            assert all(torch.equal(key, -value) for key, value in layer)
            layer = [key for key, _ in layer]
        found.append([int(token) for chunk in layer for token in chunk])
    return found


@pytest.mark.parametrize("pairs", [True, False], ids=["MHA", "MLA"])
@pytest.mark.parametrize("length", [0, 1, 3, 4, 5, 8, 11])
def test_without_leading(length: int, pairs: bool) -> None:
    """Guards against a skip that is off by one at a chunk border, in both shapes of a copy."""
    for skip in range(length + 1):
        head, rest = without_leading(cpu_copy(length, pairs), CHUNK, skip)
        found = [a + b for a, b in zip(positions(head, pairs), positions(rest, pairs), strict=True)]
        assert found == [list(range(skip + d, length + d)) for d in (0, 1000)], skip
        # SGLang loads a copy in whole chunks: only the head may begin within one.
        assert all(len(layer) <= 1 for layer in head)
        sizes = [len(chunk[0] if pairs else chunk) for chunk in rest[0]]
        assert all(size == CHUNK for size in sizes[:-1])
        if skip % CHUNK == 0:
            assert head == [[], []]


class Pool:
    """Stores one number a slot, and copies back chunk by chunk, as SGLang's pools do."""

    cpu_offloading_chunk_size = CHUNK

    def __init__(self) -> None:
        self.slots = torch.full((LAYERS, 64), -1)

    def get_kvcache(self) -> Pool:
        return self

    def load_cpu_copy(self, copy: list[list[torch.Tensor]], slots: torch.Tensor) -> None:
        for layer, chunks in enumerate(copy):
            for number, start in enumerate(range(0, len(slots), CHUNK)):
                part = slots[start : start + CHUNK]
                assert len(chunks[number]) == len(part)
                self.slots[layer][part] = chunks[number]


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 11])
def test_restore_private(length: int) -> None:
    """Guards against a restore that writes into slots that others read, or one token aside."""
    for shared in range(length + 1):
        pool = Pool()
        own = torch.arange(40, 40 + length - shared)
        req = SimpleNamespace(kv_cache_cpu=cpu_copy(length, False), cache_protected_len=shared)
        restore_private(req, own, pool)
        assert pool.slots[0][own].tolist() == list(range(shared, length))
        assert pool.slots[1][own].tolist() == list(range(1000 + shared, 1000 + length))
        assert int((pool.slots >= 0).sum()) == LAYERS * len(own)
        assert not hasattr(req, "kv_cache_cpu")
