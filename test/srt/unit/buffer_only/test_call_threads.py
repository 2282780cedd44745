"""Threads for calls that may hang, and the bounds that come from the environment."""

from __future__ import annotations

import threading

import pytest

from sglang.srt.mem_cache.buffer_only.call_threads import CallThreads
from sglang.srt.mem_cache.buffer_only.store_client import GuardSettings


def test_a_thread_is_used_again() -> None:
    """Guards against a new thread for every call."""
    threads = CallThreads("test")
    assert [threads.start(lambda n=n: n).result(10) for n in range(20)] == list(range(20))
    assert threads.made == 1
    threads.close()


def test_a_call_that_hangs_holds_up_nobody() -> None:
    """Guards against calls that wait for the thread of another one."""
    threads, gate = CallThreads("test"), threading.Event()
    stuck = threads.start(lambda: gate.wait(30))
    assert threads.start(lambda: "other").result(10) == "other"
    assert not stuck.done()
    gate.set()
    assert stuck.result(10)
    threads.close()


def test_what_a_call_raises_ends_no_thread() -> None:
    """Guards against a store that exits the interpreter, or just its thread."""
    threads = CallThreads("test")

    def leave() -> None:
        raise SystemExit(3)

    assert isinstance(threads.start(leave).exception(10), SystemExit)
    assert threads.start(lambda: "on").result(10) == "on"
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
    assert GuardSettings.from_env() == GuardSettings(2.5, 3, 0.5, 7.0)


@pytest.mark.parametrize(
    ("name", "value"),
    [("DEADLINE", "soon"), ("DEADLINE", "-1"), ("MAX_CALLS", "0"), ("MAX_CALLS", "2.5"),
     ("FIRST_RETRY", "inf"), ("LONGEST_RETRY", "")],
)  # fmt: skip
def test_wrong_bounds(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    """Guards against a server that starts with bounds which nobody meant."""
    monkeypatch.setenv(f"SGLANG_HICACHE_STORE_{name}", value)
    with pytest.raises(ValueError, match=f"SGLANG_HICACHE_STORE_{name} must be"):
        GuardSettings.from_env()
