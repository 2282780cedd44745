"""A store that fails in every way a store can, behind the client: misses and failures, no more."""

from __future__ import annotations

import concurrent.futures
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from component.buffer_only.host_pools import content, fill, hashes, host_pool, slots
from component.buffer_only.scripted_store import Gate, ScriptedStore, until
from sglang.srt.mem_cache.buffer_only.settings import StoreClientSettings
from sglang.srt.mem_cache.buffer_only.store_client import PROBE_KEY, Fault, StoreClient

KEYS = hashes(3)


class Scene:
    """A store with three pages, its client, a clock, and deadlines that pass when a call hangs."""

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
        self.stored = [content(self.pool, page) for page in (0, 1, 2)]
        self.store.calls.clear()

    def hang(self, method: str) -> Gate:
        """The next call of ``method`` hangs, and its deadline passes once it does."""
        gate = self.store.hang(method)
        self.gates.append(gate)
        return gate

    def _wait(self, call: Future[Any], seconds: float) -> None:
        while not call.done():
            concurrent.futures.wait([call], timeout=0.002)
            hanging = [gate for gate in self.gates if gate.entered.is_set()]
            if hanging:
                self.gates = [gate for gate in self.gates if gate not in hanging]
                return

    def settled(self) -> None:
        """Every call has returned."""
        self.store.open_all()
        with self.client._lock:
            calls = list(self.client._under_way)
        concurrent.futures.wait(calls, timeout=30)
        assert self.client.under_way == 0
        assert self.client.overdue == 0


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    made.settled()


