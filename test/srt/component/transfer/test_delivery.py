"""Rooms that are served, or refused before anything is sent, over real agents and engines.

Each test runs in an interpreter of its own backend, with a new pair (``component/conftest.py``);
when it has ended, no table of either side may hold an entry of a room.
"""

from __future__ import annotations

import pytest

from component.transfer.pair import ADDRESS, DONE, LOST, Pair, pages, until
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.delta import wire
from sglang.srt.disaggregation.delta.metrics import Reason
from sglang.srt.disaggregation.delta.observability import STATS


def partial_delta(pair: Pair) -> None:
    """A room of five pages, two of which decode holds, in two chunks."""
    pair.prefill.aux[3] = 77
    before = pair.sent()
    sender, receiver = pair.ready_room(20, 9, 11, prefix=8, prompt=5)
    assert (sender.decode_prefix_len, sender.num_kv_indices) == (8, 3)
    sender.send(pages(30, 31))
    assert receiver.poll() == KVPoll.WaitingForInput
    sender.send(pages(2))
    assert pair.finish(sender, receiver) == DONE
    assert pair.arrived([30, 31, 2], [20, 9, 11])
    assert pair.decode.aux[5].tolist() == [77] * 16
    assert pair.sent() - before == 3 * pair.page_bytes
    sender.clear()
    receiver.clear()


def full_hit(pair: Pair) -> None:
    """A room of three pages, all of which decode holds."""
    pair.prefill.aux[3] = 41
    before = pair.sent()
    sender, receiver = pair.ready_room(prefix=12, prompt=3, slot=2)
    assert sender.num_kv_indices == 0
    sender.send(pages())
    assert pair.finish(sender, receiver) == DONE
    assert pair.arrived([], []) and pair.decode.aux[2].tolist() == [41] * 16
    assert pair.sent() == before
    assert {end.poll() for end in (sender, receiver) for _ in range(3)} == {KVPoll.Success}
    sender.clear()
    receiver.clear()


def test_pages_behind_the_prefix_arrive_where_decode_listed_them(pair: Pair) -> None:
    """Guards against KV at other places than the announced pages, against bytes counted that were
    not moved, and against rooms that end before their last chunk."""
    partial_delta(pair)


@pytest.mark.hazard("room-number-reused")
def test_number_that_comes_again_before_its_request_was_let_go(pair: Pair) -> None:
    """Guards against a request that ends well with the one before, of which nothing was sent, and
    against what the refused one takes from the other: how that ended, and its entries."""
    sender, receiver = pair.ready_room(20)
    sender.send(pages(30))
    until(lambda: sender._room.delivered, "delivery")
    again = pair.sender(sender.bootstrap_room)
    assert again.poll() == KVPoll.Failed and "earlier transfer" in pair.reason(again)
    assert pair.finish(sender, receiver) == DONE
    sender.clear()
    receiver.clear()
    sender, receiver = pair.room(sender.bootstrap_room)
    sender.abort()
    pair.failure(sender)
    receiver.clear()


@pytest.mark.hazard("room-number-reused")
def test_second_request_of_a_number_in_use(pair: Pair) -> None:
    """Guards against a second one that ends the first on prefill: by its refusal, or by what it
    takes along when it goes. (Decode refuses it before it has a receiver.)"""
    sender, receiver = pair.ready_room(20)
    again = pair.sender(sender.bootstrap_room)
    assert again.poll() == KVPoll.Failed and "still uses its number" in pair.reason(again)
    assert (sender.poll(), receiver.poll()) == (KVPoll.WaitingForInput,) * 2
    sender.send(pages(30))
    assert pair.finish(sender, receiver) == DONE and pair.arrived([30], [20])
    sender.clear()
    receiver.clear()


@pytest.mark.hazard("full-hit-without-metadata", "full-hit-over-waiting-backend")
def test_full_prefix_hit_is_complete_with_its_metadata(pair: Pair) -> None:
    """Guards against a room without pages that never completes: its metadata arrive alone, and it
    is complete for good."""
    full_hit(pair)


