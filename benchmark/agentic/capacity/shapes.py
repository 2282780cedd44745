"""Bytes of KV that a token has, by a model's name or its ``config.json``."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmark.kv_transfer import shapes
from benchmark.kv_transfer.shapes import Shape

#: ``--kv-cache-dtype`` -> bytes of an element.
DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1}


def load(name: str, kv_dtype: str | None = None) -> Shape:
    """The shape of ``--model``: a name of ``benchmark/kv_transfer/shapes``, or a model's folder.

    ``kv_dtype``: what the pool holds, where that is not the model's own type.

    Raises:
        ValueError: no such name, a config without the fields, or an unknown type.
    """
    config = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
    shape = (
        from_config(json.loads(config.read_text()), name=config.resolve().parent.name)
        if config.is_file()
        else shapes.load(name.lower())
    )
    if kv_dtype is None:
        return shape
    return dataclasses.replace(shape, dtype_bytes=_bytes(kv_dtype))


def from_config(config: Mapping[str, Any], name: str = "model") -> Shape:
    """The shape that a Hugging Face ``config.json`` describes; MLA by its ``kv_lora_rank``.

    Raises:
        ValueError: a field is missing, or the type is unknown.
    """
    text: Mapping[str, Any] = config.get("text_config", config)
    dtype = _bytes(str(text.get("dtype") or text.get("torch_dtype") or "bfloat16"))
    try:
        layers = int(text["num_hidden_layers"])
        if "kv_lora_rank" in text:
            latent = int(text["kv_lora_rank"]) + int(text["qk_rope_head_dim"])
            return Shape(name, layers, 1, latent, dtype, mla=True)
        heads = int(text["num_attention_heads"])
        # Models older than grouped attention name no KV heads, and some no head size.
        head_dim = int(text.get("head_dim") or int(text["hidden_size"]) // heads)
        kv_heads = int(text.get("num_key_value_heads") or heads)
    except KeyError as missing:
        raise ValueError(f"--model {name}: config.json has no {missing}") from missing
    return Shape(name, layers, kv_heads, head_dim, dtype, mla=False)


def _bytes(dtype: str) -> int:
    try:
        return DTYPES[dtype]
    except KeyError:
        raise ValueError(f"KV type {dtype}: choose from {', '.join(DTYPES)}") from None
