"""benchmark/local_turns: when a claim is said to hold."""

from __future__ import annotations

import copy
from typing import Any

from benchmark.local_turns import page


def summary() -> dict[str, Any]:
    """Of a run in which every claim just holds."""

    def of(ttft: float, gap: float, rate: float, computed: float = 500.0) -> list[dict[str, Any]]:
        times: dict[str, Any] = {"ttft_later_s": {"p50": ttft}, "gap_s": {"p99": gap}}
        return [{**times, "requests_per_s": rate, "prefill_tokens": computed}]

    return {
        "load": {"talks": 2, "first_tokens": 9, "cold_clients": [0, 2]},
        "runs": {
            page.AGGREGATED: {"0": of(0.1, 0.1, 1.0), "2": of(0.1, 0.4, 1.0)},
            page.STOCK: {"0": of(0.1, 0.1, 1.0), "2": of(0.1, 0.1, 1.0)},
            page.REMOTE: {"0": of(0.2, 0.1, 1.0), "2": of(0.4, 0.02, 1.0)},
            page.ALWAYS: {"0": of(0.1, 0.1, 0.8, 18.0), "2": of(0.1, 0.1, 1.0)},
            page.CHOSEN: {"0": of(0.105, 0.1, 0.95), "2": of(0.0999, 0.0399, 1.85)},
        },
    }


def test_each_claim_can_fail() -> None:
    """Guards against a bound that holds whatever was measured."""
    good = summary()
    held = page.claims(good)
    assert len(held) == 7 and all(claim.holds for claim in held)
    worse: list[tuple[str, str, tuple[str, ...], float]] = [
        (page.CHOSEN, "2", ("ttft_later_s", "p50"), 0.2),
        (page.CHOSEN, "2", ("requests_per_s",), 1.7),
        (page.REMOTE, "2", ("gap_s", "p99"), 0.01),
        (page.CHOSEN, "0", ("ttft_later_s", "p50"), 0.12),
        (page.REMOTE, "0", ("requests_per_s",), 1.1),
        (page.ALWAYS, "0", ("prefill_tokens",), 19.0),
        (page.AGGREGATED, "2", ("gap_s", "p99"), 0.3),
    ]
    for at, (arm, clients, (*path, last), value) in enumerate(worse):
        bad = copy.deepcopy(good)
        numbers = bad["runs"][arm][clients][0]
        for name in path:
            numbers = numbers[name]
        numbers[last] = value
        assert [claim.holds for claim in page.claims(bad)] == [i != at for i in range(7)]
    del good["runs"][page.AGGREGATED]
    assert len(page.claims(good)) == 6
    del good["runs"][page.REMOTE]
    assert page.claims(good) == []
