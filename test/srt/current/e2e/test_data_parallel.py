"""Pairs of SGLang 0.5.23 of two data parallel servers each, with the group ``lead``."""

from __future__ import annotations

from pathlib import Path

from benchmark.harness import metrics
from current.e2e.support import LEAD, Talks, play


def test_two_servers_as_one(talks: Talks, tmp_path: Path) -> None:
    """Guards against a notice to another rank of prefill than the one that has the request."""
    page = play(talks, tmp_path, LEAD, data_parallel="servers")
    counts = metrics.by_labels(page, metrics.TURNS, "where", "dp_rank")
    assert all(counts["local", rank] and counts["remote", rank] for rank in "01"), counts
