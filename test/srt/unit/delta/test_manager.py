"""Deadlines of a server are read where it starts."""

from __future__ import annotations

import pytest

from sglang.srt.disaggregation.delta.manager import check_deadlines


@pytest.mark.parametrize("what", ["QUARANTINE", "TRANSFER", "CLAIM", "PEER", "HANDSHAKE"])
def test_wrong_values_are_refused_at_start(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """Guards against a typing error that is found hours later, when the deadline first counts."""
    check_deadlines()
    monkeypatch.setenv(f"SGLANG_DISAGGREGATION_{what}_TIMEOUT", "soon")
    with pytest.raises(ValueError, match=what):
        check_deadlines()
