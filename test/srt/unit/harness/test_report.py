"""Numbers from results: percentiles, gaps between tokens, equality of answers."""

import json
import math
from pathlib import Path

import pytest

from benchmark.harness import report
from benchmark.harness.client import Result
from benchmark.harness.pair import output_ids, peak_running


def result(label: str, ids: list[int], start: float, times: list[float]) -> Result:
    return Result(
        label,
        started_at=start,
        token_times=times,
        output_ids=ids,
        completion_tokens=len(ids),
        finished_at=times[-1],
    )


def test_percentiles_interpolate() -> None:
    """Guards against off-by-one ranks, which show most in short runs."""
    assert report.percentile([3, 1, 2], 50) == 2
    assert report.percentile([0, 10], 90) == 9
    assert report.percentile([5], 99) == 5
    assert math.isnan(report.percentile([], 50))


def test_summary_of_two_requests() -> None:
    """Guards the definitions: TTFT from sending, ITL a request's mean gap, time over all."""
    a = result("a", [1, 2, 3], 0.0, [1.0, 1.5, 2.0])
    b = result("b", [4, 5], 1.0, [4.0, 5.0])
    summary = report.summarize([a, b])
    assert (summary.requests, summary.failed, summary.duration_s) == (2, 0, 5.0)
    assert summary.requests_per_s == pytest.approx(0.4)
    assert summary.output_tokens_per_s == pytest.approx(1.0)
    assert summary.ttft_s.p50 == pytest.approx(2.0)
    assert summary.itl_s.p50 == pytest.approx(0.75)  # of 0.5 and 1.0


def test_failed_requests_do_not_count_as_served() -> None:
    """Guards against an arm that looks fast because its requests failed at once."""
    bad = Result("b", started_at=0.0, finished_at=0.1, error="503")
    summary = report.summarize([result("a", [1], 0.0, [2.0]), bad])
    assert (summary.failed, summary.requests_per_s) == (1, 0.5)
    assert not report.same_answers([[bad], [bad]])
    with pytest.raises(RuntimeError, match="request b: 503"):
        output_ids([bad])


def test_answers_are_compared_by_label() -> None:
    """Guards against arms compared in the order in which requests happened to end."""
    a, b = result("a", [1], 0, [1]), result("b", [2], 0, [1])
    assert report.same_answers([[a, b], [b, a]])
    assert not report.same_answers([[a, b], [a, result("b", [3], 0, [1])]])


def test_files_hold_plain_json(tmp_path: Path) -> None:
    """Guards against NaN in JSON, which most readers refuse."""
    report.write_requests(tmp_path / "r.jsonl", "arm", [result("a", [1], 0.0, [1.0])])
    row = json.loads((tmp_path / "r.jsonl").read_text())
    assert (row["arm"], row["ttft_s"], row["itl_s"]) == ("arm", 1.0, None)
    report.write_summary(tmp_path / "s.json", {"x": report.spread([]), "y": [1 / 3]})
    content = json.loads((tmp_path / "s.json").read_text())
    assert content["x"] == {"count": 0, "mean": None, "p50": None, "p90": None, "p99": None}
    assert content["y"] == [0.333333]


def test_peak_comes_from_the_decode_batches() -> None:
    """Guards against taking a prefill line's running requests for the decode batch."""
    log = (
        "[t] Prefill batch, #new-seq: 1, #running-req: 50, #queue-req: 0\n"
        "[t] Decode batch, #running-req: 2, #token: 10, #prealloc-req: 30\n"
        "[t] Decode batch, #running-req: 11, #token: 90, #prealloc-req: 0\n"
    )
    assert peak_running(log) == 11
    assert peak_running("") == 0
