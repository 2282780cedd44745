"""Questions to servers, of which some hang."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future

import pytest

from sglang.srt.disaggregation.delta import address_pool
from sglang.srt.disaggregation.delta.address_pool import AddressPool
from unit.delta.fakes import Clock

THREADS = 4


class Servers:
    """Servers that answer, but for those whose name begins with "hung" while ``gate`` is closed."""

    def __init__(self) -> None:
        self.clock, self.gate = Clock(), threading.Event()
        self.pool = AddressPool("questions", THREADS, self.clock)
        self.threads: set[int] = set()
        #: Seconds that an answer takes.
        self.slow = 0.0

    def _ask(self, address: str) -> str:
        self.threads.add(threading.get_ident())
        self.clock.now += self.slow
        if address.startswith("hung"):
            assert self.gate.wait(60)
        return address

    def ask(self, *addresses: str) -> list[Future[str]]:
        return [self.pool.submit(each, self._ask, each) for each in addresses]

    def check_other(self, name: str) -> None:
        """That server is reached meanwhile."""
        (asked,) = self.ask(name)
        assert asked.result(10) == name

    def check_all(self, asked: Iterable[Future[str]], names: list[str]) -> None:
        """Nobody hangs any more, and everybody has answered."""
        self.gate.set()
        assert [each.result(10) for each in asked] == names


@pytest.fixture
def servers() -> Iterator[Servers]:
    made = Servers()
    yield made
    made.gate.set()
    made.pool.shutdown()


@pytest.mark.parametrize(
    ("hung", "known"),
    [
        pytest.param(["hung"] * 3 * THREADS, [], id="one for which many ask"),
        pytest.param([f"hung {n}" for n in range(3 * THREADS)], ["good"], id="ever new ones"),
    ],
)
def test_servers_that_hang(servers: Servers, hung: list[str], known: list[str]) -> None:
    """Guards against servers that hang in the way of one that has answered before, or where they
    are few of one that was never asked."""
    for name in known:
        servers.check_other(name)
    asked = servers.ask(*hung)
    servers.check_other("good")
    servers.check_all(asked, hung)


def test_servers_that_hang_each_time(servers: Servers) -> None:
    """Guards against servers that hang in every thread for as long as anybody asks for them, in the
    way of a new one; and against those that are never asked again."""
    names = [f"hung {number}" for number in range(THREADS)]
    servers.slow = 5.0
    servers.gate.set()
    for name in names:
        servers.check_other(name)
    servers.gate.clear()
    again = servers.ask(*2 * names)
    servers.check_other("new")
    servers.check_all(again, 2 * names)
    assert len(servers.threads) <= THREADS


def test_the_queue_of_one_address_has_an_end(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a queue that grows with each request which names a server that hangs."""
    monkeypatch.setattr(address_pool, "_MOST_WAITING", 3)
    *asked, refused = servers.ask(*["hung"] * (2 + 3 + 1))
    error = refused.exception(10)
    assert isinstance(error, OSError)
    assert str(error) == "hung does not answer, and 3 queries to it are pending"
    servers.check_all(asked, ["hung"] * 5)
    servers.check_other("hung")


def test_a_question_that_raises(servers: Servers) -> None:
    """Guards against a thread, or a place of an address, that an error takes for ever."""

    def fail() -> None:
        raise OSError("refused")

    failed = [servers.pool.submit("bad", fail) for _ in range(5)]
    assert all(isinstance(each.exception(10), OSError) for each in failed)
    servers.check_other("bad")
