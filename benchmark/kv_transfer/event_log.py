"""Joins the event logs of prefill and decode servers by room: how long each stage took.

python -m benchmark.kv_transfer.event_log FOLDER...

decode   admitted                                                          arrived
            |  bootstrap                                            notice ^
            v                                                              |
prefill  announced --- prefill ---> enqueued -queue-build-post-wire-> moved (last chunk)

Servers take times from their hosts' clocks: those of different hosts must be in step.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console

from benchmark.harness.report import percentile, print_table
from sglang.srt.disaggregation.delta.observability import (
    Admitted,
    Announced,
    Arrived,
    Event,
    Moved,
    Sent,
)


@dataclass(frozen=True)
class Transfer:
    """Times of some chunks of a room, summed over them and over the decode ranks they went to."""

    queue_s: float
    build_s: float
    post_s: float
    wire_s: float
    descriptors: int
    bytes: int

    @property
    def seconds(self) -> float:
        return self.queue_s + self.build_s + self.post_s + self.wire_s


@dataclass(frozen=True)
class RoomStages:
    """One room. What its records do not tell is None, and ``missing`` says which record is not
    there. Where there are several ranks, the last one to be ready ends a stage.
    """

    room: int
    missing: tuple[str, ...]
    """Empty where the room is complete; else what was looked for in vain."""
    rid: str | None = None
    """The request's id, the same on both servers."""
    prompt_tokens: int | None = None
    prefix_tokens: int | None = None
    """Tokens that decode had in its tree, and prefill did not send."""
    chunks: int = 0
    bootstrap_s: float | None = None
    """From decode's announcement of its pages until prefill knows them all. Below zero where
    prefill was quicker to read it than decode to note that it is out."""
    prefill_s: float | None = None
    """From then until the last chunk is handed to the transfer workers: waiting for the scheduler
    and the forward passes, while which earlier chunks are already under way."""
    last: Transfer | None = None
    """The last chunk: what is left to do when all has been computed."""
    whole: Transfer | None = None
    """All chunks."""
    notice_s: float | None = None
    """From prefill seeing the last chunk done until decode knows that the room is complete. Below
    zero where a prefill server of an earlier version of the patch set had its notes ride on the
    writes: decode could see them first."""
    total_s: float | None = None
    """From the announcement until decode knows that the room is complete."""


def read(*folders: Path) -> list[Event]:
    """All records of event log folders.

    Raises:
        msgspec.DecodeError: a line is no record that is known here.
    """
    decoder = msgspec.json.Decoder(Event)
    return [
        decoder.decode(line)
        for folder in folders
        for path in sorted(folder.glob("*.jsonl"))
        for line in path.read_bytes().splitlines()
    ]


def stages(records: Iterable[Event]) -> list[RoomStages]:
    """One entry for each room of the records, in the order of their first times.

    Records without a room (warm-up and health requests, which move nothing) are left out.
    """
    rooms: dict[int, list[Event]] = defaultdict(list)
    for record in sorted(records, key=lambda record: record.at):
        if record.room is not None:
            rooms[record.room].append(record)
    return [_join(room, of_room) for room, of_room in rooms.items()]


def _join(room: int, records: Sequence[Event]) -> RoomStages:
    """``records``: those of the room, by time."""
    admitted = [r for r in records if isinstance(r, Admitted)]
    announced = [r for r in records if isinstance(r, Announced)]
    arrived = [r for r in records if isinstance(r, Arrived)]
    sent = [r for r in records if isinstance(r, Sent)]
    moved = [r for r in records if isinstance(r, Moved)]
    last = [r for r in moved if r.is_last]

    known_at = announced[-1].at if announced else None
    moved_at = last[-1].at if last else None
    arrived_at = arrived[-1].at if arrived else None
    enqueued_at = max((r.at - _transfer([r]).seconds for r in last), default=None)
    admitted_at = admitted[0].at if admitted else None
    return RoomStages(
        room=room,
        missing=_missing(admitted, announced, sent, moved, arrived),
        rid=admitted[0].rid if admitted else None,
        prompt_tokens=admitted[0].prompt_tokens if admitted else None,
        prefix_tokens=admitted[0].prefix_tokens if admitted else None,
        chunks=len({r.chunk for r in moved}),
        bootstrap_s=_between(admitted_at, known_at),
        prefill_s=_between(known_at, enqueued_at),
        last=_transfer(last) if last else None,
        whole=_transfer(moved) if moved else None,
        notice_s=_between(moved_at, arrived_at),
        total_s=_between(admitted_at, arrived_at),
    )


