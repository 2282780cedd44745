"""What the scheduler sees of a room, in every order of what can happen to it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.delta.metrics import Reason
from sglang.srt.disaggregation.delta.prefill.room import State
from unit.delta.nixl.fakes import nixlRemoteDisconnectError
from unit.delta.nixl.prefill_rank import ENDS, TRANSFER_TIMEOUT_S, PrefillRank, failure_of

ROOM = 7
BROKEN = ZeroDivisionError("the transport's")


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> PrefillRank:
    return PrefillRank(monkeypatch)


def pages(*numbers: int) -> np.ndarray:
    """As the scheduler gives them."""
    return np.array(numbers, np.int32)


def started(rank: PrefillRank, room: int = ROOM, count: int = 2) -> Any:
    """A room of ``count`` pages that may send."""
    sender = rank.sender(room)
    rank.announce(room, range(10, 10 + count), slot=2)
    assert sender.poll() == KVPoll.WaitingForInput
    sender.init(count, 3)
    return sender


def test_a_life(rank: PrefillRank) -> None:
    """Guards against success that is said before decode has everything, against a sender that
    holds transfers, and against entries that stay."""
    sender = started(rank)
    states = [sender.poll()]
    sender.send(pages(5))
    states.append(sender.poll())
    rank.pool.run()
    sender.send(pages(6))
    states.append(sender.poll())
    rank.tick(0.25)
    rank.agent.settle(rank.agent.handles[0])
    rank.agent.settle(rank.agent.handles[2])  # metadata overtake
    rank.tick(0.25)
    states.append(sender.poll())
    assert set(states) == {KVPoll.WaitingForInput} and sender.xfer_handles == []
    rank.settle()
    rank.tick(0.25)
    assert [sender.poll() for _ in range(3)] == [KVPoll.Success] * 3
    sender.clear()
    rank.check()
    theirs, ours = rank.decode["decode"], rank.side
    for (_, target), (_, source) in zip(
        theirs.kv + theirs.metadata, ours.kv + ours.metadata, strict=True
    ):
        if len(source) == 5:
            assert np.array_equal(target[2], source[3])
        else:
            assert np.array_equal(target[[10, 11]], source[[5, 6]])


def test_a_second_announcement_by_one_rank(rank: PrefillRank) -> None:
    """Guards against a success after which decode takes pages as written that only the second of
    two announcements listed: chunks had gone to the pages of the first one."""
    sender = started(rank)
    sender.send(pages(5))
    rank.pool.run()
    rank.settle()
    rank.announce(ROOM, [20, 21], slot=2)
    sender.send(pages(6))
    rank.finish()
    assert sender.poll() == KVPoll.Failed
    assert "decode rank decode announced it a second time" in str(failure_of(sender))
    assert [message.room for message in rank.sockets.stopped] == [ROOM], "decode is told once"
    rank.check()


def test_a_second_announcement_before_the_request(rank: PrefillRank) -> None:
    """Guards against a request that starts with pages of which only one announcement is right."""
    rank.announce(ROOM, [10])
    rank.announce(ROOM, [20])
    sender = rank.sender(ROOM)
    assert sender.poll() == KVPoll.Failed
    assert "a second time" in str(failure_of(sender))
    rank.check()


def test_its_number_is_announced_again_as_it_ends(rank: PrefillRank) -> None:
    """Guards against an announcement of a number's next request that goes with the one before,
    while the room table has it: that request started, and had no pages to send to."""
    sender, table = started(rank, count=1), rank.manager.rooms
    sender.send(pages(5))
    rank.finish()
    announce = table.announce

    def as_it_ends(*asked: Any) -> Any:
        sender.clear()
        table.announce = announce
        return announce(*asked)

    table.announce = as_it_ends
    rank.announce(ROOM, [20], slot=2)
    again = rank.sender(ROOM)
    assert again.poll() == KVPoll.WaitingForInput
    again.init(1, 3)
    again.send(pages(6))
    rank.finish()
    assert again.poll() == KVPoll.Success
    again.clear()
    rank.check()


def test_a_full_hit(rank: PrefillRank) -> None:
    """Guards against a room that is never done because it has no pages, and against one that is
    done before its metadata arrived."""
    sender = rank.sender(ROOM)
    rank.announce(ROOM, [], prefix=8)
    sender.init(2, 3)
    assert sender.num_kv_indices == 0
    sender.send(pages())
    rank.tick(0.25)
    assert sender.poll() == KVPoll.WaitingForInput and rank.agent.notes["decode"] == []
    rank.finish()
    assert sender.poll() == KVPoll.Success
    assert rank.agent.notes["decode"] == [b"7_kv_0_1_0", b"7_aux_0"]
    sender.clear()
    rank.check()


def test_bootstrapping_rooms_are_not_done(rank: PrefillRank) -> None:
    """Guards against a scheduler that takes a room which is still bootstrapping in its in-flight
    queue for one that is over, or asserts that there is none."""
    sender = rank.sender(ROOM)
    assert sender.poll() == KVPoll.Bootstrapping
    sender.init(2, 3)  # another rank of the group had its announcement first
    assert sender.poll() == KVPoll.WaitingForInput
    rank.announce(ROOM, [4, 5])
    assert sender.poll() == KVPoll.WaitingForInput
    sender.abort()
    assert sender.poll() == KVPoll.Failed
    failure_of(sender)
    rank.check()


def test_two_decode_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a room that starts before all its ranks have announced it, and against success
    while one of them waits."""
    rank = PrefillRank(monkeypatch, ("a", "b"))
    sender = rank.sender(ROOM)
    rank.announce(ROOM, [10], peer="a", of=2)
    assert sender.poll() == KVPoll.Bootstrapping
    rank.announce(ROOM, [20], peer="b", of=2)
    assert sender.poll() == KVPoll.WaitingForInput
    sender.init(1, 3)
    sender.send(pages(5))
    rank.tick(0.25)
    for handle in rank.agent.under_way("a"):
        rank.agent.settle(handle)
    rank.tick(0.25)
    assert sender.poll() == KVPoll.WaitingForInput
    rank.finish()
    assert sender.poll() == KVPoll.Success
    for name, page in (("a", 10), ("b", 20)):
        assert np.array_equal(rank.decode[name].kv[0][1][page], rank.side.kv[0][1][5])
    sender.clear()
    rank.check()


