"""Closed forms: what a pool holds, and what a prefill elsewhere costs and saves.

Lengths and pools in tokens, times in seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class Workload:
    """A steady stream of requests that each start with one of a few prefixes."""

    prefix: int
    suffix: int
    prefixes: int
    """Distinct ones that are in use together."""

    @property
    def prompt(self) -> int:
        return self.prefix + self.suffix


def holds(workload: Workload, pool: float, *, shared: bool, reserved: float = 0.0) -> int:
    """Requests that fit into one decode pool.

    ``reserved``: tokens kept for each one's answer. With ``shared``, a prefix is held once however
    many use it; as many requests as there are prefixes are assumed to use different ones.
    """
    own = workload.suffix + reserved
    whole = workload.prefix + own
    alone = math.floor(pool / whole)
    if not shared or alone < workload.prefixes:
        return alone
    return math.floor((pool - workload.prefixes * workload.prefix) / own)


def pool_tokens(pool_bytes: float, token_bytes: int) -> int:
    """Tokens in so many bytes of KV."""
    return math.floor(pool_bytes / token_bytes)


@dataclass(frozen=True)
class Isolation:
    """A prefill event on a colocated server of ``streams`` decodes against the same apart."""

    tokens: int
    prefill_s: float
    transfer_s: float
    benefit_s: float
    """Decode time that is not lost: each stream would have stood still for the prefill."""

    @property
    def ratio(self) -> float:
        """Transfer charge over benefit."""
        return self.transfer_s / self.benefit_s


def isolation(
    tokens: int, prefill_s: float, transfer_s: float, streams: int, slowdown: float = math.inf
) -> Isolation:
    """The corrected accounting of MB2: ``streams * prefill_s * (1 - 1 / slowdown)``.

    ``slowdown``: TPOT during the prefill over TPOT without; infinite where decode stands still.
    """
    return Isolation(tokens, prefill_s, transfer_s, streams * prefill_s * (1 - 1 / slowdown))
