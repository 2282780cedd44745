"""What is asked of the pair, what counts as a fault, and what is written."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from benchmark.harness.client import Result
from benchmark.kv_transfer.blackbox import report
from benchmark.kv_transfer.blackbox.report import Asked
from benchmark.kv_transfer.blackbox.run import Load, check_sizes, configure, faults, join, requests
from benchmark.kv_transfer.blackbox.stages import RoomStages, Transfer
from sglang.srt.disaggregation.delta.logs import Admitted, EventLog

ROOM = RoomStages(
    room=1,
    missing=(),
    rid="64-0-first",
    prompt_tokens=64,
    prefix_tokens=0,
    chunks=1,
    bootstrap_s=0.003,
    prefill_s=0.5,
    last=Transfer(0.001, 0.002, 0.004, 0.25, descriptors=4, bytes=2**20),
    whole=Transfer(0.001, 0.002, 0.004, 0.25, descriptors=4, bytes=2**20),
    notice_s=0.005,
    total_s=0.765,
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    config = {"vocab_size": 688, "max_position_embeddings": 1024}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def asked(label: str, **changes: object) -> Asked:
    stages = dataclasses.replace(ROOM, **changes)  # type: ignore[arg-type]
    return Asked(label, 64, label.endswith("again"), 0.8, 0, stages)


def answered(label: str, ids: list[int], error: str | None = None) -> Result:
    return Result(label, 0.0, output_ids=ids, prompt_tokens=64, error=error)


def test_every_prompt_twice_in_a_row(model: Path) -> None:
    """Guards against prompts that share a beginning, which a tree would find, and against a second
    request that comes when others have driven the first one's KV out."""
    load = Load(sizes=(64, 128), repeats=2)
    found = requests(model, load)
    assert [len(r.prompt) for r in found] == [64, 64, 128, 128] * 2
    assert all(r.prompt == s.prompt for r, s in zip(found[::2], found[1::2], strict=True))
    assert len({r.prompt[0] for r in found}) == 4
    assert [r.extra["rid"] for r in found] == [r.label for r in found]
    assert len({r.label for r in found}) == 8
    assert requests(model, load) == found


def test_sizes_that_cannot_be_asked(model: Path) -> None:
    """Guards against a size that is cut silently; a model of our own takes any length."""
    with pytest.raises(ValueError, match="--sizes: 100 is no whole number of pages of 16"):
        check_sizes(model, Load(sizes=(100,)), may_stretch=True)
    with pytest.raises(ValueError, match="--sizes: 1024 does not fit"):
        check_sizes(model, Load(sizes=(1024,)), may_stretch=False)
    check_sizes(model, Load(sizes=(1024,)), may_stretch=True)
    assert configure(model, Load(sizes=(512,)), model).decode_args == ()
    stretched = configure(model, Load(sizes=(1024,)), model)
    assert "max_position_embeddings" in stretched.prefill_args[1]
    assert stretched.prefill_args == stretched.decode_args


def test_a_run_without_faults() -> None:
    """Guards the guards: what is right is not reported."""
    results = [answered("64-0-first", [1, 2]), answered("64-0-again", [1, 2])]
    assert faults(results, [asked("64-0-first"), asked("64-0-again", prefix_tokens=64)], 16) == []


def test_faults_are_named() -> None:
    """Guards against tables of a run in which something went wrong unnoticed."""
    results = [answered("64-0-first", [1, 2]), answered("64-0-again", [1, 3])]
    results.append(answered("64-1-first", [], error="503"))
    first = asked("64-0-first", missing=("announced", "arrived"), prefix_tokens=16)
    assert faults(results, [first], 16) == [
        "64-1-first: 503",
        "64-0-again: another answer than 64-0-first",
        "64-0-again: the decode server's event log does not know it",
        "64-0-first: room 1 has no record of announced, arrived",
        "64-0-first: decode had 16 of its tokens, not 0",
    ]
    missed = [asked("64-0-again", prefix_tokens=0)]
    assert faults([], missed, 16) == ["64-0-again: decode had 0 of its tokens, not 64"]


def test_requests_and_rooms_meet_by_request_id(tmp_path: Path) -> None:
    """Guards against joining by time, which holds only while nobody else asks."""
    with (tmp_path / "decode-1.jsonl").open("ab", buffering=0) as file:
        for room, rid in ((5, "64-0-again"), (4, "warm-up"), (6, "64-0-first")):
            record = Admitted(
                at=room, room=room, rid=rid, prompt_tokens=64, prefix_tokens=0, pages=[]
            )
            EventLog(file).write(record)
    results = [answered("64-0-first", [1]), answered("64-0-again", [1]), answered("64-1-first", [])]
    found = join(results, tmp_path)
    assert [(a.label, a.again, a.stages.room) for a in found] == [
        ("64-0-first", False, 6),
        ("64-0-again", True, 5),
    ]


def test_what_the_transfer_adds() -> None:
    """Guards the sum that the table is read for, and its unit."""
    assert report.without_prefill(ROOM) == pytest.approx(0.265)
    assert report.gigabytes_per_s(ROOM) == pytest.approx(2**20 / (0.004 + 0.25) / 1e9)
    assert report.gigabytes_per_s(dataclasses.replace(ROOM, whole=None)) is None
    assert sum(value(ROOM) or 0.0 for value in report.STAGES.values()) == pytest.approx(0.265)


def test_lines_tables_and_plot(tmp_path: Path) -> None:
    """Guards against output that breaks where a stage is unknown, or that leaves one out."""
    rows = [asked("64-0-first"), asked("64-0-again", last=None, whole=None, prefill_s=None)]
    report.write_lines(tmp_path / "r.jsonl", rows)
    report.write_lines(tmp_path / "r.jsonl", rows)  # a second run replaces the first one's
    first, again = map(json.loads, (tmp_path / "r.jsonl").read_text().splitlines())
    assert first["stages"]["last"]["wire_s"] == 0.25
    assert again["stages"]["last"] is None

    console = Console(file=io.StringIO(), width=200)
    report.print_stages("New", rows[:1], console)
    report.print_stages("Again", rows[1:], console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(name in text for name in report.STAGES)
    assert all(cell in text for cell in (" 500 ", " 250 ", " 265 ", " 1,024 "))
    assert "nan" not in text
    report.write_markdown(tmp_path / "r.md", "# Two kinds", rows)
    written = (tmp_path / "r.md").read_text()
    assert written.startswith("# Two kinds\n\n## A new prompt\n\n| prompt, tokens | 64 |\n| --- |")
    assert written.count("| wire | 250 |") == written.count("| wire | - |") == 1
    report.draw(tmp_path / "p.png", rows)
    assert (tmp_path / "p.png").stat().st_size > 1000
