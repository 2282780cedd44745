"""When a store is asked, the threads for calls that may hang, and the bounds that come from the
environment."""

from __future__ import annotations

import threading

import pytest

from sglang.srt.mem_cache.buffer_only.call_threads import CallThreads
from sglang.srt.mem_cache.buffer_only.settings import StoreClientSettings
from sglang.srt.mem_cache.buffer_only.store_client import CircuitBreaker


def probes(breaker: CircuitBreaker, until: float) -> list[float]:
    """When a probe is due, with a look every half second."""
    times = [number / 2 for number in range(int(until * 2))]
    return [now for now in times if breaker.try_probe(now)]


def test_probes_come_at_growing_intervals() -> None:
    """Guards against a dead store that is asked over and over, and against one that is never asked
    again, also when no probe is ever answered."""
    breaker = CircuitBreaker(1.0, 8.0)
    assert probes(breaker, 5.0) == []
    assert breaker.timed_out(10.0)
    assert not breaker.closed
    assert probes(breaker, 60.0) == [11.0, 13.0, 17.0, 25.0, 33.0, 41.0, 49.0, 57.0]


def test_a_store_that_answers_probes_only_is_asked_less_and_less() -> None:
    """Guards against a deadline a second, for a store whose look-ups work and whose reads hang."""
    breaker = CircuitBreaker(1.0, 8.0)
    now, waits = 0.0, []
    for _ in range(5):
        breaker.timed_out(now)
        waits.append(breaker.retry_in)
        now += breaker.retry_in
        assert breaker.try_probe(now)
        breaker.probe_ended(answered=True)
    assert waits == [1.0, 4.0, 8.0, 8.0, 8.0]


def test_what_makes_it_ask_again_soon() -> None:
    """Guards against long waits for a store that hangs once a day, and against an interval that
    grows with the number of threads whose calls hang together."""
    breaker = CircuitBreaker(1.0, 8.0)
    for _ in range(4):
        assert breaker.timed_out(0.0)
        assert breaker.try_probe(100.0)
        breaker.probe_ended(answered=True)
    assert breaker.closed and not breaker.try_probe(200.0)
    breaker.succeeded()
    assert [breaker.timed_out(seconds) for seconds in (0.0, 0.5)] == [True, False]
    breaker.succeeded()  # a late answer of another call does not make it up
    assert not breaker.closed and breaker.retry_in == 1.0


def test_a_thread_is_used_again() -> None:
    """Guards against a new thread for every call, and a store that exits the interpreter, or just
    its thread."""
    threads = CallThreads("test")

    def leave() -> None:
        raise SystemExit(3)

    assert isinstance(threads.start(leave).exception(10), SystemExit)
    assert [threads.start(lambda n=n: n).result(10) for n in range(20)] == list(range(20))
    assert threads.made == 1
    threads.close()


def test_close_ends_the_threads() -> None:
    """Guards against threads that outlive their store, also one whose call returns late."""
    threads, gate = CallThreads("closing"), threading.Event()
    threads.start(lambda: None).result(10)
    stuck = threads.start(lambda: gate.wait(30))
    threads.start(lambda: None).result(10)
    own = [thread for thread in threading.enumerate() if thread.name == "closing"]
    assert len(own) == 2 and all(thread.daemon for thread in own)
    threads.close()
    gate.set()
    assert stuck.result(10)
    for thread in own:
        thread.join(10)
        assert not thread.is_alive()


def test_no_thread_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a storage thread that ends because the system has no more threads, or because
    the interpreter is ending: the call has failed, and the next one may work."""
    threads = CallThreads("refused")

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        future = threads.start(lambda: 1)
    assert "new thread" in str(future.exception(10))
    assert threads.start(lambda: 1).result(10) == 1 and threads.made == 1


def test_bounds_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against variables that are not read, and against nonsense that is."""
    monkeypatch.setenv("SGLANG_HICACHE_STORE_DEADLINE", "2.5")
    monkeypatch.setenv("SGLANG_HICACHE_STORE_MAX_CALLS", "3")
    monkeypatch.setenv("SGLANG_HICACHE_STORE_FIRST_RETRY", "0.5")
    monkeypatch.setenv("SGLANG_HICACHE_STORE_LONGEST_RETRY", "7")
    assert StoreClientSettings.from_env() == StoreClientSettings(2.5, 3, 0.5, 7.0)
