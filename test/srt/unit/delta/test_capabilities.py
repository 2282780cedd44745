"""Negotiation with a prefill server: capable, stock, or not reachable yet."""

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
        # Without a clear yes the prefix is 0.
        pytest.param((404, OURS), False, id="stock"),
        pytest.param((200, b"{}"), False, id="nothing"),
        pytest.param((200, b'{"hicache": 3}'), False, id="other keys"),
        pytest.param((200, b"<html>some proxy</html>"), False, id="a proxy"),
        pytest.param((200, b""), False, id="empty"),
        pytest.param((200, b"\xff\xfe\x00"), False, id="no text"),
        pytest.param((200, b'{"delta": "1"}'), False, id="another type"),
        pytest.param((200, b"[1]"), False, id="a list"),
        # A server that is just starting must not count as stock for ever: it is queried again.
        pytest.param((500, OURS), None, id="500"),
        pytest.param((503, b""), None, id="503"),
        pytest.param(requests.ConnectionError("refused"), None, id="refused"),
        pytest.param(requests.Timeout(), None, id="timeout"),
    ],
)
def test_capabilities_of_a_server(
    monkeypatch: pytest.MonkeyPatch, answer: Any, takes_delta: bool | None
) -> None:
    """Guards against two sides that fail to negotiate; against a prefix for a server that would
    write the start of the prompt into the pages of its tail; and against an exception on the
    scheduler's thread."""

    def get(url: str, timeout: float) -> Any:
        assert url == f"http://{ADDRESS}{wire.ROUTE}" and timeout == 5.0
        if isinstance(answer, Exception):
            raise answer
        return SimpleNamespace(status_code=answer[0], content=answer[1])

    monkeypatch.setattr(requests, "get", get)
    capabilities = wire.fetch_capabilities(ADDRESS)
    assert (capabilities and capabilities.takes_delta) is takes_delta


def test_an_invalid_address() -> None:
    """Guards against an exception if the load balancer sent an unusable host."""
    assert wire.fetch_capabilities("not a host:port") is None


@pytest.mark.parametrize("offset", [-1, 1])
def test_another_version(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, offset: int
) -> None:
    """Guards against a prefix for a peer that reads it differently, and against a lost hit rate
    without explanation: the log names both versions."""
    their_version = wire.VERSION + offset
    answer = SimpleNamespace(status_code=200, content=msgspec.json.encode({"delta": their_version}))
    monkeypatch.setattr(requests, "get", lambda url, timeout: answer)
    capabilities = wire.fetch_capabilities(ADDRESS)
    assert capabilities is not None and not capabilities.takes_delta
    assert f"protocol {their_version}, this decode server {wire.VERSION}" in caplog.text


@pytest.mark.parametrize(
    ("answer", "stages", "is_told"),
    [
        (YIELDS, 1, True),
        (OURS, 1, False),
        (b'{"delta": 1, "control": 1, "incarnation": "of before local turns"}', 1, False),
        (b"{}", 1, False),
        (YIELDS, 2, False),
        (YIELDS, None, False),
    ],
    ids=["ours", "local turns unsupported", "older", "stock", "pipeline", "unknown topology"],
)
def test_servers_that_are_told_of_local_turns(
    answer: bytes, stages: int | None, is_told: bool
) -> None:
    """Guards against a prefill server that does not know the message, or whose ranks cannot agree
    on it, and that keeps the request for ever."""
    known = msgspec.json.decode(answer, type=wire.Capabilities)
    manager: Any = SimpleNamespace(
        servers=SimpleNamespace(capabilities=lambda address: known),
        prefill_info_table={} if stages is None else {ADDRESS: SimpleNamespace(pp_size=stages)},
    )
    assert DeltaManager.peer_yields(manager, ADDRESS) is is_told
