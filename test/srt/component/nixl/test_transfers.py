"""What NIXL alone does with a room: its notes, its prepared lists, its ways to fail.

What both backends must do is in ``component/transfer``; tests run as they do there.
"""

from __future__ import annotations

import threading
from unittest.mock import patch

import pytest

from component.nixl.pair import Pair, raises
from component.transfer.pair import DONE, LIMIT_S, LOST, pages, until
from component.transfer.test_delivery import full_hit, partial_delta
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.delta.nixl import backend

pytestmark = pytest.mark.parametrize("pair", ["nixl"], indirect=True)


@pytest.mark.hazard("poll-raises")
def test_post_that_raises_is_chained_as_the_cause(pair: Pair) -> None:
    """Guards against a failure whose cause is lost, whichever call of NIXL's it was."""
    for call in ("make_prepped_xfer", "transfer"):
        sender, receiver = pair.ready_room(20, 9)
        with pair.breaking(call):
            sender.send(pages(30, 31))
            assert pair.finish(sender, receiver) == LOST
        error = pair.failure(sender)
        assert isinstance(error, RuntimeError) and "ZeroDivisionError" in str(error)
        assert isinstance(error.__cause__, ZeroDivisionError)
        assert "prefill reported" in pair.reason(receiver)
        assert pair.arrived([], [])


@pytest.mark.hazard("source-given-away")
def test_transfer_that_never_settles_fails_at_its_deadline(pair: Pair) -> None:
    """Until the room is given up: then it lands, from pages that are others' by now. Guards against
    a request that waits for ever for a decode server that hangs, against decode being told that
    all is quiet before it is, and against a write that lands later and completes the room."""
    sender, receiver = pair.ready_room(4)
    pair.prefill.manager.transfer_s = 0.2
    with pair.held_up():
        sender.send(pages(30))
        until(lambda: sender.poll() == KVPoll.Failed, "deadline")
        text = pair.reason(sender)
        assert "SGLANG_DISAGGREGATION_TRANSFER_TIMEOUT" in text and "decode" in text, text
        assert pair.rooms.numbers(), "what is under way is waited for"
        for layer in pair.prefill.kv:
            layer[30] = -1  # the scheduler gave the page to another request
        pair.prefill.aux[3] = -1
        assert receiver.poll() not in DONE + LOST, "decode is not told before it is over"
    until(lambda: not pair.rooms.numbers(), "settled")
    until(lambda: receiver.poll() in DONE + LOST, "notice")
    assert receiver.poll() == KVPoll.Failed, "decode took a room that prefill had given up"
    assert "SGLANG_DISAGGREGATION_TRANSFER_TIMEOUT" in pair.reason(receiver)


def test_transfer_to_stock_decode_that_never_settles_completes_nothing(pair: Pair) -> None:
    """Guards against the same at a decode server without our frame, which is told nothing of
    failures, and least of all that the room is done."""
    sender, receiver = pair.room()
    receiver.send_metadata(pages(1), 0, None)
    pair.announced(sender)
    sender.init(1, 3)
    allowed, pair.prefill.manager.transfer_s = pair.prefill.manager.transfer_s, 0.2
    with pair.held_up():
        sender.send(pages(30))
        until(lambda: sender.poll() == KVPoll.Failed, "deadline")
        assert pair.reason(sender)
    pair.prefill.manager.transfer_s = allowed
    until(lambda: not pair.rooms.numbers(), "settled")
    until(lambda: pair.arrived([30], [1]), "it has landed")
    with pair.counted("send_notif") as calls:
        pair.wipe()
        partial_delta(pair)  # a room after it, whose note would have overtaken nothing
    assert receiver.poll() not in DONE, "decode took a room that prefill had given up"
    assert calls == {"send_notif": 1}
    receiver.clear()


def test_broken_transfer_fails_when_it_can_write_no_more(pair: Pair) -> None:
    """Guards against a decode server that dies and takes the prefill scheduler along: NIXL raises
    when it is asked for the state of a transfer to it, and nobody knows what it has sent."""
    sender, receiver = pair.ready_room(4, 5)
    with pair.doubt_of(1.0), pair.agent_that(check_xfer_state=raises):
        sender.send(pages(30, 31))
        until(lambda: sender.poll() == KVPoll.Failed, "failure")
        text = pair.reason(sender)
        assert "to decode failed in the transport: ZeroDivisionError" in text, text
        assert pair.rooms.numbers() and receiver.poll() not in DONE + LOST, "it is not told at once"
    until(lambda: receiver.poll() in DONE + LOST, "notice")
    assert "failed in the transport" in pair.reason(receiver) and not pair.rooms.numbers()


@pytest.mark.hazard("full-hit-without-metadata")
def test_one_transfer_a_chunk_and_one_note_a_room(pair: Pair) -> None:
    """Guards against a transfer of its own for the metadata of a decode rank that takes them in the
    note, and against one of an older version that does not get them."""
    with pair.counted("transfer", "send_notif") as calls:
        partial_delta(pair)
    assert calls == {"transfer": 2, "send_notif": 1}, calls  # of two chunks
    pair.wipe()
    with pair.counted("transfer", "send_notif") as calls:
        full_hit(pair)
    assert calls == {"send_notif": 1}, calls
    pair.wipe()
    # As a package that knew nothing of this.
    pair.decode.manager.expect_metadata = lambda room, slot: False
    with pair.counted("transfer", "send_notif") as calls:
        partial_delta(pair)
    assert calls == {"transfer": 3, "send_notif": 2}, calls
    pair.wipe()
    full_hit(pair)


