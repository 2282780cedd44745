"""Rooms and numbers of the KV transfer benchmark, and the processes of a run."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmark.kv_transfer import summary
from benchmark.kv_transfer.runs import RUNS, Room, Round, deal

ROOT = Path(__file__).parents[4]
NO_PAGES = np.empty(0, dtype=np.int32)
STALL = dataclasses.replace(RUNS["stall"], rooms=4, peers=2)


def test_rooms_are_dealt_to_the_peers_in_turn() -> None:
    """Guards against one peer with all the rooms, and against slots or pages shared by two rooms of
    a peer, which would flatter an arm; and against page 0, which no request owns."""
    run = dataclasses.replace(RUNS["fleet"], tokens=(2, 3), page_size=1, rooms=10, peers=4)
    rooms = deal(run, 3)
    assert len({room.number for room in rooms}) == 10
    shares = [[room for room in rooms if room.peer == peer] for peer in range(4)]
    assert [len(share) for share in shares] == [3, 3, 2, 2]
    for share in shares:
        assert len({room.slot for room in share}) == len(share)
        for side in ("source", "destination"):
            pages = np.concatenate([getattr(room, side) for room in share])
            assert len(set(pages)) == len(pages) and 0 < min(pages) <= max(pages) < run.pool_pages


def room(total: float, outcome: str = "done", peer: int = 0, error: str = "") -> Room:
    """Return a room that took ``total`` seconds, plus a tenth until decode noticed."""
    arrived = 100.0 + total * 1.1 if outcome == "done" else 0.0
    times = {"began": 100.0, "ended": 100.0 + total, "arrived": arrived, "send_s": total / 10}
    return Room(1, peer, NO_PAGES, NO_PAGES, 0, outcome=outcome, error=error, **times)


def test_numbers_of_known_rounds() -> None:
    """Guards against failed rooms counted as fast ones, and rates over the wrong time."""
    rounds = [
        Round([room(1.0), room(3.0)], 4.0, 1.0, 10**9, peer_cpu_s=0.5),
        Round([room(2.0), room(0.001, "failed")], 1.0, 2.0, 10**9, peer_cpu_s=0.5),
    ]
    summary_ = summary.summarize(rounds)
    assert (summary_["rooms"], summary_["failed"]) == (4, 1)
    assert summary_["total_ms"] == pytest.approx({"p50": 2000, "p99": 2980})
    assert summary_["until_decode_sees_it_ms"]["p50"] == pytest.approx(2200)
    assert summary_["send_us"]["p50"] == pytest.approx(150_000)
    rates = [summary_[key] for key in ("gb_per_s", "cpu_s_per_gb", "decode_cpu_s_per_gb", "cores")]
    assert rates == pytest.approx([2 / 5, 1.5, 0.5, 4 / 5])
    assert summary_["room_mb"] == pytest.approx(2e3 / 3)


def test_gaps_of_known_turns() -> None:
    """Guards against a turn that waits for a core and is counted as blocked."""
    turns = np.array([[0.010, 0.002, 0.007], [0.004, 0.002, 0.0]])
    gaps = summary.gaps([Round([], 1.0, 1.0, 0, turns), Round([], 1.0, 1.0, 0)])
    assert gaps["turns"] == 2 and gaps["gap_ms"]["largest"] == pytest.approx(10)
    assert gaps["gap_without_waiting_for_a_core_ms"]["largest"] == pytest.approx(4)
    assert gaps["longest_blocked_ms"] == pytest.approx(2)


def test_bounds_of_a_stopped_peer() -> None:
    """Guards against rooms of the stopped peer that hang, fail late or omit its name; and against
    other rooms that wait."""
    running = Round([room(1.0), room(1.0, peer=1)] * 2, 1.0, 1.0, 0)

    def holds(others: float, *stopped: Room) -> list[bool]:
        halted = Round([room(others), room(others), *stopped], 1.0, 1.0, 0, stopped="agent-2")
        numbers = summary.stalls([running, halted], STALL)
        return [bound.holds for bound in summary.verdicts("stall", {"ours": numbers}, STALL)]

    failed, late = (room(s, "failed", 1, "decode rank agent-2 is late") for s in (5.0, 9.0))
    assert holds(1.1, failed, failed) == [True, True, True]
    assert holds(1.3, failed, failed) == [True, False, True]
    for wrong in (late, room(5.0, "failed", 1, "late"), room(20.0, "stuck", 1)):
        assert holds(1.0, failed, wrong) == [True, True, False]


@pytest.mark.slow
def test_a_run(tmp_path: Path) -> None:
    """Guards against managers, processes or loops that no other test builds: with both forms of
    metadata, and with pages that are compared."""
    command = [
        *(sys.executable, "-m", "benchmark", "kv_transfer", "fleet", "--out", str(tmp_path)),
        *("--arms", "ours,radix", "--tokens", "32,64"),
        *("--passes", "1", "--rounds", "1", "--rooms", "4"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert (tmp_path / "fleet-nixl.json").exists(), done.stdout + done.stderr
    results = json.loads((tmp_path / "fleet-nixl.json").read_text())["results"]
    loads = [(arm, tokens) for tokens in (32, 64) for arm in ("ours", "radix")]
    assert [(result["arm"], result["tokens"]) for result in results] == loads
    assert all(result["rooms"] == 4 and result["failed"] == 0 for result in results)
