"""Rooms that end early: aborted, withdrawn, failed, on either side and at any moment."""

from __future__ import annotations

import os

from component.mooncake.pair import ADDRESS, LIMIT_S, pages, until
from component.mooncake.scene import (
    DECODE,
    DONE,
    LOST,
    PAIR,
    PREFILL,
    ROOMS,
    Brake,
    engine,
    reason,
)
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.delta import capability
from sglang.srt.disaggregation.delta.metrics import STATS, Reason
from sglang.srt.disaggregation.delta.mooncake.manager import ChunkDeadlines


def abort_on_prefill() -> None:
    sender, receiver = PAIR.room()
    receiver.announce(pages(20, 9), 5, prefix_len=8)
    PAIR.announced(sender)
    sender.init(4, 3)
    sender.abort()
    sender.send(pages(30, 31))
    assert PAIR.finish(sender, receiver) == LOST
    assert PAIR.arrived([], [])
    assert receiver.defer_free() is None
    assert "prefill reported: aborted on the prefill server" in reason(receiver)
    assert "aborted on the prefill server" in reason(sender)


def abort_while_written() -> None:
    sender, receiver = PAIR.room()
    receiver.announce(pages(20, 9), 5, prefix_len=0)
    PAIR.announced(sender)
    sender.init(2, 3)
    brake = Brake()
    with engine(brake):
        sender.send(pages(30))
        assert brake.reached.wait(LIMIT_S)
        sender.abort()
        assert {sender.poll() for _ in range(3)} == {KVPoll.Transferring}, "pages still read"
        assert receiver.poll() == KVPoll.WaitingForInput, "told while it is written to"
        brake.go_on.set()
        sender.send(pages(31))
        assert PAIR.finish(sender, receiver) == LOST
    assert receiver.defer_free() is None
    assert PAIR.arrived([30], [20])
    assert reason(sender) and reason(receiver)


def worker_raises() -> None:
    sender, receiver = PAIR.room()
    receiver.announce(pages(20, 9), 5, prefix_len=0)
    PAIR.announced(sender)
    sender.init(2, 3)
    with engine(lambda *arguments: 1 / 0):
        sender.send(pages(30, 31))
        assert PAIR.finish(sender, receiver) == LOST
    assert {sender.poll() for _ in range(3)} == {KVPoll.Failed}
    assert "ZeroDivisionError" in reason(sender)
    assert "prefill reported" in reason(receiver)
    assert all(worker.is_alive() for worker in PAIR.workers)


def engine_refuses() -> None:
    """How much of the batch is under way is not known: pages stay held, the client is answered."""
    sender, receiver = PAIR.room()
    receiver.announce(pages(20, 9), 5, prefix_len=0)
    PAIR.announced(sender)
    second, other = PAIR.room()
    other.announce(pages(4), 2, prefix_len=0)
    PAIR.announced(second)
    sender.init(2, 3)
    second.init(1, 1)
    os.environ["SGLANG_DISAGGREGATION_QUARANTINE_TIMEOUT"] = "0.2"
    try:
        with engine(lambda *arguments: -1):
            sender.send(pages(30, 31))
            assert PAIR.finish(sender, receiver) == LOST
    finally:
        del os.environ["SGLANG_DISAGGREGATION_QUARANTINE_TIMEOUT"]
    deferred = receiver.defer_free()
    text = reason(sender)
    assert f"room {sender.bootstrap_room}" in text and "status -1" in text, text
    assert "127.0.0.1" in text
    assert "prefill could not deliver it" in reason(receiver)
    assert not deferred.is_drained(), "an error says nothing about the other writes of the batch"
    # Rooms that were announced before fail at once, and say why.
    second.send(pages(33))
    assert PAIR.finish(second, other) == LOST
    assert "has to register again" in reason(second) and "register again" in reason(other)
    until(deferred.is_drained, "held for ever")
    deferred.stop_following()
    # The next one is told to register, and then all is well.
    third, receiver = PAIR.room()
    receiver.announce(pages(4), 2, prefix_len=0)
    until(lambda: receiver.poll() == KVPoll.Failed, "notice")
    assert "does not know the decode rank" in reason(receiver)
    until(lambda: not DECODE.connection_pool, "it connects again next time")
    third.abort()
    assert third.poll() == KVPoll.Failed and reason(third)
    PAIR.connect()
    PAIR.register()
    sender, receiver = PAIR.room()
    receiver.announce(pages(4), 2, prefix_len=0)
    PAIR.announced(sender)
    sender.init(1, 3)
    sender.send(pages(30))
    assert PAIR.finish(sender, receiver) == DONE and PAIR.arrived([30], [4])
    sender.clear()
    receiver.clear()


