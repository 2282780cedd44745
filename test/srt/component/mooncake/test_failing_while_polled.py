"""A room fails on one thread while the scheduler polls it on another."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from component.transfer.bare import prefill
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.delta import wire
from sglang.srt.disaggregation.delta.mooncake.worker import ChunkWorker
from sglang.srt.disaggregation.mooncake.conn import MooncakeKVSender

ROOM = 7


@pytest.mark.hazard("source-given-away")
def test_a_chunk_that_is_about_to_be_sent() -> None:
    """Guards against pages that the scheduler frees because the room's status says Failed, while
    the room table still lets a worker begin to read them."""
    manager = prefill("mooncake")
    manager.update_status(ROOM, KVPoll.WaitingForInput)
    sender: Any = MooncakeKVSender.__new__(MooncakeKVSender)
    sender.__dict__.update(
        kv_mgr=manager, bootstrap_room=ROOM, conclude_state=None, _room=manager.rooms.claim(ROOM)[0]
    )
    worker = ChunkWorker(manager, ThreadPoolExecutor(1))
    served, polls = [], []
    worker._serve = served.append  # type: ignore[method-assign]
    fail = manager.fail_known

    def fail_and_poll(room: int, text: str) -> bool:
        was_known = fail(room, text)
        polls.append(sender.poll())
        return bool(was_known)

    manager.fail_known = fail_and_poll
    manager.decode_kv_args_table["D"] = SimpleNamespace(endpoint="10.0.0.1", dst_port=4000)
    manager.decode_ranks.take(wire.Withdraw(ROOM, "D", "10.0.0.1", 4000, "no reason"))
    worker.take(SimpleNamespace(room=ROOM, is_last_chunk=True, owner=sender._room))
    assert polls == [KVPoll.Failed] and served == []
    assert "no reason" in manager.failure_records[ROOM]
