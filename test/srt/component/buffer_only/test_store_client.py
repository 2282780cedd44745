"""A client of a store that fails in every possible way: the only effects are misses and
failures."""

from __future__ import annotations

import concurrent.futures
import logging
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any
from unittest import mock

import pytest

from component.buffer_only.backends import content, fill, hashes, host_pool, slots
from component.buffer_only.scripted_store import Gate, ScriptedStore, until
from sglang.srt.mem_cache.buffer_only.settings import StoreClientSettings
from sglang.srt.mem_cache.buffer_only.store_client import PROBE_KEY, Fault, StoreClient

KEYS = hashes(3)
METHODS = ("batch_exists", "batch_get_v1", "batch_set_v1")


class Scene:
    """A store with three pages, its client, a clock, and deadlines that a hanging call reaches."""

    def __init__(self, **settings: Any) -> None:
        self.pool = host_pool("mha", "page_first_direct")
        self.store = ScriptedStore(self.pool)
        self.now = 100.0
        self.gates: list[Gate] = []
        self.client = StoreClient(
            self.store, "scripted", StoreClientSettings(**settings),
            clock=lambda: self.now, wait=self._wait,
        )  # fmt: skip
        assert self.client.write(KEYS, slots(0, 1, 2)).pages == 3
        self.store.calls.clear()

    def call(self, method: str) -> Any:
        """Return the client's outcome of a call for all keys."""
        if method == "batch_exists":
            return self.client.query(KEYS)
        move = self.client.read if method == "batch_get_v1" else self.client.write
        return move(KEYS, slots(3, 4, 5))

    def hang(self, method: str) -> Gate:
        """Let the next call of ``method`` hang, and its deadline expire."""
        gate = self.store.hang(method)
        self.gates.append(gate)
        return gate

    def _wait(self, calls: list[Future[Any]], seconds: float) -> None:
        while not all(call.done() for call in calls):
            concurrent.futures.wait(calls, timeout=0.002)
            hanging = [gate for gate in self.gates if gate.entered.is_set()]
            if hanging:
                self.gates = [gate for gate in self.gates if gate not in hanging]
                return

    def up_again(self) -> None:
        """Let the store answer a probe."""
        self.now += 10.0
        self.client.query(KEYS)
        until(self.client.poll)

    def calm(self) -> None:
        """Wait until every call has returned, or hangs at a gate."""
        until(lambda: self.client.under_way == len(self.store.hanging()))

    def settled(self) -> None:
        """Wait until every call has returned."""
        self.store.open_all()
        until(lambda: self.client.under_way == self.client.overdue == 0)


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene()
    yield scene
    scene.settled()


#: Methods, their answers, and the resulting pages and fault.
ANSWERS: list[tuple[tuple[str, ...], list[Any], int, Fault]] = [
    (METHODS, [OSError("gone"), SystemExit(1), MemoryError()], 0, Fault.ERROR),
    (METHODS, [None, True, [True] * 2, [True] * 4, []], 0, Fault.ERROR),
    (METHODS[:1], [4, -1, [True] * 3], 0, Fault.ERROR),
    (METHODS[1:], [[True, no, True] for no in (False, 1, -5, "no", None)], 1, Fault.MISSING),
]
CELLS = [
    pytest.param(method, answer, pages, fault, id=f"{method} answers {answer!r}")
    for methods, answers, pages, fault in ANSWERS
    for method in methods
    for answer in answers
]


@pytest.mark.hazard("store-exception")
@pytest.mark.parametrize(("method", "answer", "pages", "fault"), CELLS)
def test_pages_and_fault_of_each_answer(
    scene: Scene, method: str, answer: Any, pages: int, fault: Fault
) -> None:
    """Guards against a storage thread that ends, results by key that are read as results by page,
    error codes taken for success, and pages that count behind a hole. The store stays in use."""
    if isinstance(answer, BaseException):
        scene.store.fail(method, 1, answer)
    else:
        scene.store.answer(method, lambda _: answer)
    outcome = scene.call(method)
    assert (outcome.pages, outcome.fault, outcome.overdue) == (pages, fault, None)
    hole = {Fault.HOLE: 1} if fault is Fault.MISSING else {}
    assert scene.client.faults == {fault: 1} | hole and scene.client.overdue == 0
    assert scene.client.up and scene.call(method).pages == 3