def test_ranks_that_announce_different_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against one rank's prefix taken for all of them."""
    rank = PrefillRank(monkeypatch, ("a", "b"))
    sender = rank.sender(ROOM)
    rank.announce(ROOM, [10, 11], peer="a", of=2)
    rank.announce(ROOM, [20], peer="b", of=2, prefix=4)
    sender.init(2, 3)
    sender.send(pages(5, 6))
    rank.finish()
    assert sender.poll() == KVPoll.Failed and rank.agent.handles == []
    assert "different prefix lengths [0, 4]" in str(failure_of(sender))
    rank.check()


@pytest.mark.hazard("poll-raises")
def test_the_cause_is_chained(rank: PrefillRank) -> None:
    """Guards against a log that says that something failed, but not where."""
    sender = started(rank)
    rank.agent.script["transfer"].append(BROKEN)
    sender.send(pages(5, 6))
    rank.finish()
    assert sender.poll() == KVPoll.Failed
    error = failure_of(sender)
    assert error.__cause__ is BROKEN
    assert f"room {ROOM}: a transfer to decode could not be posted: {BROKEN!r}" in str(error)
    rank.check()
    # Nothing of it is left for a request of the same number.
    sender = started(rank)
    sender.send(pages(5, 6))
    rank.finish()
    assert sender.poll() == KVPoll.Success
    sender.clear()
    rank.check()


def test_a_later_error_is_no_cause(rank: PrefillRank) -> None:
    """Guards against the error of a transfer that broke off after its room had been given up."""
    sender = started(rank)
    sender.send(pages(5))
    rank.tick(0.25)
    rank.withdraw(ROOM)
    rank.settle(BROKEN)
    rank.tick(0.25)
    assert sender.poll() == KVPoll.Failed
    error = failure_of(sender)
    assert "decode cancelled it" in str(error) and error.__cause__ is None
    rank.check()


@pytest.mark.hazard("poll-raises")
def test_an_error_on_the_worker_that_meets_an_abort(rank: PrefillRank) -> None:
    """Guards against an exception chained to a failure that it did not cause: the worker finds out
    after the abort, and before it is told of it."""
    sender = started(rank)
    sender.send(pages(5))
    rank.tick(0.25)
    rank.settle(BROKEN)
    cancel, late = rank.manager.room_stopped, []
    rank.manager.room_stopped = lambda *failure: late.append(failure)
    sender.abort()
    rank.tick(0.25)
    for failure in late:
        cancel(*failure)
    rank.tick(0.25)
    assert sender.poll() == KVPoll.Failed
    error = failure_of(sender)
    assert "aborted on the prefill server" in str(error) and error.__cause__ is None
    rank.check()


