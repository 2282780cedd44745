"""From rounds to numbers: percentiles of each stage, bandwidth, CPU time. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmark.harness.report import Spread, percentile, spread
from benchmark.kv_transfer.clocks import ThreadUse, Turn
from benchmark.kv_transfer.records import RoomTimes, Round

#: In the names of the threads that carry transfers: ours, and those of SGLang's Mooncake manager.
_WORKERS = ("kv-transfer", "transfer_worker")


@dataclass(frozen=True)
class Summary:
    """One arm on one load. Times in seconds; NaN where an arm cannot tell."""

    rooms: int
    failed: int
    #: A call of ``send`` on the thread of the scheduler.
    send: Spread
    #: CPU time of that thread in it.
    send_cpu: Spread
    #: A room, from its turn (``RoomTimes.began``) until prefill sees that it is done.
    total: Spread
    #: The same until decode sees it.
    arrival: Spread
    room_bytes: float
    #: All bytes over the time from the first ``send`` to the last end, 10**9 bytes a second.
    gb_per_s: float
    #: CPU time of the prefill process, and of the decode processes, for 10**9 bytes.
    cpu_s_per_gb: float
    peer_cpu_s_per_gb: float
    #: That all processes together kept busy: CPU time over time.
    cores: float


def summarize(rounds: Sequence[Round]) -> Summary:
    """All rounds of one load together."""
    rooms = [times for each in rounds for times in each.rooms]
    good = [times for times in rooms if times.outcome == "done"]
    moved = sum(each.moved_bytes for each in rounds)
    gigabytes = moved / 1e9 if moved else math.nan
    return Summary(
        rooms=len(rooms),
        failed=len(rooms) - len(good),
        send=spread([seconds for times in rooms for seconds in times.sends]),
        send_cpu=spread([seconds for times in rooms for seconds in times.send_cpus]),
        total=spread(times.total for times in good),
        arrival=spread([times.arrived - times.began for times in good if times.arrived]),
        room_bytes=moved / len(good) if good else math.nan,
        gb_per_s=gigabytes / sum(each.wall_s for each in rounds),
        cpu_s_per_gb=sum(each.cpu_s for each in rounds) / gigabytes,
        peer_cpu_s_per_gb=sum(each.peer_cpu_s for each in rounds) / gigabytes,
        cores=sum(each.cpu_s + each.peer_cpu_s for each in rounds)
        / sum(each.wall_s for each in rounds),
    )


@dataclass(frozen=True)
class Gaps:
    """Of all turns of an arm. Seconds, but ``turns``."""

    turns: int
    p50: float
    p99: float
    largest: float
    #: The same without the time for which the loop was ready to run and had no core.
    on_core_p99: float
    on_core_largest: float
    #: Most of what one turn waited for no core: its pause, and locks.
    most_blocked: float
    cpu_p50: float


def summarize_turns(turns: Sequence[Turn]) -> Gaps:
    """Percentiles; NaN of nothing."""
    took = [turn.took for turn in turns]
    on_core = [turn.took - turn.ready for turn in turns]
    return Gaps(
        turns=len(turns),
        p50=percentile(took, 50),
        p99=percentile(took, 99),
        largest=max(took, default=math.nan),
        on_core_p99=percentile(on_core, 99),
        on_core_largest=max(on_core, default=math.nan),
        most_blocked=max((turn.blocked for turn in turns), default=math.nan),
        cpu_p50=percentile([turn.cpu for turn in turns], 50),
    )


def totals(rounds: Iterable[Round], *, peers: Sequence[int]) -> list[float]:
    """What the rooms of some peers took that were done."""
    return [
        times.total
        for each in rounds
        for times in each.rooms
        if times.peer in peers and times.outcome == "done"
    ]


def of_peer(rounds: Iterable[Round], peer: int) -> list[RoomTimes]:
    """All rooms of one peer."""
    return [times for each in rounds for times in each.rooms if times.peer == peer]


def thread_groups(uses: Sequence[ThreadUse], seconds: float) -> dict[str, float]:
    """Share of a core that the workers, other Python threads, and native threads (NIXL's, UCX's,
    Mooncake's) used."""
    groups = {"workers": 0.0, "other Python threads": 0.0, "native threads": 0.0}
    for use in uses:
        if use.name.startswith("native "):
            group = "native threads"
        elif any(mark in use.name for mark in _WORKERS):
            group = "workers"
        else:
            group = "other Python threads"
        groups[group] += use.cpu_s / seconds
    return groups