def test_lost_and_short_pages_end_the_run(scene: Scene) -> None:
    """Guards against short pages that count as read."""
    scene.store.shorten(KEYS[1])
    assert scene.call("batch_get_v1").pages == 1
    scene.store.drop(KEYS[0])
    assert scene.call("batch_get_v1").pages == 0
    assert scene.client.faults == {Fault.MISSING: 3, Fault.HOLE: 2}


@pytest.mark.parametrize("method", METHODS[1:])
def test_a_hung_call_keeps_its_pages_until_it_returns(scene: Scene, method: str) -> None:
    """Guards against a late zero-copy read into pages with a new owner, and against a late write of
    their new content: the caller is notified that the call may still use its pages, and again when
    it has returned. The call keeps its own copy of the keys."""
    gate, keys = scene.hang(method), [*KEYS[:1], "9" * 64]
    call = scene.client.read if method == "batch_get_v1" else scene.client.write
    outcome = call(keys, slots(4, 5))
    keys.clear()
    assert (outcome.pages, outcome.fault) == (0, Fault.DEADLINE)
    assert scene.client.overdue == 1 and not outcome.overdue.done()
    before = [content(scene.pool, page) for page in (4, 5)]
    gate.open()
    outcome.overdue.result(60)
    if method == "batch_get_v1":
        # The read wrote long after it was abandoned, so its pages had to stay out of use.
        assert scene.store.written == [4]
        assert content(scene.pool, 4) == content(scene.pool, 0) != before[0]
    else:
        assert scene.store.content["9" * 64] == before[1] and scene.store.disturbed == []


def test_the_scripted_store_sees_pages_that_change_under_a_write(scene: Scene) -> None:
    """Guards against tests that cannot fail: they rely on ``disturbed``."""
    gate = scene.hang("batch_set_v1")
    outcome = scene.client.write(["9" * 64], slots(5))
    fill(scene.pool, seed=5)
    gate.open()
    outcome.overdue.result(60)
    assert scene.store.disturbed == ["9" * 64]