def test_an_abort_after_a_failure(rank: PrefillRank) -> None:
    """Guards against an abort that hides why the room had failed."""
    sender = started(rank)
    rank.agent.script["transfer"].append(BROKEN)
    sender.send(pages(5, 6))
    rank.finish()
    sender.abort()
    assert "could not be posted" in str(failure_of(sender))
    rank.check()


def test_it_failed_on_another_rank(rank: PrefillRank) -> None:
    """Guards against a room that failed elsewhere and is written on here, and against its pages
    being freed by a second answer."""
    sender = started(rank)
    sender.send(pages(5))
    rank.tick(0.25)
    assert rank.agent.under_way()
    assert "failed on another rank of this server" in str(failure_of(sender))
    rank.pool.run()
    assert rank.sockets.stopped == []
    rank.finish()
    assert [message.room for message in rank.sockets.stopped] == [ROOM]
    rank.check()


@pytest.mark.hazard("late-word-revives-room")
def test_given_up_while_it_is_sent(rank: PrefillRank) -> None:
    """Guards against success of a chunk that goes to nobody: the reader's thread has just dropped
    the room's announcements, and the workers have not heard of it."""
    sender = started(rank)
    add, cancel, late = rank.manager.add_transfer_request, rank.manager.room_stopped, []
    rank.manager.room_stopped = lambda *failure: late.append(failure)

    def given_up(*chunk: Any) -> Any:
        rank.withdraw(ROOM)
        return add(*chunk)

    rank.manager.add_transfer_request = given_up
    sender.send(pages(5, 6))
    rank.pool.run()
    assert sender.poll() == KVPoll.Failed
    for failure in late:
        cancel(*failure)
    rank.pool.run()
    assert sender.poll() == KVPoll.Failed
    assert "decode cancelled it" in str(failure_of(sender))
    rank.check()


@pytest.mark.hazard("source-given-away")
def test_pages_are_not_freed_while_they_are_queued(rank: PrefillRank) -> None:
    """Guards against source pages and a metadata slot that go to another request while a chunk of
    the aborted one is still in a queue."""
    sender = started(rank)
    sender.send(pages(5, 6))
    sender.abort()
    assert sender.poll() == KVPoll.Failed, "nothing of it is posted any more"
    rank.pool.run()
    assert sender.poll() == KVPoll.Failed and rank.agent.handles == []
    del rank.manager.__dict__["transfers"]  # nothing more of it is even queued
    sender.send(pages(6))
    rank.manager.transfers = rank.pool
    failure_of(sender)
    rank.check()


@pytest.mark.hazard("siblings-write-on")
def test_a_transfer_that_never_settles(rank: PrefillRank) -> None:
    """Guards against a request that waits for ever, and against telling decode that nothing is
    written any more while it is; the text names the rank."""
    sender = started(rank)
    sender.send(pages(5, 6))
    rank.tick(0.25)
    rank.tick(TRANSFER_TIMEOUT_S)
    assert sender.poll() == KVPoll.Failed and len(rank.agent.under_way()) == 2
    text = str(failure_of(sender))
    assert "not delivered to decode (posted)" in text and "_TRANSFER_TIMEOUT" in text
    assert not any(rank.manager.open_rooms().values()), "an idle server takes it for a leak"
    rank.tick(0.25)
    assert rank.sockets.stopped == []
    rank.settle()
    rank.tick(0.25)
    assert [message.room for message in rank.sockets.stopped] == [ROOM]
    rank.check()


@pytest.mark.hazard("peer-lost-for-ever")
def test_a_decode_rank_that_comes_back(rank: PrefillRank) -> None:
    """Guards against rooms that hang when their decode rank goes away, and against a rank that is
    not served after it came back."""
    sender = started(rank)
    sender.send(pages(5))
    rank.tick(0.25)
    rank.agent.disconnect("decode")
    rank.tick(0.25)
    assert sender.poll() == KVPoll.Failed and rank.manager.decode_kv_args_table == {}
    error = failure_of(sender)
    assert isinstance(error.__cause__, nixlRemoteDisconnectError)
    rank.register("decode")
    sender = started(rank, 8)
    sender.send(pages(5, 6))
    rank.finish()
    assert sender.poll() == KVPoll.Success
    sender.clear()
    rank.check()


# ---- all orders ----

