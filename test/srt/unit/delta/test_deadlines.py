"""Deadlines: a default, a value, or an error that names the variable."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sglang.srt.disaggregation.delta import config

NAMES = {
    "SGLANG_DISAGGREGATION_QUARANTINE_TIMEOUT": (config.quarantine_seconds, 60.0),
    "SGLANG_DISAGGREGATION_TRANSFER_TIMEOUT": (config.transfer_seconds, 120.0),
    "SGLANG_DISAGGREGATION_CLAIM_TIMEOUT": (config.claim_seconds, 30.0),
    "SGLANG_DISAGGREGATION_PEER_TIMEOUT": (config.peer_seconds, 120.0),
    "SGLANG_DISAGGREGATION_HANDSHAKE_TIMEOUT": (config.handshake_seconds, 5.0),
}
CASES = [(name, *what) for name, what in NAMES.items()]


@pytest.mark.parametrize(("name", "read", "default"), CASES)
def test_default_and_value(
    monkeypatch: pytest.MonkeyPatch, name: str, read: Callable[[], float], default: float
) -> None:
    """Guards against two deadlines that read each other's variable."""
    for other in NAMES:
        monkeypatch.delenv(other, raising=False)
    assert read() == default
    monkeypatch.setenv(name, "7.5")
    assert read() == 7.5
    assert [it() for it, _ in NAMES.values()].count(7.5) == 1


@pytest.mark.parametrize("text", ["", "soon", "-1", "nan", "inf", "1s"])
@pytest.mark.parametrize(("name", "read", "default"), CASES)
def test_wrong_values_name_their_variable(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    read: Callable[[], float],
    default: float,
    text: str,
) -> None:
    """Guards against a typing error that means the default, or for ever."""
    monkeypatch.setenv(name, text)
    with pytest.raises(ValueError, match=name):
        read()
