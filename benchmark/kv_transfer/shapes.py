"""Size of a token's KV, by model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

FOLDER = Path(__file__).parent / "shapes"

#: ``--kv-cache-dtype`` -> bytes of an element.
DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1}


class Shape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The KV of a model, as SGLang's pools store it on one tensor parallel rank."""

    name: str
    layers: int
    kv_heads: int
    head_dim: int
    """Elements of a head; with ``mla``, of the whole latent row."""
    dtype_bytes: int
    mla: bool
    """True: one buffer a layer; False: one of keys and one of values."""

    @property
    def buffers(self) -> int:
        """Registered KV buffers of a rank."""
        return self.layers if self.mla else 2 * self.layers

    @property
    def row_bytes(self) -> int:
        """Bytes of a token in one buffer."""
        return self.kv_heads * self.head_dim * self.dtype_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in all buffers."""
        return self.buffers * self.row_bytes


def names() -> list[str]:
    """Return the valid values of ``--shape``."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load(name: str, kv_dtype: str | None = None) -> Shape:
    """Return the shape in ``shapes/<name>.yaml``, or that of a model's folder.

    ``kv_dtype``: type of the pool's elements, if it is not the model's own type.

    Raises:
        ValueError: there is no such shape, a field is missing, or a type is unknown.
    """
    path, config = FOLDER / f"{name.lower()}.yaml", Path(name) / "config.json"
    if config.is_file():
        shape = from_config(json.loads(config.read_text()), config.resolve().parent.name)
    elif path.exists():
        shape = msgspec.yaml.decode(path.read_bytes(), type=Shape)
    else:
        raise ValueError(f"no shape {name}: choose from {', '.join(names())}, or a model's folder")
    return msgspec.structs.replace(shape, dtype_bytes=_bytes(kv_dtype)) if kv_dtype else shape


def from_config(config: dict[str, Any], name: str = "model") -> Shape:
    """Return the shape that a Hugging Face ``config.json`` describes; MLA has a ``kv_lora_rank``.

    Raises:
        ValueError: a field is missing, or the type is unknown.
    """
    text: dict[str, Any] = config.get("text_config", config)
    dtype = _bytes(str(text.get("dtype") or text.get("torch_dtype") or "bfloat16"))
    try:
        layers = int(text["num_hidden_layers"])
        if "kv_lora_rank" in text:
            latent = int(text["kv_lora_rank"]) + int(text["qk_rope_head_dim"])
            return Shape(name, layers, 1, latent, dtype, mla=True)
        heads = int(text["num_attention_heads"])
        # Models older than grouped attention have no KV head count, and some no head size.
        head_dim = int(text.get("head_dim") or int(text["hidden_size"]) // heads)
        kv_heads = int(text.get("num_key_value_heads") or heads)
    except KeyError as missing:
        raise ValueError(f"{name}: config.json has no {missing}") from missing
    return Shape(name, layers, kv_heads, head_dim, dtype, mla=False)


def _bytes(dtype: str) -> int:
    if dtype not in DTYPES:
        raise ValueError(f"KV type {dtype}: choose from {', '.join(DTYPES)}")
    return DTYPES[dtype]
