"""benchmark/local_turns: what the arms run, what is counted, and when a claim is said to hold."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from benchmark.agentic.fleet.rig import layout
from benchmark.harness.client import Result
from benchmark.harness.report import write_summary
from benchmark.harness.variants import LOCAL_ALWAYS
from benchmark.local_turns import compare, measure, page
from benchmark.local_turns.load import Load, Played

SMALL = Load(talks=2, turns=3, first_tokens=9, turn_tokens=4, cold_tokens=7)


def test_arms_differ_in_what_they_are_called() -> None:
    """Guards against a gain that comes from another pool, or from a flag that no column names."""
    seen = {}
    for arm in measure.arms(Load(local_tokens=77)):
        *engines, _ = layout(arm, Path("m"), 5000)
        assert len(engines) == 2
        for engine in engines:
            words = " ".join(engine.command)
            assert "--max-total-tokens 5000" in words
            local = "--disaggregation-decode-local-tokens 77" in words
            radix = "--disaggregation-decode-enable-radix-cache" in words
            always = engine.env.get(LOCAL_ALWAYS) == "1"
            stock = engine.env["SGLANG_PATCHSET"] == "0"
            seen[arm.title, engine.role] = (stock, radix, local, always and local)
    assert seen == {
        ("two aggregated", "aggregated"): (True, False, False, False),
        ("PD, stock", "prefill"): (True, False, False, False),
        ("PD, stock", "decode"): (True, False, False, False),
        ("PD, remote", "prefill"): (False, False, False, False),
        ("PD, remote", "decode"): (False, True, False, False),
        ("PD, always local", "prefill"): (False, False, False, False),
        ("PD, always local", "decode"): (False, True, True, True),
        ("PD, chosen", "prefill"): (False, False, False, False),
        ("PD, chosen", "decode"): (False, True, True, False),
    }


def result(label: str, at: float, *token_times: float, error: str | None = None) -> Result:
    times = list(token_times)
    ids = [len(label), *range(len(times))]
    end = times[-1] if times else at
    return Result(label, at, times, ids, finished_at=end, prompt_tokens=10, error=error)


def test_answers_are_compared_where_all_arms_were_asked() -> None:
    """Guards against a difference, or a failure, that goes unseen among cold prompts."""
    one, two = [result("c0.0", 0.0, 1.0)], [result("c0.0", 0.0, 1.0), result("cold", 0.0, 2.0)]
    assert compare.same_answers([one, two])
    assert not compare.same_answers([one, [result("c0.0", 0.0, 1.0, 2.0)]])
    assert not compare.same_answers([one, [*one, result("cold", 0.0, error="lost")]])


def summary(tmp_path: Path) -> Any:
    """Of a run in which every claim just holds."""

    def of(ttft: float, gap: float, rate: float, computed: float = 500.0) -> measure.Measured:
        one = [Result("c0.0", 0.0, [ttft], finished_at=1.0)]
        one += [Result("c0.1", 0.0, [ttft, ttft + gap], finished_at=2 / rate)]
        gained: dict[str, dict[str, float]] = {
            **{role: {} for role in measure.ENGINES},
            "computed": {"prefill": computed, "decode": 0.0, "aggregated": 0.0},
            "turns": {},
            "times": {},
            "gaps": {},
        }
        return measure.numbers(SMALL, Played(one, [], 1.0), gained)

    runs = {
        page.AGGREGATED: {0: [of(0.1, 0.1, 1.0)], 2: [of(0.1, 0.4, 1.0)]},
        page.STOCK: {0: [of(0.1, 0.1, 1.0)], 2: [of(0.1, 0.1, 1.0)]},
        page.REMOTE: {0: [of(0.2, 0.1, 1.0)], 2: [of(0.4, 0.02, 1.0)]},
        page.ALWAYS: {0: [of(0.1, 0.1, 0.8, 18.0)], 2: [of(0.1, 0.1, 1.0)]},
        page.CHOSEN: {0: [of(0.105, 0.1, 0.95)], 2: [of(0.0999, 0.0399, 1.85)]},
    }
    content = {"load": {**vars(SMALL), "cold_clients": (0, 2)}, "rounds": 1, "runs": runs}
    write_summary(tmp_path / "summary.json", content)
    return json.loads((tmp_path / "summary.json").read_text())


def test_each_claim_can_fail(tmp_path: Path) -> None:
    """Guards against a bound that holds whatever was measured."""
    good = summary(tmp_path)
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
