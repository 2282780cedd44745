"""The shipped arithmetic model scores with buffer-only HiCache what it scores with SGLang's own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest

from benchmark.harness import checks, metrics
from benchmark.harness.client import Target, send_all
from benchmark.hicache_buffer_only.fleet import hits
from e2e import hicache
from e2e.hicache import Backend, Server
from e2e.test_accuracy import MODEL, PAGE, Graded, grade, held_out

QUESTIONS = 60

T = TypeVar("T")


def score(server: Server) -> Graded:
    """All questions, 16 at once."""
    asked, right = (questions[:QUESTIONS] for questions in held_out())
    found = grade(asyncio.run(send_all(Target(server.url), asked, 16)), right)
    checks.wait_idle(server.process, server.url)
    return found


def tiers(server: Server) -> dict[str, float]:
    return hits(metrics.page(server.url))


def both(ask: Callable[[Server], T], *servers: Server) -> list[T]:
    """What both servers answer, asked at once: each has a core."""
    with ThreadPoolExecutor(len(servers)) as pool:
        return list(pool.map(ask, servers))


@pytest.mark.nightly
def test_both_modes_score_the_same(logs: Path) -> None:
    """KV that comes back wrong from the stage or the store would cost answers: a second pass finds
    every prompt in the store only. Without the second pass's hits the test would say nothing."""
    backends = [
        Backend("file", {}, {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(logs / mode)}, stage)
        for mode, stage in (("cache", False), ("buffer_only", True))
    ]
    with hicache.servers(MODEL, logs, PAGE, backends, 10.0) as (cache, staged):
        expected, found = both(score, cache, staged)
        assert expected.correct >= 0.9 * QUESTIONS
        assert found == expected
        both(Server.flush, cache, staged)
        before = both(tiers, cache, staged)
        assert both(score, cache, staged) == [expected, expected]
        after = both(tiers, cache, staged)
        gained = [metrics.gained(then, now) for now, then in zip(after, before, strict=True)]
        assert all(each["storage"] > each["prompt"] / 4 for each in gained)
        assert gained[1]["host"] == 0
        staged.drained()
