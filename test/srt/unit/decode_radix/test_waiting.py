"""How long a request may wait, and what is said about it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang.srt.disaggregation.delta.decode import waiting
from sglang.srt.disaggregation.delta.decode.waiting import Refusal
from sglang.srt.patchset import environment

LIMITS = (
    environment.ADMISSION_TIMEOUT,
    environment.PREFIX_WAIT_TIMEOUT,
    environment.WAIT_LOG,
    environment.PREFIX_WAIT_TOKENS,
)


@pytest.mark.parametrize("variable", LIMITS, ids=lambda each: each.name)
def test_wrong_settings_name_themselves(
    monkeypatch: pytest.MonkeyPatch, variable: environment.Variable[float]
) -> None:
    """Guards against a server that starts with a limit it does not understand."""
    monkeypatch.setenv(variable.name, "soon")
    with pytest.raises(ValueError, match=variable.name):
        waiting.Limits.read(16)


def test_each_limit_has_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against two limits that read each other's variable."""
    for number, variable in enumerate(LIMITS):
        monkeypatch.setenv(variable.name, str(16 * number))
    assert waiting.Limits.read(16) == (0.0, 16.0, 32.0, 48)


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
