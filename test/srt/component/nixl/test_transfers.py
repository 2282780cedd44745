"""What NIXL alone does with a room: its notes, its prepared lists.

What both backends must do is in ``component/transfer``; tests run as they do there.
"""

from __future__ import annotations

from typing import Any

import pytest

from component.nixl.pair import Pair
from component.transfer.pair import DONE, pages, until
from sglang.srt.disaggregation.base.conn import KVPoll

pytestmark = pytest.mark.parametrize("pair", ["nixl"], indirect=True)


@pytest.mark.hazard("full-hit-without-metadata")
@pytest.mark.parametrize("decode", ["ours", "older"])
def test_one_transfer_a_chunk_and_one_note_a_room(pair: Pair, decode: str) -> None:
    """Guards against a transfer of its own for the metadata of a decode rank that takes them in the
    note, and against one of an older version that does not get them, with pages or a full hit."""
    more = 0
    if decode == "older":
        more, pair.decode.manager.expect_metadata = 1, lambda room, slot: False
    for targets, prompt, prefix in (((20, 9), 2, 0), ((), 3, 12)):
        pair.prefill.aux[3] = 70 + prompt
        with pair.counted("transfer", "send_notif") as calls:
            sender, receiver = pair.ready_room(*targets, prompt=prompt, prefix=prefix)
            for chunk in [pages(30)] * len(targets) or [pages()]:
                sender.send(chunk)
            assert pair.finish(sender, receiver) == DONE
        assert calls["transfer"] == len(targets) + more and calls["send_notif"] == 1 + more, calls
        assert pair.decode.aux[5].tolist() == [70 + prompt] * 16
        pair.clear(sender, receiver)


@pytest.mark.parametrize("knows", ["no lists", "rows of three"])
def test_pages_arrive_without_prepared_lists(pair: Pair, knows: str) -> None:
    """Guards against a NIXL that prepares no lists, or knows no strided ones, failing every room:
    ranges are built, with the same result."""
    agent, asked = pair.prefill.manager.agent, []

    def prepare(name: str, rows: Any, memory: str) -> Any:
        asked.append(rows)
        if knows == "no lists" or rows.shape[1] != 3:
            raise ValueError("rows of three")
        return type(agent).prep_xfer_dlist(agent, name, rows, memory)

    with pair.agent_that(prep_xfer_dlist=prepare):
        pair.serve(30, 4)
    assert asked and pair.arrived([30], [4])


@pytest.mark.hazard("drained-per-request")
def test_many_rooms_drain_once_a_step(pair: Pair) -> None:
    """Guards against one call of the agent for each of a decode server's rooms in every step, also
    of those that were given up and may still be written to."""
    rooms = [pair.ready_room(slot, slot=slot % 8) for slot in range(10)]
    given_up = []
    for _, receiver in rooms[5:]:
        receiver.abort()
        given_up.append(receiver.defer_free())
        receiver.clear()
    agent, drains = pair.decode.manager.agent, []
    agent.get_new_notifs = lambda: drains.append(1) or type(agent).get_new_notifs(agent)
    for _ in range(5):
        for _, receiver in rooms[:5]:
            receiver.poll()
        for deferred in given_up:
            deferred.is_drained()
    del agent.get_new_notifs
    assert len(drains) == 5, drains
    for deferred, (sender, _) in zip(given_up, rooms[5:], strict=True):
        until(deferred.is_drained, "drained")
        deferred.stop_following()
        until(lambda ended=sender: ended.poll() == KVPoll.Failed, "withdrawal")
        sender.clear()
    for sender, receiver in rooms[:5]:
        sender.send(pages(40))
        assert pair.finish(sender, receiver) == DONE
        pair.clear(sender, receiver)