@pytest.mark.hazard("store-exception")
@pytest.mark.parametrize("error", [OSError("gone"), SystemExit(1), MemoryError()])
def test_exceptions_are_misses(
    scene: Scene, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against a store's exception that ends a storage thread: nothing is written any more,
    and staging pages never come back."""
    for method in ("batch_exists", "batch_get_v1", "batch_set_v1"):
        scene.store.fail(method, 1, error)
        scene.store.fail(method, 2, error)
    for _ in range(2):
        assert scene.client.query(KEYS).fault is Fault.ERROR
        assert scene.client.read(KEYS, slots(3, 4, 5)).fault is Fault.ERROR
        assert scene.client.write(KEYS, slots(3, 4, 5)).pages == 0
    assert scene.client.faults[Fault.ERROR] == 6
    assert [r.message.split(":")[0] for r in caplog.records] == ["HiCache store scripted"]
    assert scene.client.up
    assert scene.client.query(KEYS).pages == 3
    assert scene.client.read(KEYS, slots(3, 4, 5)).pages == 3


def test_a_hung_read_keeps_its_pages_until_it_returns(scene: Scene) -> None:
    """Guards against a late zero-copy read that writes into pages which somebody else has got:
    their owner hears that the call may still use them, and again when it has returned."""
    gate = scene.hang("batch_get_v1")
    outcome = scene.client.read(KEYS[:2], slots(4, 5))
    assert (outcome.pages, outcome.fault) == (0, Fault.DEADLINE)
    call = outcome.overdue
    assert call is not None and call.host_indices.tolist() == slots(4, 5).tolist()
    assert scene.client.overdue == 1 and not call.returned.done()
    free = threading.Event()
    call.returned.add_done_callback(lambda _: free.set())
    before = content(scene.pool, 4)
    assert scene.store.written == []
    gate.open()
    assert free.wait(10)
    # It did write, long after it was given up: this is why the pages had to stay out of use.
    assert scene.store.written == [4, 5]
    assert content(scene.pool, 4) == scene.stored[0] != before


def test_a_hung_write_keeps_its_pages_until_it_returns(scene: Scene) -> None:
    """Guards against a late zero-copy write that stores what the pages hold by then, under the
    keys of what they held before."""
    gate = scene.hang("batch_set_v1")
    outcome = scene.client.write(["9" * 64], slots(5))
    assert (
        outcome.overdue is not None and outcome.overdue.host_indices.tolist() == slots(5).tolist()
    )
    written = content(scene.pool, 5)
    gate.open()
    concurrent.futures.wait([outcome.overdue.returned], timeout=10)
    assert scene.store.content["9" * 64] == written
    assert scene.store.disturbed == []


def test_the_scripted_store_sees_pages_that_change_under_a_write(scene: Scene) -> None:
    """The control for the tests that rely on it."""
    gate = scene.hang("batch_set_v1")
    outcome = scene.client.write(["9" * 64], slots(5))
    fill(scene.pool, seed=5)
    gate.open()
    assert outcome.overdue is not None
    concurrent.futures.wait([outcome.overdue.returned], timeout=10)
    assert scene.store.disturbed == ["9" * 64]


def test_a_call_that_works_leaves_nothing_busy(scene: Scene) -> None:
    """Guards against pages that are held for calls that have returned."""
    assert scene.client.read(KEYS, slots(3, 4, 5)).overdue is None
    scene.store.fail("batch_get_v1")
    assert scene.client.read(KEYS, slots(3, 4, 5)).overdue is None
    assert scene.client.overdue == 0


def test_a_store_that_hangs_is_down_until_it_answers_a_probe(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against a deadline for every call of a dead store, against threads and messages
    without number, and against a store that is never asked again."""
    caplog.set_level(logging.WARNING)
    gate = scene.hang("batch_get_v1")
    assert scene.client.read(KEYS, slots(3, 4, 5)).fault is Fault.DEADLINE
    scene.store.calls.clear()
    for _ in range(50):
        assert scene.client.query(KEYS).fault is Fault.DOWN
        assert scene.client.write(KEYS, slots(0, 1, 2)).fault is Fault.DOWN
    assert scene.store.calls == [] and not scene.client.up
    assert scene.client.faults == {Fault.DEADLINE: 1, Fault.DOWN: 100}
    assert [r.levelname for r in caplog.records] == ["ERROR"]
    assert "scripted" in caplog.text and "batch_get_v1" in caplog.text

    probe = scene.store.hang("batch_exists")
    scene.now += 1.0
    assert scene.client.query(KEYS).fault is Fault.DOWN, "a probe holds up nobody"
    assert probe.entered.wait(10)
    assert scene.store.calls == [("batch_exists", [PROBE_KEY])]
    scene.now += 2.0
    second = scene.store.hang("batch_exists")
    scene.client.query(KEYS)
    assert second.entered.wait(10), "the first probe may never return"
    gate.open()
    probe.open()
    until(lambda: scene.client.up)
    assert scene.client.query(KEYS).fault is None
    assert [r.levelname for r in caplog.records] == ["ERROR", "WARNING"]
    assert scene.client.read(KEYS, slots(3, 4, 5)).pages == 3


def test_a_probe_that_fails_leaves_the_store_down(scene: Scene) -> None:
    """Guards against an error that counts as an answer."""
    scene.hang("batch_exists")
    scene.client.query(KEYS)
    scene.store.fail("batch_exists", 1)
    scene.now += 1.0
    scene.client.query(KEYS)
    until(lambda: len(scene.store.calls) == 2 and scene.client.under_way == 1)
    assert not scene.client.up


def test_threads_are_bounded() -> None:
    """Guards against a thread for every call of a store whose look-ups answer and whose reads
    hang for ever."""
    scene = Scene(max_calls=3, longest_retry=1.0)
    for _ in range(10):
        scene.hang("batch_get_v1")
        scene.client.read(KEYS, slots(3, 4, 5))
        scene.now += 10.0
        scene.client.query(KEYS)
        until(lambda: scene.client.up)
    assert scene.client.under_way == 3
    assert scene.client._threads.made <= 4  # a probe may start while the last call ends
    assert scene.client.faults[Fault.DEADLINE] == 3
    scene.settled()
    scene.now += 10.0
    scene.client.query(KEYS)
    until(lambda: scene.client.up)
    assert scene.client.query(KEYS).pages == 3


def test_probes_that_hang_do_not_keep_a_store_from_being_asked_again() -> None:
    """A connection that was cut without a word never answers: such probes used to take all calls
    that may be under way, and after hours of it nobody asked a store that had recovered."""
    scene = Scene(max_calls=3, longest_retry=1.0)
    scene.hang("batch_get_v1")
    scene.client.read(KEYS, slots(3, 4, 5))
    for hanging in range(5):
        probe = scene.store.hang("batch_exists")
        scene.now += 1.0 + hanging
        assert not scene.client.poll()
        assert probe.entered.wait(10), "the next one is due an interval later for each that hangs"
    scene.now += 6.0
    scene.client.poll()
    until(lambda: scene.client.up)
    assert scene.client.query(KEYS).pages == 3, "those that hang take nobody's place"
    scene.settled()


@pytest.mark.parametrize(
    "change",
    [lambda r: r[:-1], lambda r: [*r, True], lambda r: None, lambda r: True, lambda r: []],
    ids=["short", "long", "none", "true", "empty"],
)
@pytest.mark.parametrize("method", ["batch_get_v1", "batch_set_v1"])
def test_results_of_another_length_mean_nothing(
    scene: Scene, method: str, change: Callable[[Any], Any]
) -> None:
    """Guards against results by key read as results by page, and against backends that answer with
    one word for all."""
    scene.store.answer(method, change)
    call = scene.client.read if method == "batch_get_v1" else scene.client.write
    outcome = call(KEYS, slots(3, 4, 5))
    assert (outcome.pages, outcome.fault) == (0, Fault.MALFORMED)
    assert scene.client.faults == {Fault.MALFORMED: 1}


@pytest.mark.parametrize("answer", [4, -1, None, True, [True] * 3])
def test_hits_that_cannot_be(scene: Scene, answer: Any) -> None:
    """Guards against more hits than pages: a backend that counts keys instead of pages."""
    scene.store.answer("batch_exists", lambda _: answer)
    outcome = scene.client.query(KEYS)
    assert (outcome.pages, outcome.fault) == (0, Fault.MALFORMED)


def test_lost_and_short_pages_end_the_run(scene: Scene) -> None:
    """Guards against pages behind a hole that count, and against short pages that count at all."""
    scene.store.shorten(KEYS[1])
    outcome = scene.client.read(KEYS, slots(3, 4, 5))
    assert (outcome.pages, outcome.fault) == (1, Fault.MISSING)
    assert scene.client.faults == {Fault.MISSING: 1, Fault.HOLE: 1}
    scene.store.drop(KEYS[0])
    assert scene.client.read(KEYS, slots(3, 4, 5)).pages == 0
    assert scene.client.faults == {Fault.MISSING: 3, Fault.HOLE: 2}
    assert scene.client.up


def test_a_write_with_a_hole_counts_to_the_hole(scene: Scene) -> None:
    """Guards against a node that is marked as stored with a page of it missing."""
    scene.store.answer("batch_set_v1", lambda _: [True, False, True])
    assert scene.client.write(KEYS, slots(3, 4, 5)).pages == 1


@pytest.mark.parametrize("truth", [1, -5, "no", None])
def test_only_true_is_true(scene: Scene, truth: Any) -> None:
    """Guards against error codes that are taken for success."""
    scene.store.answer("batch_get_v1", lambda _: [True, truth, True])
    assert scene.client.read(KEYS, slots(3, 4, 5)).pages == 1


def test_a_callers_list_is_the_callers(scene: Scene) -> None:
    """Guards against a call that hangs, and then works on keys that its caller has changed."""
    gate = scene.hang("batch_get_v1")
    keys = list(KEYS)
    scene.client.read(keys, slots(3, 4, 5))
    keys.clear()
    gate.open()
    scene.settled()
    assert scene.store.written == [3, 4, 5]


def test_statistics_that_take_long_hold_up_nobody(scene: Scene) -> None:
    """The scheduler asks for them in its steps."""
    gate, answers = Gate(), iter([1, 2])

    def slow() -> int:
        gate.pass_through()
        return next(answers)

    scene.store.get_stats = slow
    assert scene.client.get_stats() is None
    assert gate.entered.wait(10)
    assert scene.client.get_stats() is None and scene.client.under_way == 1
    gate.open()
    until(lambda: scene.client.under_way == 0)
    assert scene.client.get_stats() == 1, "each answer once"
    until(lambda: scene.client.under_way == 0)
    assert scene.client.get_stats() == 2
    scene.settled()


def test_the_rest_never_raises(scene: Scene) -> None:
    """Guards against a scheduler that ends because of /clear_hicache_storage_backend, its metrics
    or its own end."""
    scene.store.fail("clear")
    assert not scene.client.clear()
    assert scene.client.clear() and scene.store.content == {}
    scene.store.answer("clear", lambda _: False)
    assert not scene.client.clear(), "as the file backend says that it could not"

    def broken() -> None:
        raise OSError("broken")

    scene.store.get_stats = broken
    assert scene.client.get_stats() is None
    until(lambda: scene.client.under_way == 0)
    assert scene.client.get_stats() is None
    until(lambda: scene.client.under_way == 0)
    scene.store.close = broken
    scene.client.close()
    assert scene.client.faults[Fault.ERROR] == 3
    assert not StoreClient(object(), "has no clear").clear()
