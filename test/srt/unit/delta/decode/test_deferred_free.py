"""A room that was given up, followed until prefill writes to it no more; and then freed once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.delta.decode import deferred_free
from sglang.srt.disaggregation.delta.decode.deferred_free import DeferredFree
from unit.delta.fakes import Manager, Progress


class Servers:
    """What a deferred free asks of ``PrefillServers``."""

    def __init__(self) -> None:
        self.rooms: dict[int, Any] = {}
        self.manager = Manager()

    def forget_deferred(self, deferred: DeferredFree) -> None:
        self.rooms.pop(deferred.room, None)

    def collect_arrivals(self, room: int) -> None:
        self.manager.collect_arrivals(room)


def follow(servers: Any, writers: int = 2) -> Any:
    """A deferred free that is listed."""
    made = servers.rooms[7] = DeferredFree(servers, 7, "p:1", Progress(), writers)
    return made


def test_drained_when_every_writer_is() -> None:
    """Guards against the first of two writers standing for both, and against one that says it
    twice."""
    made = follow(Servers())
    assert not made.is_drained()
    for writer in (3, 3):
        made.progress.stop(writer)
        assert not made.is_drained()
    made.progress.stop(5)
    assert made.is_drained() and made.is_drained()


def test_every_poll_reads_what_arrived() -> None:
    """Guards against pages held for their whole bound on a server where no other room polls."""
    servers = Servers()
    made = follow(servers)
    made.is_drained()
    made.is_drained()
    assert servers.manager.collected == 2


def test_writers_that_are_gone_write_no_more() -> None:
    """Guards against waiting for a word of processes that do not exist."""
    made = follow(Servers())
    made.writers_are_gone()
    assert made.is_drained()


def test_nothing_to_wait_for() -> None:
    """Guards against pages of a room without writers, a warm-up's, that are held for the bound."""
    assert DeferredFree().is_drained() and DeferredFree().poll() == KVPoll.Success


def entry() -> Any:
    """A queue entry that owns something."""
    req = SimpleNamespace(
        rid="a", bootstrap_room=7, bootstrap_host="p", bootstrap_port=1, kv_allocated_len=48,
        cache_protected_len=16,
    )  # fmt: skip
    return SimpleNamespace(req=req)


def test_freed_once_and_followed_no_longer() -> None:
    """Guards against an entry by which a new request with this room number is refused, and against
    pages that are freed twice; another room's entry stays."""
    servers, freed = Servers(), []
    made = follow(servers)
    servers.rooms[8] = other = DeferredFree(servers, 8, "p:1", Progress(), 1)  # type: ignore[arg-type]
    kept = entry()
    made.keep(kept)
    assert made.entry is kept
    made.free(freed.append)
    made.free(freed.append)
    assert servers.rooms == {8: other} and freed == [kept]


def test_freed_after_the_bound_and_said_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against pages that a dead network keeps for ever, and against a release that nobody
    hears of: it is the one that may corrupt KV."""
    now = [100.0]
    monkeypatch.setattr(deferred_free.time, "monotonic", lambda: now[0])
    monkeypatch.setenv("SGLANG_DISAGGREGATION_QUARANTINE_TIMEOUT", "60")
    made = follow(Servers())
    made.keep(entry())
    now[0] = 159.0
    assert made.poll() == KVPoll.Transferring and caplog.messages == []
    now[0] = 160.0
    assert made.poll() == KVPoll.Success
    assert (
        "request a (bootstrap_room=7)" in caplog.text
        and ": 32 tokens of KV are freed now" in caplog.text
    )
