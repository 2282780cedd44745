"""Which prefill servers release the rooms of requests that decode computes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import requests

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
    """What servers answer, in order: a status or an error; and questions that nobody has put."""

    answers: list[Any]
    waiting: list[Callable[[], None]] = field(default_factory=list)
    at_once: bool = True


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Network:
    """The network below ``ReleasingServers``; a query runs at once, or when a test says so."""
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
            self._run() if network.at_once else network.waiting.append(self._run)

    monkeypatch.setattr(prefill_exit.requests, "get", get)
    monkeypatch.setattr(prefill_exit.threading, "Thread", Thread)
    return network


def test_a_server_is_asked_once_and_again_when_another_one_may_be_there(asked: Network) -> None:
    """Guards against a question in each step, and against a stock server after an upgraded one."""
    peers = ReleasingServers()
    asked.answers = [200, 404]
    assert peers.releases(HERE) and peers.releases(HERE)
    peers.keep({HERE: 1})
    assert peers.releases(HERE)
    peers.keep({})
    assert not peers.releases(HERE) and not peers.releases(HERE)


def test_a_server_that_does_not_answer_is_asked_again(asked: Network) -> None:
    """Guards against a server that stays stock because it was busy once."""
    peers = ReleasingServers()
    asked.answers = [requests.ConnectionError("refused"), 200]
    # The thread is done before the question is looked at: the entry is gone already.
    assert not peers.releases(HERE)
    assert peers.releases(HERE)


def test_a_question_that_fails_while_servers_are_looked_through(asked: Network) -> None:
    """Its thread takes its entry away then: an error would end the scheduler."""
    peers, gone, kept = ReleasingServers(), "10.0.0.3:8998", "10.0.0.2:8998"
    asked.answers = [200, 200, requests.ConnectionError("refused")]
    assert peers.releases(kept) and peers.releases(gone)
    asked.at_once = False
    assert not peers.releases(HERE)

    class Table:
        def __contains__(self, address: object) -> bool:
            while asked.waiting:
                asked.waiting.pop()()
            return address == kept

    peers.keep(Table())
    assert peers.releases(kept) and not peers.releases(gone)


def test_the_oldest_rooms_are_forgotten() -> None:
    """Guards against a table that grows with each room that anybody names."""
    rooms = Rooms()
    for room in range(MAX_ROOMS + 5):
        rooms.note(room, False)
    assert len(rooms) == MAX_ROOMS and 4 not in rooms and 5 in rooms


def test_one_rank_tells_one_rank() -> None:
    """Guards against a second message that comes when the room is over, and may have begun anew."""
    sent: list[Any] = []
    for rank in (0, 1):
        receiver: Any = SimpleNamespace(
            kv_mgr=SimpleNamespace(attn_tp_rank=rank),
            bootstrap_room=7,
            bootstrap_infos=[{"rank_ip": "10.0.0.1"}, {"rank_ip": "10.0.0.2"}],
            clear=lambda: None,
        )

        def connect(info: dict[str, Any], rank: int = rank) -> Any:
            note = lambda message: sent.append((rank, info["rank_ip"], message))  # noqa: E731
            return SimpleNamespace(send_multipart=note), threading.Lock()

        receiver._connect_to_bootstrap_server = connect
        release_room(receiver)
    assert sent == [(0, "10.0.0.1", [b"ABORT", b"7", b"LOCAL"])]


def test_a_rank_that_cannot_be_told_costs_no_request(caplog: pytest.LogCaptureFixture) -> None:
    """Guards against an error of one peer's socket in the scheduler's loop."""
    cleared = []

    def connect(info: dict[str, Any]) -> Any:
        raise OSError("no route to host")

    receiver = SimpleNamespace(
        kv_mgr=SimpleNamespace(attn_tp_rank=0),
        bootstrap_room=7,
        bootstrap_infos=[{"rank_ip": "10.0.0.1"}],
        _connect_to_bootstrap_server=connect,
        clear=lambda: cleared.append(7),
    )
    release_room(receiver)
    assert cleared == [7] and "room 7" in caplog.text
