"""Questions to servers, of which some hang."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from sglang.srt.disaggregation.delta import address_pool
from sglang.srt.disaggregation.delta.address_pool import AddressPool
from unit.delta.fakes import Clock

THREADS = 4


class Servers:
    """Servers that answer, but for those whose name begins with "hung"."""

    def __init__(self) -> None:
        self.clock, self.gate, self.asking = Clock(), threading.Event(), threading.Semaphore(0)
        self.pool = AddressPool("questions", THREADS, self.clock)
        self.threads: set[int] = set()

    def ask(self, address: str) -> str:
        """A question to the server at ``address``."""
        self.threads.add(threading.get_ident())
        if address.startswith("hung"):
            self.asking.release()
            assert self.gate.wait(60)
        return address

    def slowly(self, address: str) -> str:
        """The same, and the answer takes long."""
        self.clock.now += 5
        return self.ask(address)


@pytest.fixture
def servers() -> Iterator[Servers]:
    made = Servers()
    yield made
    made.gate.set()
    made.pool.shutdown()


def test_many_questions_to_one_address(servers: Servers) -> None:
    """Guards against one server that hangs, for which many ask, in the way of all others."""
    hung = [servers.pool.submit("hung", servers.ask, "hung") for _ in range(3 * THREADS)]
    assert servers.pool.submit("good", servers.ask, "good").result(10) == "good"
    servers.gate.set()
    assert [each.result(10) for each in hung] == ["hung"] * len(hung)


def test_more_hung_addresses_than_threads(servers: Servers) -> None:
    """Guards against servers that hang in every thread, for as long as anybody asks for them."""
    names = [f"hung {number}" for number in range(THREADS - 1)]
    first = [servers.pool.submit(name, servers.ask, name) for name in names]
    for _ in names:
        assert servers.asking.acquire(timeout=10)
    servers.clock.now += 5  # they time out
    servers.gate.set()
    for each in first:
        each.result(10)
    servers.gate.clear()
    again = [servers.pool.submit(name, servers.ask, name) for name in names]
    assert servers.pool.submit("good", servers.ask, "good").result(10) == "good"
    servers.gate.set()
    assert [each.result(10) for each in again] == names, "they are asked all the same"
    assert len(servers.threads) <= THREADS


def test_new_hung_addresses(servers: Servers) -> None:
    """Guards against clients that name ever new servers which hang, in the way of one that has
    answered before."""
    assert servers.pool.submit("good", servers.ask, "good").result(10) == "good"
    names = [f"hung {number}" for number in range(3 * THREADS)]
    hung = [servers.pool.submit(name, servers.ask, name) for name in names]
    assert servers.pool.submit("good", servers.ask, "good").result(10) == "good"
    servers.gate.set()
    assert [each.result(10) for each in hung] == names


def test_new_addresses_beside_slow_ones(servers: Servers) -> None:
    """Guards against a new server that waits for those that have hung all the time."""
    names = [f"hung {number}" for number in range(THREADS)]
    servers.gate.set()
    for name in names:
        asked = servers.pool.submit(name, servers.slowly, name)
        assert asked.result(10) == name
    servers.gate.clear()
    hung = [servers.pool.submit(name, servers.ask, name) for name in 2 * names]
    assert servers.pool.submit("new", servers.ask, "new").result(10) == "new"
    servers.gate.set()
    assert [each.result(10) for each in hung] == 2 * names


def test_the_queue_of_one_address_has_an_end(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a queue that grows with each request which names a server that hangs."""
    monkeypatch.setattr(address_pool, "_MOST_WAITING", 3)
    hung = [servers.pool.submit("hung", servers.ask, "hung") for _ in range(2 + 3)]
    error = servers.pool.submit("hung", servers.ask, "hung").exception(10)
    assert isinstance(error, OSError)
    assert str(error) == "hung does not answer, and 3 queries to it are pending"
    servers.gate.set()
    assert [each.result(10) for each in hung] == ["hung"] * 5
    assert servers.pool.submit("hung", servers.ask, "hung").result(10) == "hung"


def test_a_question_that_raises(servers: Servers) -> None:
    """Guards against a thread, or a place of an address, that an error takes for ever."""

    def fail() -> None:
        raise OSError("refused")

    failed = [servers.pool.submit("bad", fail) for _ in range(5)]
    assert all(isinstance(each.exception(10), OSError) for each in failed)
    assert servers.pool.submit("bad", servers.ask, "bad").result(10) == "bad"
