"""Environment variables: a default, a value, or an error that names the variable."""

from __future__ import annotations

import pytest

from sglang.srt.disaggregation.delta.config import env_int, env_seconds

NAME = "SGLANG_DISAGGREGATION_TEST_VALUE"


def test_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against an unset variable that changes behaviour."""
    monkeypatch.delenv(NAME, raising=False)
    assert env_int(NAME, 256) == 256
    assert env_seconds(NAME, 1.5) == 1.5


@pytest.mark.parametrize(("text", "value"), [("0", 0), ("17", 17), (" 8 ", 8)])
def test_integers(monkeypatch: pytest.MonkeyPatch, text: str, value: int) -> None:
    """Guards against zero, which turns a feature off, being taken for "not set"."""
    monkeypatch.setenv(NAME, text)
    assert env_int(NAME, 256) == value


@pytest.mark.parametrize("text", ["", "many", "1.5", "-1", "0x10"])
def test_wrong_integers(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Guards against a typing error that silently means the default."""
    monkeypatch.setenv(NAME, text)
    with pytest.raises(ValueError, match=NAME):
        env_int(NAME, 256)


def test_minimum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a minimum that is off by one, or missing in the message."""
    monkeypatch.setenv(NAME, "3")
    assert env_int(NAME, 9, minimum=3) == 3
    with pytest.raises(ValueError, match="at least 4, not 3"):
        env_int(NAME, 9, minimum=4)


@pytest.mark.parametrize(("text", "value"), [("0", 0.0), ("2.5", 2.5), ("1e-3", 0.001)])
def test_seconds(monkeypatch: pytest.MonkeyPatch, text: str, value: float) -> None:
    """Guards against fractions being refused or cut."""
    monkeypatch.setenv(NAME, text)
    assert env_seconds(NAME, 30.0) == value


@pytest.mark.parametrize("text", ["", "soon", "-0.1", "nan", "inf", "-inf"])
def test_wrong_seconds(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Guards against a deadline that never comes, or that compares false with everything."""
    monkeypatch.setenv(NAME, text)
    with pytest.raises(ValueError, match=NAME):
        env_seconds(NAME, 30.0)
