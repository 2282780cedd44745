"""Stages of a request from made-up event logs with times in whole seconds."""

from __future__ import annotations

import math
import random
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmark.kv_transfer.event_log import life, read, stages, table
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


def admitted(at_s: float, room: int | None = 1) -> Admitted:
    return Admitted(
        at=at_s, room=room, rid=f"r{room}", prompt_tokens=48, prefix_tokens=0, pages=[1, 2, 3]
    )


def sent(at_s: float, room: int = 1, peer: str = "d0") -> Sent:
    return Sent(at=at_s, room=room, peer=peer, source_pages=[7], destination_pages=[1], bytes=100)


def moved(at_s: float, chunk: int, *, is_last: bool, room: int = 1, peer: str = "d0") -> Moved:
    """Return a record with 1 s in the queue, 2 s building, 3 s posting, 4 s on the wire: 10 s in
    all."""
    times = {"queue_s": 1, "build_s": 2, "post_s": 3, "wire_s": 4}
    which = {"room": room, "peer": peer, "chunk": chunk, "is_last": is_last}
    return Moved(at=at_s, **which, **times, descriptors=5, bytes=100)


def whole_room(room: int = 1, start: float = 100) -> list[RoomEvent]:
    """Two chunks to one decode rank, everything recorded."""
    return [
        admitted(start, room),
        Announced(at=start + 3, room=room),
        sent(start + 10, room),
        moved(start + 15, 0, is_last=False, room=room),
        sent(start + 30, room),
        moved(start + 36, 1, is_last=True, room=room),
        Arrived(at=start + 38, room=room),
    ]


def test_stages_of_rooms() -> None:
    """Guards the definitions: a stage that is counted twice or omitted would lead a reader to the
    wrong place. Also guards against a join by position, since each process has its own file and
    rooms overlap, and against records without a room."""
    records = [*whole_room(1, 100), *whole_room(2, 101), admitted(90, room=None)]
    random.Random(0).shuffle(records)
    first, second = stages(records)
    assert [first.room, second.room] == [1, 2]  # in the order of their first times
    assert (first.rid, first.new_tokens, first.missing) == ("r1", 48, ())
    worker = {"queue": 1, "build": 2, "post": 3, "wire": 4}
    assert first.seconds == {"bootstrap": 3, "prefill": 23, **worker, "notice": 2, "all": 38}
    assert second.seconds == first.seconds
    cells = ["3,000", "23,000", "1,000", "2,000", "3,000", "4,000", "2,000", "38,000"]
    assert table([first, second]) == [["64", "2", "0", *cells]]


def test_the_last_rank_ends_a_stage() -> None:
    """Guards against stages that end with the fastest of several ranks, or with the rank whose file
    comes last; and against one rank's transfer that passes for the room's."""
    records = [
        *(admitted(100), admitted(101)),
        *(Announced(at=103, room=1), Announced(at=104, room=1)),
        *(sent(115), moved(120, 0, is_last=True)),
        *(sent(120, peer="d1"), moved(125, 0, is_last=True, peer="d1")),
        *(Arrived(at=123, room=1), Arrived(at=128, room=1)),
    ]
    [room] = stages(reversed(records))  # files in another order
    worker = {"queue": 2, "build": 4, "post": 6, "wire": 8}
    assert room.seconds == {"bootstrap": 4, "prefill": 11, **worker, "notice": 3, "all": 28}
    assert room.missing == ()
    [room] = stages([*whole_room(), admitted(100)])
    assert room.missing == ("moved: 1 of 2 decode ranks", "arrived: 1 of 2 decode ranks")


LAST = {"prefill", "queue", "build", "post", "wire", "notice"}
#: Kind of the missing records, or number of the missing chunk; the report; unknown stages.
HOLES = [
    (Admitted, "admitted", {"bootstrap", "all"}),
    (Announced, "announced", {"bootstrap", "prefill"}),
    (Moved, "moved", LAST),
    (Arrived, "arrived", {"notice", "all"}),
    (0, "moved: a chunk to d0", set()),
    (1, "moved: a chunk to d0", LAST),
]


