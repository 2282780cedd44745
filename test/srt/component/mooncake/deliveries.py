"""Rooms that are served, or refused before anything is sent."""

from __future__ import annotations

import dataclasses
import os

import torch

from component.mooncake.pair import ADDRESS, LIMIT_S, pages, until
from component.mooncake.scene import (
    DECODE,
    DONE,
    LOST,
    PAGE_BYTES,
    PAIR,
    PREFILL,
    ROOMS,
    reason,
    sent,
)
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.delta import control, wire
from sglang.srt.disaggregation.delta.metrics import STATS, Reason


def partial_delta() -> None:
    sender, receiver = PAIR.room()
    PAIR.prefill.aux[3] = 77
    before = sent()
    receiver.announce(pages(20, 9, 11), 5, prefix_len=8)
    PAIR.announced(sender)
    sender.init(5, 3)  # the whole prompt has 5 pages
    assert (sender.decode_prefix_len, sender.num_kv_indices) == (8, 3)
    sender.send(pages(30, 31))
    assert receiver.poll() == KVPoll.WaitingForInput
    sender.send(pages(2))
    assert PAIR.finish(sender, receiver) == DONE
    assert PAIR.arrived([30, 31, 2], [20, 9, 11])
    assert PAIR.decode.aux[5].tolist() == [77] * 16
    assert sent() - before == 3 * PAGE_BYTES
    sender.clear()
    receiver.clear()


def full_hit() -> None:
    sender, receiver = PAIR.room()
    PAIR.prefill.aux[1] = 41
    before = sent()
    receiver.announce(pages(), 2, prefix_len=12)
    PAIR.announced(sender)
    sender.init(3, 1)
    assert sender.num_kv_indices == 0
    sender.send(pages())
    assert PAIR.finish(sender, receiver) == DONE
    assert PAIR.arrived([], []) and PAIR.decode.aux[2].tolist() == [41] * 16
    assert sent() == before
    # Done is done, however often it is asked.
    assert {receiver.poll() for _ in range(3)} == {KVPoll.Success}
    assert {sender.poll() for _ in range(3)} == {KVPoll.Success}
    sender.clear()
    receiver.clear()


def stock_peer() -> None:
    sender, receiver = PAIR.room()
    receiver.send_metadata(pages(1, 2), 0, None)
    PAIR.announced(sender)
    sender.init(2, 0)
    assert sender.decode_prefix_len == 0
    sender.send(pages(8, 9))
    assert PAIR.finish(sender, receiver) == DONE
    assert PAIR.arrived([8, 9], [1, 2])
    sender.clear()
    receiver.clear()


def dummy() -> None:
    info = DECODE.connection_pool[f"{ADDRESS}_0_0_0"][0]
    info["is_dummy"] = True
    try:
        sender, receiver = PAIR.room()
        receiver.announce(pages(4, 5), 5, prefix_len=0)
        PAIR.announced(sender)
        sender.init(2, 3)
        sender.send(pages(30, 31))
        until(lambda: sender.poll() == KVPoll.Success, "a dummy's part is done")
        sender.clear()
        assert PAIR.arrived([], []) and receiver.poll() == KVPoll.WaitingForInput
        receiver.abort()
        deferred = receiver.defer_free()  # asks the dummy, too
        assert reason(receiver)
        until(lambda: ROOMS._ended.get(sender.bootstrap_room), "withdrawal")
        PREFILL.decode_ranks._sockets.send(
            "127.0.0.1", DECODE.rank_port, _pong()
        )  # after an answer
        until(lambda: DECODE.servers._ranks[ADDRESS][_rank()] == 0, "pong")
        assert not deferred.is_drained(), "a rank that writes nothing spoke for the one that writes"
        deferred.stop_following()
    finally:
        info["is_dummy"] = False


def _rank():
    return "127.0.0.1", PREFILL.rank_port


def _pong():
    DECODE.servers._ranks[ADDRESS][_rank()] = 1
    return control.Pong(f"127.0.0.1:{PREFILL.rank_port}", True)


def announced_before_the_request_came() -> None:
    room = PAIR.next_room()
    receiver = PAIR.receiver(room)
    receiver.announce(pages(4), 5, prefix_len=0)
    until(lambda: room in PREFILL.transfer_infos, "announcement")
    assert room not in PREFILL.request_status, "left behind if its request never comes"
    sender = PAIR.sender(room)
    assert sender.poll() == KVPoll.WaitingForInput
    sender.init(1, 3)
    sender.send(pages(30))
    assert PAIR.finish(sender, receiver) == DONE and PAIR.arrived([30], [4])
    sender.clear()
    receiver.clear()


def late_words() -> None:
    sender, receiver = PAIR.room()
    room = sender.bootstrap_room
    receiver.announce(pages(4), 5, prefix_len=0)
    PAIR.announced(sender)
    receiver.clear()
    sender.init(1, 3)
    sender.send(pages(30))  # its completion finds no room
    until(lambda: sender.poll() == KVPoll.Success, "sender")
    sender.clear()
    PREFILL.sync_status_to_decode_endpoint("127.0.0.1", DECODE.rank_port, room, 0, 0)
    PREFILL.send_aux_data_to_endpoint("127.0.0.1", DECODE.rank_port, room, 0, 5, b"\1" * 64)
    PAIR.wipe()
    sender, receiver = PAIR.room()
    receiver.announce(pages(6), 5, prefix_len=0)
    PAIR.announced(sender)
    sender.init(1, 3)
    sender.send(pages(31))
    assert PAIR.finish(sender, receiver) == DONE
    assert PAIR.arrived([31], [6]) and PAIR.decode.aux[5].tolist() == PAIR.prefill.aux[3].tolist()
    sender.clear()
    receiver.clear()


