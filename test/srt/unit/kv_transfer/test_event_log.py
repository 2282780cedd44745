"""Stages of a request from made-up event logs, whose times are whole seconds."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest

from benchmark.kv_transfer.event_log import Transfer, read, stages
from sglang.srt.disaggregation.delta.observability import (
    Admitted,
    Announced,
    Arrived,
    Event,
    EventLog,
    Moved,
    Sent,
)


def admitted(at: float, room: int | None = 1, prefix: int = 0) -> Admitted:
    return Admitted(
        at=at, room=room, rid=f"r{room}", prompt_tokens=48, prefix_tokens=prefix, pages=[1, 2, 3]
    )


def sent(at: float, room: int = 1, peer: str = "d0") -> Sent:
    return Sent(at=at, room=room, peer=peer, source_pages=[7], destination_pages=[1], bytes=100)


def moved(at: float, chunk: int, *, is_last: bool, room: int = 1, peer: str = "d0") -> Moved:
    """1 s in the queue, 2 s of building, 3 s of posting, 4 s on the wire: 10 s in all."""
    return Moved(
        at=at,
        room=room,
        peer=peer,
        chunk=chunk,
        is_last=is_last,
        queue_s=1,
        build_s=2,
        post_s=3,
        wire_s=4,
        descriptors=5,
        bytes=100,
    )


def whole_room(room: int = 1, start: float = 100) -> list[Event]:
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


def test_stages_of_a_room() -> None:
    """Guards the definitions: a stage that is counted twice, or nowhere, would lead a reader to
    look for time in the wrong place."""
    [room] = stages(whole_room())
    assert room.missing == ()
    assert (room.room, room.rid, room.prompt_tokens, room.prefix_tokens) == (1, "r1", 48, 0)
    assert room.bootstrap_s == 3
    assert room.prefill_s == 136 - 10 - 103
    assert room.last == Transfer(1, 2, 3, 4, descriptors=5, bytes=100)
    assert room.whole == Transfer(2, 4, 6, 8, descriptors=10, bytes=200)
    assert (room.chunks, room.notice_s, room.total_s) == (2, 2, 38)


def test_records_come_in_any_order_and_rooms_do_not_mix() -> None:
    """Guards against a join by position: each process has a file of its own, and rooms overlap."""
    records = whole_room(1, start=100) + whole_room(2, start=101) + [admitted(90, room=None)]
    random.Random(0).shuffle(records)
    first, second = stages(records)
    assert [first.room, second.room] == [1, 2]  # in the order of their first times
    assert first == stages(whole_room(1, start=100))[0]
    assert second == stages(whole_room(2, start=101))[0]


def test_the_last_rank_ends_a_stage() -> None:
    """Guards against stages that end with the fastest of several ranks, or with the one whose file
    comes last."""
    records = [
        *(admitted(100), admitted(101)),
        *(Announced(at=103, room=1), Announced(at=104, room=1)),
        *(sent(115), moved(120, 0, is_last=True)),
        *(sent(120, peer="d1"), moved(125, 0, is_last=True, peer="d1")),
        *(Arrived(at=123, room=1), Arrived(at=128, room=1)),
    ]
    [room] = stages(reversed(records))  # of files whose names sort otherwise
    assert room.missing == ()
    assert (room.bootstrap_s, room.prefill_s, room.notice_s, room.total_s) == (4, 11, 3, 28)
    assert room.last == room.whole == Transfer(2, 4, 6, 8, descriptors=10, bytes=200)
    assert room.chunks == 1


@pytest.mark.parametrize(
    ("kind", "missing", "unknown"),
    [
        (Admitted, ("admitted",), {"rid", "prompt_tokens", "bootstrap_s", "total_s"}),
        (Announced, ("announced",), {"bootstrap_s", "prefill_s"}),
        (Moved, ("moved",), {"prefill_s", "last", "whole", "notice_s"}),
        (Arrived, ("arrived",), {"notice_s", "total_s"}),
    ],
)
def test_a_record_that_is_not_there(
    kind: type[Event], missing: tuple[str, ...], unknown: set[str]
) -> None:
    """Guards against a room that is left out, or gets a number, where a log has a hole."""
    [room] = stages([r for r in whole_room() if not isinstance(r, kind)])
    assert room.missing == missing
    assert all(getattr(room, name) is None for name in unknown)


def test_a_chunk_that_is_not_there() -> None:
    """Guards against sums over some of a room's chunks that pass for the whole."""
    records = whole_room()
    [room] = stages([r for r in records if not (isinstance(r, Moved) and r.is_last)])
    assert room.missing == ("moved: the last chunk to d0", "moved: 1 of 2 to d0")
    assert room.last is None and room.notice_s is None
    [room] = stages([r for r in records if not (isinstance(r, Moved) and not r.is_last)])
    assert room.missing == ("moved: 1 of 2 to d0",)


def test_a_rank_that_is_not_there() -> None:
    """Guards against taking one decode rank's transfer for the room's."""
    [room] = stages([*whole_room(), admitted(100)])
    assert room.missing == ("moved: 1 of 2 decode ranks", "arrived: 1 of 2 decode ranks")


def test_reading_what_the_servers_write(tmp_path: Path) -> None:
    """Guards against a reader that does not know what the writer writes, and drops it."""
    for side, part in (("prefill", slice(None, None, 2)), ("decode", slice(1, None, 2))):
        with (tmp_path / f"{side}-1.jsonl").open("ab", buffering=0) as file:
            for record in whole_room()[part]:
                EventLog(file).write(record)
    assert sorted(read(tmp_path), key=lambda r: r.at) == whole_room()
    (tmp_path / "prefill-2.jsonl").write_text('{"type": "unheard of"}\n')
    with pytest.raises(msgspec.DecodeError):
        read(tmp_path)


def test_a_request_id_with_lone_surrogates(tmp_path: Path):
    """A client may send one; the scheduler writes it and must not end."""
    path = tmp_path / "prefill-1.jsonl"
    with path.open("wb") as file:
        EventLog(file).write(msgspec.structs.replace(admitted(1.0), rid="\ud800"))
    assert msgspec.json.decode(path.read_bytes())["rid"] == ascii("\ud800")
