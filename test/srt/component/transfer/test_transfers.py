"""Transfers over the real library, and rooms that end early, as both sides see them.

Each cell runs in an interpreter of its backend, with a new pair (``component/conftest.py``). At its
end no table of either side may hold an entry of a room. ``unit/delta/transfer`` tests the events on
a prefill rank at each stage.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch

from component.transfer.pair import ADDRESS, DONE, LAYERS, LOST, PAGES, Pair, frame, pages, until
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.delta import wire
from sglang.srt.disaggregation.delta.observability import STATS

# ---- delivery ----


LATE = "kv_transfer_failed", "timeout"


class Room(NamedTuple):
    """Prefill's pages, decode's announced pages, and both errors if these do not fit."""

    chunks: tuple[tuple[int, ...], ...]
    targets: tuple[int, ...] = ()
    #: Tokens of the prefix on decode, and pages of the whole prompt.
    prefix: int = 0
    prompt: int = 2
    #: Pages of a sparse index that prefill sends with the last chunk.
    index: tuple[int, ...] | None = None
    refused: tuple[str, ...] = ()


ROOMS = {
    "a whole prompt": Room(((30, 31),), (20, 9)),
    "pages behind a prefix": Room(((30, 31), (2,)), (20, 9, 11), prefix=8, prompt=5),
    "a full hit": Room(((),), prefix=12, prompt=3),
    "pages with their index": Room(
        ((30, 31), (2,)), (20, 9, 11), prefix=8, prompt=5, index=(30, 31, 2)
    ),
    "an index of other pages": Room(
        ((30, 31, 2),), (20, 9, 11), prefix=8, prompt=5, index=(28, 29, 30, 31, 2),
        refused=("5 ", "listed 3"),
    ),
    "a shorter prompt": Room(
        ((30, 31),), (20, 9, 11), prefix=8, prompt=4,
        refused=("3 destination pages", "2 of the prompt's 4"),
    ),
    "a longer chunk": Room(((30, 31, 32),), (20, 9), refused=("3 pages", " 2 ")),
}  # fmt: skip


@pytest.mark.hazard("full-hit-without-metadata", "full-hit-over-waiting-backend")
@pytest.mark.hazard("lists-cut-to-fit", "peer-ignores-prefix")
@pytest.mark.parametrize("room", ROOMS)
def test_a_room_is_delivered_or_refused(pair: Pair, room: str) -> None:
    """Guards against KV, index or metadata at other places than the announced ones, against counted
    bytes that were not moved, against rooms that end before their last chunk, or never, and against
    lists cut to fit: such a room sends nothing, and both sides name both numbers."""
    it, before = ROOMS[room], pair.sent()
    pair.prefill.aux[3] = 77
    has_index = it.index is not None
    sender, receiver = pair.ready_room(
        *it.targets, prefix=it.prefix, prompt=it.prompt, index=has_index
    )
    for chunk in it.chunks[:-1]:
        sender.send(pages(*chunk))
        assert receiver.poll() == KVPoll.WaitingForInput
    sender.send(pages(*it.chunks[-1]), pages(*it.index) if has_index else None)
    ended = pair.finish(sender, receiver)
    if it.refused:
        assert ended == LOST
        for text in (pair.reason(sender), pair.reason(receiver)):
            assert all(number in text for number in it.refused), text
        if has_index:
            assert all(not layer.any() for layer in pair.decode.index)
        else:
            assert pair.sent() == before and pair.arrived([], [])
        return
    sources = [page for chunk in it.chunks for page in chunk]
    assert ended == DONE and pair.arrived(sources, list(it.targets), index=has_index)
    assert pair.decode.aux[5].tolist() == [77] * 16
    of_index = sum(pair.prefill.manager.kv_args.state_item_lens) if has_index else 0
    assert pair.sent() - before == len(sources) * (pair.page_bytes + of_index)
    pair.clear(sender, receiver)


@pytest.mark.hazard("racing-peer-tables")
def test_many_rooms_at_once(pair: Pair) -> None:
    """Guards against bytes of one room at another's places, and against a room that is lost, while
    chunks of many rooms are posted, polled and released side by side."""
    numbers = np.random.default_rng(7)
    sources, targets = (numbers.permutation(PAGES - 1) + 1 for _ in range(2))
    rooms = [pair.ready_room(*targets[at : at + 4], slot=at % 8) for at in range(0, 44, 4)]
    for part in (0, 2):
        for at, (sender, _) in enumerate(rooms):
            sender.send(pages(*sources[4 * at + part : 4 * at + part + 2]))
    for sender, receiver in rooms:
        assert pair.finish(sender, receiver) == DONE
        pair.clear(sender, receiver)
    assert pair.arrived(sources[:44].tolist(), targets[:44].tolist())


@pytest.mark.hazard("unequal-tensor-parallelism")
def test_a_decode_rank_of_another_size(pair: Pair) -> None:
    """Guards against another head than the decode rank holds, against bytes outside its half, and
    against counted bytes that were not sent."""
    decode, before = pair.decode.manager, pair.sent()
    # Decode has two ranks, this is the second one: pages of half the size, for the second head.
    decode.attn_tp_size, decode.kv_args.engine_rank = 2, 1
    decode.kv_args.kv_item_lens = [64] * 2 * LAYERS
    pair.prefill.manager.forget_peer(pair.peer)
    pair.register()
    for layer in pair.prefill.kv:
        layer[30] = torch.rand_like(layer[30])
    pair.serve(30, 9)
    for ours, theirs in zip(pair.decode.kv, pair.prefill.kv, strict=True):
        expected = torch.zeros_like(ours).view(-1, 4, 4)
        expected[9] = theirs[30].view(4, 2, 4)[:, 1]
        assert torch.equal(ours.view(-1, 4, 4), expected)
    assert pair.sent() - before == pair.page_bytes // 2


def test_a_stock_decode_server(pair: Pair) -> None:
    """Guards against an unpatched decode server that is no longer served."""
    sender, receiver = pair.room()
    receiver.send_metadata(pages(1, 2), 0, None)
    pair.announced(sender)
    sender.init(2, 0)
    assert sender.decode_prefix_len == 0
    sender.send(pages(8, 9))
    assert pair.finish(sender, receiver) == DONE and pair.arrived([8, 9], [1, 2])
    pair.clear(sender, receiver)


def test_announced_before_the_request(pair: Pair) -> None:
    """Guards against a request that waits for an announcement that has already arrived, and against
    entries of rooms whose request never comes."""
    room = pair.next_room()
    receiver = pair.receiver(room)
    receiver.announce(frame(0), pages(4), 5)
    until(lambda: pair.prefill.manager.rooms.room(room), "announcement")
    assert room not in pair.prefill.manager.request_status, "left behind if its request never comes"
    sender = pair.sender(room)
    assert sender.poll() == KVPoll.WaitingForInput
    sender.init(1, 3)
    sender.send(pages(30))
    assert pair.finish(sender, receiver) == DONE and pair.arrived([30], [4])
    pair.clear(sender, receiver)


def test_announced_in_another_version(pair: Pair) -> None:
    """Guards against a frame that ends the thread which reads every room's announcement, and
    against a decode server that detects the failure only by its timeout."""
    theirs = wire.VERSION + 1
    changed = wire.encode_frame(
        wire.DeltaFrame(version=theirs, decode_prefix_len=8, num_pages=1, is_dummy=False)
    )
    sender, receiver = pair.room()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "encode_frame", lambda ours: changed)
        receiver.announce(frame(8), pages(7), 0)
    pair.announced(sender)
    sender.init(3, 0)
    assert pair.finish(sender, receiver) == LOST
    for text in (pair.reason(sender), pair.reason(receiver)):
        assert f"delta protocol {theirs}" in text, text
    assert pair.arrived([], [])


# ---- rooms that end early ----


@pytest.mark.hazard("other-side-not-told", "abort-before-settled", "source-given-away")
@pytest.mark.parametrize("stage", ["unannounced", "announced", "under way"])
def test_prefill_gives_it_up(pair: Pair, stage: str) -> None:
    """Guards against a decode server that holds its pages until the timeout, against pages freed
    while one is read and written, and against a notification that overtakes the write."""
    sender, receiver = pair.room() if stage == "unannounced" else pair.ready_room(20, 9)
    with pair.held_up() as hold:
        if stage == "under way":
            sender.send(pages(30))
            hold.wait()
        sender.abort()
        if stage == "unannounced":
            receiver.announce(frame(0), pages(20, 9), 5)
        if stage == "under way":
            assert {sender.poll() for _ in range(3)} == {KVPoll.Transferring}, "its page is read"
            assert receiver.poll() == KVPoll.WaitingForInput, "notified during the write"
        hold.release()
        sender.send(pages(31))  # the scheduler has computed the next chunk
        assert pair.finish(sender, receiver) == LOST
    assert receiver.defer_free() is None, "all that prefill would write has arrived"
    assert pair.arrived([30], [20]) if stage == "under way" else pair.arrived([], [])
    for end in (sender, receiver):
        assert "aborted on the prefill server" in pair.reason(end)


#: Errors for decode's client, and on prefill.
GIVEN_UP = {
    "an abort": ("Abort", "decode cancelled it"),
    "a timeout": ("SGLANG_DISAGGREGATION_WAITING_TIMEOUT", "did not complete it"),
}


@pytest.mark.hazard("pages-written-after-release", "other-side-not-told")
@pytest.mark.hazard("late-notification", "room-number-reused")
@pytest.mark.parametrize("by", GIVEN_UP)
@pytest.mark.parametrize("stage", ["announced", "under way"])
def test_decode_gives_it_up(pair: Pair, stage: str, by: str) -> None:
    """Guards against pages of a room that are reused while prefill still writes to them, also for
    the next request with the same number, against a prefill server that goes on sending, and
    against pages that are held for the whole quarantine timeout."""
    sender, receiver = pair.ready_room(4, 5)
    late = STATS.totals[LATE]
    with pair.held_up() as hold:
        if stage == "under way":
            sender.send(pages(30))
            hold.wait()
        if by == "an abort":
            receiver.abort()
        else:
            pair.decode.manager.waiting_timeout = 0
        assert receiver.poll() == KVPoll.Failed
        assert STATS.totals[LATE] == late + (by == "a timeout")
        deferred = receiver.defer_free()  # notifies prefill
        text = pair.reason(receiver)
        assert GIVEN_UP[by][0] in text and (by == "an abort" or ADDRESS in text), text
        again = pair.receiver(sender.bootstrap_room)
        assert again.poll() == KVPoll.Failed and "still in use" in pair.reason(again)
        until(lambda: sender.is_stopped, "withdrawal")
        if stage == "under way":
            assert not deferred.is_drained() and sender.poll() == KVPoll.Transferring
        sender.send(pages(31))  # not sent any more
        hold.release()
        until(lambda: sender.poll() == KVPoll.Failed, "sender")
        until(deferred.is_drained, "drained")
    assert pair.arrived([30], [4]) if stage == "under way" else pair.arrived([], [])
    assert GIVEN_UP[by][1] in pair.reason(sender)
    deferred.free(lambda entry: None)


@pytest.mark.hazard("late-notification", "room-number-reused")
def test_decode_gives_it_up_when_all_was_sent(pair: Pair) -> None:
    """Guards against pages held for the whole quarantine timeout although nothing can be written
    any more, and against such a room's completion that counts for the next one."""
    sender, receiver = pair.ready_room(4)
    sender.send(pages(30))
    until(lambda: sender.poll() == KVPoll.Success, "sender")
    sender.clear()
    receiver.abort()
    deferred = receiver.defer_free()
    assert pair.reason(receiver)
    if deferred is not None:
        until(deferred.is_drained, "drained")
        deferred.free(lambda entry: None)
    pair.serve(31, 6)
    assert pair.arrived([30, 31], [4, 6])