def stock_peer_of_a_failed_transfer() -> None:
    sender, receiver = PAIR.room()
    receiver.send_metadata(pages(1, 2), 0, None)
    PAIR.announced(sender)
    sender.init(2, 0)
    with engine(lambda *arguments: 1 / 0):
        sender.send(pages(8, 9))
        assert PAIR.finish(sender, receiver) == LOST  # stock decode knows nothing but the status
    assert reason(sender) and "prefill could not deliver it" in reason(receiver)


def withdrawn_before_it_is_written() -> None:
    sender, receiver = PAIR.room()
    receiver.announce(pages(4, 5), 5, prefix_len=0)
    PAIR.announced(sender)
    sender.init(2, 3)
    receiver.abort()
    deferred = receiver.defer_free()
    assert "Abort" in reason(receiver)
    until(lambda: sender.poll() == KVPoll.Failed, "withdrawal")
    sender.send(pages(30))
    until(deferred.is_drained, "quiet")
    assert PAIR.arrived([], []) and "decode gave it up" in reason(sender)
    deferred.stop_following()


def withdrawn_while_written() -> None:
    sender, receiver = PAIR.room()
    receiver.announce(pages(4, 5), 5, prefix_len=0)
    PAIR.announced(sender)
    sender.init(2, 3)
    brake = Brake()
    with engine(brake):
        sender.send(pages(30))
        assert brake.reached.wait(LIMIT_S)
        receiver.abort()
        assert receiver.poll() == KVPoll.Failed
        deferred = receiver.defer_free()  # tells prefill
        assert "Abort" in reason(receiver)
        until(lambda: sender.is_stopped, "withdrawal")
        assert not deferred.is_drained() and sender.poll() == KVPoll.Transferring
        sender.send(pages(31))  # not queued any more
        brake.go_on.set()
        until(lambda: sender.poll() == KVPoll.Failed, "sender")
        until(deferred.is_drained, "quiet")
    assert PAIR.arrived([30], [4])
    assert "decode gave it up" in reason(sender)
    deferred.stop_following()


def chunk_that_is_never_over() -> None:
    """The engine's call does not return: a peer that is frozen, with nothing that ends its TCP."""
    sender, receiver = PAIR.room()
    receiver.announce(pages(4, 5), 5, prefix_len=0)
    PAIR.announced(sender)
    sender.init(2, 3)
    behind, other = PAIR.room()
    other.announce(pages(7), 2, prefix_len=0)
    PAIR.announced(behind)
    behind.init(1, 1)
    before, brake = STATS.failures[Reason.TIMEOUT], Brake()
    PREFILL.chunk_deadlines = ChunkDeadlines(0.1)
    try:
        with engine(brake):
            sender.send(pages(30))
            assert brake.reached.wait(LIMIT_S)
            behind.send(pages(33))  # into the same queue
            until(lambda: receiver.poll() == KVPoll.Failed, "notice")
            until(lambda: other.poll() == KVPoll.Failed, "notice of what waits behind it")
            deferred = receiver.defer_free()
            assert not deferred.is_drained() and sender.poll() == KVPoll.Transferring, (
                "it is written"
            )
            assert other.defer_free() is None and behind.poll() == KVPoll.Failed, (
                "nothing was begun"
            )
            assert STATS.failures[Reason.TIMEOUT] == before + 2
            brake.go_on.set()
            until(lambda: sender.poll() == KVPoll.Failed, "sender")
            until(deferred.is_drained, "quiet")
    finally:
        PREFILL.chunk_deadlines = ChunkDeadlines(LIMIT_S)
    assert PAIR.arrived([30], [4])
    for text in (reason(sender), reason(behind)):
        assert "SGLANG_DISAGGREGATION_TRANSFER_TIMEOUT" in text and DECODE.peer_name in text, text
    assert reason(receiver) and reason(other)
    deferred.stop_following()
    # Nobody else is the worse for it.
    sender, receiver = PAIR.room()
    receiver.announce(pages(4), 2, prefix_len=0)
    PAIR.announced(sender)
    sender.init(1, 3)
    sender.send(pages(31))
    assert PAIR.finish(sender, receiver) == DONE
    assert PREFILL.chunk_deadlines.rooms() == []
    sender.clear()
    receiver.clear()


