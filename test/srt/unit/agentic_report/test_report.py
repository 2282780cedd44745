"""The page of the agentic report: what is compared, with what load, and what is said of it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from benchmark.agentic.replay.classes import Classes
from benchmark.agentic.replay.outcome import Outcome
from benchmark.agentic.replay.report import report
from benchmark.agentic.report.arms import BEHIND, Arm, layout, matrix
from benchmark.agentic.report.findings import findings
from benchmark.agentic.report.load import Load, Trace, prepare
from benchmark.agentic.report.measure import Measured, peak_usage
from benchmark.agentic.report.page import page
from benchmark.harness.arm import Traffic
from benchmark.traces.generate import CONVERSATION, generate
from benchmark.traces.read import write

pytestmark = pytest.mark.slow

CLASSES = Classes()
ENVIRONMENT = {"date": "2026-01-01", "machine": "a machine", "sglang": "1", "commit": "c0ffee"}


def outcome(index: int, ttft_s: float, *, late_s: float = 0.0, failed: bool = False) -> Outcome:
    return Outcome(
        index=index,
        prompt_tokens=100,
        wanted_tokens=5,
        trace_new_tokens=100,
        cached_tokens=50,
        new_tokens=50,
        output_tokens=5,
        request_class="WARM",
        scheduled_s=float(index),
        started_s=float(index),
        finished_s=index + 1.0,
        late_s=late_s,
        ttft_s=None if failed else ttft_s,
        tpot_s=0.01,
        e2e_s=1.0,
        error="abort" if failed else None,
        prefill_worker="http://p",
        decode_worker=f"http://d{index % 2}",
    )


def measured(arm: Arm, moved: float, ttft_s: float = 0.1, **of: float) -> Measured:
    outcomes = [outcome(i, ttft_s, late_s=of.get("late_s", 0.0)) for i in range(10)]
    outcomes += [outcome(10 + i, ttft_s, failed=True) for i in range(int(of.get("failed", 0)))]
    traffic = Traffic(moved, 0.0, 1000.0 if arm.variant.radix else 0.0, 250.0, "pages sent")
    return Measured(arm, report(outcomes, CLASSES), traffic, (3,), (0.5,), outcomes)


def arm(name: str) -> Arm:
    return next(found for found in matrix(spinning=True) if found.name == name)


def test_every_group_has_sglangs_own_router() -> None:
    """A comparison of our router with itself would flatter it; and names tell arms apart, as logs
    and figures go by them."""
    arms = matrix()
    for group in {found.group for found in arms}:
        assert any(a.policy.startswith("sglang-router") for a in arms if a.group == group)
    assert len({found.name for found in arms}) == len(arms)


def test_layouts_differ_in_what_the_arm_says(tmp_path: Path) -> None:
    """Equal pools for all servers, the flag on radix arms' decode servers only, engines behind the
    client, and one router, last."""
    load = Load()
    for found in matrix(spinning=True):
        *engines, router = layout(found, tmp_path, load)
        assert router.role == "router" and router.command[0] != BEHIND[0]
        roles = [engine.role for engine in engines]
        expected = ["prefill"] + ["decode"] * found.decodes if found.decodes else []
        assert roles == expected + ["aggregated"] * found.colocated
        for engine in engines:
            command = " ".join(engine.command)
            assert engine.command[: len(BEHIND)] == BEHIND
            assert f"--max-total-tokens {load.pool_tokens}" in command
            flag = "--disaggregation-decode-enable-radix-cache" in command
            assert flag == (found.variant.radix and engine.role == "decode")
            assert engine.env["SGLANG_PATCHSET"] == ("0" if found.variant.stock else "1")
            spins = engine.env.get("SGLANG_DISAGGREGATION_NIXL_PROGRESS_DELAY") == "0"
            assert spins == ("spinning" in found.name)


def test_load_is_sampled_and_scaled(tmp_path: Path) -> None:
    """Whole sessions, about as many requests as asked, over the seconds asked, each within half a
    pool; what is left out is counted."""
    file = tmp_path / "trace.jsonl"
    write(file, generate(3000, 1, CONVERSATION))
    load = Load(requests=100, seconds=20, max_single_turn=0.5, pool_tokens=2048)
    trace = prepare(file, load)
    assert 50 <= len(trace.records) + trace.left_out <= 200
    assert trace.left_out > 0
    assert all(r.input_length + r.output_length <= 1024 for r in trace.records)
    assert trace.records[-1].timestamp / 1000 == pytest.approx(20, rel=0.05)
    assert trace.described.multi_turn_sessions >= 0.5
    assert prepare(file, load) == trace


def test_bad_sizes_name_their_flag() -> None:
    with pytest.raises(ValueError, match="--pool-tokens"):
        Load(pool_tokens=0)


def test_findings_say_when_something_does_not_hold() -> None:
    """Guards against a page that praises whatever came out: the sentence turns with the numbers."""
    base = measured(arm("1P2D round_robin"), 100.0)
    (good,) = findings([base, measured(arm("1P2D delta_kv"), 59.0)])
    assert "0.59 of the bytes (at most 0.6 as asked)" in good and "no difference" in good
    (bad,) = findings([base, measured(arm("1P2D delta_kv"), 61.0, ttft_s=0.2)])
    assert "more than the 0.6 asked" in bad and "TTFT p50 2.00 (worse)" in bad


def test_findings_tell_the_flag_from_the_rest() -> None:
    """Guards against ascribing to the flag what the patch set is worth without it."""
    names = ("1P1D stock", "1P1D patched", "1P1D radix, same router", "1P1D radix, spinning")
    times = (0.4, 0.2, 0.1, 0.3)
    arms = [measured(arm(name), 10.0, ttft_s) for name, ttft_s in zip(names, times, strict=True)]
    thread, flag, both, spinning = findings(arms)
    assert "patched without a flag against the stock release" in thread
    assert "TTFT p50 0.50" in thread and "against patched without it" in flag
    assert "TTFT p50 0.50" in flag and "TTFT p50 0.25" in both
    assert "spinning progress thread" in spinning and "TTFT p50 0.75" in spinning
    (alone,) = findings([arms[0], arms[2]])
    assert "against the stock release" in alone


def test_findings_name_the_client_and_failures() -> None:
    """Numbers of a client that was late are not the servers'; failed requests are not left out."""
    on_time = measured(arm("1P1D radix"), 1.0)
    late, failed = findings([on_time, measured(arm("1P1D stock"), 1.0, late_s=0.2, failed=2)])
    assert "client was a bottleneck" in late and "1P1D stock (200 and 0 ms)" in late
    assert "1P1D radix" not in late
    assert "2 requests failed" in failed and "2 abort" in failed