def test_a_store_that_hangs_is_down_until_it_answers_a_probe(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against a deadline for every call of a dead store, against an unbounded number of
    threads and messages, and against a store that is never queried again."""
    caplog.set_level(logging.WARNING)
    scene.hang("batch_set_v1")
    assert scene.call("batch_set_v1").fault is Fault.DEADLINE
    scene.store.calls.clear()
    for _ in range(50):
        assert scene.call("batch_exists").fault is scene.call("batch_set_v1").fault is Fault.DOWN
    assert scene.store.calls == [] and not scene.client.up
    assert scene.client.faults == {Fault.DEADLINE: 1, Fault.DOWN: 100}
    scene.store.fail("batch_exists")
    probe = scene.store.hang("batch_exists", call=2)
    for seconds in (1.0, 3.0):  # a probe that fails or hangs delays no call, and is no answer
        until(lambda: scene.client.under_way == 1)  # only the write: the probe before has ended
        scene.now += seconds
        assert scene.call("batch_exists").fault is Fault.DOWN
    assert probe.entered.wait(60)
    assert scene.store.calls == [("batch_exists", [PROBE_KEY])] * 2 and not scene.client.up
    scene.store.open_all()
    until(lambda: scene.client.up)
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"]
    assert scene.call("batch_get_v1").pages == 3


def test_threads_are_bounded() -> None:
    """Guards against a thread for every call of a store that answers look-ups while all its writes
    hang for ever."""
    scene = Scene(max_calls=3, longest_retry=1.0)
    for _ in range(10):
        scene.hang("batch_set_v1")
        scene.call("batch_set_v1")
        scene.up_again()
    assert scene.client.under_way == scene.client.faults[Fault.DEADLINE] == 3
    scene.settled()
    scene.up_again()
    assert scene.client.query(KEYS).pages == 3


def test_hung_probes_do_not_block_the_recovery_of_a_store() -> None:
    """Guards against probes that use up all permitted calls: over a connection that was cut
    silently they never return, and after hours no recovered store was queried again."""
    scene = Scene(max_calls=3, longest_retry=1.0)
    scene.hang("batch_set_v1")
    scene.call("batch_set_v1")
    for hanging in range(5):
        probe = scene.store.hang("batch_exists")
        scene.now += 1.0 + hanging
        assert not scene.client.poll()
        assert probe.entered.wait(60), "the next one is due an interval later for each that hangs"
    scene.now += 6.0
    scene.client.poll()
    until(lambda: scene.client.up)
    assert scene.client.query(KEYS).pages == 3, "hung probes do not count against max_calls"
    scene.settled()


def seconds_down(scene: Scene) -> float:
    """Let a write hang; return the seconds from its deadline until a probe is answered, with a
    check every half second."""
    scene.hang("batch_set_v1")
    assert scene.call("batch_set_v1").fault is Fault.DEADLINE
    start = scene.now
    while not scene.client.poll():
        scene.now += 0.5
        scene.client.poll()
        scene.calm()
    return scene.now - start


def test_intervals_of_probes() -> None:
    """Guards against a dead store that is probed too often or never again, and against a store with
    working look-ups and hanging writes that costs a deadline a second. After the store has worked,
    intervals start again."""
    scene = Scene(first_retry=1.0, longest_retry=8.0)
    for call in range(1, 6):
        scene.store.fail("batch_exists", call)
    assert seconds_down(scene) == 31.0, "the sixth: after 1, 3, 7, 15, 23 and 31 s"
    assert seconds_down(scene) == 8.0
    assert scene.call("batch_get_v1").pages == 3
    assert [seconds_down(scene) for _ in range(4)] == [1.0, 4.0, 8.0, 8.0]
    scene.settled()


@pytest.mark.parametrize("hangs", [True, False], ids=["hang", "late and empty"])
def test_a_store_with_working_lookups_and_failing_reads(scene: Scene, hangs: bool) -> None:
    """Guards against reads that cost half of all requests their whole time limit while no alert
    fires. After each interval one read is the trial."""

    def late(keys: Any) -> list[bool]:
        scene.now += 0.5 * scene.client.settings.deadline
        return [False] * 3

    def read() -> Any:
        if hangs:
            scene.hang("batch_get_v1")
        else:
            scene.store.answer("batch_get_v1", late)
        outcome = scene.call("batch_get_v1")
        if hangs:  # so that the probe is answered
            scene.now += 0.5
        return outcome

    assert scene.client.up
    assert read().fault is (Fault.DEADLINE if hangs else Fault.MISSING)
    assert scene.call("batch_get_v1").fault is Fault.DOWN and not scene.client.up
    scene.up_again()
    assert read().pages == 0, "the trial"
    for _ in range(0 if hangs else 3):
        assert scene.call("batch_exists").pages == 3 and not scene.client.up
        assert scene.call("batch_get_v1").fault is Fault.DOWN
    scene.up_again()
    assert scene.client.up, "up without a hit"
    assert scene.call("batch_get_v1").pages == scene.call("batch_get_v1").pages == 3


def until_up(scene: Scene) -> float:
    """Return the seconds until reads are tried again, with a check every half second."""
    scene.calm()
    start = scene.now
    while not scene.client.up and scene.now < start + 100.0:
        scene.now += 0.5
    return scene.now - start


def test_trials_of_a_store_that_does_not_deliver() -> None:
    """Guards against pauses that grow by more than a factor of two, and against other reads that
    wait during the trial."""
    scene, concurrent = Scene(first_retry=1.0, longest_retry=8.0), list[Any]()

    def late(keys: Any) -> list[bool]:
        concurrent.append(
            scene.client.read(KEYS, slots(3, 4, 5)).fault if concurrent else "not yet"
        )
        scene.now += 0.5 * scene.client.settings.deadline
        return [False] * 3

    for pause in (1.0, 2.0, 4.0, 8.0, 8.0):
        scene.store.answer("batch_get_v1", late)
        assert scene.call("batch_get_v1").fault is Fault.MISSING
        assert until_up(scene) == pause
    assert concurrent[1:] == [Fault.DOWN] * 4
    scene.settled()


def test_trials_that_find_no_failure() -> None:
    """Guards against a pause that starts or grows because of a page that was evicted since its
    look-up, or because of a read without a free call."""
    scene = Scene(first_retry=1.0, max_calls=1)

    def late(keys: Any) -> list[bool]:
        scene.now += 0.5 * scene.client.settings.deadline
        return [False] * 3

    scene.calm()
    scene.store.answer("batch_get_v1", late)
    assert scene.call("batch_get_v1").fault is Fault.MISSING and until_up(scene) == 1.0
    gate = scene.store.hang("batch_set_v1")
    writer = threading.Thread(target=scene.call, args=["batch_set_v1"])
    writer.start()
    assert gate.entered.wait(60)
    assert scene.call("batch_get_v1").fault is Fault.DOWN and scene.client.up
    gate.open()
    writer.join(60)
    scene.calm()
    scene.store.answer("batch_get_v1", lambda _: [False] * 3)
    assert scene.call("batch_get_v1").fault is Fault.MISSING and scene.client.up
    scene.calm()
    assert scene.call("batch_get_v1").pages == 3
    scene.settled()


def test_reads_go_on_after_evictions_of_the_store(scene: Scene) -> None:
    """Guards against hits that are lost because another prompt was evicted before its read."""
    for _ in range(5):
        scene.store.answer("batch_get_v1", lambda _: [False] * 3)
        assert scene.call("batch_get_v1").fault is Fault.MISSING and scene.client.up
    assert scene.call("batch_get_v1").pages == 3


def test_a_store_that_hangs_while_its_reads_are_refused(scene: Scene) -> None:
    """Guards against queries that all wait for a dead store whose reads were refused before."""
    scene.hang("batch_get_v1")
    assert scene.call("batch_get_v1").fault is Fault.DEADLINE
    scene.now += 1.0
    scene.client.poll()
    until(scene.client.poll)
    scene.hang("batch_exists")
    assert scene.call("batch_exists").fault is Fault.DEADLINE
    assert scene.call("batch_exists").fault is Fault.DOWN


def test_threads_are_reused_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a thread for every call, a store that exits the interpreter or its thread,
    threads that outlive their store, and a failed start of a thread: that call fails, and the next
    one may work."""
    before = set(threading.enumerate())
    scene, gate = Scene(), Gate()
    scene.store.fail("batch_exists", 1, SystemExit(3))
    assert [scene.call("batch_exists").pages for _ in range(20)] == [0] + [3] * 19
    (thread,) = set(threading.enumerate()) - before
    assert thread.daemon
    scene.store.get_stats = gate.pass_through
    scene.client.get_stats()
    assert gate.entered.wait(60)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", mock.Mock(side_effect=RuntimeError("no more")))
        assert scene.call("batch_exists").fault is Fault.ERROR
    assert scene.call("batch_exists").pages == 3
    new_threads = set(threading.enumerate()) - before
    assert [thread.name for thread in new_threads] == [
        "hicache-store-scripted"
    ] * 2 and scene.client.close()
    gate.open()
    for thread in new_threads:
        thread.join(60)
        assert not thread.is_alive()


def test_slow_statistics_delay_no_call(scene: Scene) -> None:
    """Guards against a scheduler step that waits for the statistics of a slow store."""
    gate, answers = Gate(), iter([1, 2])

    def slow() -> int:
        gate.pass_through()
        return next(answers)

    scene.store.get_stats = slow
    assert scene.client.get_stats() is None
    assert gate.entered.wait(60)
    assert scene.client.get_stats() is None and scene.client.under_way == 1
    gate.open()
    for answer in (1, 2):
        until(lambda: scene.client.under_way == 0)
        assert scene.client.get_stats() == answer, "each answer is returned once"


def test_clear_statistics_and_close_never_raise(scene: Scene) -> None:
    """Guards against a scheduler that ends because of /clear_hicache_storage_backend, its metrics
    or its own shutdown."""
    scene.store.fail("clear")
    assert not scene.client.clear()
    assert scene.client.clear() and scene.store.content == {}
    scene.store.answer("clear", lambda _: False)
    assert not scene.client.clear(), "False is the file backend's failure"

    def broken() -> None:
        raise OSError("broken")

    scene.store.get_stats = scene.store.close = broken
    for _ in range(2):
        assert scene.client.get_stats() is None
        until(lambda: scene.client.under_way == 0)
    scene.client.close()
    assert scene.client.faults[Fault.ERROR] == 3
    assert not StoreClient(object(), "has no clear").clear()