def withdrawn_when_all_was_sent() -> None:
    sender, receiver = PAIR.room()
    receiver.announce(pages(4), 5, prefix_len=0)
    PAIR.announced(sender)
    sender.init(1, 3)
    sender.send(pages(30))
    until(lambda: sender.poll() == KVPoll.Success, "sender")
    sender.clear()
    receiver.abort()
    deferred = receiver.defer_free()
    assert deferred is None or until(deferred.is_drained, "quiet") is None
    assert reason(receiver)
    if deferred is not None:
        deferred.stop_following()


def withdrawn_before_the_request_came() -> None:
    room = PAIR.next_room()
    receiver = PAIR.receiver(room)
    receiver.withdraw("the client went away")
    until(lambda: ROOMS._ended.get(room), "withdrawal")
    sender = PAIR.sender(room)
    assert sender.poll() == KVPoll.Failed
    assert "decode gave it up: the client went away" in reason(sender)
    receiver.clear()


def completion_of_a_room_that_is_watched() -> None:
    sender, receiver = PAIR.room()
    receiver.announce(pages(4), 5, prefix_len=0)
    PAIR.announced(sender)
    sender.init(1, 3)
    DECODE.servers._capabilities.clear()  # a stock prefill: it takes no withdrawal
    receiver.abort()
    deferred = receiver.defer_free()
    assert reason(receiver) and not deferred.is_drained()
    sender.send(pages(30))
    until(deferred.is_drained, "quiet")
    assert PAIR.arrived([30], [4])
    deferred.stop_following()
    until(lambda: sender.poll() == KVPoll.Success, "sender")
    sender.clear()
    DECODE.servers._capabilities[ADDRESS] = capability.OURS


def room_number_still_in_use() -> None:
    sender, receiver = PAIR.room()
    receiver.announce(pages(4, 5), 5, prefix_len=0)
    PAIR.announced(sender)
    sender.init(2, 3)
    brake = Brake()
    with engine(brake):
        sender.send(pages(30))
        assert brake.reached.wait(LIMIT_S)
        receiver.abort()
        deferred = receiver.defer_free()
        assert reason(receiver)
        again = PAIR.receiver(sender.bootstrap_room)
        assert again.poll() == KVPoll.Failed and "still in use" in reason(again)
        assert not deferred.is_drained()
        brake.go_on.set()
        until(deferred.is_drained, "quiet")
    deferred.stop_following()
    until(lambda: sender.poll() == KVPoll.Failed, "sender")
    assert reason(sender)


def decode_rank_that_went_silent() -> None:
    sender, receiver = PAIR.room()
    receiver.announce(pages(4), 5, prefix_len=0)
    PAIR.announced(sender)
    ranks = PREFILL.decode_ranks
    ranks._heard[DECODE.peer_name] = ranks._clock() - ranks._timeout_s
    PREFILL._tick()
    assert PREFILL.decode_kv_args_table == {}
    assert PAIR.finish(sender, receiver) == LOST and "gave no sign" in reason(sender)
    assert receiver.defer_free() is None and reason(receiver)
    PAIR.register()


def announced_after_the_failure() -> None:
    sender, receiver = PAIR.room()
    sender.abort()
    assert sender.poll() == KVPoll.Failed and reason(sender)
    receiver.announce(pages(4), 5, prefix_len=0)
    until(lambda: receiver.poll() == KVPoll.Failed, "notice")
    assert receiver.defer_free() is None
    assert "aborted on the prefill server" in reason(receiver)


def failed_on_another_rank() -> None:
    sender, receiver = PAIR.room()
    receiver.announce(pages(4), 5, prefix_len=0)
    PAIR.announced(sender)
    assert "another rank" in reason(sender)  # the scheduler asks without a failure of its own
    until(lambda: receiver.poll() == KVPoll.Failed, "notice")
    assert receiver.defer_free() is None and "another rank" in reason(receiver)


SCENARIOS = (
    abort_on_prefill,
    abort_while_written,
    worker_raises,
    engine_refuses,
    stock_peer_of_a_failed_transfer,
    withdrawn_before_it_is_written,
    withdrawn_while_written,
    chunk_that_is_never_over,
    withdrawn_when_all_was_sent,
    withdrawn_before_the_request_came,
    completion_of_a_room_that_is_watched,
    room_number_still_in_use,
    decode_rank_that_went_silent,
    announced_after_the_failure,
    failed_on_another_rank,
)
