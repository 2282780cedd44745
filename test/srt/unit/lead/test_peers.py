"""Prefill servers that release the rooms of requests that decode computes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import requests
import zmq

from sglang.srt.disaggregation.lead import prefill_exit
from sglang.srt.disaggregation.lead.prefill_exit import (
    MAX_ROOMS,
    ReleasingServers,
    Rooms,
    release_room,
)

HERE = "10.0.0.1:8998"


@dataclass
class Network:
    """The servers' answers in order, each a status or an error, and the queries not yet sent."""

    answers: list[Any]
    waiting: list[Callable[[], None]] = field(default_factory=list)
    immediate: bool = True


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Network:
    """The network below ``ReleasingServers``; queries run at once, or when a test runs them."""
    network = Network([])

    def get(url: str, timeout: float) -> Any:
        answer = network.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return SimpleNamespace(status_code=answer)

    class Thread:
        def __init__(self, target: Callable[..., None], args: tuple[Any, ...], daemon: bool):
            self._run = lambda: target(*args)

        def start(self) -> None:
            self._run() if network.immediate else network.waiting.append(self._run)

    monkeypatch.setattr(prefill_exit.requests, "get", get)
    monkeypatch.setattr(prefill_exit.threading, "Thread", Thread)
    return network


def test_a_server_is_queried_once_and_again_when_it_may_have_changed(network: Network) -> None:
    """Guards against a query in each step, and against a stock server that replaced an upgraded
    one."""
    peers = ReleasingServers()
    network.answers = [200, 404]
    assert peers.releases(HERE) and peers.releases(HERE)
    peers.keep({HERE: 1})
    assert peers.releases(HERE)
    peers.keep({})
    assert not peers.releases(HERE) and not peers.releases(HERE)


def test_a_server_that_does_not_answer_is_queried_again(network: Network) -> None:
    """Guards against a server that counts as stock because it was busy once."""
    peers = ReleasingServers()
    network.answers = [requests.ConnectionError("refused"), 200]
    # The thread ends before the caller checks: its entry is already removed.
    assert not peers.releases(HERE)
    assert peers.releases(HERE)


def test_a_query_that_fails_while_servers_are_iterated(network: Network) -> None:
    """The thread removes its entry during the iteration: an error would end the scheduler."""
    peers, gone, kept = ReleasingServers(), "10.0.0.3:8998", "10.0.0.2:8998"
    network.answers = [200, 200, requests.ConnectionError("refused")]
    assert peers.releases(kept) and peers.releases(gone)
    network.immediate = False
    assert not peers.releases(HERE)

    class Table:
        def __contains__(self, address: object) -> bool:
            while network.waiting:
                network.waiting.pop()()
            return address == kept

    peers.keep(Table())
    assert peers.releases(kept) and not peers.releases(gone)


def test_the_oldest_rooms_are_forgotten() -> None:
    """Guards against a table that grows with each room that a message names."""
    rooms = Rooms()
    for room in range(MAX_ROOMS + 5):
        rooms.note(room, False)
    assert len(rooms) == MAX_ROOMS and 4 not in rooms and 5 in rooms


def test_a_notice_that_comes_with_its_request_is_kept() -> None:
    """Guards against an error for the client: the reader thread notes that decode computes the
    request while the scheduler thread records that it has arrived."""
    rooms = Rooms()
    rooms.note(1, True)
    rooms.note(2, False)
    assert [rooms.arrive(room) for room in (1, 2, 3)] == [True, False, None]
    assert rooms == {1: True, 2: None, 3: None}
    for room in range(MAX_ROOMS + 1):
        rooms.arrive(room)
    assert len(rooms) == MAX_ROOMS


def test_one_rank_notifies_one_rank() -> None:
    """Guards against a second message that arrives after the room ended, when its number may be
    reused, against one to a later stage (the first one decides whether a room has failed), and
    against a wait for a rank that reads nothing, whose socket is full after 1,000 messages."""
    sent: list[Any] = []
    for rank in (0, 1):
        receiver: Any = SimpleNamespace(
            kv_mgr=SimpleNamespace(attn_tp_rank=rank),
            bootstrap_room=7,
            bootstrap_infos=[
                {"rank_ip": f"10.0.0.{number}", "pp_rank": stage}
                for number, stage in enumerate((1, 0, 1, 0))
            ],
            clear=lambda: None,
        )

        def connect(info: dict[str, Any], rank: int = rank) -> Any:
            def note(message: list[bytes], flags: int) -> None:
                sent.append((rank, info["rank_ip"], message, flags))

            return SimpleNamespace(send_multipart=note), threading.Lock()

        receiver._connect_to_bootstrap_server = connect
        release_room(receiver)
    assert sent == [(0, "10.0.0.1", [b"ABORT", b"7", b"LOCAL"], zmq.NOBLOCK)]


def test_a_failed_notification_costs_no_request(caplog: pytest.LogCaptureFixture) -> None:
    """Guards against an error of one peer's socket in the scheduler's loop."""
    cleared = []

    def connect(info: dict[str, Any]) -> Any:
        raise OSError("no route to host")

    receiver = SimpleNamespace(
        kv_mgr=SimpleNamespace(attn_tp_rank=0),
        bootstrap_room=7,
        bootstrap_infos=[{"rank_ip": "10.0.0.1", "pp_rank": 0}],
        _connect_to_bootstrap_server=connect,
        clear=lambda: cleared.append(7),
    )
    release_room(receiver)
    assert cleared == [7] and "room 7" in caplog.text