#: What can happen to a room beside its chunks and the workers' turns.
CAUSES = {
    "broken": lambda rank, sender: rank.settle(BROKEN),
    "error": lambda rank, sender: rank.settle("ERR"),
    "abort": lambda rank, sender: sender.abort(),
    "withdrawn": lambda rank, sender: rank.withdraw(sender.bootstrap_room),
    "silent": lambda rank, sender: rank.manager.rooms.fail(
        sender.bootstrap_room, Reason.PEER_LOST, "the peer gave no sign"
    ),
    "forgotten": lambda rank, sender: rank.manager.peers.forget("decode"),
    "disconnected": lambda rank, sender: rank.agent.disconnect("decode"),
    "overdue": lambda rank, sender: rank.tick(TRANSFER_TIMEOUT_S),
}


def orders(causes: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Every order of these with two chunks, three turns of the workers, and everything settling."""
    steps = ("chunk", "chunk", "work", "work", "settle", *causes)
    yield from sorted(set(itertools.permutations(steps)))


def live(rank: PrefillRank, room: int, order: tuple[str, ...]) -> list[str]:
    """One room in one order; what is wrong with it."""
    problems: list[str] = []
    sender = started(rank, room)
    left = iter((5, 6))
    seen, texts = [], []

    def look(event: str) -> None:
        state = sender.poll()
        if seen and seen[-1] in ENDS and state != seen[-1]:
            problems.append(f"{seen[-1]} became {state} with {event}")
        is_held = rank.agent.under_way(room=room) and sender._room.state is not State.OVERDUE
        if state == KVPoll.Failed and is_held:
            problems.append(f"failed at {event} while something is under way")
        delivered = [h for h in rank.agent.handles if h.room == room and h.state == "DONE"]
        told = [note for note in rank.agent.notes["decode"] if note.startswith(f"{room}_".encode())]
        wanted = [f"{room}_kv_0_1_0".encode(), f"{room}_aux_0".encode()]
        if state == KVPoll.Success and (len(delivered) != 3 or told != wanted):
            problems.append(f"success at {event} with {len(delivered)} transfers, {told}")
        if state == KVPoll.Failed and told:
            problems.append(f"failed at {event}, and decode was told {told}")
        seen.append(state)
        text = rank.manager.failure_records.get(room)
        if text is not None and text not in texts:
            texts.append(text)

    for event in order:
        if event == "chunk":
            sender.send(pages(next(left)))
        elif event == "work":
            rank.tick(0.25)
        elif event == "settle":
            rank.settle(room=room)
        else:
            CAUSES[event](rank, sender)
        look(event)
    for _ in left:
        problems.append("a chunk is left")
    rank.finish()
    look("the end")
    if seen[-1] not in ENDS:
        problems.append(f"it ends as {seen[-1]}")
    told = [message.reason for message in rank.sockets.stopped]
    rank.sockets.stopped.clear()
    if "withdrawn" in order:
        del told[1:]  # decode's own word is answered once more, if it comes late
    if seen[-1] == KVPoll.Failed:
        error = failure_of(sender)
        if len(texts) != 1:
            problems.append(f"causes: {texts}")
        elif str(error) != texts[0] or told != texts:
            problems.append(f"scheduler: {error}; decode: {told}; recorded: {texts}")
        was_raised = any(
            what in str(error) for what in ("the transport: ", "be posted: ", "it is complete: ")
        )
        if (error.__cause__ is not None) != was_raised:
            problems.append(f"{texts[0]} because of {error.__cause__!r}")
    else:
        sender.clear()
    rank.finish()
    rank.register("decode")
    if rank.leftovers():
        problems.append(f"left: {rank.leftovers()}")
    problems += rank.agent.misuse + rank.sockets.misuse
    rank.agent.check()
    rank.agent.handles.clear()
    rank.agent.notes.clear()
    return problems


@pytest.mark.hazard("poll-raises")
@pytest.mark.parametrize("cause", [None, *CAUSES])
def test_every_order(rank: PrefillRank, cause: str | None) -> None:
    """Guards against an order of chunks, failures and endings in which a request ends while its
    pages are read, changes its mind, waits for ever, forgets its cause or leaves something."""
    for room, order in enumerate(orders((cause,) if cause else ()), start=1):
        assert live(rank, room, order) == [], order


@pytest.mark.hazard("late-word-revives-room")
@pytest.mark.parametrize("causes", list(itertools.combinations(CAUSES, 2)), ids="-".join)
def test_two_causes(rank: PrefillRank, causes: tuple[str, str]) -> None:
    """Guards against a second cause that takes the place of the first, or undoes it."""
    some = list(orders(causes))[::11]
    for room, order in enumerate(some, start=1):
        assert live(rank, room, order) == [], order
