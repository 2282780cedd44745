"""How long a request may wait, and what is said about it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang.srt.disaggregation.delta.decode.admission import Limits
from sglang.srt.disaggregation.delta.decode.record import DecodeRecord, Refusal, Wait
from sglang.srt.disaggregation.delta.decode.waiting import missing
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
        Limits.read(16)


def test_each_limit_has_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against two limits that read each other's variable."""
    for number, variable in enumerate(LIMITS):
        monkeypatch.setenv(variable.name, str(16 * number))
    assert Limits.read(16) == (0.0, 16.0, 32.0, 48)


@pytest.mark.parametrize(
    ("own", "head", "text"),
    [
        (None, None, "its admission was not attempted yet; it needs 96 tokens, P"),
        (
            Refusal("no_tokens", 48),
            Refusal("no_tokens", 9),
            "not enough free KV tokens; it needs 48 tokens, P",
        ),
        (
            None,
            Refusal("no_tokens", 9),
            "request b ahead of it does not fit: not enough free KV tokens; it needs 96 tokens, P",
        ),
        (Refusal("no_metadata_slot"), None, "no free metadata slot; it needs 96 tokens, P"),
    ],
)
def test_what_is_missing(own: Refusal | None, head: Refusal | None, text: str) -> None:
    """Guards against a message that blames the wrong request, or gives another one's numbers."""

    def waiting_request(rid: str, refusal: Refusal | None) -> Any:
        return SimpleNamespace(rid=rid, delta=DecodeRecord(wait=Wait(refusal=refusal)))

    ahead = waiting_request("b", head) if head is not None else None
    assert missing(waiting_request("a", own), ahead, 96, "P") == text


def test_who_is_blocked() -> None:
    """Guards against a request that others pass being named as the one that holds them up."""
    key = ("p:1", None, 7, b"")
    refusals = (None, Refusal("prefix_arriving", prefix=key), Refusal("no_tokens", 9))
    assert [Wait(refusal=refusal).is_blocked for refusal in refusals] == [False, False, True]