def test_metadata_of_other_sizes_fail_the_room(pair: Pair) -> None:
    """Guards against metadata written over the slots beside theirs, where versions differ."""
    sender, receiver = pair.ready_room(4)
    with patch.object(backend, "metadata_bytes", lambda *_: [b"123"]):
        sender.send(pages(30))
        until(lambda: receiver.poll() == KVPoll.Failed, "refusal")
    text = pair.reason(receiver)
    assert "metadata of [3] bytes" in text and "expects [64]" in text, text
    assert pair.decode.aux.abs().sum() == 0
    until(lambda: sender.poll() in DONE + LOST, "sender")
    sender.clear()


def test_pages_arrive_without_prepared_lists(pair: Pair) -> None:
    """Guards against a NIXL that prepares no lists, or knows no strided ones, failing every room:
    ranges are built, with the same result."""
    agent = pair.prefill.manager.agent

    def only_rows_of_three(name, rows, memory):
        """An older NIXL, which does not know the strided form."""
        if rows.shape[1] != 3:
            raise ValueError("rows of three")
        return type(agent).prep_xfer_dlist(agent, name, rows, memory)

    peers = pair.prefill.manager.peers
    backend = pair.prefill.manager.transfers.backend
    for prepare in (raises, only_rows_of_three):
        peer = peers.hold("decode")
        for lists in (backend._lists, peer.lists):
            lists._lists.clear()
        peers.release(peer)
        pair.wipe()
        with pair.agent_that(prep_xfer_dlist=prepare):
            partial_delta(pair)


@pytest.mark.hazard("source-given-away")
def test_source_is_kept_until_it_was_read(pair: Pair) -> None:
    """Guards against pages and a metadata slot given to the next request while a worker still reads
    them, and against a queued chunk that changes with the scheduler's own table."""
    sender, receiver = pair.ready_room(4)
    posting, go_on = threading.Event(), threading.Event()
    agent = pair.prefill.manager.agent

    def held_up(handle, note=b""):  # NIXL has been told nothing yet
        posting.set()
        go_on.wait(LIMIT_S)
        return type(agent).transfer(agent, handle, note)

    table = pages(30)
    with pair.agent_that(transfer=held_up):
        sender.send(table)
        assert posting.wait(LIMIT_S)
        table[0] = 31  # the scheduler's table changes; the chunk in the queue does not
        sender.abort()
        assert {sender.poll() for _ in range(3)} == {KVPoll.Transferring}, "its page is still read"
        go_on.set()
        until(lambda: sender.poll() == KVPoll.Failed, "settled")
    assert pair.arrived([30], [4])
    assert pair.reason(sender)
    # Everything was on its way when it was aborted: decode may see that before the notice.
    until(lambda: receiver.poll() in (KVPoll.Failed, KVPoll.Success), "notice")
    receiver.clear()


@pytest.mark.hazard("drained-per-request")
def test_many_rooms_drain_once_a_step(pair: Pair) -> None:
    """Guards against one call of the agent for each of a decode server's rooms in every step, also
    of those that were given up and may still be written to."""
    rooms = [pair.ready_room(slot, slot=slot % 8) for slot in range(20)]
    given_up = []
    for _, receiver in rooms[10:]:
        receiver.abort()
        given_up.append(receiver.defer_free())
        receiver.clear()
    agent, drains = pair.decode.manager.agent, []
    agent.get_new_notifs = lambda: drains.append(1) or type(agent).get_new_notifs(agent)
    for _ in range(5):
        for _, receiver in rooms[:10]:
            receiver.poll()
        for deferred in given_up:
            deferred.is_drained()
    del agent.get_new_notifs
    assert len(drains) == 5, drains
    for deferred, (sender, _) in zip(given_up, rooms[10:], strict=True):
        until(deferred.is_drained, "drained")
        deferred.stop_following()
        until(lambda ended=sender: ended.poll() == KVPoll.Failed, "withdrawal")
        sender.clear()
    for sender, _ in rooms[:10]:
        sender.send(pages(40))
    for sender, receiver in rooms[:10]:
        assert pair.finish(sender, receiver) == DONE
        sender.clear()
        receiver.clear()


@pytest.mark.hazard("dead-peer-leftovers", "peer-lost-for-ever")
def test_forgotten_decode_rank_is_served_when_it_registers_again(pair: Pair) -> None:
    """Guards against a room sent to a decode rank that is gone, and against one that registers
    again and is not served."""
    manager = pair.prefill.manager
    info = manager.decode_kv_args_table["decode"]
    sender, receiver = pair.ready_room(4)
    manager.peers.forget("decode")
    sender.send(pages(30))
    until(lambda: sender.poll() == KVPoll.Failed, "failure")
    assert "decode rank decode is no longer registered" in pair.reason(sender)
    until(lambda: receiver.poll() == KVPoll.Failed, "notice")
    assert pair.reason(receiver)
    manager.peers.add(info)  # it registers again
    assert manager.decode_kv_args_table["decode"] is info
    pair.wipe()
    partial_delta(pair)
