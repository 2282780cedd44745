"""Joins the event logs of a prefill and a decode server by room: how long each stage took.

decode   admitted                                                          arrived
            |  bootstrap                                            notice ^
            v                                                              |
prefill  announced --- prefill ---> enqueued -queue-build-post-wire-> moved (last chunk)

Pure but for ``read``. Both servers take times from the clock of one host.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from sglang.srt.disaggregation.delta.logs import (
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


def read(folder: Path) -> list[Event]:
    """All records of an event log folder.

    Raises:
        msgspec.DecodeError: a line is no record that is known here.
    """
    decoder = msgspec.json.Decoder(Event)
    return [
        decoder.decode(line)
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
