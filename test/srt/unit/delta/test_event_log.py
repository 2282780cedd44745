"""The event log: off by default; one readable JSON line for each event."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang.srt.disaggregation.delta import event_log
from sglang.srt.patchset.environment import EVENT_LOG

ADMITTED = event_log.Admitted(
    at=12.5, room=None, rid="r1", prompt_tokens=40, prefix_tokens=32, pages=[7]
)
SENT = event_log.Sent(
    at=13.0, room=5, peer="agent", source_pages=[1, 2], destination_pages=[8, 9], bytes=64
)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """The log of a process is opened once; each test is a process of its own here."""
    event_log.event_log.cache_clear()
    yield
    event_log.event_log.cache_clear()


@pytest.mark.parametrize("value", [None, ""])
def test_off_by_default(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    """Guards against a log that nobody asked for."""
    if value is None:
        monkeypatch.delenv(EVENT_LOG.name, raising=False)
    else:
        monkeypatch.setenv(EVENT_LOG.name, value)
    assert event_log.event_log("decode") is None


def test_lines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Guards against lines that are buffered when a server is killed, or that do not say what they
    are; and against both sides writing to one file."""
    monkeypatch.setenv(EVENT_LOG.name, str(tmp_path / "log"))
    decode, prefill = event_log.event_log("decode"), event_log.event_log("prefill")
    assert decode is not None and prefill is not None and decode is not prefill
    assert event_log.event_log("decode") is decode
    decode.write(ADMITTED)
    decode.write(ADMITTED)
    prefill.write(SENT)

    lines = (tmp_path / "log" / f"decode-{os.getpid()}.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == 2 * [
        {
            "type": "admitted",
            "at": 12.5,
            "room": None,
            "rid": "r1",
            "prompt_tokens": 40,
            "prefix_tokens": 32,
            "pages": [7],
        }
    ]
    (line,) = (tmp_path / "log" / f"prefill-{os.getpid()}.jsonl").read_text().splitlines()
    assert json.loads(line)["type"] == "sent" and json.loads(line)["destination_pages"] == [8, 9]


def test_appends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Guards against a restarted server with the same process id that erases what was logged."""
    monkeypatch.setenv(EVENT_LOG.name, str(tmp_path))
    for _ in range(2):
        log = event_log.event_log("prefill")
        assert log is not None
        log.write(SENT)
        event_log.event_log.cache_clear()
    (file,) = tmp_path.iterdir()
    assert len(file.read_bytes().splitlines()) == 2
