"""The namespace that is hashed into every store key, so that servers share only equal KV.

SGLang's page hash covers only the tokens up to the end of a page, and several storage backends add
only a rank. But a page is useful only to a server that would compute the same bytes. So a namespace
identifies

- the model: a fingerprint of the weights in memory, and its configuration;
- the page layout: pool, dtype, layout, page size, sizes of its parts, tensor parallel size;
- the request: ``extra_key``, which contains the LoRA adapter and the salt.

The fingerprint is computed from the weights in memory, not from a path. So servers of one model
share pages wherever its files are, two models never do, and updated weights get new keys without
clearing the store; servers updated to the same weights share again. Keys never equal SGLang's own,
under which stock servers write KV of LoRA adapters and of salted requests.
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


#: Increment the number when the encoding of an identity changes, so that old pages are not read.
_FORMAT = b"hicache namespace 2"


@dataclass(frozen=True)
class Namespace:
    """Derives store keys from page hashes; different namespaces give different keys."""

    seed: bytes

    @classmethod
    def of(cls, identity: Mapping[str, Any]) -> Namespace:
        """Return the namespace of all servers with this ``identity`` (JSON values)."""
        text = json.dumps(identity, sort_keys=True)
        return cls(hashlib.sha256(_FORMAT + text.encode()).digest())

    def within(self, name: str | None, kind: bytes = b"within") -> Namespace:
        """Return the sub-namespace ``name``, or ``self`` without a name. Because clients choose
        names, ``kind`` separates kinds of names; all kinds must have the same length."""
        if not name:
            return self
        # A client's text may have lone surrogates, which strict UTF-8 rejects.
        text = name.encode(errors="surrogatepass")
        return Namespace(hashlib.sha256(kind + self.seed + text).digest())

    def keys(self, hashes: Sequence[str]) -> list[str]:
        """Return the keys of pages (hex of SHA-256) for SGLang's page hashes (hex)."""
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
    """Return the page layout of ``pool`` on each of ``tp_size`` ranks.

    ``tp_size`` is part of it even if a rank's share has the same size: with more ranks than KV
    heads, ranks hold replicas, and a given rank holds a different head.
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
    """Convert ``value`` to JSON that is equal on every server, because ``str`` of an object may
    contain an address, and the order of a set differs between processes."""
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
        f"the model's configuration contains {text}, which differs on every server, so that "
        "servers with --hicache-host-memory-mode buffer_only would not find each other's KV. "
        "Remove it from the configuration or remove the flag"
    )


# ---- weights ----

#: Elements hashed at a time, which takes up to 200 MB of device memory.
_BLOCK = 1 << 22


def fingerprint(model: torch.nn.Module) -> str:
    """Return a hash of all weights of ``model`` in this rank's memory.

    It covers every bit, but not names, because LoRA support wraps modules, and not unsaved buffers,
    because some grow while a server runs. Computed on the weights' device, one block at a time:
    about a second for tens of gigabytes on a GPU.
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
    for module in model.modules():  # scales of quantized KV are plain attributes
        for name in ("k_scale_float", "v_scale_float"):
            hasher.update(repr(getattr(module, name, None)).encode())
    return hasher.hexdigest()


def _plain(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield ``tensor``, or the components of a quantized tensor subclass (torchao)."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for name in names:
        yield from _plain(getattr(tensor, name))


def _sums(tensor: torch.Tensor) -> list[int]:
    """Return a weighted sum, modulo 2**64, of the bytes of each block of ``tensor``."""
    import torch

    sums: list[torch.Tensor] = []
    weights = torch.empty(0)
    for block in _blocks(tensor.detach()):
        words = block.reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8)
        if len(words) % 4 == 0:
            words = words.view(torch.int32)
        if len(weights) < len(words):
            # A different odd weight per position, so that swapping two elements changes the sum.
            index = torch.arange(1, len(words) + 1, dtype=torch.int64, device=words.device)
            index = index * 0x9E3779B97F4A7C1 ^ index * 0x85EBCA6B
            weights = (index ^ (index >> 29)) * 2 + 1
        sums.append((words.long() * weights[: len(words)]).sum())
    return torch.stack(sums).tolist() if sums else []


def _blocks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield ``tensor`` in blocks of at most ``_BLOCK`` elements, in an order independent of its
    strides. Never copies all of it, as flattening a transposed view would."""
    if tensor.numel() <= _BLOCK:
        if tensor.numel():
            yield tensor
    elif (row := tensor[0].numel()) > _BLOCK:
        for part in tensor:
            yield from _blocks(part)
    else:
        yield from tensor.split(_BLOCK // row)


def model_identity(config: Mapping[str, Any], fingerprints: Iterable[str]) -> dict[str, Any]:
    """Return the identity of a model: its configuration (``PretrainedConfig.to_dict``) and each
    rank's weights. The configuration covers values that are not in the weights, such as the base of
    the rotary embedding; the model's path and the library version are left out."""
    text = json.dumps(_lasting(config), sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return {"config": digest, "weights": list(fingerprints)}
