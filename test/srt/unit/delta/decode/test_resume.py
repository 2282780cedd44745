"""Bringing back a retracted request's KV: every token at its place, shared pages untouched."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang.srt.disaggregation.delta.decode.retraction import restore_private

LAYERS, CHUNK = 2, 4


def cpu_copy(length: int, pairs: bool) -> list[list[Any]]:
    """A CPU copy as SGLang keeps it; each token's value is its position, and its layer's sign."""
    copy: list[list[Any]] = []
    for layer in range(LAYERS):
        tokens = torch.arange(length) + 1000 * layer
        chunks = list(torch.split(tokens, CHUNK)) if length else []
        copy.append([[chunk, -chunk] for chunk in chunks] if pairs else chunks)
    return copy


class Pool:
    """Stores one number a slot, and copies back chunk by chunk, as SGLang's pools do."""

    cpu_offloading_chunk_size = CHUNK

    def __init__(self) -> None:
        self.slots = torch.full((LAYERS, 64), -1)

    def get_kvcache(self) -> Pool:
        return self

    def load_cpu_copy(self, copy: list[list[Any]], slots: torch.Tensor) -> None:
        for layer, chunks in enumerate(copy):
            for number, start in enumerate(range(0, len(slots), CHUNK)):
                part, chunk = slots[start : start + CHUNK], chunks[number]
                if isinstance(chunk, list):
                    chunk, value = chunk
                    assert torch.equal(chunk, -value)
                assert len(chunk) == len(part)
                self.slots[layer][part] = chunk


@pytest.mark.parametrize("pairs", [True, False], ids=["MHA", "MLA"])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 11])
def test_restore_private(length: int, pairs: bool) -> None:
    """Guards against a restore that writes into slots that others read, or that is off by one at a
    border of the chunks in which SGLang loads a copy."""
    for shared in range(length + 1):
        pool = Pool()
        own = torch.arange(40, 40 + length - shared)
        req = SimpleNamespace(kv_cache_cpu=cpu_copy(length, pairs), cache_protected_len=shared)
        restore_private(req, own, pool)
        for layer in range(LAYERS):
            restored = range(1000 * layer + shared, 1000 * layer + length)
            assert pool.slots[layer][own].tolist() == list(restored)
        assert int((pool.slots >= 0).sum()) == LAYERS * len(own)
        assert not hasattr(req, "kv_cache_cpu")
