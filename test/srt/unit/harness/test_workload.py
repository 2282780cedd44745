"""Loads: what a cache can save in them has to be known exactly, and be the same everywhere."""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

from benchmark.harness import workload
from benchmark.harness.client import Request

VOCABULARY = range(16, 688)


def common(a: Sequence[object], b: Sequence[object]) -> int:
    return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))))


def load(seed: int = 0) -> list[Request]:
    return workload.SharedPrefixes(48, 4, 150, 13, 8, seed).sent(VOCABULARY)


def group(request: Request) -> str:
    return request.label.partition("-")[0]


def test_same_seed_same_prompts() -> None:
    """Guards against arms of a comparison that do different work."""
    assert load() == load()
    assert load(0) != load(1)


def test_prompts_share_exactly_their_groups_prefix() -> None:
    """Guards against a hit that is longer than meant, by chance, and spoils exact byte counts."""
    for a, b in itertools.combinations(load(), 2):
        assert common(a.prompt, b.prompt) == (150 if group(a) == group(b) else 0)


def test_groups_take_turns_and_lengths_are_exact() -> None:
    """Guards against a load in which one group's requests come first and hide contention."""
    prompts = load()
    assert [group(p) for p in prompts[:8]] == ["g0", "g1", "g2", "g3"] * 2
    assert {len(p.prompt) for p in prompts} == {163}
    assert all(token in VOCABULARY for p in prompts for token in p.prompt)
    assert len({p.label for p in prompts}) == 48


def test_whole_prompts_fill_whole_pages() -> None:
    """Guards against counting tokens where pages move."""
    assert workload.pages_bytes([1, 16, 17], page_size=16, bytes_per_token=2) == (1 + 1 + 2) * 32


def test_sizes_come_from_the_models_configuration(tmp_path: Path) -> None:
    """Guards against byte counts that belong to another model."""
    config = {
        "vocab_size": 688,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert workload.token_range(tmp_path) == range(16, 688)
    assert workload.kv_bytes_per_token(tmp_path) == 2048
