"""Which tier cached tokens came from, as the servers count them.

SGLang adds a request's cached-token details to a counter, with the source as a label, when the
request has finished.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import astuple, dataclass

from benchmark.harness import metrics

CACHED = "sglang:cached_tokens_total"
PROMPT = "sglang:prompt_tokens_total"
_STORAGE = "storage_"  # followed by the name of the backend


@dataclass(frozen=True)
class Hits:
    """Prompt tokens of finished requests, and those of them found in each tier."""

    prompt: float = 0.0
    device: float = 0.0
    host: float = 0.0
    storage: float = 0.0

    @property
    def cached(self) -> float:
        return self.device + self.host + self.storage

    def rate(self, tokens: float) -> float:
        """``tokens`` over all prompt tokens."""
        return tokens / self.prompt if self.prompt else 0.0

    def __add__(self, other: Hits) -> Hits:
        return Hits(*map(operator.add, astuple(self), astuple(other)))

    def since(self, before: Hits) -> Hits:
        """What was counted after ``before``."""
        return Hits(*map(operator.sub, astuple(self), astuple(before)))


def total(pages: Iterable[str]) -> Hits:
    """Of several servers' metrics pages.

    Raises:
        ValueError: a server counts cached tokens without their source.
    """
    return sum((hits(page) for page in pages), Hits())


def hits(page: str) -> Hits:
    """Of one server's metrics page."""
    tiers = {"device": 0.0, "host": 0.0, "storage": 0.0}
    for (source,), tokens in metrics.by_labels(page, CACHED, "cache_source").items():
        tier = "storage" if source.startswith(_STORAGE) else source
        if tier not in tiers:
            raise ValueError(f"{CACHED} has tokens of an unknown source: {source}")
        tiers[tier] += tokens
    return Hits(metrics.parse(page).get(PROMPT, 0.0), **tiers)
