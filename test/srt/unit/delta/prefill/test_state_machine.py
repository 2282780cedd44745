"""Random lives of rooms on one worker, against a model that knows only what it asked for."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from effort import tries
from sglang.srt.disaggregation.delta.metrics import Reason
from sglang.srt.disaggregation.delta.prefill.transfer_backend import State
from unit.delta.prefill.fakes import Bench, Handle

ROOMS = st.integers(0, 5)
PEERS = st.sets(st.sampled_from(["a", "b", "stalled"]), max_size=3).map(sorted)
#: Rooms that live long enough to be served.
RARELY = st.sampled_from([True, *[False] * 7])
WINDOW, QUOTA = 4, 2


class Lives(RuleBasedStateMachine):
    """Numbers are used again, as the room table lets them: when nothing of the room before is under
    way."""

    #: By what became of rooms, over all examples.
    ends: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench(window=WINDOW, quota=QUOTA)
        #: Room number -> how many entries the diary had when its present life began; None: unknown.
        self.alive: dict[int, int | None] = defaultdict(lambda: None)
        #: Rooms that ended early by our own doing, in their present life.
        self.cancelled: set[int] = set()
        self.had_last: set[int] = set()
        #: Chunks of the present life, in order: index and peers.
        self.submitted: dict[int, list[tuple[int, list[str]]]] = defaultdict(list)
        #: By room and index of a chunk.
        self.deadlines: dict[tuple[int, int], float] = {}
        #: Rooms that were completed before its present life began, per room.
        self.completions: dict[int, int] = defaultdict(int)
        #: Diary entries of a room when it was forgotten, per room.
        self.silent: dict[int, int] = {}

    # ---- what the scheduler and other threads do ----

    def open(self, room: int) -> None:
        """Its request comes, unless it is here, or something of the one before is under way."""
        handles = self.bench.backend.handles
        if self.alive[room] is not None or any(h.room == room and not h.releases for h in handles):
            return
        self.bench.open(room)
        self.bench.rooms.stopped.discard(room)
        self.alive[room] = len(self.bench.rooms.of(room))
        self.completions[room] = len(self.bench.backend.completed)
        self.silent.pop(room, None)
        self.cancelled.discard(room)
        self.had_last.discard(room)
        self.submitted[room] = []

    @rule(
        room=ROOMS, peers=PEERS, last=st.booleans(), handles=st.integers(0, 3),
        fault=st.sampled_from(["", "", "", "post", "complete"]),
        within=st.sampled_from([2.0, 120.0]),
    )  # fmt: skip
    def submit(
        self, room: int, peers: list[str], last: bool, handles: int, fault: str, within: float
    ) -> None:
        self.open(room)
        if room in self.had_last:
            return
        chunk = self.bench.submit(
            room, *peers, last=last, within=within, handles=handles, to_nobody=not peers,
            error=RuntimeError("post") if fault == "post" else None,
            complete_error=RuntimeError("complete") if fault == "complete" else None,
        )  # fmt: skip
        self.deadlines[room, chunk.payload.index] = chunk.deadline
        if self.alive[room] is not None:
            self.submitted[room].append((chunk.payload.index, list(chunk.peers)))
            if last:
                self.had_last.add(room)

    @rule(room=ROOMS, really=RARELY)
    def cancel(self, room: int, really: bool) -> None:
        if not really:
            return
        self.bench.cancel(room, Reason.ABORTED)
        if self.alive[room] is not None:
            self.cancelled.add(room)

    @rule(room=ROOMS, really=RARELY)
    def stop_at_the_gate(self, room: int, really: bool) -> None:
        if not really:
            return
        self.bench.rooms.stopped.add(room)

    @rule(room=ROOMS, really=RARELY)
    def forget(self, room: int, really: bool) -> None:
        if not really:
            return
        self.bench.forget(room)
        self.alive[room] = None
        self.silent.setdefault(room, len(self.bench.rooms.of(room)))

    # ---- what the transport does ----

    def _open(self) -> list[Handle]:
        return [h for h in self.bench.backend.open_handles() if h.peer != "stalled"]

    @precondition(lambda self: self._open())
    @rule(
        data=st.data(),
        state=st.sampled_from([State.DONE, State.DONE, State.DONE, State.ERROR, RuntimeError("x")]),
    )
    def settle(self, data: st.DataObject, state: State | Exception) -> None:
        data.draw(st.sampled_from(self._open())).state = state

    @precondition(lambda self: self._open())
    @rule()
    def settle_all(self) -> None:
        for handle in self._open():
            handle.state = State.DONE

    @rule()
    def one_step(self) -> None:
        self.bench.worker.step(self.bench.clock.now)

    @rule(seconds=st.sampled_from([0.0, 0.001, *[0.05] * 6, 3.0, 61.0]))
    def run_for(self, seconds: float) -> None:
        self.bench.run(seconds)
        self._nobody_waits_without_need()

    # ---- what must hold ----

    def _nobody_waits_without_need(self) -> None:
        """A healthy peer with nothing under way has nothing that waits for it, however many
        transfers to others are stuck."""
        busy = {handle.peer for handle in self.bench.backend.handles if not handle.releases}
        posted = set(self.bench.backend.posts)
        for room, chunks in self.submitted.items():
            if self.alive[room] is None or self._ended(room) or room in self.bench.rooms.stopped:
                continue
            for index, peers in chunks:
                for peer in peers:
                    assert (room, index, peer) in posted or peer in busy

    def _ended(self, room: int) -> bool:
        told = self._told(room)
        return room in self.cancelled or "drained" in told or "failed" in told

    def _told(self, room: int) -> list[str]:
        start = self.alive[room]
        assert start is not None
        return self.bench.rooms.of(room)[start:]

    @invariant()
    def nobody_is_misused(self) -> None:
        self.bench.check()

    @invariant()
    def bounds(self) -> None:
        """Of transfers that are not late. A peer gets a place beyond the window if it has none."""
        under_way = {
            (h.room, h.index, h.peer)
            for h in self.bench.backend.handles
            if not h.releases and h.state is State.IN_PROGRESS
            and self.deadlines[h.room, h.index] > self.bench.clock.now
        }  # fmt: skip
        a_peer = Counter(peer for _, _, peer in under_way)
        assert all(count <= QUOTA for count in a_peer.values())
        assert len(under_way) <= WINDOW + list(a_peer.values()).count(1)

    @invariant()
    def order_within_rooms(self) -> None:
        seen: dict[tuple[int, str], int] = {}
        for room, index, peer in self.bench.backend.posts:
            assert seen.get((room, peer), -1) < index
            seen[room, peer] = index

    @invariant()
    def complete_if_and_only_if_all_was_delivered(self) -> None:
        """Of the present lives: a room that failed, was cancelled or stopped is never complete."""
        for room, start in self.alive.items():
            if start is None:
                continue
            told = self._told(room)
            posts = {index for index, _ in self.submitted[room]}
            is_complete = self.bench.backend.completed[self.completions[room] :].count(room)
            is_done = room in self.had_last and f"done {max(posts)}" in told
            assert is_complete == is_done
            if is_complete:
                mine = [
                    h for h in self.bench.backend.handles if h.room == room and h.index in posts
                ]
                assert all(handle.state is State.DONE for handle in mine)

    @invariant()
    def what_is_told(self) -> None:
        for room, start in self.alive.items():
            if start is None:
                continue
            told = self._told(room)
            chunks = [entry for entry in told if entry.startswith("done")]
            indices = [index for index, _ in self.submitted[room]]
            assert chunks == [f"done {index}" for index in indices[: len(chunks)]]
            for once in ("failed", "overdue", "drained"):
                assert told.count(once) <= 1
            if "drained" in told:
                assert told[-1] == "drained"
            if room in self.had_last and len(chunks) == len(indices):
                assert told[-1] == "drained" and "failed" not in told

    @invariant()
    def quiet_if_and_only_if_nothing_is_under_way(self) -> None:
        for room, start in self.alive.items():
            if start is None:
                continue
            posts = {index for index, _ in self.submitted[room]}
            under_way = any(
                handle.room == room and handle.index in posts and not handle.releases
                for handle in self.bench.backend.handles
            )
            if "drained" in self._told(room):
                assert not under_way
            elif self._ended(room):
                assert under_way

    @invariant()
    def silence_after_forget(self) -> None:
        for room, entries in self.silent.items():
            if self.alive[room] is None:
                assert len(self.bench.rooms.of(room)) == entries

    def teardown(self) -> None:
        """When everything settles and every room is forgotten, nothing is left."""
        for _ in range(200):
            self.bench.let_doubt_pass()
            if not self.bench.backend.open_handles() and not self.bench.worker.tables()["waiting"]:
                break
            self.bench.settle()
        for room in self.had_last - self.cancelled - self.bench.rooms.stopped:
            if self.alive[room] is not None and "failed" not in self._told(room):
                last = max(index for index, _ in self.submitted[room])
                assert self._told(room)[-2:] == [f"done {last}", "drained"], "it waits for ever"
        for room in range(6):
            if self.alive[room] is not None:
                self.bench.cancel(room, Reason.ABORTED)
        self.bench.let_doubt_pass()
        for room in range(6):
            if self.alive[room] is not None:
                assert self._told(room)[-1] == "drained"
                self.ends[self._told(room)[-2:][0]] += 1
            self.bench.forget(room)
        self.bench.run(1.0)
        self.bench.check_empty()
        assert self.bench.run() is None
        self.ends["complete"] += len(self.bench.backend.completed)


@pytest.mark.hazard(
    "chunks-overtake", "writers-confused", "source-given-away", "siblings-write-on", "slow-peer"
)
@pytest.mark.fuzz
def test_lives() -> None:
    """Guards against a worker that serves no room as it should, and against lives in which little
    happens."""
    Lives.ends.clear()
    run_state_machine_as_test(
        Lives,
        settings=settings(
            max_examples=tries(60),
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )
    assert min(Lives.ends["complete"], Lives.ends["failed"]) >= tries(60) / 6, Lives.ends
