"""What the scheduler sees of its rooms, whatever the workers say, and when."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from sglang.srt.disaggregation.delta.metrics import Reason
from sglang.srt.disaggregation.delta.prefill.tickets import Tickets
from sglang.srt.disaggregation.delta.prefill.transfer_backend import Chunk


class Scene:
    """Tickets, and what was told of them in order."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []
        self.tickets = Tickets(self._fail, self._delivered)

    is_complete = False

    def _fail(self, *failure: Any) -> bool:
        ticket = self.tickets._tickets.get(failure[0])
        self.told.append((*failure, ticket and ticket.error))
        return not self.is_complete

    def _delivered(self, room: int) -> None:
        self.told.append((room, self.tickets._tickets[room].delivered))

    def tell(self, what: str, room: int = 1) -> None:
        """One word of a worker."""
        error = ZeroDivisionError()
        {
            "chunk": lambda: self.tickets.chunk_done(chunk(room, False)),
            "last": lambda: self.tickets.chunk_done(chunk(room, True)),
            "failed": lambda: self.tickets.room_failed(room, Reason.TRANSPORT, "text", error),
            "buried": lambda: self.tickets.room_buried(room),
            "quiet": lambda: self.tickets.room_quiet(room),
        }[what]()


def chunk(room: int, is_last: bool) -> Chunk:
    """A chunk to nobody."""
    return Chunk(room, (), None, is_last, 0.0, 0.0)


@pytest.fixture
def scene() -> Scene:
    return Scene()


@pytest.mark.parametrize(
    ("words", "delivered", "quiet", "buried", "is_over"),
    [
        (("chunk",), False, False, False, False),
        (("chunk", "last"), True, False, False, False),
        (("last", "quiet"), True, True, False, True),
        (("failed",), False, False, False, False),
        (("failed", "quiet"), False, True, False, True),
        (("failed", "buried"), False, False, True, True),
        (("failed", "buried", "quiet"), False, True, True, True),
        (("quiet",), False, True, False, True),  # cancelled
    ],
)
def test_lives(
    scene: Scene,
    words: tuple[str, ...],
    delivered: bool,
    quiet: bool,
    buried: bool,
    is_over: bool,
) -> None:
    """Guards against a request whose pages are freed while they are read, and against one that is
    never let go."""
    ticket = scene.tickets.open(1)
    for word in words:
        scene.tell(word)
    assert (ticket.delivered, ticket.quiet, ticket.buried) == (delivered, quiet, buried)
    assert ticket.is_over is is_over


def test_decode_is_told_before_the_scheduler_sees_it(scene: Scene) -> None:
    """Guards against a status or a cause that is not there yet when the ticket says that it is
    over."""
    ticket = scene.tickets.open(1)
    scene.tell("last")
    assert scene.told.pop() == (1, False)
    scene.tell("failed")
    (told,) = scene.told
    assert told[:3] == (1, Reason.TRANSPORT, "text") and told[3] is ticket.error is not None


@pytest.mark.hazard("late-word-revives-room")
@pytest.mark.parametrize(
    "words", itertools.permutations(("last", "failed", "buried", "quiet")), ids=" ".join
)
def test_late_words(scene: Scene, words: tuple[str, ...]) -> None:
    """Guards against a ticket that comes to life for a request that is gone, or that has not come;
    a failure is told all the same: decode waits for it."""
    ticket = scene.tickets.open(1)
    scene.tickets.close(1, ticket)
    for word in words:
        scene.tell(word)
    assert scene.tickets.rooms() == [] and not ticket.is_over and not ticket.delivered
    assert [told[:3] for told in scene.told] == [(1, Reason.TRANSPORT, "text")]


def test_a_number_that_is_used_again(scene: Scene) -> None:
    """Guards against one request that ends another of the same number."""
    old = scene.tickets.open(1)
    new = scene.tickets.open(1)
    scene.tickets.close(1, old)
    assert scene.tickets.rooms() == [1]
    scene.tell("quiet")
    assert new.quiet and not old.quiet
    for _ in range(2):
        scene.tickets.close(1, new)
    assert scene.tickets.rooms() == []


def test_rooms_do_not_touch_each_other(scene: Scene) -> None:
    """Guards against one room's end in another's ticket."""
    tickets = {room: scene.tickets.open(room) for room in (3, 1, 2)}
    for room, word in ((1, "last"), (2, "quiet"), (3, "buried")):
        scene.tell(word, room)
    assert scene.tickets.rooms() == [1, 2, 3]
    assert [tickets[room].delivered for room in (1, 2, 3)] == [True, False, False]
    assert [tickets[room].quiet for room in (1, 2, 3)] == [False, True, False]
    assert [tickets[room].buried for room in (1, 2, 3)] == [False, False, True]


def test_a_failure_after_completion(scene: Scene) -> None:
    """Guards against a request that fails, or waits for ever, although decode has all of it."""
    ticket = scene.tickets.open(1)
    scene.is_complete = True
    scene.tell("failed")
    assert ticket.delivered


@pytest.mark.parametrize("was_stopped", [False, True])
def test_a_worker_that_does_not_go_on(scene: Scene, was_stopped: bool) -> None:
    """Guards against a request that waits for a worker which will never say anything, and against
    one whose pages go before its gate was stopped."""
    ticket = scene.tickets.open(1)
    if was_stopped:
        scene.tickets.stop(1)
    for _ in range(3):
        scene.tickets.abandon(1, Reason.INTERNAL, "stuck")
    scene.tickets.abandon(2, Reason.INTERNAL, "stuck")
    assert ticket.is_over and not ticket.delivered
    assert [told[:3] for told in scene.told] == ([] if was_stopped else [(1, "internal", "stuck")])
