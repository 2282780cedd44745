"""A study of a fleet of stub servers given by address: one command, one page."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmark.agentic.studies import cli, record
from benchmark.harness.environment import commit
from benchmark.traces.generate import generate
from benchmark.traces.record import write
from component.agentic import stub


@pytest.fixture(scope="module")
def urls() -> Iterator[list[str]]:
    """Two aggregated servers, a prefill and a decode server."""
    with (
        stub.thread("colocated", 0.004) as a,
        stub.thread("colocated", 0.004) as b,
        stub.thread("prefill") as p,
        stub.thread("decode", 0.001) as d,
    ):
        yield [a, b, p, d]


@pytest.fixture
def trace(tmp_path: Path) -> str:
    write(tmp_path / "trace.jsonl", generate(300, 1))
    return str(tmp_path / "trace.jsonl")


def fleet(tmp_path: Path, text: str) -> str:
    sizes = "block_tokens: 16\nmax_answer_tokens: 20\npool_tokens: 8800\nwarm_up: 1\n"
    (tmp_path / "fleet.yaml").write_text(sizes + text)
    return str(tmp_path / "fleet.yaml")


def test_three_urls_and_a_trace_give_a_page(
    urls: list[str], trace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the newcomer's command, with a key: the page begins with its answer and an interval,
    and contains neither an address nor the key."""
    monkeypatch.setenv("FLEET_KEY", "sk-secret")
    file = fleet(
        tmp_path,
        f"api_key_env: FLEET_KEY\naggregated: [{urls[0]}, {urls[1]}]\ndecode: [{urls[3]}]\n"
        f"prefill: [{{url: {urls[2]}, bootstrap_port: 8998}}]\n",
    )
    out = tmp_path / "run"
    sizes = ("--requests", "16", "--sessions", "4", "--rounds", "3")
    words = ["worth", "--fleet", file, "--trace", trace, *sizes]
    assert cli.run([*words, "--out", str(out)]) == 0

    text = (out / "page.md").read_text()
    first = text.split("\n\n")[1]
    # The test does not check which stub is faster, because the machine may be busy.
    assert first.startswith("At 4 sessions at once, **") and "[" in first
    assert "2 aggregated" in first and "pd" in first
    assert "; sent from " in text and "(2 aggregated, pd: 1P 1D; the question counts" in text
    for secret in (*urls, "sk-secret", str(tmp_path)):
        assert secret not in text + (out / "run.json").read_text()
    loaded = record.load(out)
    of_arm = {arm: [c for c in loaded.cells if c.arm == arm] for arm in loaded.titles}
    assert {cell.via for cell in of_arm["aggregated"]} == {"our router, linear"}
    assert "PD, stock" not in text.split("## Before")[0] and "pd-stock, pd-patched" in text
    assert "run worth --fleet fleet.yaml --trace trace.jsonl --requests" in text
    numbers = json.loads((out / "summary.json").read_text())["loads"]
    assert numbers["4"]["pd"]["failed"] == 0 and len(numbers["4"]["pd"]["rounds"]) == 3
    assert (out / "load.svg").exists() and loaded.trace["source"] == "trace.jsonl"
    assert all(cell.samples and not cell.unflushed for cell in of_arm["pd"])
    assert any(
        len({cell.outcomes[0].session_id for cell in cells}) > 1 for cells in of_arm.values()
    )

    assert cli.run([*words, "--out", str(out), "--resume", "--sessions", "5"]) == 2
    fleet_text = Path(file).read_text()
    Path(file).write_text(fleet_text.replace("max_answer_tokens: 20", "max_answer_tokens: 30"))
    assert cli.run([*words, "--out", str(out), "--resume"]) == 2, "answers would be longer"
    Path(file).write_text(fleet_text)
    loaded.cells.pop()
    loaded.environment["commit"] = "earlier"
    record.save(out, loaded)
    assert cli.run([*words, "--out", str(out), "--resume"]) == 0  # one load is sent again
    assert record.load(out).environment["commit"] == f"earlier and {commit()}"
    before = (out / "requests.jsonl").read_bytes()
    assert cli.run([*words, "--out", str(out), "--resume"]) == 0  # no load is left to send
    assert (out / "requests.jsonl").read_bytes() == before
    text = (out / "page.md").read_text()
    assert cli.report([str(out), "--page", str(tmp_path / "again")]) == 0
    assert (tmp_path / "again" / "page.md").read_text() == text
    assert cli.compare([str(out), str(out), "--page", str(tmp_path / "both")]) == 0
    both = (tmp_path / "both" / "page.md").read_text()
    assert "| 4 | before: pd |" in both and "| 4 | after: pd |" in both


