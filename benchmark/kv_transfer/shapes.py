"""Size of a token's KV, by model."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import msgspec

FILE = Path(__file__).with_name("shapes.yaml")

#: ``--kv-cache-dtype`` -> bytes of an element.
DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1}
INDEX_BLOCK = 128
"""Elements of a sparse-attention index that share a scale of 4 bytes in SGLang's pool."""
LINEAR = ("linear_attention", "mamba", "recurrent")
"""Values of ``layer_types`` for layers without KV."""


class Shape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The KV of a model, as SGLang's pools store it on one tensor parallel rank of one."""

    name: str
    layers: int
    """Layers with KV."""
    kv_heads: int
    head_dim: int
    """Elements of a head; with ``mla``, of the whole latent row."""
    dtype_bytes: int = 2
    mla: bool = False
    """True: one buffer a layer; False: one of keys and one of values."""
    index_bytes: int = 0
    """Bytes of a token in each layer's index of sparse attention (DSA)."""
    window_layers: int = 0
    """Number of ``layers`` that see ``window_tokens`` tokens only."""
    window_tokens: int = 0
    state_layers: int = 0
    """Layers that keep a recurrent state of fixed size for each request, and no KV."""
    repositories: tuple[str, ...] = ()
    """Names on Hugging Face."""

    @property
    def buffers(self) -> int:
        """KV buffers of a rank, without those of an index."""
        return self.layers if self.mla else 2 * self.layers

    @property
    def row_bytes(self) -> int:
        """Bytes of a token in one buffer."""
        return self.kv_heads * self.head_dim * self.dtype_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in all buffers, with the index."""
        return self.buffers * self.row_bytes + self.layers * self.index_bytes

    @property
    def formula(self) -> str:
        """How ``token_bytes`` is computed."""
        factor = "" if self.mla else "2 x "
        heads = "" if self.mla else f"{self.kv_heads} KV heads x "
        text = f"{factor}{self.layers} layers x {heads}{self.head_dim} x {self.dtype_bytes} B"
        return text + f" + {self.layers} x {self.index_bytes} B of index" * bool(self.index_bytes)

    def on_rank(self, ranks: int) -> Shape:
        """Return the KV on one of ``ranks`` tensor parallel ranks: heads are split, and copied if
        there are fewer heads than ranks; a latent row is on every rank."""
        return msgspec.structs.replace(self, kv_heads=max(1, self.kv_heads // ranks))


@functools.cache
def table() -> dict[str, Shape]:
    """Return the shapes of ``shapes.yaml`` by name."""
    return msgspec.yaml.decode(FILE.read_bytes(), type=dict[str, Shape])


def names() -> list[str]:
    """Return the names in the table."""
    return sorted(table())


def load(name: str, kv_dtype: str | None = None) -> Shape:
    """Return the shape of a model: its name in the table or on Hugging Face, or the path of a
    ``config.json`` or of its folder.

    ``kv_dtype``: type of the pool's elements, if it is not the model's own type.

    Raises:
        ValueError: there is no such shape, a field is missing, or a type is unknown.
    """
    path = Path(name)
    config = path if path.suffix == ".json" else path / "config.json"
    if config.is_file():
        shape = from_config(json.loads(config.read_text()), config.resolve().parent.name)
    elif (found := _named(name)) is not None:
        shape = found
    else:
        raise ValueError(
            f"no model {name!r}: choose from {', '.join(names())}, their names on Hugging Face, or "
            "the path of a config.json"
        )
    return msgspec.structs.replace(shape, dtype_bytes=_bytes(kv_dtype)) if kv_dtype else shape


def _named(name: str) -> Shape | None:
    """Return the shape of this name, with or without the organization, in any case."""
    by_name = dict(table())
    for shape in table().values():
        for repository in shape.repositories:
            by_name |= {repository.lower(): shape, repository.lower().partition("/")[2]: shape}
    return by_name.get(name.lower())


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
            index = int(text.get("index_head_dim") or 0)
            index_bytes = index + index // INDEX_BLOCK * 4
            return Shape(name, layers, 1, latent, dtype, mla=True, index_bytes=index_bytes)
        heads = int(text["num_attention_heads"])
        # Models older than grouped attention have no KV head count, and some no head size.
        head_dim = int(text.get("head_dim") or int(text["hidden_size"]) // heads)
        kv_heads = int(text.get("num_key_value_heads") or heads)
    except KeyError as missing:
        raise ValueError(f"{name}: config.json has no {missing}") from missing
    kinds = text.get("layer_types") or []
    states = sum(kind in LINEAR for kind in kinds)
    if not kinds and (interval := text.get("full_attention_interval")):
        states = layers - layers // int(interval)
    windows = sum(kind == "sliding_attention" for kind in kinds)
    return Shape(
        name,
        layers - states,
        kv_heads,
        head_dim,
        dtype,
        window_layers=windows,
        window_tokens=int(text.get("sliding_window") or 0) if windows else 0,
        state_layers=states,
    )


def _bytes(dtype: str) -> int:
    if dtype not in DTYPES:
        raise ValueError(f"KV type {dtype}: choose from {', '.join(DTYPES)}")
    return DTYPES[dtype]
