"""Following a room until prefill writes to it no more."""

from __future__ import annotations

from typing import Any

from sglang.srt.disaggregation.delta.decode.deferred_free import RoomWatch
from unit.delta.fakes import Manager, Progress


class Servers:
    """What a watch asks of ``PrefillServers``."""

    def __init__(self) -> None:
        self.watches: dict[int, Any] = {}
        self.manager = Manager()

    def close_watch(self, room: int) -> None:
        self.watches.pop(room, None)

    def collect_arrivals(self) -> None:
        self.manager.collect_arrivals()


def watch(servers: Servers, writers: int = 2) -> RoomWatch:
    """A watch that is listed."""
    made = servers.watches[7] = RoomWatch(servers, 7, "p:1", Progress(), writers)
    return made


def test_quiet_when_every_writer_is() -> None:
    """Guards against the first of two writers standing for both, and against one that says it
    twice."""
    made = watch(Servers())
    assert not made.quiet()
    for writer in (3, 3):
        made.progress.stop(writer)
        assert not made.quiet()
    made.progress.stop(5)
    assert made.quiet() and made.quiet()


def test_every_look_reads_what_arrived() -> None:
    """Guards against pages held for their whole bound on a server where no other room polls."""
    servers = Servers()
    made = watch(servers)
    made.quiet()
    made.quiet()
    assert servers.manager.collected == 2


def test_writers_that_are_gone_write_no_more() -> None:
    """Guards against waiting for a word of processes that do not exist."""
    made = watch(Servers())
    made.writer_is_gone()
    assert made.quiet()


def test_closing_leaves_nothing() -> None:
    """Guards against an entry by which a new request with this room number is refused; twice is
    harmless, and another room's entry stays."""
    servers = Servers()
    made = watch(servers)
    servers.watches[8] = other = RoomWatch(servers, 8, "p:1", Progress(), 1)
    made.close()
    made.close()
    assert servers.watches == {8: other}
