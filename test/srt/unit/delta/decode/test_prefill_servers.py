"""Prefill servers from a decode rank's view: handshakes, lost servers, messages of their ranks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from component.transfer import bare
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.delta import address_pool, wire
from sglang.srt.disaggregation.delta.address_pool import AddressPool
from sglang.srt.disaggregation.delta.decode import deferred as deferred_release
from sglang.srt.disaggregation.delta.decode.deferred import DeferredFree
from sglang.srt.disaggregation.delta.metrics import Reason
from sglang.srt.disaggregation.delta.wire import STOCK
from unit.delta.decode.prefills import ADDRESS, ROOM, Prefills, run_of_ours
from unit.delta.fakes import Clock

OTHER = "10.0.0.1:80"  # the beginning of ``ADDRESS``


@pytest.fixture
def prefills(monkeypatch: pytest.MonkeyPatch) -> Iterator[Prefills]:
    with ExitStack() as stack:
        yield Prefills(monkeypatch, stack)


# ---- handshake ----


def test_servers_that_hang(prefills: Prefills, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a scheduler that waits for a server's answer, that queries again at every
    step, or that treats a server as known which SGLang lists but whose handshake is not over; and
    against hanging servers, more than there are threads, that block one that has answered
    before."""
    monkeypatch.setattr(address_pool, "_SLOW_S", 60.0)  # no answer is slow on a slow machine
    hung = [f"10.0.1.{number}:8998" for number in range(100)]
    prefills.connect()
    prefills.hung.update(hung)
    prefills.answers.update(dict.fromkeys(hung, run_of_ours("a")))
    for _ in range(5):
        assert not any(prefills.servers.connections.ensure(address) for address in hung)
        assert all(prefills.servers.connections.is_asking(address) for address in hung)
    prefills.servers.disconnect(ADDRESS)
    prefills.connect()
    assert not any(prefills.servers.connections.ensure(address) for address in hung)
    prefills.go_on()
    assert all(prefills.ask(address) for address in hung)
    assert [prefills.asked[address] for address in (ADDRESS, *hung)] == [2, *[1] * 100]


@pytest.mark.parametrize("during", [True, False], ids=["during its handshake", "afterwards"])
def test_a_server_that_is_lost_is_asked_again(prefills: Prefills, during: bool) -> None:
    """Guards against "known" for a server that is in no table: the next room would fail."""
    prefills.answers[ADDRESS] = run_of_ours("a")
    if during:
        prefills.meanwhile = lambda: prefills.servers.disconnect(ADDRESS)
    assert prefills.ask() is not during
    prefills.meanwhile = lambda: None
    prefills.servers.disconnect(ADDRESS)
    assert prefills.ask() and ADDRESS in prefills.manager.prefill_info_table
    assert prefills.asked[ADDRESS] == 2


def test_what_differs_is_said(prefills: Prefills) -> None:
    """SGLang raises if page sizes differ. Guards against an exception that ends the scheduler, and
    against a client that gets a timeout instead of the reason; the reason is dropped when the
    server was replaced."""
    prefills.answers[ADDRESS] = run_of_ours("a")
    prefills.problem = RuntimeError("Page size mismatch: 16 and 64")
    assert not prefills.ask()
    assert prefills.servers.connections.refusals == {ADDRESS: "Page size mismatch: 16 and 64"}
    prefills.problem = None
    assert prefills.ask() and prefills.servers.connections.refusals == {}


def test_a_server_that_cannot_be_asked_is_asked_again(prefills: Prefills) -> None:
    """Guards against a server that is just starting and counts as stock for ever."""
    prefills.answers[ADDRESS] = None
    assert not prefills.ask() and not prefills.asked
    assert "could not be reached" in prefills.servers.connections.refusals[ADDRESS]
    assert prefills.servers.capabilities(ADDRESS) == STOCK
    prefills.connect()
    assert prefills.servers.capabilities(ADDRESS).takes_delta
    assert prefills.servers.connections.ensure(ADDRESS) and prefills.asked[ADDRESS] == 1, (
        "known: no further query"
    )
    assert prefills.servers.connections.refusals == {}, (
        "a later abort must not say that it cannot be reached"
    )


def test_a_restart_is_noticed_at_the_next_handshake(prefills: Prefills) -> None:
    """Guards against pages held for the whole bound for processes that were replaced, and against
    releasing them after a mere reconnection to the same server."""
    prefills.connect(name="a")
    prefills.room(7)
    prefills.room(9)
    deferred = prefills.give_up(7)
    prefills.servers.disconnect(ADDRESS)
    prefills.connect(name="a")
    assert not deferred.is_drained()
    prefills.servers.disconnect(ADDRESS)
    prefills.connect(name="b")
    assert deferred.is_drained()
    prefills.room(8)
    assert prefills.give_up(9) is None, "a room of the old run"
    assert prefills.give_up(8) is not None, "a room of the new run"


# ---- lost servers ----


