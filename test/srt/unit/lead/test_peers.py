"""Which prefill servers release the rooms of requests that decode computes."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import requests

from sglang.srt.disaggregation.lead import prefill_exit
from sglang.srt.disaggregation.lead.prefill_exit import Peers, release

HERE = "10.0.0.1:8998"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Addresses that were asked. What is put into it first is answered: a status or an error."""
    answers: list[Any] = []

    def get(url: str, timeout: float) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return SimpleNamespace(status_code=answer)

    class AtOnce:
        """In the place of a thread."""

        def __init__(self, target: Callable[..., None], args: tuple[Any, ...], daemon: bool):
            self.start = lambda: target(*args)

    monkeypatch.setattr(prefill_exit.requests, "get", get)
    monkeypatch.setattr(prefill_exit.threading, "Thread", AtOnce)
    return answers


def test_a_server_is_asked_once_and_again_when_another_one_may_be_there(asked: list[Any]) -> None:
    """Guards against a question in each step, and against a stock server after an upgraded one."""
    peers = Peers()
    asked[:] = [200]
    assert peers.releases(HERE) and peers.releases(HERE)
    assert peers.keep({HERE: 1}) == [] and peers.releases(HERE)
    assert peers.keep({}) == [HERE]
    asked[:] = [404]
    assert not peers.releases(HERE) and not peers.releases(HERE)


def test_a_server_that_does_not_answer_is_asked_again(asked: list[Any]) -> None:
    """Guards against a server that stays stock because it was busy once."""
    peers = Peers()
    asked[:] = [requests.ConnectionError("refused"), 200]
    # The thread is done before the question is looked at: the entry is gone already.
    assert not peers.releases(HERE)
    assert peers.releases(HERE)


def test_a_rank_that_cannot_be_told_costs_no_request(caplog: pytest.LogCaptureFixture) -> None:
    """Guards against an error of one peer's socket in the scheduler's loop."""
    cleared = []

    def connect(info: dict[str, Any]) -> Any:
        raise OSError("no route to host")

    receiver = SimpleNamespace(
        bootstrap_room=7,
        bootstrap_infos=[{"rank_ip": "10.0.0.1"}],
        _connect_to_bootstrap_server=connect,
        clear=lambda: cleared.append(7),
    )
    release(receiver)
    assert cleared == [7] and "room 7" in caplog.text
