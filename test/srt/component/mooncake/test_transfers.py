"""What Mooncake alone does with a room: its workers and their calls, sessions, words beside them.

What both backends must do is in ``component/transfer``; tests run as they do there.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from component.mooncake.pair import Pair
from component.transfer.pair import ADDRESS, DONE, LOST, pages, until
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.delta import wire
from sglang.srt.disaggregation.delta.metrics import Reason
from sglang.srt.disaggregation.delta.mooncake.worker import ChunkDeadlines
from sglang.srt.disaggregation.delta.observability import STATS

pytestmark = pytest.mark.parametrize("pair", ["mooncake"], indirect=True)


@pytest.mark.hazard("leaking-room-records")
def test_dummy_rank_sends_nothing_and_proves_nothing(pair: Pair) -> None:
    """Guards against writes from a dummy rank, against its request that never ends, and against
    its word on a withdrawal, which counted as that of the rank that writes."""
    prefill, decode = pair.prefill.manager, pair.decode.manager
    decode.connection_pool[f"{ADDRESS}_0_0_0"][0]["is_dummy"] = True
    sender, receiver = pair.ready_room(4, 5)
    sender.send(pages(30, 31))
    until(lambda: sender.poll() == KVPoll.Success, "a dummy's part is done")
    sender.clear()
    assert pair.arrived([], []) and receiver.poll() == KVPoll.WaitingForInput
    receiver.abort()
    deferred = receiver.defer_free()  # asks the dummy, too
    assert pair.reason(receiver)
    until(lambda: sender.bootstrap_room in pair.rooms._ended, "withdrawal")
    signs, rank = decode.servers._ranks[ADDRESS], ("127.0.0.1", prefill.rank_port)
    signs[rank] = 1
    pong = wire.Pong(f"127.0.0.1:{prefill.rank_port}", True)
    prefill.decode_ranks._sockets.send("127.0.0.1", decode.rank_port, pong)  # after an answer
    until(lambda: signs[rank] == 0, "pong")
    assert not deferred.is_drained(), "a rank that writes nothing spoke for the one that writes"
    deferred.stop_following()


@pytest.mark.hazard("unequal-tensor-parallelism")
def test_rank_of_another_size_gets_its_heads(pair: Pair) -> None:
    """Guards against another head than the decode rank holds, against bytes outside its half, and
    against bytes counted that went to nobody."""
    table, session = pair.prefill.manager.decode_kv_args_table, pair.peer
    # Decode has two ranks, this is the second one: pages of half the size, for the second head.
    table[session] = dataclasses.replace(
        table[session], dst_attn_tp_size=2, dst_tp_rank=1, dst_kv_item_len=64
    )
    before = pair.sent()
    for layer in pair.prefill.kv:
        layer[30:32] = torch.rand_like(layer[30:32])
    sender, receiver = pair.ready_room(20, 9)
    sender.send(pages(30, 31))
    assert pair.finish(sender, receiver) == DONE
    for ours, theirs in zip(pair.decode.kv, pair.prefill.kv, strict=True):
        expected = torch.zeros_like(ours).view(-1, 4, 4)
        expected[[20, 9]] = theirs[30:32].view(2, 4, 2, 4)[:, :, 1]
        assert torch.equal(ours.view(-1, 4, 4), expected)
    assert pair.sent() - before == pair.page_bytes  # half of two pages
    sender.clear()
    receiver.clear()


@pytest.mark.hazard("room-number-reused")
def test_words_of_a_cleared_room_change_nothing(pair: Pair) -> None:
    """Guards against entries of rooms that were cleared, and against metadata written for one."""
    prefill, port = pair.prefill.manager, pair.decode.manager.rank_port
    sender, receiver = pair.ready_room(4)
    room = sender.bootstrap_room
    receiver.clear()
    sender.send(pages(30))  # its completion finds no room
    until(lambda: sender.poll() == KVPoll.Success, "sender")
    sender.clear()
    prefill.sync_status_to_decode_endpoint("127.0.0.1", port, room, 0, 0)
    prefill.send_aux_data_to_endpoint("127.0.0.1", port, room, 0, 5, b"\1" * 64)
    pair.wipe()
    pair.serve(31, 6)
    assert pair.arrived([31], [6])
    assert pair.decode.aux[5].tolist() == pair.prefill.aux[3].tolist()


def test_metadata_over_tcp_arrive(pair: Pair) -> None:
    """Guards against metadata that stock sends beside the engine and that no longer arrive."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_MOONCAKE_SEND_AUX_TCP", "1")
        pair.prefill.aux[3] = 55
        pair.serve(30, 4)
    assert pair.arrived([30], [4]) and pair.decode.aux[5].tolist() == [55] * 16


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


