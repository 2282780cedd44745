"""The same of Mooncake's senders: a worker's call of the engine is what is waited for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from component.decode.pair import Pair, ranks_reduce
from component.transfer.bare import prefill
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.delta.metrics import Reason
from sglang.srt.disaggregation.delta.prefill.scheduler import ended
from sglang.srt.disaggregation.mooncake.conn import MooncakeKVSender

ROOM = 7


def request() -> Any:
    """A request in flight on one rank, which a worker is just sending."""
    manager = prefill("mooncake")
    manager.update_status(ROOM, KVPoll.WaitingForInput)
    sender: Any = MooncakeKVSender.__new__(MooncakeKVSender)
    sender.__dict__.update(
        kv_mgr=manager, bootstrap_room=ROOM, conclude_state=None, _room=manager.rooms.claim(ROOM)[0]
    )
    assert manager.rooms.enter(sender._room)
    return SimpleNamespace(rid="r", disagg_kv_sender=sender)


@pytest.mark.hazard("source-given-away")
def test_pages_stay_until_the_engines_call_returns_on_every_rank() -> None:
    """Guards against one rank's failure freeing the pages that another rank's engine reads."""
    requests = [request(), request()]
    ours, theirs = (it.disagg_kv_sender.kv_mgr for it in requests)
    with ranks_reduce():
        pair = Pair(lambda rank, group: None)

        def turn() -> list[list[str]]:
            return pair.call(lambda rank: ended([requests[rank]], [pair.groups[rank]]))

        assert turn() == [[], []]
        ours.rooms.fail(ROOM, Reason.TRANSPORT, "broken")
        ours.rooms.leave(ROOM)
        for _ in range(3):
            assert turn() == [[], []]
        assert theirs.rooms.stopped(ROOM) == "it failed on another rank of this server"
        assert theirs.rooms.destinations(ROOM) == [] and not theirs.rooms.enter(
            requests[1].disagg_kv_sender._room
        )
        theirs.rooms.leave(ROOM)
        assert turn() == [["r"], ["r"]]
        pair.close()


def test_a_stage_takes_in_what_the_one_before_has() -> None:
    """Guards against a pipeline stage that drops a request which the others run."""
    sender = request().disagg_kv_sender
    sender.is_taken_in = True
    sender.kv_mgr.rooms.leave(ROOM)
    sender.kv_mgr.rooms.fail(ROOM, Reason.ABORTED, "withdrawn")
    assert sender.poll() == KVPoll.WaitingForInput
    sender.num_kv_indices = 3  # as its ``init`` sets it
    assert sender.poll() == KVPoll.Failed
