"""When a scheduler may sleep (``--sleep-on-idle``): requests wake it, peers do not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from component.decode.decoder import Decoder
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.scheduler import Scheduler


class Sleeper:
    """Counts instead of sleeping."""

    def __init__(self) -> None:
        self.naps = 0

    def maybe_sleep(self) -> None:
        self.naps += 1


def naps(decoder: Any) -> int:
    """How often the scheduler would sleep now: once or not at all."""
    decoder.idle_sleeper = Sleeper()
    decoder.maybe_sleep_on_idle()
    return decoder.idle_sleeper.naps


def test_an_idle_server_sleeps_and_without_the_flag_none_does() -> None:
    """Guards against a server that asks for rest and spins."""
    decoder = Decoder(16, 640)
    assert naps(decoder) == 1
    decoder.idle_sleeper = None
    decoder.maybe_sleep_on_idle()


def test_a_prefill_server_is_awake_while_a_handshake_is_under_way() -> None:
    """Guards against up to a second of sleep on a request whose decode server announces its pages
    meanwhile: stock's scheduler does that."""
    prefill = Scheduler.__new__(Scheduler)
    manager = SimpleNamespace(rooms=object())
    bootstrap = SimpleNamespace(queue=[], kv_manager=manager)
    prefill.__dict__.update(
        vars(Decoder(16, 640)),
        disaggregation_mode=DisaggregationMode.PREFILL,
        disagg_prefill_inflight_queue=[],
        disagg_prefill_bootstrap_queue=bootstrap,
    )
    assert naps(prefill) == 1
    bootstrap.queue.append("a request whose room is not announced yet")
    assert naps(prefill) == 0


@pytest.mark.parametrize("where", ["retracted", "held"])
def test_a_decode_server_is_awake_while_requests_wait_that_stock_does_not_count(where: str) -> None:
    """Guards against a second of sleep for each look at a retracted request, or at pages that are
    free once prefill has stopped writing to them."""
    decoder = Decoder(16, 640)
    req = decoder.submit([1] * 40)
    decoder.tick_queues()
    if where == "held":
        decoder.abort(req.rid)
        decoder.tick_queues()
        assert decoder._deferred
    else:
        decoder.disagg_decode_transfer_queue.queue.clear()
        decoder.disagg_decode_prealloc_queue.retracted_queue.append(req)
    assert naps(decoder) == 0
