"""What NIXL's binding is asked for when a real 0.5.23 server makes its agent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any  # Any: settings of NIXL's binding

import pytest

if TYPE_CHECKING:
    from current.decode import Decode


#: Half-made managers: what they hold would wait for their sockets when it is collected.
_kept: list[Any] = []


def pause_of_an_agent(decode: Decode, monkeypatch: pytest.MonkeyPatch) -> int:
    """Microseconds, of the agent that another manager of this server would get from NIXL."""
    from nixl import _api

    made: list[Any] = []

    def make(name: str, settings: Any) -> None:
        made.append(settings)
        raise ZeroDivisionError

    stock = _api.nixlBind.nixlAgentConfig
    monkeypatch.setattr(_api.nixlBind, "nixlAgent", make)
    with pytest.raises(ZeroDivisionError) as raised:
        decode.call(decode.prealloc._init_kv_manager)
    _kept.append(raised)
    assert _api.nixlBind.nixlAgentConfig is stock
    return int(made[0].pthrDelay)


@pytest.mark.server()
def test_stock_spins(decode: Decode, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault: the binding sets no pause, and SGLang cannot ask for one."""
    assert pause_of_an_agent(decode, monkeypatch) == 0


@pytest.mark.server(env={"SGLANG_DISAGGREGATION_NIXL_PROGRESS_DELAY": "1000"})
def test_the_pause_that_was_asked_for(decode: Decode, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a thread that takes a core in each process."""
    assert pause_of_an_agent(decode, monkeypatch) == 1000
