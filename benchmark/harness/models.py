"""The models of the test folder, loaded without making it a package; properties of a model."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
_MODELS = REPOSITORY / "test" / "srt" / "models"

TINY_ARITH = _MODELS / "tiny_arith"
"""The shipped model: grade-school arithmetic, 2 KiB of KV a token in float32."""


def random_qwen3(folder: Path, seed: int = 0, **shape: int) -> Path:
    """Return a model of random weights whose greedy output depends on its whole context.

    Made in ``folder`` if it is not there. ``shape``: layers, heads, kv_heads, head_dim, hidden,
    intermediate; by default 2 KiB of KV a token in float32.
    """
    return Path(_module("random_qwen3").build(folder, seed, **shape))


def on_current(venv: Path) -> dict[str, str]:
    """Return the variables of a server of SGLang 0.5.23, installed in ``venv``, that runs a random
    Qwen3 on a machine without a GPU."""
    package = next(venv.glob("lib/python*/site-packages/sglang"), None)
    return dict(_module("environment", _MODELS.parent / "current").environment(package))


def token_range(model: Path | str) -> range:
    """Return ordinary token ids of a model folder, without the first ones, which may be special."""
    return range(16, int(_config(model)["vocab_size"]))


def kv_bytes_per_token(model: Path | str) -> int:
    """Return the bytes of KV of a token in all layers of a model folder, in float32."""
    config = _config(model)
    heads = config["num_key_value_heads"] * config["head_dim"]
    return int(config["num_hidden_layers"] * 2 * heads * 4)


def _config(model: Path | str) -> Any:
    return json.loads((Path(model) / "config.json").read_text())


def _module(name: str, folder: Path = _MODELS) -> Any:
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