def test_decode_gives_it_up_before_its_request_came(pair: Pair) -> None:
    """Guards against a prefill request that waits although decode has cancelled it."""
    room = pair.next_room()
    receiver = pair.receiver(room)
    receiver.withdraw("the client went away")
    sender = pair.sender(room)
    until(lambda: sender.poll() == KVPoll.Failed, "withdrawal")
    assert "decode cancelled it: the client went away" in pair.reason(sender)
    receiver.clear()


@pytest.mark.hazard("exception-ends-worker")
def test_a_library_that_raises_fails_its_room_alone(pair: Pair) -> None:
    """Guards against one room's error that ends the thread which sends for all rooms, and against a
    status that changes with every poll."""
    sender, receiver = pair.ready_room(20, 9)
    with pair.breaking():
        sender.send(pages(30, 31))
        assert pair.finish(sender, receiver) == LOST
    assert {sender.poll() for _ in range(3)} == {KVPoll.Failed}
    assert "ZeroDivisionError" in pair.reason(sender)
    assert pair.word_of_a_broken_write in pair.reason(receiver)
    assert pair.arrived([], [])
    pair.serve(30, 20)


@pytest.mark.hazard("slow-peer", "source-given-away")
@pytest.mark.parametrize("is_aborted", [False, True])
def test_a_write_that_does_not_end(pair: Pair, is_aborted: bool) -> None:
    """Guards against a request that waits for a frozen decode rank for ever, whether its client has
    left or not, against pages freed while they are written to, and against a late write that
    completes the room. Over NIXL decode waits until the write has settled; over Mooncake its client
    is answered at once."""
    sender, receiver = pair.ready_room(4)
    deferred = None
    with pair.held_up() as hold:
        sender.send(pages(30))
        hold.wait()
        if is_aborted:
            sender.abort()
            assert sender.poll() == KVPoll.Transferring
        pair.expire()
        until(lambda: sender.poll() == KVPoll.Failed, "deadline")
        if pair.tells_at_once:
            until(lambda: receiver.poll() == KVPoll.Failed, "word")
            deferred = receiver.defer_free()
            assert not deferred.is_drained()
        else:
            assert receiver.poll() == KVPoll.WaitingForInput
        hold.release()
        until(lambda: receiver.poll() == KVPoll.Failed, "settled")
        if deferred is not None:
            until(deferred.is_drained, "drained")
    assert pair.arrived([30], [4])
    text = pair.reason(sender)
    if is_aborted:
        assert "aborted" in text
    else:
        assert "SGLANG_DISAGGREGATION_TRANSFER_TIMEOUT" in text and pair.peer in text, text
    assert pair.reason(receiver)
    if deferred is not None:
        deferred.free(lambda entry: None)
    pair.serve(31, 4)


