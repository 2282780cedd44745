"""Whether this side kept up."""

from __future__ import annotations

from typing import Any

from benchmark.agentic.load.outcome import Outcome, client, most_open


def outcome(index: int, **more: Any) -> Outcome:
    fields: dict[str, Any] = {
        "index": index,
        "prompt_tokens": 100,
        "wanted_tokens": 3,
        "trace_new_tokens": 50,
        "cached_tokens": 40,
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


def test_late_sending_is_said_aloud() -> None:
    """Guards against a client's limit published as a server's."""
    fine = [outcome(i) for i in range(100)]
    assert not client(fine).was_the_bottleneck
    assert client(fine[:95] + [outcome(i, late_s=0.2) for i in range(95, 100)]).was_the_bottleneck


def test_late_reading_and_missing_files_too() -> None:
    """Guards against token times that hold this process's own delay."""
    assert client([outcome(i, loop_lag_s=0.3) for i in range(9)]).was_the_bottleneck
    assert client([outcome(0, error="open_files")]).was_the_bottleneck
    assert not client([]).was_the_bottleneck


def test_open_at_once() -> None:
    """Guards against counting two requests of which one began as the other ended."""
    assert most_open([outcome(i) for i in range(5)]) == 1
    assert most_open([outcome(i, finished_s=i + 2.5) for i in range(5)]) == 3
