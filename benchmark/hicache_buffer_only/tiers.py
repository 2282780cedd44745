"""Which tier cached tokens came from, as the servers count them.

SGLang adds a request's cached-token details to a counter, with the source as a label, when the
request has finished.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

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
        return Hits(
            self.prompt + other.prompt,
            self.device + other.device,
            self.host + other.host,
            self.storage + other.storage,
        )

    def since(self, before: Hits) -> Hits:
        """What was counted after ``before``."""
        return Hits(
            self.prompt - before.prompt,
            self.device - before.device,
            self.host - before.host,
            self.storage - before.storage,
        )


def total(pages: Iterable[str]) -> Hits:
    """Of several servers' metrics pages.

    Raises:
        ValueError: a server counts cached tokens without their source.
    """
    return sum((hits(page) for page in pages), Hits())


def hits(page: str) -> Hits:
    """Of one server's metrics page."""
    counts = {"prompt": 0.0, "device": 0.0, "host": 0.0, "storage": 0.0}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name == PROMPT:
                counts["prompt"] += sample.value
            elif sample.name == CACHED:
                source = sample.labels["cache_source"]
                tier = "storage" if source.startswith(_STORAGE) else source
                if tier not in counts or tier == "prompt":
                    raise ValueError(f"{CACHED} has tokens of an unknown source: {source}")
                counts[tier] += sample.value
    return Hits(**counts)
