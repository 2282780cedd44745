"""Numbers and verdicts from rounds. Pure functions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from benchmark.harness.report import Verdict, percentile
from benchmark.kv_transfer.runs import Room, Round, Run

#: Quantity -> a number, or several by name; the quantity's name ends with its unit.
Numbers = dict[str, Any]


def p50_p99(seconds: Iterable[float], unit: float) -> dict[str, float]:
    """Return percentiles in units of ``unit`` seconds; NaN if there are no values."""
    values = [s / unit for s in seconds]
    return {"p50": percentile(values, 50), "p99": percentile(values, 99)}


def rooms_of(rounds: Sequence[Round], outcome: str = "") -> list[Room]:
    """Return the rooms of some rounds, or only those with ``outcome``."""
    rooms = [room for round_ in rounds for room in round_.rooms]
    return [room for room in rooms if not outcome or room.outcome == outcome]


def summarize(rounds: Sequence[Round]) -> Numbers:
    """Return numbers over all rounds of one arm and size; NaN if nothing was sent."""
    rooms, done = rooms_of(rounds), rooms_of(rounds, "done")
    moved = sum(r.moved_bytes for r in rounds)
    gigabytes = moved / 1e9 or math.nan
    wall_s, cpu_s, peer_cpu_s = (
        sum(getattr(r, name) for r in rounds) for name in ("wall_s", "cpu_s", "peer_cpu_s")
    )
    return {
        "rooms": len(rooms),
        "failed": len(rooms) - len(done),
        "room_mb": moved / 1e6 / len(done) if done else math.nan,
        "send_us": p50_p99((room.send_s for room in rooms), 1e-6),
        "send_cpu_us": p50_p99((room.send_cpu_s for room in rooms), 1e-6),
        "total_ms": p50_p99((room.ended - room.began for room in done), 1e-3),
        "until_decode_sees_it_ms": p50_p99(
            (room.arrived - room.began for room in done if room.arrived), 1e-3
        ),
        "gb_per_s": gigabytes / wall_s,
        "cpu_s_per_gb": cpu_s / gigabytes,
        "decode_cpu_s_per_gb": peer_cpu_s / gigabytes,
        "cores": (cpu_s + peer_cpu_s) / wall_s,
    }


def gaps(rounds: Sequence[Round]) -> Numbers:
    """Return numbers over all turns of prefill's loop. A turn's time beyond its CPU time is a wait:
    for a core, or *blocked* by its pause, the interpreter's lock or a lock of the library."""
    took, cpu, ready = np.concatenate([r.turns for r in rounds if r.turns is not None]).T
    return {
        "turns": len(took),
        "gap_ms": p50_p99(took, 1e-3) | {"largest": 1e3 * took.max()},
        "gap_without_waiting_for_a_core_ms": {
            "p99": 1e3 * np.percentile(took - ready, 99),
            "largest": 1e3 * (took - ready).max(),
        },
        "longest_blocked_ms": 1e3 * np.maximum(0.0, took - cpu - ready).max(),
        "cpu_of_a_turn_p50_ms": 1e3 * np.median(cpu),
    }


def stalls(rounds: Sequence[Round], run: Run) -> Numbers:
    """Return numbers of the last peer, which was stopped in some rounds, and of the other peers."""
    last = run.peers - 1
    running = [r for r in rounds if not r.stopped]
    halted = [r for r in rounds if r.stopped]
    others = [room for room in rooms_of(halted) if room.peer != last]
    of_stopped = [(room, r.stopped) for r in halted for room in r.rooms if room.peer == last]
    before, after = (
        p50_p99((r.ended - r.began for r in rooms_of(group, "done") if r.peer != last), 1e-3)
        for group in (running, halted)
    )
    failed = [(room, name) for room, name in of_stopped if room.outcome == "failed"]
    ends = Counter(room.outcome for room, _ in of_stopped)
    return {
        "others_ms": before,
        "others_ms_one_stopped": after,
        "others_p99_growth": after["p99"] / before["p99"] - 1,
        "others_rooms": len(others),
        "others_done": sum(room.outcome == "done" for room in others),
        "rooms_of_the_stopped": {end: ends[end] for end in ("done", "failed", "stuck")},
        "failed_after_s": p50_p99((room.ended - room.began for room, _ in failed), 1.0),
        "failed_with_its_name": sum(name in room.error for room, name in failed),
    }


def verdicts(name: str, by_arm: Mapping[str, Numbers], run: Run) -> list[Verdict]:
    """Return the bounds of the run ``name``, checked against the numbers ``by_arm``."""
    checked = []
    ours, stock = by_arm.get("ours"), by_arm.get("stock")
    if name == "send" and ours and stock:
        p99, ratio = ours["send_us"]["p99"], stock["send_us"]["p50"] / ours["send_us"]["p99"]
        text = f"send p99 of ours is {p99:.0f} us, {ratio:.0f} times less than stock's p50"
        text += "; at most 100 us, at least 20 times"
        checked.append(Verdict(text, p99 <= 100 and ratio >= 20))
    for arm in ("ours", "radix"):
        numbers = by_arm.get(arm)
        if name == "fleet" and numbers:
            tail = numbers["total_ms"]["p99"] / numbers["total_ms"]["p50"]
            text = f"{arm}: p99 of a room is {tail:.2f} times its p50, at most 3"
            checked.append(Verdict(text, tail <= 3))
        if name == "fleet" and numbers and stock:
            share = numbers["gb_per_s"] / stock["gb_per_s"]
            text = f"{arm}: throughput is {share:.2f} of stock's, at least 1"
            checked.append(Verdict(text, share >= 1))
        if name == "gap" and numbers:
            largest = numbers["gap_ms"]["largest"]
            text = f"the largest gap of {arm} is {largest:.1f} ms, below 5"
            checked.append(Verdict(text, largest < 5))
    if name == "stall" and ours:
        done, rooms, growth = (
            ours[key] for key in ("others_done", "others_rooms", "others_p99_growth")
        )
        total, named = sum(ours["rooms_of_the_stopped"].values()), ours["failed_with_its_name"]
        after = ours["failed_after_s"]["p99"]
        checked += [
            Verdict(f"{done} of {rooms} rooms of the other peers are done", done == rooms),
            Verdict(f"the other peers' p99 changes by {growth:+.0%}, at most +20%", growth <= 0.2),
            Verdict(
                f"{named} of the stopped peer's {total} rooms fail with its name, p99 after "
                f"{after:.1f} s (deadline {run.deadline_s:g} s)",
                named == total and after <= run.deadline_s + 2.0,
            ),
        ]
    if name == "idle" and ours:
        share = ours["idle_share_of_a_core"]["workers"]
        checked.append(Verdict(f"idle workers use {share:.2%} of a core, below 1%", share < 0.01))
    return checked