def test_several_urls_get_a_router_and_openai_endpoints_are_counted(
    urls: list[str], trace: str, tmp_path: Path
) -> None:
    """Guards fleets with OpenAI's API, and a comparison of policies on one setup."""
    file = fleet(tmp_path, f"endpoint: chat\naggregated: [{urls[0]}, {urls[1]}]\n")
    out = tmp_path / "run"
    words = ["linear_lmetric", "--fleet", file, "--trace", trace, "--out", str(out)]
    sizes = ("--requests", "8", "--rounds", "1", "--sessions", "4")
    assert cli.run([*words, *sizes, "--arms", "^(linear|lmetric)$"]) == 0
    run = record.load(out)
    assert list(run.titles) == ["linear", "lmetric"]
    for cell in run.cells:
        assert cell.outcomes and all(o.error is None for o in cell.outcomes)
        assert all(o.output_tokens == o.wanted_tokens for o in cell.outcomes)
        assert {o.decode_worker for o in cell.outcomes} == set(urls[:2])
        assert cell.via == f"our router, {cell.arm}"
    assert "No verdict: 1 round" in (out / "page.md").read_text()


STUDY = """
title: A grid
question: Which?
arms:
  slow: {title: slow}
  fast: {title: fast}
made: {first_tokens: 64, turns: 3, turn_tokens: 16, answer_tokens: 8, cold_tokens: 200}
grid: {cold_share: [0.0, 0.3]}
load: {sessions: [1, 4], think_s: 0, window: {warm_up: 4, requests: 20, of_class: 3, limit_s: 120}}
rounds: 3
claims:
  - {text: fast is faster, arm: fast, over: slow, of: e2e, at: 4, at_most: 1, theirs: "0.5, paper"}
"""


def test_a_steady_grid_gives_a_page_and_a_picture(tmp_path: Path) -> None:
    """Guards steady loads from the file to the page: cells for each load, the claim, equal answers,
    only counted requests in the numbers; and a stopped run that resumes."""
    study, out = tmp_path / "study.yaml", tmp_path / "run"
    study.write_text(STUDY)
    with (
        stub.thread("colocated", 0.008) as slow,
        stub.thread("colocated", 0.001) as fast,
    ):
        setups = f"{{slow: {{aggregated: [{slow}]}}, fast: {{aggregated: [{fast}]}}}}"
        file = fleet(tmp_path, f"setups: {setups}\n")
        words = [str(study), "--fleet", file, "--out", str(out)]
        assert cli.run(words) == 0
        run = record.load(out)
        assert len(run.cells) == 2 * 3 * 4
        run.cells = run.cells[:-1]
        record.save(out, run)
        assert cli.run([*words, "--resume"]) == 0
    run = record.load(out)
    for cell in run.cells:
        opened, closed = cell.span
        counted = cell.counted
        assert len(counted) >= 20 and len(cell.outcomes) > len(counted)
        assert all(opened <= o.started_s < closed and o.error is None for o in counted)
    summary = json.loads((out / "summary.json").read_text())
    assert list(summary["loads"]) == [
        f"{many}, cold_share {share}" for share in ("0", "0.3") for many in (1, 4)
    ]
    assert set(summary["loads"]["4, cold_share 0.3"]["fast"]["classes"]) == {
        "FIRST",
        "LATER",
        "COLD",
    }
    for load, arms in summary["loads"].items():
        for arm in arms.values():
            at_once = arm["numbers"]["at_once"][0] / float(load.partition(",")[0])
            assert 0.5 < at_once <= 1.01, "ended sessions are replaced"
    compared, different = summary["answers"]
    assert compared > 50 and different == 0
    text = (out / "page.md").read_text()
    # The test does not check the certainty, because the machine may be busy.
    assert "Of 4 loads, against slow: **fast** is better in TTFT at " in text
    assert re.search(
        r"\| fast is faster \| 4, cold_share 0.3 \| 0\.5, paper; .* \| (agrees|no verdict) \|",
        text,
    )
    assert "\n| 4, cold_share 0.3 | fast | " in text.split("## Per cold prompt")[1]
    assert "grid.svg" in text and (out / "grid.svg").exists()
    assert "0 of them differently" in text


def test_a_server_that_is_not_there_is_named(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = fleet(tmp_path, "aggregated: ['http://127.0.0.1:9']\n")
    words = ["worth", "--fleet", file, "--trace", trace, "--out", str(tmp_path / "run")]
    assert cli.run([*words, "--arms", "aggregated", "--sessions", "1"]) == 1
    assert "http://127.0.0.1:9 cannot be reached" in " ".join(capsys.readouterr().err.split())
