"""Prompts on their way to this decode server.

When a burst of requests with one new prefix arrives, none of them hits: the first one's KV is
still being moved. Admitting them all would move the prefix once for each and fill the pool with
duplicates. So a request whose *next* tokens after its match are just arriving for another one, from
the same prefill server, waits for those to land. Prefill computes them first in any case, so little
is lost.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Any

from sglang.srt.disaggregation.delta.env import env_int, env_seconds
from sglang.srt.disaggregation.delta.pages import page_ceil

#: (prefill server, extra key, tree node, next tokens). Keys are looked up in every step, and bytes
#: remember their hash.
PrefixKey = tuple[str, str | None, int, bytes]


def window_tokens(page: int) -> int:
    """How many equal next tokens make waiting worth it; zero turns waiting off.

    Raises:
        ValueError: the environment variable is not a number.
    """
    return page_ceil(env_int("SGLANG_DISAGGREGATION_DECODE_PREFIX_WAIT_TOKENS", 256), page)


def wait_seconds() -> float:
    """How long one request waits at most for another one's prefix.

    Raises:
        ValueError: the environment variable is not a number.
    """
    return env_seconds("SGLANG_DISAGGREGATION_DECODE_PREFIX_WAIT_TIMEOUT", 30.0)


def prefix_key(prefill: str, req: Any, node: Any, prefix: int, window: int) -> PrefixKey | None:
    """Where in the tree ``req`` will add KV, and which; None if less than ``window``.

    The node that a match ended at keeps its identity when others split the path above it, so two
    requests with a common continuation have equal keys.
    """
    following = req.origin_input_ids[prefix : prefix + window]
    if window == 0 or len(following) < window:
        return None
    return prefill, req.extra_key, node.id, array("q", following).tobytes()


def arriving(decode_requests: Iterable[Any]) -> set[PrefixKey]:
    """The keys of requests in transfer (set by the prealloc queue when it admits one)."""
    keys = {getattr(decode_req, "arriving_prefix", None) for decode_req in decode_requests}
    return {key for key in keys if key is not None}
