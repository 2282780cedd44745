"""A model with only a configuration, which is enough for arguments and dummy weights."""

from __future__ import annotations

import json

import pytest

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 2,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "torch_dtype": "float32",
}


@pytest.fixture
def model_config(tmp_path):
    """Write a model folder with the given changes to a small Qwen3, and return its path."""

    def write(**changes):
        (tmp_path / "config.json").write_text(json.dumps(CONFIG | changes))
        return str(tmp_path)

    return write