def test_index_pages_go_where_the_kv_goes(pair: Pair) -> None:
    """Guards against an index of sparse attention that is not sent, or not behind the prefix only:
    decode would select by that of another text. It goes with the last chunk, and is that of all."""
    sender, receiver = pair.ready_room(20, 9, 11, prefix=8, prompt=5, index=True)
    sender.send(pages(30, 31))
    sender.send(pages(2), pages(30, 31, 2))
    assert pair.finish(sender, receiver) == DONE
    assert pair.arrived([30, 31, 2], [20, 9, 11], index=True)
    sender.clear()
    receiver.clear()


@pytest.mark.hazard("lists-cut-to-fit")
def test_another_number_of_index_pages_fails_the_room(pair: Pair) -> None:
    """Guards against index pages that are paired with others': neither list is cut to fit."""
    sender, receiver = pair.ready_room(20, 9, 11, prefix=8, prompt=5, index=True)
    sender.send(pages(30, 31, 2), pages(28, 29, 30, 31, 2))
    assert pair.finish(sender, receiver) == LOST
    for text in (pair.reason(sender), pair.reason(receiver)):
        assert "5 " in text and "listed 3" in text, text
    assert all(not layer.any() for layer in pair.decode.index)


def test_stock_decode_is_sent_the_whole_prompt(pair: Pair) -> None:
    """Guards against an unpatched decode server that is not served any more."""
    sender, receiver = pair.room()
    receiver.send_metadata(pages(1, 2), 0, None)
    pair.announced(sender)
    sender.init(2, 0)
    assert sender.decode_prefix_len == 0
    sender.send(pages(8, 9))
    assert pair.finish(sender, receiver) == DONE
    assert pair.arrived([8, 9], [1, 2])
    sender.clear()
    receiver.clear()


def test_announcement_may_come_before_the_request(pair: Pair) -> None:
    """Guards against a request that waits for an announcement that is already here, and against
    entries of rooms whose request never comes."""
    room = pair.next_room()
    receiver = pair.receiver(room)
    receiver.announce(pages(4), 5, prefix_len=0)
    until(lambda: room in pair.prefill.manager.rooms.numbers(), "announcement")
    assert room not in pair.prefill.manager.request_status, "left behind if its request never comes"
    sender = pair.sender(room)
    assert sender.poll() == KVPoll.WaitingForInput
    sender.init(1, 3)
    sender.send(pages(30))
    assert pair.finish(sender, receiver) == DONE and pair.arrived([30], [4])
    sender.clear()
    receiver.clear()


@pytest.mark.hazard("late-notification", "room-number-reused")
def test_late_completion_counts_for_no_other_room(pair: Pair) -> None:
    """Guards against entries of rooms that were aborted and cleared, and against such a room's
    completion counting for the next one."""
    sender, receiver = pair.ready_room(4)
    receiver.abort()
    assert receiver.poll() == KVPoll.Failed and "Abort" in pair.reason(receiver)
    sender.send(pages(30))  # its completion finds no room
    until(lambda: sender.poll() == KVPoll.Success, "sender")
    sender.clear()
    pair.wipe()
    sender, receiver = pair.ready_room(6)
    sender.send(pages(31))
    assert pair.finish(sender, receiver) == DONE
    assert pair.arrived([31], [6])
    sender.clear()
    receiver.clear()


@pytest.mark.hazard("peer-ignores-prefix")
def test_page_counts_that_differ_fail_the_room(pair: Pair) -> None:
    """Guards against a list cut to fit: nothing is sent, and both sides name both numbers."""
    before = pair.sent()
    # Decode counts a prompt of 5 pages, prefill one of 4.
    sender, receiver = pair.ready_room(20, 9, 11, prefix=8, prompt=4)
    sender.send(pages(30, 31))
    assert pair.finish(sender, receiver) == LOST
    for text in (pair.reason(sender), pair.reason(receiver)):
        assert "3 destination pages" in text and "2 of the prompt's 4" in text, text
    assert pair.sent() == before and pair.arrived([], [])


@pytest.mark.hazard("lists-cut-to-fit")
def test_chunk_longer_than_its_destinations_fails_the_room(pair: Pair) -> None:
    """Guards against the same within a room."""
    before = pair.sent()
    sender, receiver = pair.ready_room(20, 9)
    sender.send(pages(30, 31, 32))
    assert pair.finish(sender, receiver) == LOST
    for text in (pair.reason(sender), pair.reason(receiver)):
        assert "3 pages" in text and " 2 " in text, text
    assert pair.sent() == before and pair.arrived([], [])