def test_a_room_that_nobody_announces(pair: Pair) -> None:
    """Guards against a prefill request that waits for ever for a lost decode server, and against an
    error that does not name the timeout's variable."""
    sender, receiver = pair.room()
    pair.prefill.manager.bootstrap_timeout = 0
    assert sender.poll() == KVPoll.Failed
    assert "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT" in pair.reason(sender)
    receiver.clear()


@pytest.mark.hazard("other-side-not-told", "dead-peer-leftovers", "peer-lost-for-ever")
def test_a_decode_rank_that_prefill_forgot_is_served_again(pair: Pair) -> None:
    """Guards against rooms of a silent decode rank that are kept, against a decode rank that waits
    for a prefill rank which does not know it, and against one that is not served after it has
    registered again."""
    sender, receiver = pair.ready_room(4)
    pair.prefill.manager.forget_peer(pair.peer)
    sender.send(pages(30))
    assert pair.finish(sender, receiver) == LOST and pair.arrived([], [])
    assert pair.peer in pair.reason(sender) and pair.reason(receiver)
    sender, receiver = pair.room()
    receiver.announce(frame(0), pages(4), 5)
    until(lambda: receiver.poll() == KVPoll.Failed, "notice")
    assert receiver.defer_free() is None, (
        "a rank that does not know this decode rank writes nothing"
    )
    assert "the decode rank is not registered" in pair.reason(receiver)
    until(lambda: not pair.decode.manager.connection_pool, "disconnected, to connect again")
    sender.abort()
    assert sender.poll() == KVPoll.Failed and pair.reason(sender)
    pair.connect()
    pair.register()
    pair.serve(30, 4)
    assert pair.arrived([30], [4])


@pytest.mark.hazard("room-number-reused")
def test_without_the_flag_a_request_outlives_the_first_of_its_number(pair: Pair) -> None:
    """Guards against a scheduler that ends with a KeyError: without the flag, as in SGLang, two
    requests with one number share their entries, and the first one's clear removes them."""
    manager = pair.decode.manager
    servers, manager.servers = manager.servers, None
    room = pair.next_room()
    first, second = pair.receiver(room), pair.receiver(room)
    assert first.poll() == second.poll() == KVPoll.WaitingForInput
    first.clear()
    assert [second.poll() for _ in range(2)] == [KVPoll.Failed] * 2
    assert str(room) in pair.reason(second)
    manager.addr_to_rooms_tracker.clear()  # Mooncake's entry stays, as in SGLang
    manager.servers = servers
