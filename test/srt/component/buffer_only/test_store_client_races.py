"""Calls that hang, are given up and return late, in every order, on one client."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest

from component.buffer_only.host_pools import content, host_pool, slots
from component.buffer_only.scripted_store import ScriptedStore, until
from sglang.srt.mem_cache.buffer_only.settings import StoreClientSettings
from sglang.srt.mem_cache.buffer_only.store_client import StoreClient


@pytest.mark.parametrize("seed", range(8))
def test_no_page_is_handed_out_while_a_call_may_use_it(seed: int) -> None:
    """Guards against every interleaving of calls that hang, are given up, and return late: three
    threads on one store, each page with its own content, and an owner that hands out a page again
    as soon as it may."""
    _Stampede(seed).run()


class _Stampede:
    """Threads that write and read pages through one client, with calls that hang now and then."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.pool = host_pool("mha", "page_first_direct")
        self.store = ScriptedStore(self.pool)
        self.lock = threading.Lock()
        self.free = [0, 1, 2, 3, 4, 5]
        self.truth: dict[str, bytes] = {}
        self.problems: list[str] = []
        self.late = 0
        settings = StoreClientSettings(
            deadline=0.002, max_calls=16, first_retry=0.0, longest_retry=0.0
        )
        self.client = StoreClient(self.store, "stampede", settings)

    def run(self) -> None:
        threads = [threading.Thread(target=self._live, args=(n,)) for n in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        self.store.open_all()
        until(lambda: self.client.under_way == 0)
        until(lambda: sorted(self.free) == [0, 1, 2, 3, 4, 5])
        assert self.problems == [] and self.store.disturbed == []
        assert self.late > 0, "no call was given up: the test shows nothing"
        assert all(self.store.content[key] == self.truth[key] for key in self.store.content)

    def _live(self, number: int) -> None:
        for turn in range(40):
            with self.lock:
                page = self.free.pop(self.random.randrange(len(self.free))) if self.free else None
                hang = self.random.random() < 0.2
                method = self.random.choice(["batch_get_v1", "batch_set_v1"])
                known = self.random.choice(list(self.truth)) if self.truth else None
                if hang:
                    gate = self.store.hang(method)
                    threading.Timer(self.random.uniform(0, 0.03), gate.open).start()
            if page is None:
                continue
            outcome = (
                self._write(f"{number}-{turn}", page)
                if method == "batch_set_v1" or known is None
                else self._read(known, page)
            )
            if outcome.overdue is None:
                self._give_back(page)
            else:
                self.late += 1
                outcome.overdue.returned.add_done_callback(
                    lambda _, page=page: self._give_back(page)
                )

    def _write(self, key: str, page: int) -> Any:
        self.store.page.scatter(page, self.store.page.gather(page).random_(0, 256))
        with self.lock:
            self.truth[key] = content(self.pool, page)
        return self.client.write([key], slots(page))

    def _read(self, key: str, page: int) -> Any:
        outcome = self.client.read([key], slots(page))
        if outcome.pages and content(self.pool, page) != self.truth[key]:
            self.problems.append(f"page {page} does not hold {key}")
        return outcome

    def _give_back(self, page: int) -> None:
        with self.lock:
            self.free.append(page)