def metadata_over_tcp() -> None:
    os.environ["SGLANG_MOONCAKE_SEND_AUX_TCP"] = "1"
    try:
        sender, receiver = PAIR.room()
        PAIR.prefill.aux[3] = 55
        receiver.announce(pages(4), 5, prefix_len=0)
        PAIR.announced(sender)
        sender.init(1, 3)
        sender.send(pages(30))
        assert PAIR.finish(sender, receiver) == DONE
        assert PAIR.arrived([30], [4]) and PAIR.decode.aux[5].tolist() == [55] * 16
        sender.clear()
        receiver.clear()
    finally:
        del os.environ["SGLANG_MOONCAKE_SEND_AUX_TCP"]


def heads_of_another_size() -> None:
    table, session = PREFILL.decode_kv_args_table, DECODE.peer_name
    registered = table[session]
    # Decode has two ranks, this is the second one: pages of half the size, for the second head.
    table[session] = dataclasses.replace(
        registered, dst_attn_tp_size=2, dst_tp_rank=1, dst_kv_item_len=64
    )
    before = sent()
    for layer in PAIR.prefill.kv:
        layer[30:32] = torch.rand_like(layer[30:32])
    try:
        sender, receiver = PAIR.room()
        receiver.announce(pages(20, 9), 5, prefix_len=0)
        PAIR.announced(sender)
        sender.init(2, 3)
        sender.send(pages(30, 31))
        assert PAIR.finish(sender, receiver) == DONE
    finally:
        table[session] = registered
    for ours, theirs in zip(PAIR.decode.kv, PAIR.prefill.kv, strict=True):
        expected = torch.zeros_like(ours).view(-1, 4, 4)
        expected[[20, 9]] = theirs[30:32].view(2, 4, 2, 4)[:, :, 1]
        assert torch.equal(ours.view(-1, 4, 4), expected)
    assert sent() - before == PAGE_BYTES  # half of two pages
    sender.clear()
    receiver.clear()


def mismatch() -> None:
    sender, receiver = PAIR.room()
    before = sent()
    receiver.announce(pages(20, 9, 11), 5, prefix_len=8)
    PAIR.announced(sender)
    sender.init(4, 3)  # decode counts a prompt of 5 pages
    sender.send(pages(30, 31))
    assert PAIR.finish(sender, receiver) == LOST
    for text in (reason(sender), reason(receiver)):
        assert "3 destination pages" in text and "2 of the prompt's 4" in text, text
    assert sent() == before and PAIR.arrived([], [])


def chunk_of_another_length() -> None:
    sender, receiver = PAIR.room()
    before = sent()
    receiver.announce(pages(20, 9), 5, prefix_len=0)
    PAIR.announced(sender)
    sender.init(2, 3)
    sender.send(pages(30, 31, 32))
    assert PAIR.finish(sender, receiver) == LOST
    for text in (reason(sender), reason(receiver)):
        assert "3 pages cannot go to the 2" in text, text
    assert sent() == before and PAIR.arrived([], [])


def unreadable_frame() -> None:
    sender, receiver = PAIR.room()
    original, wire.VERSION = wire.VERSION, wire.VERSION + 1
    frame = wire.DeltaFrame(version=wire.VERSION, decode_prefix_len=8, num_pages=1, is_dummy=False)
    wire.VERSION = original
    encode = wire.encode_frame
    wire.encode_frame = lambda ours: encode(frame)
    try:
        receiver.announce(pages(7), 0, prefix_len=8)
    finally:
        wire.encode_frame = encode
    PAIR.announced(sender)
    sender.init(3, 0)
    assert PAIR.finish(sender, receiver) == LOST
    assert "delta protocol 2" in reason(sender) and "delta protocol 2" in reason(receiver)
    assert PAIR.arrived([], [])


def never_announced() -> None:
    sender, receiver = PAIR.room()
    PREFILL.bootstrap_timeout = 0
    assert sender.poll() == KVPoll.Failed
    PREFILL.bootstrap_timeout = LIMIT_S
    assert "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT" in reason(sender)
    receiver.clear()


def never_delivered() -> None:
    sender, receiver = PAIR.room()
    receiver.announce(pages(4), 5, prefix_len=0)
    PAIR.announced(sender)
    failures = STATS.failures[Reason.TIMEOUT]
    DECODE.waiting_timeout = 0
    assert receiver.poll() == KVPoll.Failed
    DECODE.waiting_timeout = LIMIT_S
    assert STATS.failures[Reason.TIMEOUT] == failures + 1
    deferred = receiver.defer_free()
    text = reason(receiver)
    assert "SGLANG_DISAGGREGATION_WAITING_TIMEOUT" in text and ADDRESS in text
    until(lambda: sender.poll() == KVPoll.Failed, "withdrawal")
    until(deferred.is_drained, "quiet")
    deferred.stop_following()
    assert "did not complete it" in reason(sender)


SCENARIOS = (
    partial_delta,
    full_hit,
    stock_peer,
    dummy,
    heads_of_another_size,
    announced_before_the_request_came,
    late_words,
    metadata_over_tcp,
    mismatch,
    chunk_of_another_length,
    unreadable_frame,
    never_announced,
    never_delivered,
)
