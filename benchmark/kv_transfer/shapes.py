"""Model shapes: how large a token's KV is, and which sizes fit into memory."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import yaml

FOLDER = Path(__file__).parent / "shapes"

#: Tokens, as in the per-stage report of Mooncake transfers that this benchmark follows.
SIZES = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


@dataclass(frozen=True)
class Shape:
    """The KV of a model, as SGLang's pools hold it on one tensor parallel rank."""

    name: str
    layers: int
    kv_heads: int
    #: Elements of a head; of the whole latent row where ``mla``.
    head_dim: int
    dtype_bytes: int
    #: One buffer a layer; otherwise one of keys and one of values.
    mla: bool

    def __post_init__(self) -> None:
        for field in ("layers", "kv_heads", "head_dim", "dtype_bytes"):
            if getattr(self, field) < 1:
                raise ValueError(f"{self.name}: {field} must be at least 1")
        if self.mla and self.kv_heads != 1:
            raise ValueError(f"{self.name}: a latent row belongs to no head; kv_heads must be 1")

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

    def with_layers(self, layers: int | None) -> Shape:
        """The same model with fewer layers, so that more tokens fit; None changes nothing."""
        if layers is None or layers == self.layers:
            return self
        if layers > self.layers:
            raise ValueError(f"--layers {layers}: {self.name} has only {self.layers}")
        return dataclasses.replace(self, name=f"{self.name} ({layers} layers)", layers=layers)


def names() -> list[str]:
    """What ``--shape`` takes."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load(name: str) -> Shape:
    """The shape in ``shapes/<name>.yaml``.

    Raises:
        ValueError: there is none, or it lacks a field or has one too many.
    """
    path = FOLDER / f"{name}.yaml"
    if not path.exists():
        raise ValueError(f"--shape {name}: choose from {', '.join(names())}")
    fields = yaml.safe_load(path.read_text())
    try:
        return Shape(**fields)
    except TypeError as error:
        raise ValueError(f"{path.name}: {error}") from error


def pool_bytes(shape: Shape, tokens: int, in_flight: int, peers: int) -> int:
    """Memory of all pools of a run with ``in_flight`` rooms of ``tokens`` under way in all.

    Every room under way at one peer has destination pages of its own; the prefill pool is as large
    as one peer's, since rooms of different peers may send the same pages.
    """
    rooms_a_peer = -(-in_flight // peers)
    return (peers + 1) * rooms_a_peer * tokens * shape.token_bytes
