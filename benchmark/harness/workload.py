"""Seeded loads as token ids. Pure functions: the same arguments give the same prompts."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmark.harness.client import Request


def token_range(model: Path | str, first: int = 16) -> range:
    """Ordinary token ids of a model folder, those below ``first`` left out as likely special."""
    config = json.loads((Path(model) / "config.json").read_text())
    return range(first, int(config["vocab_size"]))


def kv_bytes_per_token(model: Path | str, bytes_per_value: int = 4) -> int:
    """Bytes of KV a token takes in all layers of a model folder (4 bytes a value: float32)."""
    config = json.loads((Path(model) / "config.json").read_text())
    heads = config["num_key_value_heads"] * config["head_dim"]
    return int(config["num_hidden_layers"] * 2 * heads * bytes_per_value)


@dataclass(frozen=True)
class SharedPrefixes:
    """Prompts over ``groups`` prefixes in turn: group 0, 1, ..., 0, 1, ..., all sent for
    ``generated_tokens``.

    Two prompts of a group share their prefix and not one token more, and prompts of different
    groups share nothing, so that what a cache can save is known exactly.
    """

    requests: int
    groups: int
    prefix_tokens: int
    suffix_tokens: int
    generated_tokens: int
    seed: int = 0

    def sent(self, vocabulary: range) -> list[Request]:
        """Labelled ``gGROUP-MEMBER``."""
        rng = random.Random(self.seed)
        starts = rng.sample(vocabulary, self.groups)
        prefixes = [_ids(rng, vocabulary, start, self.prefix_tokens) for start in starts]
        members = -(-self.requests // self.groups)
        suffix_starts = [rng.sample(vocabulary, members) for _ in range(self.groups)]
        requests = []
        for i in range(self.requests):
            member, group = divmod(i, self.groups)
            suffix = _ids(rng, vocabulary, suffix_starts[group][member], self.suffix_tokens)
            prompt, label = prefixes[group] + suffix, f"g{group}-{member}"
            requests.append(Request(prompt, self.generated_tokens, label=label))
        return requests


def pages_bytes(prompt_lengths: Sequence[int], page_size: int, bytes_per_token: int) -> int:
    """Bytes of the pages that whole prompts fill: what moves when nothing is skipped."""
    return sum(-(-n // page_size) * page_size * bytes_per_token for n in prompt_lengths)


def _ids(rng: random.Random, vocabulary: range, first: int, count: int) -> tuple[int, ...]:
    return (first, *rng.choices(vocabulary, k=count - 1))
