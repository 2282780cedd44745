"""Keys of pages in the store: requests with different ``extra_key`` never meet."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence


def store_keys(hashes: Sequence[str], extra_key: str | None) -> list[str]:
    """Keys of pages, given SGLang's position-aware page hashes (hex) and the namespace.

    SGLang's hash covers the tokens up to the end of the page, but neither LoRA nor salt, which it
    keeps apart in the tree by ``extra_key``. An empty namespace keeps SGLang's keys, so that stores
    filled by other servers stay useful; any other one is hashed into the key together with its
    length, so that no namespace can imitate another.
    """
    if not extra_key:
        return list(hashes)
    name = extra_key.encode()
    seed = hashlib.sha256(b"sglang extra_key" + len(name).to_bytes(8, "little") + name)
    keys = []
    for page in hashes:
        hasher = seed.copy()
        hasher.update(bytes.fromhex(page))
        keys.append(hasher.hexdigest())
    return keys
