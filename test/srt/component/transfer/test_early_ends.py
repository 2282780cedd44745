"""Rooms that end early: aborted, withdrawn or failed, on either side and at any moment."""

from __future__ import annotations

import pytest

from component.transfer.pair import DONE, LOST, Pair, pages, until
from sglang.srt.disaggregation.base.conn import KVPoll


@pytest.mark.hazard("other-side-not-told")
def test_abort_on_prefill_fails_the_room_on_decode(pair: Pair) -> None:
    """Guards against a decode server that holds its pages until the timeout, and against pages sent
    for a room that was aborted."""
    sender, receiver = pair.ready_room(20, 9, prefix=8, prompt=4)
    sender.abort()
    sender.send(pages(30, 31))
    assert pair.finish(sender, receiver) == LOST
    assert pair.arrived([], [])
    assert receiver.defer_free() is None
    assert "prefill reported: aborted on the prefill server" in pair.reason(receiver)
    assert "aborted on the prefill server" in pair.reason(sender)


@pytest.mark.hazard("abort-before-settled", "source-given-away")
def test_abort_on_prefill_waits_for_what_is_under_way(pair: Pair) -> None:
    """Guards against pages freed or given back while one is read and written, and against a notice
    that overtakes the write."""
    sender, receiver = pair.ready_room(20, 9)
    with pair.held_up() as hold:
        sender.send(pages(30))
        hold.wait()
        sender.abort()
        assert {sender.poll() for _ in range(3)} == {KVPoll.Transferring}, "its page is still read"
        assert receiver.poll() == KVPoll.WaitingForInput, "told while it is written to"
        hold.release()
        sender.send(pages(31))
        assert pair.finish(sender, receiver) == LOST
    assert receiver.defer_free() is None, "all that prefill would write has arrived"
    assert pair.arrived([30], [20])
    for end in (sender, receiver):
        assert "aborted on the prefill server" in pair.reason(end)


@pytest.mark.hazard("other-side-not-told")
def test_room_aborted_on_prefill_before_its_announcement_is_answered(pair: Pair) -> None:
    """Guards against a decode server that waits for its timeout, and a table entry that stays,
    when prefill aborts a request first."""
    sender, receiver = pair.room()
    sender.abort()
    assert sender.poll() == KVPoll.Failed and pair.reason(sender)
    receiver.announce(pages(4), 5, prefix_len=0)
    until(lambda: receiver.poll() == KVPoll.Failed, "notice")
    assert receiver.defer_free() is None
    assert "aborted on the prefill server" in pair.reason(receiver)


@pytest.mark.hazard("exception-ends-worker")
def test_library_that_raises_fails_the_room_alone(pair: Pair) -> None:
    """Guards against one room's error ending the thread that sends for all, and against a status
    that changes with every look at it."""
    sender, receiver = pair.ready_room(20, 9)
    with pair.breaking():
        sender.send(pages(30, 31))
        assert pair.finish(sender, receiver) == LOST
    assert {sender.poll() for _ in range(3)} == {KVPoll.Failed}
    assert "ZeroDivisionError" in pair.reason(sender)
    assert "prefill reported" in pair.reason(receiver)
    assert pair.arrived([], [])
    pair.serve(30, 20)


def test_failure_on_another_prefill_rank_fails_the_room(pair: Pair) -> None:
    """Guards against a rank that goes on writing for a room that failed on its neighbour."""
    sender, receiver = pair.room()
    receiver.announce(pages(4), 5, prefix_len=0)
    pair.announced(sender)
    assert "another rank" in pair.reason(sender)  # asked without a failure of its own
    until(lambda: receiver.poll() == KVPoll.Failed, "notice")
    assert receiver.defer_free() is None and "another rank" in pair.reason(receiver)


def test_room_withdrawn_before_its_request_came(pair: Pair) -> None:
    """Guards against a prefill request that waits for a decode server that does not want it."""
    room = pair.next_room()
    receiver = pair.receiver(room)
    receiver.withdraw("the client went away")
    until(lambda: room in pair.rooms._ended, "withdrawal")
    sender = pair.sender(room)
    assert sender.poll() == KVPoll.Failed
    assert "decode cancelled it: the client went away" in pair.reason(sender)
    receiver.clear()


def test_room_withdrawn_before_it_is_written(pair: Pair) -> None:
    """Guards against pages sent that nobody wants."""
    sender, receiver = pair.ready_room(4, 5)
    receiver.abort()
    deferred = receiver.defer_free()
    assert "Abort" in pair.reason(receiver)
    until(lambda: sender.poll() == KVPoll.Failed, "withdrawal")
    sender.send(pages(30))
    until(deferred.is_drained, "drained")
    assert pair.arrived([], []) and "decode cancelled it" in pair.reason(sender)
    deferred.stop_following()


