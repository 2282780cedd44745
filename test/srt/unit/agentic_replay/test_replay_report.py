"""Numbers from outcomes."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from benchmark.agentic.replay.classes import Classes
from benchmark.agentic.replay.outcome import Outcome
from benchmark.agentic.replay.report import client, most_open, report
from benchmark.agentic.replay.tables import show


def outcome(index: int, **more: Any) -> Outcome:
    fields: dict[str, Any] = {
        "index": index,
        "prompt_tokens": 100,
        "wanted_tokens": 3,
        "trace_new_tokens": 50,
        "cached_tokens": 40,
        "new_tokens": 60,
        "output_tokens": 3,
        "request_class": "WARM",
        "scheduled_s": float(index),
        "started_s": float(index),
        "sent_s": float(index),
        "first_token_s": index + 0.5,
        "finished_s": index + 1.0,
        "late_s": 0.001,
        "ttft_s": 0.5,
        "tpot_s": 0.25,
        "e2e_s": 1.0,
        "itl_s": (0.2, 0.3),
        "prefill_worker": "w0",
        "decode_worker": "w0",
    }
    return Outcome(**{**fields, **more})


def test_percentiles_are_over_answers_and_failures_are_counted_apart() -> None:
    """Guards against requests that failed fast and make a server look quick."""
    outcomes = [outcome(i, ttft_s=0.01 * i) for i in range(101)]
    outcomes += [outcome(101, error="abort", ttft_s=1e-9, output_tokens=1)]
    result = report(outcomes, Classes())
    assert (result.overall.requests, result.overall.failed) == (102, 1)
    ttft = result.overall.ttft_s
    assert (ttft.p50, ttft.p90, ttft.p99) == pytest.approx((0.5, 0.9, 0.99))
    assert result.overall.output_tokens == 303
    assert result.overall.requests_per_s == pytest.approx(101 / 102)
    assert result.errors == {"abort": 1}


def test_inter_token_latency_is_over_tokens() -> None:
    """Guards against a mean a request, which hides the stalls of a decode batch."""
    outcomes = [outcome(i) for i in range(9)] + [outcome(9, itl_s=(0.2, 5.0))]
    assert report(outcomes, Classes()).overall.itl_s.p99 > 4


def test_groups_by_class_and_by_worker() -> None:
    """Guards the hit rate of each worker, and requests that fall into no class or into two."""
    outcomes = [
        outcome(0, trace_new_tokens=10, cached_tokens=90, prefill_worker="p0"),
        outcome(1, trace_new_tokens=15, cached_tokens=0, prefill_worker="p1"),
        outcome(2, trace_new_tokens=30, cached_tokens=None, new_tokens=None, prefill_worker="p1"),
    ]
    result = report(outcomes, Classes(15, 20))
    assert {name: g.requests for name, g in result.by_class.items()} == {
        "WARM": 1,
        "MEDIUM": 1,
        "HEAVY": 1,
    }
    rates = {name: g.hit_rate for name, g in result.by_prefill_worker.items()}
    assert rates == {"p0": 0.9, "p1": 0.0}
    assert result.by_decode_worker["w0"].hit_rate == 0.45  # of 200 tokens that were reported on


def test_late_sending_is_said_aloud(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against a client's limit published as a server's."""
    fine = [outcome(i) for i in range(100)]
    assert client(fine).warnings() == []
    late = fine[:95] + [outcome(i, late_s=0.2) for i in range(95, 100)]
    assert "sent late" in client(late).warnings()[0]
    assert client(late).warnings(limit_s=0.3) == []
    show(report(late, Classes()), Console(width=200))
    assert "The client was the bottleneck" in capsys.readouterr().out


def test_late_reading_and_missing_files_too() -> None:
    """Guards against token times that hold this process's own delay."""
    lagging = [outcome(i, loop_lag_s=0.3) for i in range(9)]
    assert "late in reading" in client(lagging).warnings()[0]
    assert "ulimit" in client([outcome(0, error="open_files")]).warnings()[0]


def test_open_at_once() -> None:
    """Guards against counting two requests of which one began as the other ended."""
    assert most_open([outcome(i) for i in range(5)]) == 1
    assert most_open([outcome(i, finished_s=i + 2.5) for i in range(5)]) == 3


def test_a_report_of_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against a crash where every request was left out or a run was stopped at once."""
    show(report([], Classes()), Console(width=200))
    assert "at most 0 requests" in capsys.readouterr().out
