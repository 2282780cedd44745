"""Sizes of the KV transfer benchmark: a wrong one would make every bandwidth wrong."""

from __future__ import annotations

import pytest

from benchmark.kv_transfer import shapes
from benchmark.kv_transfer.cases import Case

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


def test_fewer_layers_are_said_in_the_name() -> None:
    """Results of a shrunk model that pass for those of the whole one."""
    shape = shapes.load("qwen3-32b").with_layers(8)
    assert shape.token_bytes == 32_768 and "8 layers" in shape.name
    assert shapes.load("qwen3-32b").with_layers(None).name == "Qwen3-32B"
    with pytest.raises(ValueError, match="--layers 65"):
        shapes.load("qwen3-32b").with_layers(65)


def test_unknown_shape() -> None:
    """An error that does not say what there is."""
    with pytest.raises(ValueError, match="deepseek-v3"):
        shapes.load("gpt")


def test_pools_of_all_processes_count() -> None:
    """A cap that forgets the peers, and a machine that runs out of memory."""
    assert Case(100).pool_tokens == 200
    assert Case(100, rooms=5, peers=4).pool_tokens == 5 * 2 * 100
