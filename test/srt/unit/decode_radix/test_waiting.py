"""How long a request may wait, and what is said about it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang.srt.disaggregation.delta.decode import waiting
from sglang.srt.disaggregation.delta.decode.waiting import Refusal


@pytest.mark.parametrize("name", [waiting.TIMEOUT_ENV, waiting.LOG_ENV])
@pytest.mark.parametrize("text", ["soon", "-1", "inf"])
def test_wrong_settings_name_themselves(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str
) -> None:
    """Guards against a server that starts with a limit it does not understand."""
    read = {
        waiting.TIMEOUT_ENV: waiting.admission_timeout,
        waiting.LOG_ENV: waiting.log_after,
    }[name]
    monkeypatch.setenv(name, text)
    with pytest.raises(ValueError, match=name):
        read()


def test_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a default that differs from what the documents say."""
    for name in (waiting.TIMEOUT_ENV, waiting.LOG_ENV):
        monkeypatch.delenv(name, raising=False)
    assert (waiting.admission_timeout(), waiting.log_after()) == (300.0, 10.0)


def test_once_a_wait() -> None:
    """Guards against a line for every step, and against a second wait that nobody hears of."""
    entry = SimpleNamespace()

    def said(since: float | None, *times: float) -> list[bool]:
        return [waiting.once(entry, since, now, 10.0) for now in times]

    assert said(None, 100.0) == [False]
    assert said(0.0, 9.0, 10.0, 11.0, 500.0) == [False, True, False, False]
    assert said(600.0, 605.0, 610.0, 615.0) == [False, True, False]


@pytest.mark.parametrize(
    ("own", "head", "text"),
    [
        (None, None, "it was not tried yet; 96 tokens wanted, P"),
        (
            Refusal("a", "no_tokens", 48),
            Refusal("b", "no_tokens", 9),
            "not enough free KV tokens; 48 tokens wanted, P",
        ),
        (
            None,
            Refusal("b", "no_tokens", 9),
            "request b ahead of it does not fit: not enough free KV tokens; 96 tokens wanted, P",
        ),
        (Refusal("a", "no_metadata_slot"), None, "no free metadata slot; 96 tokens wanted, P"),
    ],
)
def test_what_is_missing(own: Refusal | None, head: Refusal | None, text: str) -> None:
    """Guards against a message that blames the wrong request, or gives another one's numbers."""
    assert waiting.missing(SimpleNamespace(rid="a"), own, head, 96, "P") == text
