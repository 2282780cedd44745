"""A room on a prefill rank of each backend: possible events at every stage, and its end.

Each cell of the table holds for both backends; ``ranks.py`` has the differences between their
libraries. Checked after each: no other page was written, and no table entry is left.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.delta.metrics import Reason
from sglang.srt.disaggregation.delta.observability import STATS
from unit.delta.nixl.prefill_rank import TRANSFER_TIMEOUT_S
from unit.delta.transfer.steps import BROKEN, ROOM, arrived, failure_of, pages, started

# ---- stage x action ----

#: Stages of a room: two pages in two chunks, then its metadata.
STAGES: dict[str, Callable[[Any, Any], None]] = {
    "announced": lambda rank, sender: None,
    "queued": lambda rank, sender: sender.send(pages(5)),
    "written": lambda rank, sender: (sender.send(pages(5)), rank.tick(0.25)),
    "half": lambda rank, sender: (
        sender.send(pages(5)), rank.tick(0.25), rank.settle(), rank.tick(0.25),
    ),
    "at its end": lambda rank, sender: (
        sender.send(pages(5)), rank.tick(0.25), rank.settle(), sender.send(pages(6)),
        rank.tick(0.25),
    ),
    "delivered": lambda rank, sender: (
        sender.send(pages(5)), sender.send(pages(6)), rank.finish(),
    ),
}  # fmt: skip
WRITTEN = ("written", "at its end")

ACTIONS: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "aborted": (lambda rank, sender: sender.abort(), "aborted on the prefill server"),
    "withdrawn": (lambda rank, sender: rank.withdraw(ROOM), "decode cancelled it: no reason"),
    "silent": (
        lambda rank, sender: sender.fail(Reason.PEER_LOST, "it gave no sign"),
        "it gave no sign",
    ),
    "announced again": (
        lambda rank, sender: rank.announce(ROOM, [20, 21], slot=2), "announced it a second time",
    ),
}  # fmt: skip


@pytest.mark.hazard("abort-before-settled", "source-given-away", "other-side-not-told")
@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("stage", STAGES)
def test_given_up(rank: Any, stage: str, action: str) -> None:
    """Guards against pages that are freed while they are read, against a decode rank that is
    notified too early, twice or never, and against a delivered room that fails."""
    memory_before = rank.decode["decode"].snapshot()
    sender, (act, text) = started(rank), ACTIONS[action]
    STAGES[stage](rank, sender)
    act(rank, sender)
    began = len(rank.writes)
    if stage == "delivered":
        assert sender.poll() == KVPoll.Success and rank.heard(ROOM)[0] == "complete"
        assert "stopped" not in rank.heard(ROOM) or action in ("withdrawn", "announced again")
        assert arrived(rank, memory_before, 10, 11)
        rank.clear(sender)
        return
    is_read = stage in WRITTEN
    for _ in range(2):
        assert sender.poll() == (KVPoll.Transferring if is_read else KVPoll.Failed)
        assert rank.heard(ROOM) == ([] if is_read else ["stopped"])
    sender.send(pages(6))  # the scheduler has computed more
    rank.finish()
    assert sender.poll() == KVPoll.Failed and rank.heard(ROOM) == ["stopped"]
    assert len(rank.writes) == began, "no write began after that, nor metadata"
    assert arrived(
        rank, memory_before, *{"written": [10], "half": [10], "at its end": [10, 11]}.get(stage, ())
    )
    assert text in str(failure_of(sender))
    rank.check()


LATE = {
    "is late": lambda rank: rank.tick(TRANSFER_TIMEOUT_S),
    "is refused": lambda rank: rank.settle("ERR"),
}


@pytest.mark.hazard("siblings-write-on", "slow-peer")
@pytest.mark.parametrize("how", LATE)
@pytest.mark.parametrize("stage", WRITTEN)
def test_a_write_that_may_still_land(rank: Any, stage: str, how: str) -> None:
    """Guards against a request that waits for ever, against a message to decode that no more is
    written while it may be, and against a room that its late write completes."""
    sender = started(rank)
    STAGES[stage](rank, sender)
    LATE[how](rank)
    rank.tick(0.25)
    assert sender.poll() == KVPoll.Failed
    assert rank.heard(ROOM) == rank.messages_of_a_late_write[:-1]
    text = str(failure_of(sender))
    assert not any(rank.manager.open_rooms().values()), "an idle server would report a leak"
    rank.finish()
    assert rank.heard(ROOM) == rank.messages_of_a_late_write
    assert f"room {ROOM}" in text and ("TRANSFER_TIMEOUT" in text) == (how == "is late"), text
    rank.check()
    rank.register("decode")
    rank.heard(ROOM).clear()
    sender = started(rank)  # the number is free, and the decode rank is served
    STAGES["delivered"](rank, sender)
    assert sender.poll() == KVPoll.Success and rank.heard(ROOM) == ["complete"]
    rank.clear(sender)


@pytest.mark.hazard("poll-raises", "exception-ends-worker")
@pytest.mark.parametrize("stage", WRITTEN)
def test_a_library_that_raises(rank: Any, stage: str) -> None:
    """Guards against an error that ends the worker, or whose cause is not reported."""
    sender, other = started(rank), started(rank, 8)
    STAGES[stage](rank, sender)
    rank.settle(BROKEN)
    other.send(pages(5, 6))
    rank.finish()
    assert sender.poll() == KVPoll.Failed and rank.heard(ROOM) == rank.messages_of_a_late_write
    error = failure_of(sender)
    assert repr(BROKEN) in str(error) and error.__cause__ is BROKEN
    assert other.poll() == KVPoll.Success and rank.heard(8) == ["complete"]
    rank.clear(other)


@pytest.mark.hazard("peer-lost-for-ever")
@pytest.mark.parametrize(
    ("stage", "how"), [("half", "lose"), ("half", "forget"), ("queued", "forget")]
)
def test_a_decode_rank_that_is_gone(rank: Any, stage: str, how: str) -> None:
    """Guards against rooms that hang when their decode rank disconnects, and against a rank that is
    not served after it returned."""
    sender = started(rank)
    STAGES[stage](rank, sender)
    getattr(rank, how)()
    sender.send(pages(6))
    rank.finish()
    assert sender.poll() == KVPoll.Failed and rank.heard(ROOM) == ["stopped"]
    assert f"to {rank.peer} " in (text := str(failure_of(sender))) or f"rank {rank.peer} " in text
    rank.register("decode")
    rank.heard(ROOM).clear()
    sender = started(rank)
    STAGES["delivered"](rank, sender)
    assert sender.poll() == KVPoll.Success
    rank.clear(sender)


@pytest.mark.hazard("room-number-reused")
@pytest.mark.parametrize("stage", STAGES)
def test_a_second_request_with_the_same_number(rank: Any, stage: str) -> None:
    """Guards against a second request that ends the first, or is sent in its place."""
    memory_before = rank.decode["decode"].snapshot()
    sender = started(rank)
    STAGES[stage](rank, sender)
    again = rank.sender(ROOM)
    assert again.poll() == KVPoll.Failed
    assert "its number" in (text := str(failure_of(again))) or "earlier transfer" in text
    for _ in range(sender.curr_idx, 2):
        sender.send(pages(5 + sender.curr_idx))
    rank.finish()
    assert sender.poll() == KVPoll.Success
    assert rank.heard(ROOM) == ["complete"] and arrived(rank, memory_before, 10, 11)
    rank.clear(sender)


# ---- special cases ----


@pytest.mark.hazard("late-word-revives-room")
@pytest.mark.parametrize("has_sent", [False, True])
def test_a_poll_during_a_failure(rank: Any, has_sent: bool) -> None:
    """The reader's thread fails the room while the scheduler polls. Guards against pages that are
    freed because the room's status says Failed, while a worker may read them or begin to."""
    sender = started(rank)
    STAGES["written" if has_sent else "queued"](rank, sender)
    fail, polls = rank.manager.statuses.fail_known, []

    def fail_and_poll(room: int, text: str) -> bool:
        was_known = fail(room, text)
        polls.append(sender.poll())
        return bool(was_known)

    rank.manager.statuses.fail_known = fail_and_poll
    rank.withdraw(ROOM)
    began = len(rank.writes)
    assert polls == [KVPoll.Transferring if has_sent else KVPoll.Failed]
    rank.finish()
    assert len(rank.writes) == began and sender.poll() == KVPoll.Failed
    assert "decode cancelled it" in str(failure_of(sender))
    rank.check()


