"""Makes a decode server lose the draft KV of every prefix that a request shares.

A server loads it as ``SGLANG_EXTERNAL_MODEL_PACKAGE``, which it imports at its start; there are no
models in it.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.disaggregation.delta.decode.prefix_tree import PrefixLease

_hand_over = PrefixLease.hand_over


def _lose(lease: PrefixLease, req: Any) -> None:
    pool = lease._tree.draft_pool
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer[lease.indices] = 0
    _hand_over(lease, req)


PrefixLease.hand_over = _lose  # type: ignore[method-assign]
