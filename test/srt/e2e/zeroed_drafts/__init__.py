"""Makes a decode server lose the draft KV of every prefix that a request shares.

A server loads it as ``SGLANG_EXTERNAL_MODEL_PACKAGE``, which it imports at its start; there are no
models in it.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.disaggregation.delta.decode.tree import PrefixLease

_bind = PrefixLease.bind


def _lose(lease: PrefixLease, *args: Any) -> None:
    pool = lease._tree.draft_pool
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer[lease.indices] = 0
    _bind(lease, *args)


PrefixLease.bind = _lose  # type: ignore[method-assign]
