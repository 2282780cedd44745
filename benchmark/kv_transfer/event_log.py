"""Join the event logs of prefill and decode servers by room, and compute how long stages took.

python -m benchmark.kv_transfer.event_log FOLDER...
python -m benchmark.kv_transfer.event_log FOLDER... [SERVER_LOG...] --request RID

decode   admitted                                                          arrived
            |  bootstrap                                            notice ^
            v                                                              |
prefill  announced --- prefill ---> enqueued -queue-build-post-wire-> moved (last chunk)

Servers take times from their hosts' clocks, which must be synchronized. With ``--request`` the
records of one request are printed, with the lines of servers' text logs that name it or its room.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.console import Console

from benchmark.harness.report import print_table
from sglang.srt.disaggregation.delta.observability import (
    Admitted,
    Announced,
    Arrived,
    Computed,
    Ended,
    Moved,
    RoomEvent,
    Sent,
    TakenLocally,
)

#: Stages of a chunk in a transfer worker.
_WORKER = ("queue", "build", "post", "wire")
STAGES = ("bootstrap", "prefill", *_WORKER, "notice", "all")


@dataclass(frozen=True)
class RoomStages:
    """Stages of one room. With several decode ranks, a stage ends when the last rank ends it."""

    room: int
    #: The request's id, the same on both servers.
    rid: str | None
    #: Tokens of the prompt that decode did not have in its tree.
    new_tokens: int
    #: Seconds by stage; NaN if a record is missing. Queue to wire are of the last chunk, which is
    #: the wait that remains after the computation, summed over the decode ranks. Bootstrap is
    #: negative if prefill read an announcement before decode logged it.
    seconds: dict[str, float]
    #: Records that were not found; empty if the room is complete.
    missing: tuple[str, ...]


def read(*folders: Path) -> list[RoomEvent]:
    """Return all records of event log folders.

    Raises:
        msgspec.DecodeError: a line is not a known record.
    """
    return [record for _, record in _read(folders)]


def _read(folders: Iterable[Path]) -> list[tuple[str, RoomEvent]]:
    """Return all records, each with the name of its process."""
    decoder = msgspec.json.Decoder(RoomEvent)
    return [
        (path.stem, decoder.decode(line))
        for folder in folders
        for path in sorted(folder.glob("*.jsonl"))
        for line in path.read_bytes().splitlines()
    ]


def stages(records: Iterable[RoomEvent]) -> list[RoomStages]:
    """Return one entry for each room of the records, in the order of their first times.

    Records without a room (warm-up and health requests, which move nothing) and those of local
    turns are left out.
    """
    rooms: dict[int, list[Any]] = defaultdict(list)
    for record in sorted(records, key=lambda record: record.at):
        is_moved = not isinstance(record, (TakenLocally, Computed, Ended))
        if is_moved and (room := getattr(record, "room", None)) is not None:
            rooms[room].append(record)
    return [_join(room, of_room) for room, of_room in rooms.items()]


def _join(room: int, records: Sequence[Any]) -> RoomStages:
    """Return the stages of a room. ``records``: its records, by time."""
    by_kind = {
        kind: [record for record in records if isinstance(record, kind)]
        for kind in (Admitted, Announced, Moved, Arrived, Sent)
    }
    admitted, moved, last = (
        by_kind[Admitted],
        by_kind[Moved],
        [record for record in by_kind[Moved] if record.is_last],
    )

    known_at, moved_at, arrived_at = (
        max((record.at for record in kind_records), default=math.nan)
        for kind_records in (by_kind[Announced], last, by_kind[Arrived])
    )
    admitted_at = min((record.at for record in admitted), default=math.nan)
    spent = np.array([[getattr(record, f"{name}_s") for name in _WORKER] for record in last])
    enqueued_at = max(
        (record.at - sum(times) for record, times in zip(last, spent, strict=True)),
        default=math.nan,
    )
    seconds = dict(zip(_WORKER, spent.sum(axis=0) if last else [math.nan] * 4, strict=True))
    seconds |= {"bootstrap": known_at - admitted_at, "prefill": enqueued_at - known_at}
    seconds |= {"notice": arrived_at - moved_at, "all": arrived_at - admitted_at}

    kinds = (Admitted, Announced, Moved, Arrived)
    missing = [kind.__name__.lower() for kind in kinds if not by_kind[kind]]
    posted, done = (Counter(record.peer for record in by_kind[kind]) for kind in (Sent, Moved))
    ended = {record.peer for record in last}
    for peer in sorted(posted.keys() | done.keys()):
        if moved and (peer not in ended or done[peer] < posted[peer]):
            missing.append(f"moved: a chunk to {peer}")
    for name, ranks in (("moved", len(done)), ("arrived", len(by_kind[Arrived]))):
        if 0 < ranks < len(admitted):  # every decode rank admits
            missing.append(f"{name}: {len(admitted) - ranks} of {len(admitted)} decode ranks")
    return RoomStages(
        room=room,
        rid=admitted[0].rid if admitted else None,
        new_tokens=admitted[0].prompt_tokens - admitted[0].prefix_tokens if admitted else 0,
        seconds=seconds,
        missing=tuple(missing),
    )


def table(rooms: Iterable[RoomStages]) -> list[list[str]]:
    """Return a row for each power of two of new tokens: medians in milliseconds of known values."""
    sizes: dict[int, list[RoomStages]] = defaultdict(list)
    for room in rooms:
        sizes[1 << max(room.new_tokens - 1, 0).bit_length()].append(room)
    rows = []
    for size, size_rooms in sorted(sizes.items()):
        cells = []
        for stage in STAGES:
            known = [s for room in size_rooms if not math.isnan(s := room.seconds[stage])]
            cells.append(f"{float(f'{np.median(known) * 1e3:.3g}'):,g}" if known else "-")
        incomplete = sum(bool(room.missing) for room in size_rooms)
        rows.append([f"{size:,}", f"{len(size_rooms):,}", f"{incomplete:,}", *cells])
    return rows


# ---- one request ----

#: Begin of a line of SGLang's text logs: its local time, to the second.
_LOGGED = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)")


def life(rid: str, paths: Iterable[Path]) -> list[str]:
    """Return a line for each record of request ``rid``, by time: milliseconds from its first one,
    the process, the event. ``paths``: folders of event logs, and text logs of servers, of which the
    lines are returned that contain the id or the number of its room."""
    folders, texts = [], []
    for path in paths:
        (folders if path.is_dir() else texts).append(path)
    records = _read(folders)
    rooms = {record.room for _, record in records if getattr(record, "rid", "") == rid}
    rooms.discard(None)
    lines = [
        (record.at, process, _text(record))
        for process, record in records
        if (record.rid == rid if hasattr(record, "rid") else record.room in rooms)
    ]
    names = re.compile("|".join(rf"(?<!\w){re.escape(str(name))}(?!\w)" for name in (rid, *rooms)))
    for path in texts:
        for line in path.read_text(errors="replace").splitlines():
            if (logged := _LOGGED.match(line)) and names.search(line):
                at = datetime.strptime(logged[1], "%Y-%m-%d %H:%M:%S").timestamp()
                lines.append((at, path.stem, line))
    lines.sort()
    return [
        f"{1e3 * (at - lines[0][0]):10.1f} ms  {process:<16} {text}" for at, process, text in lines
    ]


def _text(record: RoomEvent) -> str:
    """Return the kind and the values of a record; of a list its length."""
    values = msgspec.to_builtins(record)
    kind = values.pop("type")
    values |= values.pop("explanation", {})
    shown = (
        f"{name}={len(value) if isinstance(value, list) else value}"
        for name, value in values.items()
        if name not in ("at", "rid")
    )
    return f"{kind:<10} {' '.join(shown)}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmark.kv_transfer.event_log")
    parser.add_argument(
        "folders",
        type=Path,
        nargs="+",
        help="folder with the event logs of both servers; with --request also their text logs",
    )
    parser.add_argument(
        "--request", metavar="RID", help="print the life of the request with this id"
    )
    arguments = parser.parse_args()
    if arguments.request:
        lines = life(arguments.request, arguments.folders)
        print("\n".join(lines) or f"no record of request {arguments.request}")
        return 0 if lines else 1
    rooms = stages(read(*arguments.folders))
    columns = ["new tokens, up to", "rooms", "incomplete", *STAGES]
    print_table("stages of a room, p50, ms", columns, table(rooms), Console())
    return 0


if __name__ == "__main__":
    sys.exit(main())