def test_bootstrapping_is_not_done(rank: Any) -> None:
    """Guards against a scheduler that treats a room without an announcement as ended, or gets two
    causes for its end."""
    sender = rank.sender(ROOM)
    assert sender.poll() == KVPoll.Bootstrapping
    sender.abort()
    sender.fail(Reason.PEER_LOST, "later")
    rank.announce(ROOM, [4, 5])
    assert sender.poll() == KVPoll.Failed and rank.heard(ROOM) == ["stopped"]
    assert "aborted on the prefill server" in str(failure_of(sender))
    rank.check()


@pytest.mark.hazard("stages-part")
def test_a_stage_accepts_a_request_of_the_previous_stage(rank: Any) -> None:
    """Guards against a pipeline stage that drops a request which the others run."""
    sender = rank.sender(ROOM)
    rank.announce(ROOM, [10, 11])
    sender.is_taken_in = True
    rank.withdraw(ROOM)
    assert sender.poll() == KVPoll.WaitingForInput
    sender.init(2, 3)
    assert sender.poll() == KVPoll.Failed
    failure_of(sender)
    rank.check()


@pytest.mark.parametrize("rank", ["nixl"], indirect=True)
def test_a_room_is_initialised_before_its_announcement(rank: Any) -> None:
    """Another rank of the group had its announcement first. Guards against a scheduler that asserts
    that its in-flight queue has no such room."""
    sender = rank.sender(ROOM)
    sender.init(2, 3)
    assert sender.poll() == KVPoll.WaitingForInput
    rank.announce(ROOM, [4, 5])
    assert sender.poll() == KVPoll.WaitingForInput
    sender.abort()
    failure_of(sender)
    rank.check()


