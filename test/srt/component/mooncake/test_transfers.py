"""Mooncake's own behaviour in a room: dummies, failed sessions, metadata over TCP.

``component/transfer`` tests the behaviour of both backends; these tests run in the same way.
"""

from __future__ import annotations

import pytest

from component.mooncake.pair import Pair
from component.transfer.pair import ADDRESS, LOST, pages, until
from sglang.srt.disaggregation.base.conn import KVPoll

pytestmark = pytest.mark.parametrize("pair", ["mooncake"], indirect=True)


@pytest.mark.hazard("leaking-room-records")
def test_dummy_rank_sends_nothing_and_proves_nothing(pair: Pair) -> None:
    """Guards against writes from a dummy rank, against its request that never ends, and against its
    answer to a withdrawal, which counted as that of the writing rank."""
    (info,) = pair.decode.manager.connection_pool[f"{ADDRESS}_0_0_0"]
    info["is_dummy"] = True
    sender, receiver = pair.ready_room(4, 5)
    sender.send(pages(30, 31))
    until(lambda: sender.poll() == KVPoll.Success, "the dummy's part is done")
    sender.clear()
    assert pair.arrived([], []) and receiver.poll() == KVPoll.WaitingForInput
    receiver.abort()
    deferred = receiver.defer_free()  # notifies the dummy, too
    assert pair.reason(receiver)
    again = pair.sender(sender.bootstrap_room)
    until(lambda: again.poll() == KVPoll.Failed, "withdrawal")
    assert pair.reason(again)
    info["is_dummy"] = False
    pair.serve(31, 6)  # its answer has arrived by then
    assert not deferred.is_drained(), "the dummy's answer counted for the writing rank"
    deferred.free(lambda entry: None)


def test_metadata_over_tcp_arrive(pair: Pair) -> None:
    """Guards against lost metadata that stock sends beside the engine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_MOONCAKE_SEND_AUX_TCP", "1")
        pair.prefill.aux[3] = 55
        pair.serve(30, 4)
    assert pair.arrived([30], [4]) and pair.decode.aux[5].tolist() == [55] * 16


def test_a_stock_server_of_two_ranks(pair: Pair) -> None:
    """Guards against a room with a stock announcement that never completes: the status of one rank
    of its server was forgotten when the other one's arrived."""
    manager, room = pair.decode.manager, pair.next_room()
    receiver = pair.receiver(room)
    receiver.send_metadata(pages(1, 2), 0, None)
    manager.required_prefill_response_num_table[room] = 2
    for writer, state in ((0, KVPoll.WaitingForInput), (1, KVPoll.Success)):
        manager.take_status([b"%d" % number for number in (room, KVPoll.Success, writer)])
        assert receiver.poll() == state
    receiver.withdraw("the test ends")
    receiver.clear()


def test_stock_decode_is_told_of_a_failed_transfer(pair: Pair) -> None:
    """Guards against an unpatched decode server that waits for a failed transfer: it only
    understands the status."""
    sender, receiver = pair.room()
    receiver.send_metadata(pages(1, 2), 0, None)
    pair.announced(sender)
    sender.init(2, 0)
    with pair.breaking():
        sender.send(pages(8, 9))
        assert pair.finish(sender, receiver) == LOST
    assert pair.reason(sender) and "prefill could not deliver it" in pair.reason(receiver)


def test_stock_decode_is_told_of_a_mismatch(pair: Pair) -> None:
    """Guards against an unpatched decode server that waits for its own deadline if prefill has
    another number of pages than it announced."""
    sender, receiver = pair.room()
    receiver.send_metadata(pages(1, 2), 0, None)
    pair.announced(sender)
    sender.init(2, 0)
    sender.send(pages(8, 9, 10))
    assert pair.finish(sender, receiver) == LOST
    assert pair.reason(sender) and "prefill could not deliver it" in pair.reason(receiver)


@pytest.mark.hazard("pages-written-after-release", "peer-lost-for-ever")
def test_batch_that_the_engine_refuses(pair: Pair) -> None:
    """Guards against pages that are reused while writes of a refused batch may still arrive (it is
    unknown how many are in flight), against clients that wait as long as the pages, and against a
    decode rank that stays excluded."""
    sender, receiver = pair.ready_room(20, 9)
    second, other = pair.ready_room(4, slot=2)
    with pair.engine(lambda *arguments: -1):
        sender.send(pages(30, 31))
        assert pair.finish(sender, receiver) == LOST
    deferred = receiver.defer_free()
    text = pair.reason(sender)
    assert f"room {sender.bootstrap_room}" in text and "127.0.0.1" in text and "status -1" in text
    assert "prefill could not deliver it" in pair.reason(receiver)
    assert not deferred.is_drained(), "an error says nothing about the other writes of the batch"
    second.send(pages(33))  # announced before: fails at once, with the reason
    assert pair.finish(second, other) == LOST
    for end in (second, other):
        assert "register again" in pair.reason(end)
    pair.expire()
    until(deferred.is_drained, "held for ever")
    deferred.free(lambda entry: None)
    pair.register()
    pair.serve(30, 4)
    assert pair.arrived([30], [4])