@pytest.mark.parametrize(("lost", "missing", "unknown"), HOLES)
def test_a_missing_record(lost: object, missing: str, unknown: set[str]) -> None:
    """Guards against a room that is left out, or gets a wrong number, because a log has a hole."""
    records = (r for r in whole_room() if lost not in (type(r), getattr(r, "chunk", None)))
    [room] = stages(records)
    assert room.missing == (missing,)
    assert {stage for stage, seconds in room.seconds.items() if math.isnan(seconds)} == unknown


def test_reading_the_servers_files(tmp_path: Path) -> None:
    """Guards against a reader that silently drops records of the writer."""
    (tmp_path / "prefill-1.jsonl").write_bytes(b"\n".join(map(msgspec.json.encode, whole_room())))
    assert read(tmp_path) == whole_room()
    (tmp_path / "prefill-2.jsonl").write_text('{"type": "unheard of"}\n')
    with pytest.raises(msgspec.DecodeError):
        read(tmp_path)


# ---- one request ----


def local_turn(room: int, start: float) -> list[RoomEvent]:
    """A turn that decode computed."""
    which: dict[str, Any] = {"room": room, "rid": f"r{room}"}
    explanation: dict[str, int | str] = {"turn": "local", "memory_ms": 7}
    taken = {"prompt_tokens": 48, "prefix_tokens": 40, "reason": "short"}
    return [
        TakenLocally(at=start, **which, **taken),
        Computed(at=start + 1, **which),
        Ended(at=start + 2, **which, finish="stop", error="", explanation=explanation),
    ]


def test_local_turns_have_no_stages_of_a_transfer() -> None:
    """Guards against local turns that count as rooms with missing records."""
    assert [room.room for room in stages([*local_turn(1, 100), *whole_room(2)])] == [2]


def test_the_life_of_a_request(tmp_path: Path) -> None:
    """Guards against lines of another request or without the prefill side, whose records have no
    request id, and against an order by file instead of time."""

    def write(name: str, *records: RoomEvent) -> None:
        (tmp_path / f"{name}.jsonl").write_bytes(b"\n".join(map(msgspec.json.encode, records)))

    decode = [r for r in whole_room() if isinstance(r, (Admitted, Arrived))]
    write("decode-1", *decode, *local_turn(2, 100), *local_turn(12, 100))
    write("prefill-1", *(r for r in whole_room() if r not in decode), *whole_room(11)[1:-1])
    lines = [line.split() for line in life("r1", [tmp_path])]
    assert [(line[0], line[2], line[3]) for line in lines] == [
        ("0.0", "decode-1", "admitted"),
        ("3000.0", "prefill-1", "announced"),
        ("10000.0", "prefill-1", "sent"),
        ("15000.0", "prefill-1", "moved"),
        ("30000.0", "prefill-1", "sent"),
        ("36000.0", "prefill-1", "moved"),
        ("38000.0", "decode-1", "arrived"),
    ]
    assert "pages=3" in lines[0] and "prompt_tokens=48" in lines[0]
    local = life("r2", [tmp_path])
    assert [line.split()[3] for line in local] == ["local", "computed", "ended"]
    assert "reason=short" in local[0] and "memory_ms=7" in local[2]
    assert life("r3", [tmp_path]) == []


def test_text_logs_in_the_life_of_a_request(tmp_path: Path) -> None:
    """Guards against lines of other requests whose names contain this one's, and against log lines
    in front of the events that they follow."""
    events, log = tmp_path / "events", tmp_path / "decode.log"
    events.mkdir()
    start = datetime(2026, 1, 2, 3, 4, 5).timestamp()
    (events / "decode-1.jsonl").write_bytes(
        b"\n".join(map(msgspec.json.encode, local_turn(7, start)))
    )
    log.write_text(
        "[2026-01-02 03:04:06 TP0] request r7 (bootstrap_room=7) has waited 10 s\n"
        "[2026-01-02 03:04:06 TP0] request r77 (bootstrap_room=77) has waited 10 s\n"
        "[2026-01-02 03:04:09] room 7: withdrawn\n"
        "a line of r7 without a time\n"
    )
    texts = [line.split("ms", 1)[1].split()[:2] for line in life("r7", [log, events])]
    assert texts == [
        ["decode-1", "local"],
        ["decode", "[2026-01-02"],
        ["decode-1", "computed"],
        ["decode-1", "ended"],
        ["decode", "[2026-01-02"],
    ]
