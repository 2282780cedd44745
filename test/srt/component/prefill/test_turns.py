"""SGLang's own loops say when a prefill scheduler has taken the requests that came to it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from component.prefill.prefiller import Prefiller


class Stop(Exception):
    """Ends a loop that goes on for ever."""


class Looping(Prefiller):
    """Writes down what its loop does, for two turns."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__(patch)
        self.did: list[str] = []
        self.rank.manager.rooms.scheduler_time = SimpleNamespace(
            turn=lambda: self.did.append("turn")
        )
        self.disagg_prefill_bootstrap_queue.pop_bootstrapped = list
        self.running_batch = SimpleNamespace(batch_is_full=False)
        self.waiting_queue: list[Any] = []
        self.chunked_req = self.last_batch = self.cur_batch = None
        self.enable_overlap = False

    def recv_requests(self) -> list[Any]:
        if self.did.count("requests") == 2:
            raise Stop
        return []

    def process_input_requests(self, requests: list[Any]) -> None:
        self.did.append("requests")

    def get_new_batch_prefill(self) -> None:
        self.did.append("batch")

    def maybe_prepare_mlp_sync_batch(self, batch: None) -> None:
        pass

    def self_check_during_idle(self) -> None:
        pass

    def launch_batch_sample_if_needed(self, result: None) -> None:
        pass


@pytest.mark.parametrize("is_paused", [False, True])
@pytest.mark.parametrize("loop", ["normal", "overlap"])
def test_every_turn_counts_once(
    monkeypatch: pytest.MonkeyPatch, loop: str, is_paused: bool
) -> None:
    """Guards against a server whose rooms never age, against one whose time goes on before the
    requests that came were looked at, and against a pause that stops rooms which decode has
    announced: their requests are held back, and come when it ends."""
    prefiller = Looping(monkeypatch)
    prefiller._engine_paused = is_paused
    with pytest.raises(Stop):
        getattr(prefiller, f"event_loop_{loop}_disagg_prefill")()
    assert prefiller.did == ["requests", *["turn"] * (not is_paused), "batch"] * 2
