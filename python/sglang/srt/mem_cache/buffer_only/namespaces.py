"""Whose KV a page in the store is: the namespace that is hashed into every key.

SGLang's page hash covers the tokens up to the end of a page and nothing else, and several storage
backends add no more than a rank. But a page is of use only to a server that would have computed the
same bytes, so a namespace stands for

- the model: a fingerprint of the weights in memory, and its configuration;
- how KV lies in a page: pool, dtype, layout, page size, sizes of its parts, tensor parallel size;
- the request's own: ``extra_key``, which has LoRA adapter and salt in it.

The fingerprint is taken of what the ranks hold and not of a path, so that servers of one model meet
wherever its files lie, two models never do, and an update of the weights ends the old keys without
clearing the store: servers that are updated to the same weights meet again. No key is one of
SGLang's own: stock servers write KV of LoRA adapters and of salted requests under those.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any  # Any: values of a configuration, as in JSON

from sglang.srt.mem_cache.buffer_only.host_pool import describe

if TYPE_CHECKING:
    import torch

    from sglang.srt.mem_cache.memory_pool_host import HostKVCache


#: Grows when an identity is encoded in another way: pages of the old one are not read.
_FORMAT = b"hicache namespace 2"


@dataclass(frozen=True)
class Namespace:
    """Makes keys of page hashes; those of different namespaces are different."""

    seed: bytes

    @classmethod
    def of(cls, identity: Mapping[str, Any]) -> Namespace:
        """The namespace of all who have this ``identity``: whatever JSON can hold."""
        text = json.dumps(identity, sort_keys=True)
        return cls(hashlib.sha256(_FORMAT + text.encode()).digest())

    def within(self, name: str | None, kind: bytes = b"within") -> Namespace:
        """The part of this namespace that is called ``name``; without a name, itself. Parts of
        different ``kind``, of as many bytes, never meet: clients choose names of tenants."""
        if not name:
            return self
        # A client's text may have lone surrogates, which plain UTF-8 refuses.
        text = name.encode(errors="surrogatepass")
        return Namespace(hashlib.sha256(kind + self.seed + text).digest())

    def keys(self, hashes: Sequence[str]) -> list[str]:
        """Keys of pages (hex of SHA-256), given SGLang's page hashes (hex)."""
        seed = hashlib.sha256(self.seed)
        keys = []
        for page in hashes:
            hasher = seed.copy()
            hasher.update(bytes.fromhex(page))
            keys.append(hasher.hexdigest())
        return keys

    def __str__(self) -> str:
        return self.seed.hex()[:12]


def pool_identity(pool: HostKVCache, tp_size: int) -> dict[str, Any]:
    """How KV lies in a page of ``pool``, on each of ``tp_size`` ranks.

    The number of ranks counts even where a rank's share is as large with more of them: with more
    ranks than KV heads, ranks hold replicas, and the same rank another head.
    """
    parts = describe(pool)
    return {
        "pool": type(pool).__name__,
        "dtype": str(pool.device_pool.dtype),
        "layout": pool.layout,
        "page_size": pool.page_size,
        "layers": pool.layer_num,
        "parts": [[part.label, part.size] for part in parts],
        "tp_size": tp_size,
    }


def _lasting(value: Any) -> Any:
    """``value`` as JSON that is the same on every server: ``str`` of an object may hold an address,
    and that of a set has another order in every process."""
    if isinstance(value, Mapping):
        return {
            str(name): _lasting(part)
            for name, part in value.items()
            if not str(name).startswith("_") and name != "transformers_version"
        }
    if isinstance(value, (set, frozenset)):
        return sorted(json.dumps(_lasting(part), sort_keys=True) for part in value)
    if isinstance(value, (list, tuple)):
        return [_lasting(part) for part in value]
    if value is None or isinstance(value, (str, int, float)):
        return value
    if " at 0x" not in (text := str(value)):
        return text
    if hasattr(value, "__dict__") and not callable(value):
        return [type(value).__qualname__, _lasting(vars(value))]
    raise ValueError(
        f"the model's configuration holds {text}, which differs on every server: servers with "
        "--hicache-host-memory-mode buffer_only would not find each other's KV. Remove it from "
        "the configuration or remove the flag"
    )


# ---- weights ----

#: Elements that are looked at in one go, which takes up to 200 MB of device memory.
_BLOCK = 1 << 22


def fingerprint(model: torch.nn.Module) -> str:
    """Of all weights of ``model`` on this rank, in memory, wherever they came from.

    Every bit counts. Names do not, since LoRA support wraps modules; nor do buffers that are not
    saved, some of which grow while a server runs. All is computed where the weights are, one block
    at a time: a second or so for tens of gigabytes on a GPU.
    """
    import torch

    hasher = hashlib.sha256()
    for tensor in model.state_dict().values():
        if not isinstance(tensor, torch.Tensor):
            continue  # a module's extra state
        for part in _plain(tensor):
            hasher.update(f"{part.dtype}{tuple(part.shape)}".encode())
            for block in _sums(part):
                hasher.update(block.to_bytes(8, "little", signed=True))
    for module in model.modules():  # of quantized KV, kept as plain attributes
        for name in ("k_scale_float", "v_scale_float"):
            hasher.update(repr(getattr(module, name, None)).encode())
    return hasher.hexdigest()


def _plain(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """``tensor``, or, of a quantized one with operators of its own (torchao), what it is made
    of."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for name in names:
        yield from _plain(getattr(tensor, name))


def _sums(tensor: torch.Tensor) -> list[int]:
    """A weighted sum, modulo 2**64, of the bytes of each block of ``tensor``."""
    import torch

    sums: list[torch.Tensor] = []
    weights = torch.empty(0)
    for block in _blocks(tensor.detach()):
        words = block.reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8)
        if len(words) % 4 == 0:
            words = words.view(torch.int32)
        if len(weights) < len(words):
            # An odd number for each position, so that no two elements can change places unseen.
            at = torch.arange(1, len(words) + 1, dtype=torch.int64, device=words.device)
            at = at * 0x9E3779B97F4A7C1 ^ at * 0x85EBCA6B
            weights = (at ^ (at >> 29)) * 2 + 1
        sums.append((words.long() * weights[: len(words)]).sum())
    return torch.stack(sums).tolist() if sums else []


def _blocks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """All of ``tensor`` in pieces of at most ``_BLOCK`` elements, in an order that does not depend
    on how it lies in memory; it may be a transposed view, of which no whole copy is to be made."""
    if tensor.numel() <= _BLOCK:
        if tensor.numel():
            yield tensor
    elif (row := tensor[0].numel()) > _BLOCK:
        for part in tensor:
            yield from _blocks(part)
    else:
        yield from tensor.split(_BLOCK // row)


def model_identity(config: Mapping[str, Any], fingerprints: Iterable[str]) -> dict[str, Any]:
    """Of a server's model: its configuration (``PretrainedConfig.to_dict``), and what each rank
    holds of its weights. The configuration has what the weights do not say, such as the base of the
    rotary embedding; where the model was loaded from, and by which version of a library, is left
    out."""
    text = json.dumps(_lasting(config), sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return {"config": digest, "weights": list(fingerprints)}
