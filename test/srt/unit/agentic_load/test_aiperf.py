"""AIPerf's export, as version 0.13.0 wrote it, and the command that produces it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmark.agentic.load.outcome import Classes
from benchmark.agentic.load.prepare import PromptSource
from benchmark.agentic.load.run import Window
from benchmark.agentic.load.sessions import Turn
from benchmark.agentic.load.sessions import turns as turns_of
from benchmark.aiperf import Program, command, counted, outcomes, profile
from benchmark.harness.command import RunFailed
from benchmark.traces.record import Record

EXPORT = Path(__file__).with_name("aiperf_export.jsonl")
#: Session -> tokens of the prompt and of the answer, as they were sent.
SENT = {"s1": (592, 2), "s2": (256, 4), "s4": (592, 2), "s5": (437, 1), "s6": (370, 3)}


def turns(*names: str) -> list[Turn]:
    return list(turns_of(records(*names), 16, Classes(300, 400)))


def records(*names: str) -> list[Record]:
    return [
        Record(0.0, tokens, answer, tuple(range(100 * i, 100 * i + -(-tokens // 16))), name, 0)
        for i, (name, (tokens, answer)) in enumerate(SENT.items())
        if name in names
    ]


def test_a_recorded_export_is_read() -> None:
    """Guards units, clocks and names: requests keep the trace's index and class, an answer of one
    token has no time per token, and a failed request stays failed."""
    results = {o.session_id: o for o in outcomes(EXPORT, turns(*SENT))}
    assert results.keys() == SENT.keys()
    assert [results[name].index for name in SENT] == list(range(5))
    assert {o.session_id: o.request_class for o in results.values()} == {
        "s1": "HEAVY",
        "s2": "WARM",
        "s4": "HEAVY",
        "s5": "HEAVY",
        "s6": "MEDIUM",
    }
    assert min(result.started_s for result in results.values()) == 0
    request = results["s6"]
    assert (request.ttft_s, request.tpot_s, request.e2e_s) == pytest.approx(
        (0.0142, 0.0057, 0.0257), abs=1e-4
    )
    assert (
        request.itl_s == pytest.approx((0.006, 0.0054), abs=1e-4) and request.prompt_tokens == 233
    )
    assert (
        request.started_s < (request.first_token_s or 0) < request.finished_s
        and request.error is None
    )
    assert request.output_tokens == request.wanted_tokens == 3 and 0 < request.late_s < 0.1
    assert results["s5"].tpot_s is None and results["s5"].itl_s == ()
    failed = results["s1"]
    assert failed.error == "aiperf" and failed.ttft_s is None and failed.e2e_s > 0
    assert (failed.message or "").startswith("InvalidInferenceResultError: No responses")
    with pytest.raises(RunFailed, match="no record has turn 0"):
        outcomes(EXPORT, turns("s2"))


def test_the_command_is_one_of_sessions_or_of_times(tmp_path: Path) -> None:
    how = {"model": "m", "endpoint": "chat", "block_tokens": 16, "timeout_s": 60.0}
    paths = (Program(tmp_path / "aiperf", tmp_path / "t.jsonl"), "http://a", tmp_path)
    arguments = command(*paths, **how, requests=9, sessions=4, headers={"X-Team": "t"})
    text = " ".join(arguments)
    assert "--no-fixed-schedule --concurrency 4 --request-count 9" in text
    assert "--custom-dataset-type mooncake_trace" in text
    assert "--prompt-input-tokens-block-size 16 --tokenizer builtin" in text
    assert arguments[-2:] == ["-H", "X-Team:t"]
    assert "--fixed-schedule --request-count 9" in " ".join(
        command(*paths, **how, requests=9, sessions=None)
    )
    sent, source = turns("s1", "s2"), PromptSource(range(9), 16, endpoint="completions", model="m")
    with pytest.raises(RunFailed, match="--aiperf"):
        profile(*paths[:2], sent, source, tmp_path, None, 0.2, sessions=1, **how)
    lines = [json.loads(line) for line in (tmp_path / "trace.jsonl").read_text().splitlines()]
    assert [(x["session_id"], len(x["payload"]["prompt"])) for x in lines] == [
        (name, SENT[name][0]) for name in ("s1", "s2")
    ]


def test_requests_without_turns_are_counted_in_a_window() -> None:
    """Guards the results of a trace that only AIPerf reads, and against counting the start and end
    of a load."""
    results = outcomes(EXPORT, None)
    assert sorted(o.index for o in results) == list(range(5))
    assert {o.request_class for o in results} == {"ALL"}
    windowed, (opened, closed) = counted(results, Window(warm_up=1, requests=2, of_class=1))
    first = min(o.finished_s for o in windowed)
    inside = [o for o in windowed if o.counted]
    assert inside and all(o.started_s >= first for o in inside) and len(inside) <= 2
    assert opened <= closed
