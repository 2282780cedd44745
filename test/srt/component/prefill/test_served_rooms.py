"""The data-parallel rank that serves a room, as prefill reports it to its bootstrap server."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import requests

from component.transfer import bare
from sglang.srt.disaggregation.nixl.conn import NixlKVSender

ADDRESS, ROOM = "10.0.0.1:8998", 7


class Bootstrap:
    """The bootstrap server, which answers other threads than the scheduler's only on command."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.scheduler = threading.current_thread()
        self.answers = threading.Event()
        self.blocked: list[str] = []
        self.told: list[tuple[str, Any]] = []
        patch.setattr(requests, "post", self.post)

    def post(self, url: str, json: Any, timeout: float) -> Any:
        if threading.current_thread() is self.scheduler:
            self.blocked.append(url)
        else:
            assert self.answers.wait(60)
        self.told.append((url, json))
        return SimpleNamespace(status_code=200, raise_for_status=lambda: None)


def rank(**attributes: int) -> Any:
    """Return a rank of a prefill server with round-robin data-parallel ranks."""
    manager = bare.prefill("nixl", **attributes)
    manager.server_args.dp_size, manager.server_args.load_balance_method = 2, "round_robin"
    return manager


@pytest.mark.parametrize(
    ("attributes", "is_told"),
    [
        ({"system_dp_size": 2, "system_dp_rank": 1}, True),
        ({"attn_dp_rank": 1}, True),
        ({"attn_dp_rank": 1, "attn_tp_size": 2, "attn_tp_rank": 1}, False),
    ],
    ids=["a process for each", "attention", "not the first of its group"],
)
def test_decode_is_told_in_the_background(
    monkeypatch: pytest.MonkeyPatch, attributes: dict[str, int], is_told: bool
) -> None:
    """Guards against a scheduler that waits for HTTP with each request; against a rank that reports
    0, as SGLang's do without data-parallel attention (decode announced the request to another rank,
    and it failed by its deadline); and against one HTTP request for each tensor-parallel rank."""
    bootstrap = Bootstrap(monkeypatch)
    manager = rank(**attributes)
    NixlKVSender(manager, ADDRESS, ROOM, [0], 0)
    bootstrap.answers.set()
    manager.served_rooms.pool.shutdown()
    assert bootstrap.blocked == []
    served = {"bootstrap_room": ROOM, "dp_rank": 1}
    told = (f"http://{ADDRESS}/register_dp_rank", served)
    assert bootstrap.told == [told] * is_told


def test_a_bootstrap_server_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against an error that is not logged."""

    def refuse(url: str, json: Any, timeout: float) -> Any:
        raise requests.ConnectionError("refused")

    monkeypatch.setattr(requests, "post", refuse)
    manager = rank()
    NixlKVSender(manager, ADDRESS, ROOM, [0], 0)
    manager.served_rooms.pool.shutdown()
    assert f"room {ROOM}" in caplog.text and ADDRESS in caplog.text


@pytest.mark.parametrize(
    ("method", "here", "says"),
    [("follow_bootstrap_room", 0, True), ("follow_bootstrap_room", 1, False)]
    + [("round_robin", 0, False)],
)
def test_a_router_that_names_another_rank(method: str, here: int, says: bool) -> None:
    """Guards against a request that fails by its deadline without the cause: decode announced it to
    the rank that follows from its number."""
    manager = rank(attn_dp_rank=here)
    manager.server_args.load_balance_method = method
    manager.bootstrap_timeout = 0
    manager.served_rooms.pool.shutdown()
    manager.served_rooms.tell = lambda *_: None
    sender = NixlKVSender(manager, ADDRESS, ROOM, [0], 0)
    sender.fail_if_unannounced()
    assert ("disagg_prefill_dp_rank" in manager.failure_records[ROOM]) == says