@pytest.mark.parametrize("is_gone", [False, True])
def test_a_lost_server(prefills: Prefills, is_gone: bool) -> None:
    """Guards against rooms that wait for a dead server, or whose outcome changes; against releasing
    pages because a server was silent, since it may still write; and against removing the
    connections, rooms and pages of "10.0.0.1:8998" together with those of "10.0.0.1:80"."""
    prefills.connect(ADDRESS, ranks=[{"rank_ip": "10.0.0.1", "rank_port": 4002}])
    prefills.connect(OTHER)
    for room in (1, 2):
        prefills.room(room)
    others = prefills.give_up(2)
    for room in (3, 4, 5, 6, 7):
        prefills.room(room, OTHER)
    deferred = prefills.give_up(4, OTHER)
    prefills.servers.fail(5, Reason.TIMEOUT, "too late")
    prefills.manager.update_status(6, KVPoll.Success)
    for why in ("why", "again"):
        prefills.servers.lost(OTHER, is_gone, why)
    assert prefills.manager.request_status[6] == KVPoll.Success
    assert [prefills.end_of(room) for room in (1, 3, 5)] == [
        None, f"lost prefill server {OTHER}: why", "too late",
    ]  # fmt: skip
    assert (deferred.is_drained(), others.is_drained()) == (is_gone, False)
    assert (prefills.give_up(3, OTHER) is None) is is_gone
    assert list(prefills.manager.prefill_info_table) == [ADDRESS]
    assert list(prefills.manager.connection_pool) == [f"{ADDRESS}_0_0_0"]
    ranks = [(rank["rank_ip"], rank["rank_port"]) for rank in prefills.ranks]
    assert prefills.sockets.dropped == prefills.dropped == (ranks if is_gone else [])
    prefills.connect(OTHER, name="b")
    prefills.room(8, OTHER)
    assert prefills.give_up(8, OTHER) is not None, "a room of the next run"


