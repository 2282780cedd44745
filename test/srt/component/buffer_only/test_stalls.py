"""Stores that are killed, frozen, full, slow or refuse, under a stream of requests: how long each
one waits, by a clock of the test's own, and what is left afterwards."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from component.buffer_only.cache import PAGE, Cache, prompt
from component.buffer_only.checks import check
from component.buffer_only.scenes import stored
from component.buffer_only.scripted_store import ScriptedStore
from component.buffer_only.test_prefetch import ALONE
from component.buffer_only.threads import ManualThreads
from sglang.srt.mem_cache.buffer_only.namespaces import Namespace
from sglang.srt.mem_cache.buffer_only.page_store import Job
from sglang.srt.mem_cache.buffer_only.worth import Choice

STEP_S = 0.01
#: Seconds for which a request may wait: of the flag, and where the store answers.
DEADLINE_S, SOON_S = 10.0, 0.1


@dataclass
class Pace:
    """How long each call takes, by a clock; both can be changed while calls are under way."""

    call_s: float = 0.0
    clock: Callable[[], float] = field(default=lambda: 0.0)


class PacedThreads(ManualThreads):
    """Each of ``threads`` threads does one job at a time, which takes as long as ``pace`` says."""

    def __init__(self, pace: Pace, name: str, threads: int = 1) -> None:
        super().__init__(name)
        self._pace, self._threads = pace, threads
        self._begun: list[tuple[float, Job]] = []

    def run(self, jobs: int | None = None) -> int:
        now, count = self._pace.clock(), 0
        while True:
            while self.jobs and len(self._begun) < self._threads:
                self._begun.append((now, self.jobs.popleft()))
            done = [one for one in self._begun if now >= one[0] + self._pace.call_s]
            if not done:
                return count
            for one in done:
                self._begun.remove(one)
                one[1].run()
                one[1].seconds = self._pace.call_s
                count += 1


class DeadStore(ScriptedStore):
    """Raises in every call while ``dead``."""

    dead = False

    def _scripted(self, method: str, keys: list[str], work: Callable[[], Any]) -> Any:
        if self.dead:
            raise ConnectionError("nobody is there")
        return super()._scripted(method, keys, work)


def paced(pace: Pace, *prompts: list[int], **changes: Any) -> Cache:
    """A cache whose store has ``prompts``, and answers at the pace."""
    found = stored(
        *prompts, threads=lambda *args: PacedThreads(pace, *args), store=DeadStore(), **changes
    )
    pace.clock = lambda: found.now
    return found


@ALONE
@pytest.mark.parametrize(
    ("ailment", "limit_s"),
    [
        ("none", SOON_S),
        ("killed", SOON_S),
        ("full", SOON_S),
        ("refusing", SOON_S),
        ("frozen", DEADLINE_S + SOON_S),
        ("slow", DEADLINE_S + SOON_S),
    ],
)
def test_a_store_that_is_not_well(ailment: str, limit_s: float, alone: bool):
    """Every answer is right (``compute`` looks at the KV of each hit), nobody waits longer than
    the store's answers, or the deadline, take, a flush and new weights work meanwhile, and when
    the store is well nothing is left."""
    pace = Pace()
    cache = paced(pace, *(prompt(n, 6) for n in range(6)), tokens=120 * PAGE, alone=alone)
    cache.buffer.ran(1.0, 100_000)
    fall_ill(ailment, cache.store, pace)
    waits = stream(cache, [prompt(number % 12, 6) for number in range(24)])
    assert max(waits) <= limit_s, waits
    cache.flush()
    assert cache.tree.protected_size() == 0 and not cache.tree.root_node.children
    cache.buffer.use(Namespace.of({"weights": "new"}), "nonce")
    cache.compute(prompt(50, 6))
    check(cache)
    fall_ill("none", cache.store, pace)
    cache.now += 200.0
    cache.settle()
    cache.compute(prompt(51, 6))
    cache.settle()
    hits = []
    while not any(hits) and len(hits) < 17:  # a slow store is tried once in sixteen times
        cache.flush()
        hits.append(cache.serve(f"well {len(hits)}", prompt(51, 6)))
        cache.settle()
    assert hits[-1] == 5 * PAGE and (len(hits) == 1 or ailment == "slow")


def fall_ill(ailment: str, store: Any, pace: Pace) -> None:
    store.dead = ailment == "killed"
    store.refusing = {"full": True, "refusing": OSError("no")}.get(ailment, False)
    pace.call_s = {"frozen": math.inf, "slow": 2.0}.get(ailment, 0.0)


@ALONE
@pytest.mark.parametrize("dead", [False, True], ids=["misses", "errors"])
def test_most_do_not_wait_for_slow_lookups(alone: bool, dead: bool):
    """A store that has nothing, or fails, in two seconds, and 33 requests a second: two lookups run
    side by side, so that each request would wait for all before it, up to its deadline."""
    pace = Pace(2.0)
    cache = paced(pace, tokens=1200 * PAGE, alone=alone)
    cache.store.dead = dead
    cache.buffer.ran(1.0, 1000)
    waits = stream(cache, [prompt(number, 6) for number in range(160)])
    first = 2 * 33 + 2  # nothing is known before the first answer
    assert max(waits) < 11
    later = sorted(waits)[:-first]
    assert later[int(len(later) * 0.9)] <= 0.1, "all but one in sixteen are admitted at once"
    before = cache.buffer.context.choices[Choice.UNASKED]
    assert before > 70
    # It is found out that the store is well again.
    pace.call_s, cache.store.dead = 0.0, False
    cache.now += 100
    cache.flush()
    cache.settle()
    stream(cache, [prompt(500 + number, 6) for number in range(200)])
    assert cache.buffer.context.choices[Choice.UNASKED] - before < 150


def stream(cache: Cache, prompts: list[list[int]]) -> list[float]:
    """Requests, one every three steps, each admitted as soon as it may; how long each one waited,
    in seconds."""
    waiting: dict[str, tuple[float, list[int]]] = {}
    waits, steps = [], 0
    while prompts or waiting:
        if prompts and steps % 3 == 0:
            rid, tokens = f"r{steps}", prompts.pop(0)
            waiting[rid] = (cache.now, tokens)
            cache.want(rid, tokens)
        steps += 1
        assert steps < 5000, cache.describe()
        cache.buffer.prefetches.in_line(waiting)
        cache.step()
        for rid, (since, tokens) in list(waiting.items()):
            if cache.tree.check_prefetch_progress(rid):
                cache.compute(tokens, rid=rid)
                waits.append(cache.now - since)
                del waiting[rid]
        cache.now += STEP_S
    return waits
