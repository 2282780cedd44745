"""KV bytes of a token, by hand and by the defaults that transformers ships."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmark.kv_transfer import shapes
from benchmark.kv_transfer.shapes import Shape

CONFIG = {
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "hidden_size": 2048,
    "torch_dtype": "bfloat16",
}
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_hidden_layers": 61}

#: Bytes of a token, in bfloat16. Keys and values: 2 x layers x KV heads x head size x 2 bytes;
#: latents: layers x (512 + 64) x 2 bytes; an index: layers x (128 + 4) bytes more.
TOKEN_BYTES = {
    "qwen3-32b": 262_144,
    "qwen3-coder-30b-a3b": 98_304,
    "qwen3-235b-a22b": 192_512,
    "glm-4.5": 376_832,
    "glm-4.5-air": 188_416,
    "gpt-oss-120b": 73_728,
    "gpt-oss-20b": 49_152,
    "deepseek-v3": 70_272,
    "deepseek-v3.2": 78_324,
    "kimi-k2": 70_272,
}


def test_bytes_of_a_token_by_hand() -> None:
    """Guards against a typing error in the table, and against MLA counted as keys and values."""
    assert {name: shapes.load(name).token_bytes for name in shapes.names()} == TOKEN_BYTES


@pytest.mark.parametrize(
    "name",
    ["Qwen/Qwen3-32B", "qwen3-32b", "Qwen3-32B", "qwen/qwen3-32b", "QWEN3-32B-FP8"],
)
def test_a_model_has_all_its_names(name: str) -> None:
    assert shapes.load(name).name == "Qwen3-32B"


def test_names_on_hugging_face_are_distinct() -> None:
    every = [r.lower() for shape in shapes.table().values() for r in shape.repositories]
    assert len(set(every)) == len(every) >= len(TOKEN_BYTES)


def test_shape_from_a_config(tmp_path: Path) -> None:
    """A model folder, or its file, gives the same shape as the entry by name; MLA is recognized by
    its latent rank."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert shapes.load(str(tmp_path)).token_bytes == 98_304
    assert shapes.load(str(tmp_path / "config.json")).token_bytes == 98_304
    assert shapes.load(str(tmp_path), "fp8_e4m3").token_bytes == 98_304 // 2
    assert shapes.from_config({**CONFIG, **LATENT}).token_bytes == 61 * 576 * 2
    index = shapes.from_config({**CONFIG, **LATENT, "index_head_dim": 128})
    assert index.token_bytes == shapes.load("deepseek-v3.2").token_bytes
    with pytest.raises(ValueError, match="num_hidden_layers"):
        shapes.from_config({})
    with pytest.raises(ValueError, match="no model 'x': choose from deepseek-v3, .* config.json"):
        shapes.load("x")


def test_layers_that_keep_no_kv_or_little() -> None:
    """Guards against recurrent layers counted as KV, and windows that go unmentioned."""
    kinds = ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 12
    for more in ({"layer_types": kinds}, {"full_attention_interval": 4}):
        hybrid = shapes.from_config({**CONFIG, **more})
        assert (hybrid.layers, hybrid.state_layers) == (12, 36)
        assert hybrid.token_bytes == 98_304 // 4
    kinds = ["sliding_attention", "full_attention"] * 24
    windows = shapes.from_config({**CONFIG, "layer_types": kinds, "sliding_window": 128})
    assert (windows.layers, windows.window_layers, windows.window_tokens) == (48, 24, 128)


def test_heads_are_split_over_ranks_and_latents_are_not() -> None:
    grouped, latent = Shape("g", 2, 8, 128), Shape("l", 2, 1, 576, mla=True)
    assert [grouped.on_rank(n).kv_heads for n in (1, 2, 8, 16)] == [8, 4, 1, 1]
    assert latent.on_rank(8).token_bytes == latent.token_bytes


@pytest.mark.slow
def test_defaults_of_transformers_agree() -> None:
    """Guards the entries whose model is the default of a class in transformers."""
    from transformers import DeepseekV3Config, Glm4MoeConfig, GptOssConfig

    for name, kind in (
        ("deepseek-v3", DeepseekV3Config),
        ("glm-4.5-air", Glm4MoeConfig),
        ("gpt-oss-120b", GptOssConfig),
    ):
        config = {**kind().to_dict(), "head_dim": 64 if "oss" in name else 128}
        shape, entry = shapes.from_config({**config, "dtype": "bfloat16"}), shapes.load(name)
        for field in ("layers", "kv_heads", "head_dim", "mla", "window_layers", "window_tokens"):
            assert getattr(shape, field) == getattr(entry, field), (name, field)