def test_a_chunk_without_a_decode_rank(rank: Any) -> None:
    """Guards against a chunk that is silently dropped: no deadline would run for it."""
    sender = rank.sender(ROOM)
    sender.init(1, 3)
    sender.send(pages(5))
    assert sender.poll() == KVPoll.Failed
    assert "no decode rank's pages are known" in str(failure_of(sender))
    rank.check()


def test_two_announcements_before_the_request(rank: Any) -> None:
    """Guards against a request that starts with pages of which only one announcement is right."""
    for page in (10, 20):
        rank.announce(ROOM, [page])
    sender = rank.sender(ROOM)
    assert sender.poll() == KVPoll.Failed and rank.heard(ROOM) == ["stopped"]
    assert "a second time" in str(failure_of(sender))
    rank.check()


def test_a_number_is_announced_again_as_its_room_ends(rank: Any) -> None:
    """Guards against an announcement of the number's next request that is dropped with the ending
    room, while the room table has it: the new request started, and had no pages to send to."""
    sender, table = started(rank), rank.manager.rooms
    STAGES["delivered"](rank, sender)
    assert sender.poll() == KVPoll.Success
    announce = table.announce

    def as_it_ends(*announcement: Any) -> Any:
        table.announce = announce
        rank.clear(sender)
        return announce(*announcement)

    table.announce = as_it_ends
    rank.announce(ROOM, [10, 11], slot=2)
    again = rank.sender(ROOM)
    assert again.poll() == KVPoll.WaitingForInput
    again.init(2, 3)
    STAGES["delivered"](rank, again)
    assert again.poll() == KVPoll.Success
    rank.clear(again)


