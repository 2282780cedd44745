"""Negotiation with a prefill server: understood, stock, or not reachable yet."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import requests

from sglang.srt.disaggregation.delta import wire
from sglang.srt.disaggregation.delta.manager import DeltaManager

ADDRESS = "10.0.0.1:8998"
OURS = msgspec.json.encode(wire.OURS)
YIELDS = msgspec.json.encode(msgspec.structs.replace(wire.OURS, yields=True))
LATER = msgspec.json.encode({"delta": wire.VERSION, "abort": 1})


@pytest.mark.parametrize(
    ("answer", "takes_delta"),
    [
        pytest.param((200, OURS), True, id="ours"),
        pytest.param((200, LATER), True, id="a later release, with more capabilities"),
        # No clear yes means prefix 0.
        pytest.param((404, OURS), False, id="stock"),
        pytest.param((200, b"{}"), False, id="nothing"),
        pytest.param((200, b'{"hicache": 3}'), False, id="other keys"),
        pytest.param((200, b"<html>some proxy</html>"), False, id="a proxy"),
        pytest.param((200, b""), False, id="empty"),
        pytest.param((200, b"\xff\xfe\x00"), False, id="no text"),
        pytest.param((200, b'{"delta": "1"}'), False, id="another type"),
        pytest.param((200, b"[1]"), False, id="a list"),
        # One that is just starting must not count as stock for ever: it is asked again.
        pytest.param((500, OURS), None, id="500"),
        pytest.param((503, b""), None, id="503"),
        pytest.param(requests.ConnectionError("refused"), None, id="refused"),
        pytest.param(requests.Timeout(), None, id="timeout"),
    ],
)
def test_what_a_server_takes(
    monkeypatch: pytest.MonkeyPatch, answer: Any, takes_delta: bool | None
) -> None:
    """Guards against two sides that do not find each other; against a prefix for a server that
    would write the start of the prompt into the pages of its tail; and against an exception on the
    scheduler's thread."""

    def get(url: str, timeout: float) -> Any:
        assert url == f"http://{ADDRESS}{wire.ROUTE}" and timeout == 5.0
        if isinstance(answer, Exception):
            raise answer
        return SimpleNamespace(status_code=answer[0], content=answer[1])

    monkeypatch.setattr(requests, "get", get)
    found = wire.fetch_capabilities(ADDRESS)
    assert (found and found.takes_delta) is takes_delta


def test_address_that_is_none() -> None:
    """Guards against an exception where the load balancer sent an unusable host."""
    assert wire.fetch_capabilities("not a host:port") is None


@pytest.mark.parametrize("offset", [-1, 1])
def test_another_version(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, offset: int
) -> None:
    """Guards against a prefix for a peer that reads it differently, and against a lost hit rate
    that nobody can explain: the log names both versions."""
    theirs = wire.VERSION + offset
    answer = SimpleNamespace(status_code=200, content=msgspec.json.encode({"delta": theirs}))
    monkeypatch.setattr(requests, "get", lambda url, timeout: answer)
    found = wire.fetch_capabilities(ADDRESS)
    assert found is not None and not found.takes_delta
    assert f"protocol {theirs}, this decode server {wire.VERSION}" in caplog.text


@pytest.mark.parametrize(
    ("theirs", "stages", "told"),
    [
        (YIELDS, 1, True),
        (OURS, 1, False),
        (b'{"delta": 1, "control": 1, "incarnation": "of before local turns"}', 1, False),
        (b"{}", 1, False),
        (YIELDS, 2, False),
        (YIELDS, None, False),
    ],
    ids=["ours", "nobody who answers there", "older", "stock", "pipeline", "unknown topology"],
)
def test_who_is_told_that_decode_computes(theirs: bytes, stages: int | None, told: bool) -> None:
    """Guards against a prefill server that does not know the message, or whose ranks cannot agree
    on it, and that keeps the request for ever."""
    known = msgspec.json.decode(theirs, type=wire.Capabilities)
    manager: Any = SimpleNamespace(
        servers=SimpleNamespace(capabilities=lambda address: known),
        prefill_info_table={} if stages is None else {ADDRESS: SimpleNamespace(pp_size=stages)},
    )
    assert DeltaManager.peer_yields(manager, ADDRESS) is told