@pytest.mark.hazard("pages-written-after-release", "other-side-not-told")
def test_room_withdrawn_while_it_is_written(pair: Pair) -> None:
    """Guards against pages of an aborted room that are given to others while prefill still writes
    to them, and against a prefill server that goes on sending what nobody wants."""
    sender, receiver = pair.ready_room(4, 5)
    with pair.held_up() as hold:
        sender.send(pages(30))
        hold.wait()
        receiver.abort()
        assert receiver.poll() == KVPoll.Failed
        deferred = receiver.defer_free()  # tells prefill
        assert "Abort" in pair.reason(receiver)
        until(lambda: sender.is_stopped, "withdrawal")
        assert not deferred.is_drained() and sender.poll() == KVPoll.Transferring
        sender.send(pages(31))  # not sent any more
        hold.release()
        until(lambda: sender.poll() == KVPoll.Failed, "sender")
        until(deferred.is_drained, "drained")
    assert pair.arrived([30], [4])
    assert "decode cancelled it" in pair.reason(sender)
    deferred.stop_following()


def test_room_withdrawn_when_all_was_sent(pair: Pair) -> None:
    """Guards against pages held for their whole bound though nothing can be written any more."""
    sender, receiver = pair.ready_room(4)
    sender.send(pages(30))
    until(lambda: sender.poll() == KVPoll.Success, "sender")
    sender.clear()
    receiver.abort()
    deferred = receiver.defer_free()
    assert pair.reason(receiver)
    if deferred is not None:
        until(deferred.is_drained, "drained")
        deferred.stop_following()


@pytest.mark.hazard("room-number-reused", "pages-written-after-release")
def test_chunk_in_the_queue_is_not_sent_for_a_later_room_of_its_number(pair: Pair) -> None:
    """Guards against the pages of an aborted request being sent, and said to be complete, for a
    later request of its room number: its chunk waits behind others while the number changes
    hands."""
    first, first_receiver = pair.ready_room(*range(10, 20))
    room = pair.room_behind(first.bootstrap_room)
    sender, receiver = pair.ready_room(4, number=room)
    with pair.held_up() as hold:
        for page in range(10):  # as many as keep the queue behind them from being served
            first.send(pages(page))
        hold.wait()
        sender.send(pages(30))
        sender.abort()
        assert pair.finish(sender, receiver) == LOST
        assert receiver.defer_free() is None
        for end in (sender, receiver):
            assert "aborted on the prefill server" in pair.reason(end)
        sender, receiver = pair.ready_room(5, number=room)
        hold.release()
        assert pair.finish(first, first_receiver) == DONE
    assert sender.poll() == receiver.poll() == KVPoll.WaitingForInput
    assert pair.arrived(list(range(10)), list(range(10, 20)))
    sender.send(pages(31))
    assert pair.finish(sender, receiver) == DONE
    assert pair.arrived([*range(10), 31], [*range(10, 20), 5])
    for end in (first, first_receiver, sender, receiver):
        end.clear()


@pytest.mark.hazard("late-notification", "room-number-reused")
def test_room_number_still_in_use_is_refused(pair: Pair) -> None:
    """Guards against a new request whose pages get what was sent for the one before."""
    sender, receiver = pair.ready_room(4, 5)
    with pair.held_up() as hold:
        sender.send(pages(30))
        hold.wait()
        receiver.abort()
        deferred = receiver.defer_free()
        assert pair.reason(receiver)
        again = pair.receiver(sender.bootstrap_room)
        assert again.poll() == KVPoll.Failed and "still in use" in pair.reason(again)
        until(lambda: sender.is_stopped, "withdrawal")
        assert not deferred.is_drained()
        hold.release()
        until(deferred.is_drained, "drained")
    deferred.stop_following()
    until(lambda: sender.poll() == KVPoll.Failed, "settled")
    assert pair.reason(sender)


@pytest.mark.hazard("room-number-reused")
def test_without_the_flag_a_request_outlives_the_first_of_its_number(pair: Pair) -> None:
    """Guards against a scheduler that ends with a KeyError: without the flag, as in SGLang, two
    requests of a number share their entries, and the first that is done with takes them along."""
    manager = pair.decode.manager
    servers, manager.servers = manager.servers, None
    room = pair.next_room()
    first, second = pair.receiver(room), pair.receiver(room)
    assert first.poll() == second.poll() == KVPoll.WaitingForInput
    first.clear()
    assert [second.poll() for _ in range(2)] == [KVPoll.Failed] * 2
    assert str(room) in pair.reason(second)
    manager.addr_to_rooms_tracker.clear()  # Mooncake's stays, as SGLang's
    manager.servers = servers