@pytest.mark.hazard("pages-written-after-release", "peer-lost-for-ever")
def test_batch_that_the_engine_refuses(pair: Pair) -> None:
    """How much of the batch is under way is not known. Guards against pages given to others while
    its writes may still arrive, against clients that wait as long as the pages, and against a
    decode rank that stays shut out."""
    sender, receiver = pair.ready_room(20, 9)
    second, other = pair.ready_room(4, slot=2)
    with pytest.MonkeyPatch.context() as patch, pair.engine(lambda *arguments: -1):
        patch.setenv("SGLANG_DISAGGREGATION_QUARANTINE_TIMEOUT", "0.2")
        sender.send(pages(30, 31))
        assert pair.finish(sender, receiver) == LOST
    deferred = receiver.defer_free()
    text = pair.reason(sender)
    assert f"room {sender.bootstrap_room}" in text and "status -1" in text, text
    assert "127.0.0.1" in text
    assert "prefill could not deliver it" in pair.reason(receiver)
    assert not deferred.is_drained(), "an error says nothing about the other writes of the batch"
    # Rooms that were announced before fail at once, and say why.
    second.send(pages(33))
    assert pair.finish(second, other) == LOST
    for end in (second, other):
        assert "register again" in pair.reason(end)
    until(deferred.is_drained, "held for ever")
    deferred.stop_following()
    # The next one is told to register, and then all is well.
    third, receiver = pair.room()
    receiver.announce(pages(4), 2, prefix_len=0)
    until(lambda: receiver.poll() == KVPoll.Failed, "notice")
    assert "the decode rank is not registered" in pair.reason(receiver)
    until(lambda: not pair.decode.manager.connection_pool, "it connects again next time")
    third.abort()
    assert third.poll() == KVPoll.Failed and pair.reason(third)
    pair.connect()
    pair.register()
    pair.serve(30, 4)
    assert pair.arrived([30], [4])


@pytest.mark.hazard("slow-peer")
def test_call_that_does_not_return_fails_its_rooms_at_their_deadline(pair: Pair) -> None:
    """A peer that is frozen, with nothing that ends its TCP. Guards against it holding its client,
    its decode server and what waits behind it until their own, longer deadlines; against its pages
    being given away while it reads and writes them; and against a failure that is not counted."""
    sender, receiver = pair.ready_room(4, 5)
    behind, other = pair.ready_room(7, slot=2)
    before, prefill = STATS.failures[Reason.TIMEOUT], pair.prefill.manager
    allowed, prefill.chunk_deadlines = prefill.chunk_deadlines, ChunkDeadlines(0.1)
    with pair.held_up() as hold:
        sender.send(pages(30))
        hold.wait()
        behind.send(pages(33))  # into the same queue
        until(lambda: receiver.poll() == KVPoll.Failed, "notice")
        until(lambda: other.poll() == KVPoll.Failed, "notice of what waits behind it")
        deferred = receiver.defer_free()
        assert not deferred.is_drained() and sender.poll() == KVPoll.Transferring, "it is written"
        assert other.defer_free() is None and behind.poll() == KVPoll.Failed, "nothing was begun"
        assert STATS.failures[Reason.TIMEOUT] == before + 2
        hold.release()
        until(lambda: sender.poll() == KVPoll.Failed, "sender")
        until(deferred.is_drained, "drained")
    assert pair.arrived([30], [4])
    for end in (sender, behind):
        text = pair.reason(end)
        assert "SGLANG_DISAGGREGATION_TRANSFER_TIMEOUT" in text and pair.peer in text, text
    assert pair.reason(receiver) and pair.reason(other)
    deferred.stop_following()
    assert prefill.chunk_deadlines.rooms() == []
    # Nobody else is the worse for it.
    prefill.chunk_deadlines = allowed
    pair.serve(31, 4)


def test_watched_room_that_stock_prefill_completes_is_over(pair: Pair) -> None:
    """Guards against pages held for the whole bound although a stock prefill, which takes no
    withdrawal, said that everything has arrived."""
    sender, receiver = pair.ready_room(4)
    pair.decode.manager.servers._capabilities.clear()  # a stock prefill
    receiver.abort()
    deferred = receiver.defer_free()
    assert pair.reason(receiver) and not deferred.is_drained()
    sender.send(pages(30))
    until(deferred.is_drained, "drained")
    assert pair.arrived([30], [4])
    deferred.stop_following()
    until(lambda: sender.poll() == KVPoll.Success, "sender")
    sender.clear()


@pytest.mark.hazard("dead-peer-leftovers")
def test_silent_decode_rank_is_forgotten(pair: Pair) -> None:
    """Guards against rooms and buffers of a dead decode server that are kept for ever."""
    prefill = pair.prefill.manager
    sender, receiver = pair.room()
    receiver.announce(pages(4), 5, prefix_len=0)
    pair.announced(sender)
    ranks = prefill.decode_ranks
    known = prefill.decode_kv_args_table[pair.peer]
    ranks._heard[pair.peer] = ranks._clock() - ranks._timeout_s, known
    prefill._tick()
    assert prefill.decode_kv_args_table == {}
    assert pair.finish(sender, receiver) == LOST and "was silent" in pair.reason(sender)
    assert receiver.defer_free() is None and pair.reason(receiver)
