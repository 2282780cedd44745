"""Sizes of the KV transfer benchmark: a wrong one would make every bandwidth wrong."""

from __future__ import annotations

import pytest

from benchmark.kv_transfer import shapes

#: Bytes of a token, and buffers: one of keys and one of values a layer; latent attention has one.
SIZES = {
    "qwen3-32b": (2 * 64 * 8 * 128 * 2, 128),
    "qwen3-coder-30b-a3b": (98_304, 96),
    "deepseek-v3": (61 * 576 * 2, 61),
    "llama-3.1-8b": (2 * 32 * 8 * 128 * 2, 64),
}


@pytest.mark.parametrize("name", sorted(SIZES))
def test_sizes_of_a_shape(name: str) -> None:
    """The published sizes: a typing error in a YAML file, or MLA counted as keys and values."""
    shape = shapes.load(name)
    assert (shape.token_bytes, shape.buffers) == SIZES[name]


def test_every_file_is_a_shape() -> None:
    """A new file that cannot be read, or one that no test knows."""
    assert shapes.names() == sorted(SIZES)