def test_frame_of_another_version_fails_the_room(
    pair: Pair,
) -> None:
    """Guards against a frame that ends the thread which reads every room's announcement, and
    against a decode server that learns of it by its timeout only."""
    theirs = wire.VERSION + 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "VERSION", theirs)
        frame = wire.DeltaFrame(version=theirs, decode_prefix_len=8, num_pages=1, is_dummy=False)
    sender, receiver = pair.room()
    with pytest.MonkeyPatch.context() as patch:
        encode = wire.encode_frame
        patch.setattr(wire, "encode_frame", lambda ours: encode(frame))
        receiver.announce(pages(7), 0, prefix_len=8)
    pair.announced(sender)
    sender.init(3, 0)
    assert pair.finish(sender, receiver) == LOST
    for text in (pair.reason(sender), pair.reason(receiver)):
        assert f"delta protocol {theirs}" in text, text
    assert pair.arrived([], [])


def test_unannounced_room_fails_at_its_deadline(pair: Pair) -> None:
    """Guards against a prefill request that waits for ever for a decode server that is gone, and
    against an error that does not name the variable that sets how long."""
    sender, receiver = pair.room()
    pair.prefill.manager.bootstrap_timeout = 0
    assert sender.poll() == KVPoll.Failed
    assert "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT" in pair.reason(sender)
    receiver.clear()


def test_undelivered_room_fails_at_its_deadline(pair: Pair) -> None:
    """Guards against a decode request that waits for ever for prefill, and against a prefill
    server that is not told."""
    sender, receiver = pair.room()
    receiver.announce(pages(4), 5, prefix_len=0)
    pair.announced(sender)
    failures = STATS.failures[Reason.TIMEOUT]
    pair.decode.manager.waiting_timeout = 0
    assert receiver.poll() == KVPoll.Failed
    assert STATS.failures[Reason.TIMEOUT] == failures + 1
    deferred = receiver.defer_free()
    text = pair.reason(receiver)
    assert "SGLANG_DISAGGREGATION_WAITING_TIMEOUT" in text and ADDRESS in text
    until(lambda: sender.poll() == KVPoll.Failed, "withdrawal")
    until(deferred.is_drained, "drained")
    deferred.stop_following()
    assert "did not complete it" in pair.reason(sender)


@pytest.mark.hazard("other-side-not-told")
def test_decode_rank_that_prefill_does_not_know_connects_again(pair: Pair) -> None:
    """Guards against a decode server that waits for a prefill rank which does not know it, and
    never registers again."""
    sender, receiver = pair.room()
    pair.prefill.manager.decode_kv_args_table.clear()
    receiver.announce(pages(4), 5, prefix_len=0)
    until(lambda: receiver.poll() == KVPoll.Failed, "notice")
    assert receiver.defer_free() is None, "a rank that knows nothing of us writes nothing"
    assert "the decode rank is not registered" in pair.reason(receiver)
    until(lambda: not pair.decode.manager.connection_pool, "it connects again next time")
    sender.abort()
    assert sender.poll() == KVPoll.Failed and pair.reason(sender)


@pytest.mark.hazard("dead-peer-leftovers")
def test_pages_are_held_until_prefill_is_certainly_gone(pair: Pair) -> None:
    """Guards against pages released because a prefill server is silent, which proves nothing, and
    against pages held when nobody listens at its port any more."""
    sender, receiver = pair.room()
    receiver.announce(pages(4), 5, prefix_len=0)
    pair.announced(sender)
    servers = pair.decode.manager.servers
    servers.lost(ADDRESS, False, "silent")
    assert receiver.poll() == KVPoll.Failed
    pair.rooms.enter(sender._room)  # it never answers
    deferred = receiver.defer_free()
    assert f"lost prefill server {ADDRESS}: silent" in pair.reason(receiver)
    assert not deferred.is_drained(), "silence is no proof"
    servers.lost(ADDRESS, True, "refused")
    assert deferred.is_drained()
    deferred.stop_following()
    pair.rooms.leave(sender.bootstrap_room)
    sender.abort()
    assert sender.poll() == KVPoll.Failed and pair.reason(sender)