def test_linear_and_lmetric_are_compared_in_both_places() -> None:
    names = ("colocated linear", "colocated lmetric", "1P2D linear", "1P2D lmetric")
    found = findings([measured(arm(name), 10.0) for name in names])
    assert len(found) == 2 and "hit rate 50.0% and 50.0%" in found[0]
    assert "lmetric moves 1.00 of the bytes" in found[1]


def test_page_has_every_arm_and_well_formed_tables(tmp_path: Path) -> None:
    """Each arm is in each table; each table's rows have as many cells as its head, else it is not
    shown as one."""
    file = tmp_path / "trace.jsonl"
    write(file, generate(500, 1, CONVERSATION))
    load = Load(requests=30)
    trace: Trace = prepare(file, load)
    arms = [measured(found, 10.0) for found in matrix()]
    text = page(arms, trace, load, ENVIRONMENT, "the command", {"A figure": "figure.png"})
    for found in matrix():
        assert text.count(f"| {found.name} |") >= 4, found.name
    tables = re.findall(r"(?:^\|.*\n?)+", text, re.MULTILINE)
    assert len(tables) == 3 + 3
    for table in tables:
        assert len({line.count("|") for line in table.strip().splitlines()}) == 1
    assert "![A figure](figure.png)" in text and "the command" in text
    one = page([replace(arms[0])], trace, load, ENVIRONMENT, "c", {})
    assert "1P1D" not in one.split("## The load")[1]


def test_pool_usage_is_read_from_the_log() -> None:
    log = (
        "Decode batch, #running-req: 1, #token: 5, token usage: 0.19, x\n"
        "Prefill batch, token usage: 0.99\n"
        "Decode batch, #running-req: 1, #token: 5, token usage: 0.42, x\n"
    )
    assert peak_usage(log) == 0.42
    assert peak_usage("") == 0.0
