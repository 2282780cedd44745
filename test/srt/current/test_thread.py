"""The settings of the NIXL agent that a real 0.5.23 server creates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any  # Any: settings of NIXL's binding

import pytest

if TYPE_CHECKING:
    from current.decode import Decode


#: Incomplete managers, kept because their collection would wait for their sockets.
_kept: list[Any] = []


def pause_of_an_agent(decode: Decode, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return the progress delay in microseconds of an agent that this server creates."""
    from nixl import _api

    settings_used: list[Any] = []

    def make(name: str, settings: Any) -> None:
        settings_used.append(settings)
        raise ZeroDivisionError

    stock = _api.nixlBind.nixlAgentConfig
    monkeypatch.setattr(_api.nixlBind, "nixlAgent", make)
    with pytest.raises(ZeroDivisionError) as raised:
        decode.call(decode.prealloc._init_kv_manager)
    _kept.append(raised)
    assert _api.nixlBind.nixlAgentConfig is stock
    return int(settings_used[0].pthrDelay)


@pytest.mark.server()
def test_stock_spins(decode: Decode, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault: the binding sets no pause, and SGLang has no setting for it."""
    assert pause_of_an_agent(decode, monkeypatch) == 0


@pytest.mark.server(env={"SGLANG_DISAGGREGATION_NIXL_PROGRESS_DELAY": "1000"})
def test_the_configured_pause_is_set(decode: Decode, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a thread that spins on a core in each process."""
    assert pause_of_an_agent(decode, monkeypatch) == 1000