@pytest.mark.hazard("room-number-reused", "source-given-away")
@pytest.mark.parametrize("is_late", [False, True])
def test_a_chunk_of_an_earlier_request_with_the_same_number(rank: Any, is_late: bool) -> None:
    """Guards against an aborted request's chunk, still queued when the number is used again, that
    is sent for the later request or fails it with its own deadline; and against a late message
    (``is_late``) to the workers about the earlier request that ends the later one."""
    memory_before, sender, messages = rank.decode["decode"].snapshot(), started(rank), []
    table = rank.manager.rooms
    stopped = table.on_stopped
    sender.send(pages(5))
    if is_late:
        table.on_stopped = lambda *failure: messages.append(failure)
    sender.abort()
    failure_of(sender)
    rank.clock.now += TRANSFER_TIMEOUT_S - 1
    rank.heard(ROOM).clear()
    again = started(rank)
    rank.tick(1.0)
    table.on_stopped = stopped
    assert rank.writes == [] and again.poll() == KVPoll.WaitingForInput
    again.send(pages(5))
    for failure in messages:
        stopped(*failure)
    again.send(pages(6))
    rank.finish()
    assert again.poll() == KVPoll.Success and arrived(rank, memory_before, 10, 11)
    rank.clear(again)


@pytest.mark.hazard("slow-peer")
def test_each_chunk_has_its_own_deadline(rank: Any) -> None:
    """Guards against a deadline that begins when the worker reaches a chunk, or is another
    chunk's."""
    first, second = started(rank), started(rank, 8)
    timeouts_before = STATS.totals["kv_transfer_failed", Reason.TIMEOUT.value]
    first.send(pages(5))
    rank.tick(4.0)
    second.send(pages(5))
    rank.tick(5.9)
    assert STATS.totals["kv_transfer_failed", Reason.TIMEOUT.value] == timeouts_before
    for room in (ROOM, 8):
        rank.tick(0.1)
        assert rank.manager.request_status[room] == KVPoll.Failed
        rank.tick(3.9)
    assert STATS.totals["kv_transfer_failed", Reason.TIMEOUT.value] == timeouts_before + 2
    rank.finish()
    for sender in (first, second):
        text = str(failure_of(sender))
        assert "SGLANG_DISAGGREGATION_TRANSFER_TIMEOUT" in text and rank.peer in text
    rank.check()


@pytest.mark.parametrize("stage", ["announced", "written"])
def test_a_room_failed_on_another_rank(rank: Any, stage: str) -> None:
    """Guards against a room that failed elsewhere and is still written here."""
    sender = started(rank)
    STAGES[stage](rank, sender)
    began = len(rank.writes)
    assert "failed on another rank of this server" in str(failure_of(sender))
    rank.tick(0.25)
    assert rank.heard(ROOM) == ([] if stage == "written" else ["stopped"])
    rank.finish()
    assert rank.heard(ROOM) == ["stopped"] and len(rank.writes) == began
    rank.check()


@pytest.mark.hazard("late-word-revives-room")
def test_withdrawn_while_it_is_sent(rank: Any) -> None:
    """Guards against success of a chunk without a receiver: the reader's thread has just dropped
    the room's announcements, and the workers are not yet notified."""
    sender, manager = started(rank), rank.manager
    cut, stopped, late = manager.cut, manager.rooms.on_stopped, []
    manager.rooms.on_stopped = lambda *failure: late.append(failure)

    def given_up(*chunk: Any, **rest: Any) -> Any:
        rank.withdraw(ROOM)
        return cut(*chunk, **rest)

    manager.cut = given_up
    sender.send(pages(5, 6))
    for _ in range(2):
        rank.tick(0.25)
        assert sender.poll() == KVPoll.Failed and rank.writes == []
        for failure in late:
            stopped(*failure)
    assert "decode cancelled it" in str(failure_of(sender))
    rank.check()
