"""The heartbeat's view of prefill servers (alive, silent, ended or restarted), and the effects."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import requests

from sglang.srt.disaggregation.delta import wire
from unit.delta.decode.prefills import ADDRESS, ROOM, Answer, Prefills, run_of_ours

OTHER = "10.0.0.2:8998"


@pytest.fixture
def prefills(monkeypatch: pytest.MonkeyPatch) -> Iterator[Prefills]:
    with ExitStack() as stack:
        yield Prefills(monkeypatch, stack)


SILENT, REFUSED = "no answer to 1 probes", "its port refuses connections"
NO_HOST = [{"rank_ip": "no such host", "rank_port": 1}]


@pytest.mark.parametrize(
    ("answer", "listening", "ranks", "end"),
    [
        pytest.param(run_of_ours("a"), [0, 1], None, None, id="alive"),
        pytest.param(run_of_ours("b"), [0, 1], None, "it was restarted", id="restarted"),
        pytest.param((200, b"<html>"), [0, 1], None, None, id="a proxy"),
        pytest.param((200, b'{"incarnation": "\xff"}'), [0, 1], None, None, id="no UTF-8"),
        pytest.param((503, b""), [0, 1], None, SILENT, id="503"),
        pytest.param(requests.ConnectionError("reset"), [], None, SILENT, id="reset"),
        pytest.param(requests.Timeout(), [], None, SILENT, id="timeout"),
        pytest.param(requests.exceptions.InvalidURL(), [], None, SILENT, id="URL"),
        pytest.param(None, [], None, REFUSED, id="no process"),
        # The bootstrap server is one process of one node, and its address may be a service's.
        pytest.param(None, [0, 1], None, SILENT, id="the ranks live"),
        pytest.param(None, [0], None, SILENT, id="the first rank lives"),
        pytest.param(None, [1], None, SILENT, id="the second rank lives"),
        pytest.param(None, [], NO_HOST, SILENT, id="unknown ranks"),
    ],
)
def test_what_a_probe_shows(
    prefills: Prefills, answer: Answer, listening: list[int], ranks: Any, end: str | None
) -> None:
    """Guards against a hanging server or network that counts as ended: only refused connections, or
    another run, show that no process of the old run can write."""
    for rank in listening:
        prefills.ports[rank].listen()
    prefills.connect(ranks=ranks)
    prefills.room(7)
    prefills.room(8)
    deferred = prefills.give_up(8)
    prefills.answers[ADDRESS] = answer
    prefills.beat()
    assert prefills.end_of(7) == (end and f"lost prefill server {ADDRESS}: {end}")
    assert deferred.is_drained() is (end not in (None, SILENT))
    assert prefills.urls[-1] == f"http://{ADDRESS}{wire.ROUTE}"


ALIVE, NEW, NAMELESS, HUNG = run_of_ours("a"), run_of_ours("b"), (200, b"{}"), (503, b"")
GONE, FORGOTTEN = None, "no room needs it"
RESTARTED = "it was restarted"


@pytest.mark.parametrize(
    ("failures", "known", "signs", "ends"),
    [
        pytest.param(1, "a", [HUNG], {0: "no answer to 1 probes"}, id="silent once"),
        pytest.param(
            3,
            "a",
            [HUNG] * 7,
            {2: "no answer to 3 probes", 5: "no answer to 3 probes"},
            id="silent at each third",
        ),
        pytest.param(2, "a", [HUNG, ALIVE] * 3, {}, id="a sign of life resets the count"),
        pytest.param(2, "a", [HUNG, GONE], {1: REFUSED}, id="no process"),
        pytest.param(
            2, "a", [GONE, HUNG], {1: "no answer to 2 probes"}, id="something answers there again"
        ),
        pytest.param(9, "a", [ALIVE, NEW], {1: RESTARTED}, id="restarted between two probes"),
        pytest.param(2, "a", [HUNG, NEW, HUNG], {1: RESTARTED}, id="a restart resets the count"),
        pytest.param(1, "a", [NAMELESS], {}, id="it gave no name this time"),
        pytest.param(1, None, [NEW], {}, id="it never gave one"),
        pytest.param(2, "a", [HUNG, FORGOTTEN, HUNG], {}, id="forgotten in between"),
    ],
)
def test_when_a_server_is_given_up(
    prefills: Prefills, failures: int, known: str | None, signs: list[Answer], ends: dict[int, str]
) -> None:
    """``ends``: failed rooms' reasons by number of the last probe before. Guards against a server
    given up for one lost packet, or never; against failures of a whole day that add up; and against
    rooms that wait for ranks which do not exist any more."""
    prefills.beat.failures = failures
    prefills.connect(name=known)
    found = dict[int, str]()
    for probe, sign in enumerate(signs):
        prefills.room(probe)
        if sign == FORGOTTEN:
            prefills.servers.disconnect(ADDRESS)
        prefills.answers[ADDRESS] = sign
        prefills.beat()
        for _, _, ping in prefills.sockets.take():
            prefills.servers.take(wire.Pong(ping.to, True))
        end = prefills.end_of(probe)
        if end is not None:
            found[probe] = end.removeprefix(f"lost prefill server {ADDRESS}: ")
        prefills.connect(name=known)
    assert found == ends


def test_servers_do_not_disturb_each_other(prefills: Prefills) -> None:
    """Guards against servers that are probed or judged in sequence: one that hangs for its whole
    time limit would hide the next one's death; and against one with a strange answer that ends the
    probes of all others."""
    is_judged, seen = threading.Event(), list[bool]()
    servers = ["10.0.1.1:1", "10.0.1.2:1", "10.0.1.3:1", "10.0.1.4:1"]
    for room, address in enumerate(servers):
        prefills.connect(address)
        prefills.room(room, address)
    statuses = prefills.manager.statuses
    fail = statuses.fail_known

    def note(room: int, reason: str) -> bool:
        if room == 1:
            is_judged.set()
        return bool(fail(room, reason))

    def hang() -> Answer:
        seen.append(is_judged.wait(60))
        return HUNG

    statuses.fail_known = note
    signs = [hang, HUNG, UnicodeError("label too long"), ALIVE]
    prefills.answers.update(zip(servers, signs, strict=True))
    prefills.beat()
    assert [prefills.end_of(room) is None for room in range(4)] == [False, False, False, True]
    assert seen == [True]


def test_a_look_says_nothing_of_a_later_server(prefills: Prefills) -> None:
    """A server was restarted and connected to while the heartbeat probed it. Guards against failing
    the new run's rooms, and releasing their pages, because of the old run's result."""

    def restart() -> None:
        prefills.meanwhile = lambda: None
        prefills.servers.disconnect(ADDRESS)
        prefills.connect(name="b")
        prefills.room()
        prefills.answers[ADDRESS] = None

    prefills.connect(name="a")
    prefills.meanwhile = restart
    prefills.beat()
    assert prefills.end_of() is None and prefills.give_up() is not None
    prefills.beat()
    assert ADDRESS not in prefills.manager.prefill_info_table


def test_ranks_that_do_not_answer_pings(prefills: Prefills) -> None:
    """The bootstrap server answers also if a scheduler hangs. Guards against rooms that wait for
    that scheduler; one answer of each rank is enough to count as alive again. A rank with an
    unusable address ends no probe of a server, and counts as silent."""

    def pong(*ranks: int) -> None:
        for rank in ranks:
            prefills.servers.take(wire.Pong(f"127.0.0.1:{ports[rank]}", True))

    prefills.connect()
    ports = [rank["rank_port"] for rank in prefills.ranks]
    prefills.beat()
    assert prefills.sockets.take() == [
        ("127.0.0.1", port, wire.Ping(f"127.0.0.1:{port}", "decode", "10.9.9.9", 4999, 7.0))
        for port in ports
    ]
    known = prefills.manager.prefill_info_table
    for answers, is_known in (((0, 1), True), ((0,), False), ((), True), ((), False)):
        pong(*answers)
        prefills.beat()
        assert (ADDRESS in known) is is_known, answers
        if not is_known:
            prefills.connect()  # resets the count
    prefills.sockets.refuse.add("127.0.0.1")
    for is_known in (True, False):
        prefills.beat()
        assert (ADDRESS in known) is is_known
    prefills.connect()
    prefills.room()
    prefills.beat()
    prefills.answers[ADDRESS] = run_of_ours("b")
    prefills.beat()
    assert (prefills.end_of() or "").endswith("it was restarted"), (
        "although its ranks were silent before"
    )


def test_a_stock_server_is_asked_as_stock_asks(prefills: Prefills) -> None:
    """Guards against control messages to a stock prefill rank, which would end its thread."""
    prefills.answers[ADDRESS] = (404, b"")
    assert prefills.ask()
    prefills.servers.connected(ADDRESS, prefills.ranks)
    prefills.answers[ADDRESS] = (200, b"")
    prefills.beat()
    prefills.servers.withdraw(ADDRESS, prefills.ranks, ROOM, "x")
    assert prefills.urls[-1] == f"http://{ADDRESS}/health" and prefills.sockets.take() == []
    assert ADDRESS in prefills.manager.prefill_info_table
