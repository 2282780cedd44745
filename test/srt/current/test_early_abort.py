"""Decode aborts its half of a request before prefill has received the other half (docs/upstream.md,
change 1)."""

from __future__ import annotations

import pytest

from current.environment import MOONCAKE
from current.prefill import Prefill

LEAD = {"SGLANG_DISAGGREGATION_DECODE_LOCAL_TOKENS": "512"}
ROOM = 77
PROMPT = list(range(100, 300))


def ends(prefill: Prefill, *, early: bool) -> bool:
    """Return whether a request has ended a few steps after decode's abort.

    ``early``: the abort arrives before the request. Once the client has disconnected too, the
    request must be gone.
    """
    if early:
        prefill.hear_abort(ROOM)
    rid = prefill.ask(PROMPT, 4, bootstrap_room=ROOM)
    prefill.step(3)
    if not early:
        prefill.hear_abort(ROOM)
    prefill.step(20)
    has_ended = prefill.ended(rid)
    prefill.abort(rid)
    prefill.step(3)
    assert prefill.ended(rid)
    return has_ended


@pytest.mark.server(mode="prefill")
def test_stock_ends_a_request_whose_abort_comes_in_time(prefill: Prefill) -> None:
    """The control: a request that arrived before its abort ends."""
    assert ends(prefill, early=False)


@pytest.mark.server(mode="prefill")
def test_stock_waits_after_an_early_abort(prefill: Prefill) -> None:
    """The fault: the abort is dropped, and the request waits for an announcement that never comes,
    until SGLang's bootstrap timeout of 300 s."""
    assert prefill.manager.bootstrap_timeout == 300
    assert not ends(prefill, early=True)


@pytest.mark.parametrize(
    (),
    [
        pytest.param(marks=pytest.mark.server(mode="prefill", env=LEAD), id="nixl"),
        pytest.param(marks=pytest.mark.server(*MOONCAKE, mode="prefill", env=LEAD), id="mooncake"),
    ],
)
def test_an_early_abort_is_remembered(prefill: Prefill) -> None:
    """The cure: the request ends as if the abort had come in time, and so does a second one."""
    assert ends(prefill, early=True)
    assert ends(prefill, early=False)