def test_connected_while_a_server_is_lost(
    prefills: Prefills, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a connection without ranks to ping, through which rooms are announced to an
    ended server until each times out."""
    prefills.connect(OTHER)
    prefills.room(3, OTHER)
    fail = prefills.servers.fail

    def of_the_scheduler(*arguments: Any) -> None:
        prefills.servers.connected(OTHER, prefills.ranks)
        prefills.manager.connection_pool[f"{OTHER}_0_0_0"] = prefills.ranks
        fail(*arguments)

    monkeypatch.setattr(prefills.servers, "fail", of_the_scheduler)
    prefills.servers.lost(OTHER, True, "why")
    assert not prefills.manager.connection_pool


# ---- messages of a server's ranks ----


@pytest.mark.parametrize(
    ("message", "is_known"),
    [
        pytest.param(wire.Pong("10.0.0.1:4001", True), True, id="it answers"),
        pytest.param(wire.Pong("10.0.0.1:4001", False), False, id="it does not know us"),
        pytest.param(wire.Pong("10.7.7.7:4001", False), True, id="another rank"),
        pytest.param(wire.Pong("10.0.0.1", False), True, id="no port"),
        pytest.param(wire.Stopped(ROOM, 0, "x"), True, id="it ended a room"),
        pytest.param(wire.Stopped(ROOM, 0, "x", True), False, id="it ended an unknown peer's room"),
    ],
)
def test_a_rank_that_does_not_know_us(
    prefills: Prefills, message: wire.Message, is_known: bool
) -> None:
    """The rank was restarted, or removed this peer. Guards against further rooms announced to it,
    which it must refuse: the next request registers again; other servers stay connected."""
    prefills.connect(ranks=[{"rank_ip": "10.0.0.1", "rank_port": port} for port in (4000, 4001)])
    prefills.connect("10.0.0.2:8998", ranks=[{"rank_ip": "10.0.0.2", "rank_port": 4000}])
    prefills.room()
    prefills.servers.take(message)
    connected = [ADDRESS, "10.0.0.2:8998"] if is_known else ["10.0.0.2:8998"]
    assert list(prefills.manager.prefill_info_table) == connected
    assert list(prefills.manager.connection_pool) == [f"{each}_0_0_0" for each in connected]


@pytest.mark.parametrize(
    "message", [wire.Ping("a:1", "p", "h", 1), wire.Withdraw(7, "p", "h", 1, "")]
)
def test_messages_for_prefill(prefills: Prefills, message: wire.Message) -> None:
    """Guards against silently mixing up a prefill rank's port and a decode rank's."""
    with pytest.raises(wire.ControlError):
        prefills.servers.take(message)


# ---- abandoned rooms ----

WORDS = st.lists(st.integers(0, 2), max_size=4)


@given(writers=st.integers(1, 3), before=WORDS, after=WORDS)
def test_a_room_is_drained_when_each_writer_has_stopped(
    writers: int, before: list[int], after: list[int]
) -> None:
    """Guards against the first of several prefill ranks counting for all, and against one that
    reports twice, in every order with giving up; against a changed reason of a failure, an entry
    that stays, and pages held on a server where no other room polls for arrivals."""
    manager, asked = bare.decode("nixl", ROOM), list[int]()
    servers, manager.collect_arrivals = manager.servers, asked.append
    for writer in before:
        servers.take(wire.Stopped(ROOM, writer, "because"))
    servers.fail(ROOM, Reason.TIMEOUT, "too late")
    reason = f"prefill {bare.ADDRESS} reported: because" if before else "too late"
    assert manager.failure_records == {ROOM: reason}
    receiver = bare.announced(manager, ROOM, writers=writers)
    deferred = receiver.defer_free()
    stopped = set(before)
    assert (deferred is None) == (len(stopped) >= writers)
    for number, writer in enumerate(after if deferred is not None else ()):
        assert deferred.is_drained() == (len(stopped) >= writers)
        assert asked == [ROOM] * (number + 1)
        servers.take(wire.Stopped(ROOM, writer, "again"))
        stopped.add(writer)
    if deferred is not None:
        assert deferred.is_drained() == (len(stopped) >= writers)
        deferred.free(lambda entry: None)
    assert manager.failure_records == {ROOM: reason}
    receiver.clear()
    servers.take(wire.Stopped(ROOM, 0, "late"))
    servers.fail(ROOM, Reason.PEER_FAILED, "late")
    assert not any(manager.open_rooms().values())


def test_words_about_other_rooms(prefills: Prefills) -> None:
    """Guards against a message about one room that releases or fails another: also if a new request
    has the number of a room that is still followed (it is refused; see ``DeltaReceiver``)."""
    prefills.connect()
    for room in (7, 8):
        prefills.room(room)
    deferred = prefills.give_up(7)
    for room in (8, 9):
        prefills.servers.take(wire.Stopped(room, 0, "because"))
    assert not deferred.is_drained() and prefills.end_of(7) is None
    assert not any(9 in rooms for rooms in prefills.manager.open_rooms().values())
    prefills.manager.statuses.forget(7)
    prefills.room(7)  # the new request, about to be refused
    prefills.servers.take(wire.Stopped(7, 0, "because"))
    assert deferred.is_drained() and prefills.end_of(7) is None
    deferred.free(lambda entry: None)
    assert 7 not in prefills.manager.open_rooms()["transfer_statuses"]


def test_all_ranks_are_told_that_a_room_ended(prefills: Prefills) -> None:
    """Guards against one of two prefill ranks that continues to compute and write; and against an
    unreachable rank, or a ``bootstrap_room`` that no message can carry (clients choose it), that
    keeps the message from the other or ends the scheduler."""
    prefills.connect()
    prefills.servers.withdraw(ADDRESS, prefills.ranks, ROOM, "the client went away")
    told = wire.Withdraw(ROOM, "decode", "10.9.9.9", 4999, "the client went away", True)
    ranks = [(rank["rank_ip"], rank["rank_port"]) for rank in prefills.ranks]
    assert prefills.sockets.take() == [(*rank, told) for rank in ranks]
    prefills.sockets.refuse.add("127.0.0.1")
    infos = [*prefills.ranks, {"rank_ip": "10.0.0.2", "rank_port": 4000}]
    prefills.servers.withdraw(ADDRESS, infos, ROOM, "x")
    prefills.servers.yield_room(infos, ROOM)
    assert [host for host, _, _ in prefills.sockets.take()] == ["10.0.0.2"] * 2
    prefills.servers.withdraw(ADDRESS, infos, 2**64, "x")
    prefills.servers.yield_room(infos, 2**64)
    assert prefills.sockets.take() == []


def test_freed_after_the_bound_and_said_so(
    prefills: Prefills, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against pages that a dead network keeps for ever, that are freed twice, or freed
    without a log line, since this release may corrupt KV; and against a leftover entry by which a
    new request with this room number is refused. A warm-up's room has no writer."""
    clock = Clock()
    monkeypatch.setattr(deferred_release, "time", SimpleNamespace(monotonic=clock))
    monkeypatch.setenv("SGLANG_DISAGGREGATION_QUARANTINE_TIMEOUT", "60")
    prefills.connect()
    deferred = prefills.give_up()
    req = SimpleNamespace(
        rid="a", bootstrap_room=ROOM, bootstrap_host="p", bootstrap_port=1, kv_allocated_len=48,
        cache_protected_len=16,
    )  # fmt: skip
    entry, freed = SimpleNamespace(req=req), list[Any]()
    deferred.keep(entry)
    prefills.give_up(8)
    clock.now += 59
    assert deferred.poll() == KVPoll.Transferring and caplog.messages == []
    clock.now += 1
    assert deferred.poll() == KVPoll.Success
    (line,) = caplog.messages
    assert "request a (bootstrap_room=7)" in line and ": 32 tokens of KV are freed now" in line
    for _ in range(2):
        deferred.free(freed.append)
    assert freed == [entry] and list(prefills.manager.transfer_statuses) == [8]
    assert DeferredFree().poll() == KVPoll.Success


def test_queries_pile_up() -> None:
    """Guards against a hanging server whose queries fill the memory."""
    pool, gate = AddressPool("queries"), threading.Event()
    queries = [pool.submit("p:1", gate.wait, 60) for _ in range(4100)]
    refused = [query for query in queries if query.done()]
    assert 0 < len(refused) <= 4 and "p:1 does not answer" in str(refused[0].exception())
    gate.set()
    assert queries[4000].result(60)