def _missing(
    admitted: Sequence[Admitted],
    announced: Sequence[Announced],
    sent: Sequence[Sent],
    moved: Sequence[Moved],
    arrived: Sequence[Arrived],
) -> tuple[str, ...]:
    """What a room has no record of, in words. Every decode rank admits, and writes its arrival."""
    kinds = {"admitted": admitted, "announced": announced, "moved": moved, "arrived": arrived}
    missing = [kind for kind, found in kinds.items() if not found]
    posted = Counter(r.peer for r in sent)
    done = Counter(r.peer for r in moved)
    ended = {r.peer for r in moved if r.is_last}
    for peer in sorted(posted.keys() | done.keys()):
        if moved and peer not in ended:
            missing.append(f"moved: the last chunk to {peer}")
        if moved and done[peer] < posted[peer]:
            missing.append(f"moved: {posted[peer] - done[peer]} of {posted[peer]} to {peer}")
    ranks = len(admitted)
    for kind, found in (("moved", len(done)), ("arrived", len(arrived))):
        if 0 < found < ranks:
            missing.append(f"{kind}: {ranks - found} of {ranks} decode ranks")
    return tuple(missing)


def _transfer(moved: Sequence[Moved]) -> Transfer:
    return Transfer(
        queue_s=sum(r.queue_s for r in moved),
        build_s=sum(r.build_s for r in moved),
        post_s=sum(r.post_s for r in moved),
        wire_s=sum(r.wire_s for r in moved),
        descriptors=sum(r.descriptors for r in moved),
        bytes=sum(r.bytes for r in moved),
    )


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start


#: Column -> seconds of a room; the first ones and ``prefill`` add up to ``all``.
COLUMNS: dict[str, Callable[[RoomStages], float | None]] = {
    "bootstrap": lambda room: room.bootstrap_s,
    "prefill": lambda room: room.prefill_s,
    "queue": lambda room: room.last and room.last.queue_s,
    "build": lambda room: room.last and room.last.build_s,
    "post": lambda room: room.last and room.last.post_s,
    "wire": lambda room: room.last and room.last.wire_s,
    "notice": lambda room: room.notice_s,
    "all": lambda room: room.total_s,
}


def table(rooms: Iterable[RoomStages]) -> list[list[str]]:
    """A row for each power of two of new tokens: medians in milliseconds of what is known."""
    sizes: dict[int, list[RoomStages]] = defaultdict(list)
    for room in rooms:
        new = (room.prompt_tokens or 0) - (room.prefix_tokens or 0)
        sizes[1 << max(new - 1, 0).bit_length()].append(room)
    rows = []
    for size, of in sorted(sizes.items()):
        cells = []
        for stage in COLUMNS.values():
            known = [seconds for seconds in map(stage, of) if seconds is not None]
            cells.append(f"{float(f'{percentile(known, 50) * 1e3:.3g}'):,g}" if known else "-")
        incomplete = sum(bool(room.missing) for room in of)
        rows.append([f"{size:,}", f"{len(of):,}", f"{incomplete:,}", *cells])
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmark.kv_transfer.event_log")
    parser.add_argument(
        "folders",
        type=Path,
        nargs="+",
        help="folder with the event logs of both servers",
    )
    rooms = stages(read(*parser.parse_args().folders))
    columns = ["new tokens, up to", "rooms", "incomplete", *COLUMNS]
    print_table("stages of a room, p50, ms", columns, table(rooms), Console())
    return 0


if __name__ == "__main__":
    sys.exit(main())
