"""What Mooncake alone does with a room: dummies, failed sessions, metadata over TCP.

What both backends must do is in ``component/transfer``; tests run as they do there.
"""

from __future__ import annotations

import pytest

from component.mooncake.pair import Pair
from component.transfer.pair import ADDRESS, LOST, pages, until
from sglang.srt.disaggregation.base.conn import KVPoll

pytestmark = pytest.mark.parametrize("pair", ["mooncake"], indirect=True)


@pytest.mark.hazard("leaking-room-records")
def test_dummy_rank_sends_nothing_and_proves_nothing(pair: Pair) -> None:
    """Guards against writes from a dummy rank, against its request that never ends, and against
    its word on a withdrawal, which counted as that of the rank that writes."""
    (info,) = pair.decode.manager.connection_pool[f"{ADDRESS}_0_0_0"]
    info["is_dummy"] = True
    sender, receiver = pair.ready_room(4, 5)
    sender.send(pages(30, 31))
    until(lambda: sender.poll() == KVPoll.Success, "a dummy's part is done")
    sender.clear()
    assert pair.arrived([], []) and receiver.poll() == KVPoll.WaitingForInput
    receiver.abort()
    deferred = receiver.defer_free()  # asks the dummy, too
    assert pair.reason(receiver)
    again = pair.sender(sender.bootstrap_room)
    until(lambda: again.poll() == KVPoll.Failed, "withdrawal")
    assert pair.reason(again)
    info["is_dummy"] = False
    pair.serve(31, 6)  # what it said is here by then
    assert not deferred.is_drained(), "a rank that writes nothing spoke for the one that writes"
    deferred.free(lambda entry: None)


def test_metadata_over_tcp_arrive(pair: Pair) -> None:
    """Guards against metadata that stock sends beside the engine and that no longer arrive."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_MOONCAKE_SEND_AUX_TCP", "1")
        pair.prefill.aux[3] = 55
        pair.serve(30, 4)
    assert pair.arrived([30], [4]) and pair.decode.aux[5].tolist() == [55] * 16


def test_a_stock_server_of_two_ranks(pair: Pair) -> None:
    """Guards against a room that is announced as stock announces it, and never complete: what one
    rank of its server had said was forgotten when the other one spoke."""
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
    """Guards against an unpatched decode server that waits for what failed: it knows nothing but
    the status."""
    sender, receiver = pair.room()
    receiver.send_metadata(pages(1, 2), 0, None)
    pair.announced(sender)
    sender.init(2, 0)
    with pair.breaking():
        sender.send(pages(8, 9))
        assert pair.finish(sender, receiver) == LOST
    assert pair.reason(sender) and "prefill could not deliver it" in pair.reason(receiver)


def test_stock_decode_is_told_of_a_mismatch(pair: Pair) -> None:
    """Guards against an unpatched decode server that waits for its own deadline where prefill has
    other pages than it announced."""
    sender, receiver = pair.room()
    receiver.send_metadata(pages(1, 2), 0, None)
    pair.announced(sender)
    sender.init(2, 0)
    sender.send(pages(8, 9, 10))
    assert pair.finish(sender, receiver) == LOST
    assert pair.reason(sender) and "prefill could not deliver it" in pair.reason(receiver)


@pytest.mark.hazard("pages-written-after-release", "peer-lost-for-ever")
def test_batch_that_the_engine_refuses(pair: Pair) -> None:
    """How much of the batch is under way is not known. Guards against pages given to others while
    its writes may still arrive, against clients that wait as long as the pages, and against a
    decode rank that stays shut out."""
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
    second.send(pages(33))  # announced before: it fails at once, and says why
    assert pair.finish(second, other) == LOST
    for end in (second, other):
        assert "register again" in pair.reason(end)
    until(deferred.is_drained, "held for ever")
    deferred.free(lambda entry: None)
    pair.register()
    pair.serve(30, 4)
    assert pair.arrived([30], [4])
