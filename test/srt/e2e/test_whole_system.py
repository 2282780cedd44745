"""The whole system: prefill with a small tree in front of a Mooncake store; decode with a radix
cache, which computes short turns and writes to the same store.

Greedy output is the aggregated server's. After each test both servers are idle, balanced and
without staged pages.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from benchmark.harness import checks, metrics
from benchmark.harness.fleet import Pair
from benchmark.harness.metrics import CACHED_TOKENS, HIT_TOKENS
from chaos import store
from chaos.logs import log_problems
from component.buffer_only.masters import Master
from e2e.prometheus import scraping
from e2e.support import (
    DOZE,
    Ids,
    Reference,
    answers_with,
    ask_both,
    post,
    prompt_maker,
    take_turns,
    until,
)
from e2e.test_local_turns import local_config, turns
from models.random_qwen3 import build
from unit.documents import alert_rules, queries

NEW_TOKENS = 16
GREEDY = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
DECODE_TOKENS = 3072
"""Smaller than the conversations below, which also exceed prefill's pool."""


@dataclass(frozen=True)
class Shape:
    """Variant of the system under test."""

    backend: str
    page: int
    ranks: int = 1
    writes: bool = True
    """Decode writes computed KV to the store."""

    def __str__(self) -> str:
        more = f"-tp{self.ranks}" * (self.ranks > 1) + "-reads" * (not self.writes)
        return f"{self.backend}-{self.page}{more}"


EVERY_RUN = Shape("nixl", 16)
NIGHTLY = (
    Shape("mooncake", 64),
    Shape("nixl", 64),
    Shape("mooncake", 16, writes=False),
    Shape("nixl", 16, ranks=2),
)


@dataclass(frozen=True)
class System:
    """A running pair with its store, and the right answers."""

    pair: Pair
    master: Master
    reference: Reference
    shape: Shape
    tokens: Any
    """A function that returns random ordinary tokens."""
    new_tokens: int = NEW_TOKENS

    @property
    def urls(self) -> tuple[str, str]:
        return self.pair.prefill_url, self.pair.decode_url

    def answer(self, prompt: Ids) -> Ids:
        return self.reference.answers([prompt], self.new_tokens)[0]

    def stored_tokens(self, prompt: Ids, expected: Ids | None = None) -> int:
        """Send a prompt; check that the answer is ``expected`` (by default the reference's). Return
        the tokens of the prompt that prefill loaded from the store."""
        greedy = {**GREEDY, "max_new_tokens": self.new_tokens}
        there, here = (answer.json() for answer in ask_both(self.pair, prompt, greedy))
        assert here["output_ids"] == (expected or self.answer(prompt))
        # There are no details without a hit, or if decode computed the turn.
        details = there["meta_info"].get("cached_tokens_details") or {}
        assert not details.get("host")
        return int(details.get("storage", 0))

    def settle(self) -> None:
        """Check that both servers are idle and balanced, pass the memory checks, and hold no tokens
        and no staged pages."""
        self.pair.check()
        for url in self.urls[: 1 + self.shape.writes]:
            store.wait_drained(url, 60.0)
        for url in self.urls:
            assert checks.load(url).tokens == 0, "an idle server holds tokens"
        for process in self.pair.processes.values():
            assert not log_problems(process.log)

    def empty(self, *, stored: bool = True) -> None:
        """Empty both trees, after the writes to the store have ended (if ``stored``)."""
        self.pair.check()
        if stored and self.shape.writes:  # prefill's flush waits for it
            store.wait_drained(self.pair.decode_url, 60.0)
        for url in self.urls:
            checks.flush(url, wait_s=30.0)

    def update(self, model: Path) -> None:
        """Load new weights on both servers."""
        for url in self.urls:
            post(url, "/update_weights_from_disk", model_path=str(model))


def check_answer_is_found(system: System) -> None:
    """Send two turns, the second computed by decode. With both trees empty, the third turn must
    find their KV in the store."""
    pair, tokens = system.pair, system.tokens
    before = turns(pair)
    first = tokens(333)
    second = [*first, *system.answer(first), *tokens(50)]
    for prompt in (first, second):
        system.stored_tokens(prompt)
    counted = turns(pair, before)
    assert (counted["remote", "long"], counted["local", "short"]) == (1, 1)
    system.empty()
    answered = [*second, *system.answer(second)]
    loaded, page = system.stored_tokens([*answered, *tokens(70)]), system.shape.page
    if system.shape.writes:
        # The last generated token has KV if the overlapped next step had begun.
        assert loaded in {(len(answered) - 1) // page * page, len(answered) // page * page}
    else:
        assert loaded == len(first) // page * page
    system.settle()


@contextmanager
def running(
    shape: Shape,
    model: Path,
    reference: Reference,
    logs: Path,
    args: tuple[str, ...] = (),
    new_tokens: int = NEW_TOKENS,
) -> Iterator[System]:
    """Start a system. ``args``: more arguments of both servers."""
    if shape.backend == "mooncake":
        pytest.importorskip("mooncake.engine", reason="needs Mooncake's transfer engine")
    master = Master()
    staged = store.prefill_with_stage(shape.page, master)
    # A slow machine must not turn hits into timeouts.
    staged["prefill_env"] = {**staged["prefill_env"], "SGLANG_HICACHE_BUFFER_READ_TIMEOUT": "60"}
    config = local_config(
        model,
        logs,
        backend=shape.backend,
        page_size=shape.page,
        decode_tokens=DECODE_TOKENS,
        prefill_tp=shape.ranks,
        decode_tp=shape.ranks,
        env={"MC_FORCE_TCP": "1"},
        **staged,
    )
    # A small reserve, so that running requests outgrow the pool.
    reserved = ("--num-reserved-decode-tokens", str(max(16, shape.page)))
    writes = store.decode_that_writes(shape.page, master) if shape.writes else ()
    config = replace(
        config,
        prefill_args=(*config.prefill_args, *DOZE, *args),
        decode_args=(*config.decode_args, *reserved, *writes, *args),
        decode_env={**config.decode_env, **(store.ENV if shape.writes else {})},
    )
    try:
        with Pair(config, logs) as pair:
            yield System(pair, master, reference, shape, prompt_maker(model, seed=19), new_tokens)
    finally:
        master.kill()


@pytest.fixture(
    scope="module",
    params=[EVERY_RUN, *(pytest.param(shape, marks=pytest.mark.nightly) for shape in NIGHTLY)],
    ids=str,
)
def system(
    request: Any, model: Path, reference: Reference, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[System]:
    shape = request.param
    with running(shape, model, reference, tmp_path_factory.mktemp(f"whole-{shape}")) as system:
        yield system


def test_talks_on_pools_that_evict(system: System) -> None:
    """Guards against a wrong page from any of the four sources of a turn's KV: decode's tree,
    prefill's tree, the store, and computation on either side."""
    pair, tokens = system.pair, system.tokens
    before, turns_before = pair.metrics(), turns(pair)
    prompts: list[Ids] = [tokens(250 + 37 * i) for i in range(8)]
    lengths = itertools.cycle(range(19, 19 + 23 * len(prompts), 23))
    prompts = take_turns(
        pair, system.reference, prompts, 4, NEW_TOKENS, lambda: tokens(next(lengths))
    )
    assert sum(map(len, prompts)) > max(DECODE_TOKENS, store.PREFILL_TOKENS)
    system.settle()
    prefill, decode = (
        metrics.gained(*snapshots) for snapshots in zip(before, pair.metrics(), strict=True)
    )
    assert prefill[f"{CACHED_TOKENS} storage"] > 0
    assert decode[HIT_TOKENS] > 0
    by_side = turns(pair, turns_before)
    assert {where for (where, _), count in by_side.items() if count > 0} == {"local", "remote"}


def test_the_store_has_what_was_computed(system: System) -> None:
    """Guards against tokens that are recomputed although a server of the system has computed them:
    both trees are empty, and the next turn must find its history in the store."""
    check_answer_is_found(system)


#: Metrics that may have no samples in this system -> why.
IDLE = {
    "sglang:num_retracted_requests_total": "SGLang's own; exported from the first retraction on",
}


@pytest.mark.parametrize("system", [EVERY_RUN], indirect=True, ids=str)
def test_prometheus_has_data_for_every_query(system: System, tmp_path: Path) -> None:
    """Guards against a dashboard, alerts or a runbook that are empty although servers export the
    metrics: a real Prometheus scrapes a pair by the example's configuration. An alert is empty on
    healthy servers, so each of its metrics is queried."""
    tokens = system.tokens
    with scraping(system.urls, tmp_path / "prometheus") as prometheus:
        prometheus.wait_for_scrapes(2)
        talks = [tokens(250 + 37 * i) for i in range(4)]
        talks = take_turns(system.pair, system.reference, talks, 2, NEW_TOKENS, lambda: tokens(30))
        system.empty()
        take_turns(system.pair, system.reference, talks, 1, NEW_TOKENS, lambda: tokens(30))
        system.settle()
        prometheus.wait_for_scrapes(3)
        expressions = [*queries.dashboard_queries(), *alert_rules.runbook_queries()]
        for alert in alert_rules.expressions():
            expressions += queries.selectors(alert)
        empty = [each for each in expressions if not prometheus.values(each)]
        assert [each for each in empty if not queries.metrics(each) <= set(IDLE)] == []
        assert "ServerWithoutPackage" not in prometheus.active_alerts()


def test_a_master_that_dies_and_comes_back(system: System) -> None:
    """Guards against failed answers after the loss of the store, and against a store that is not
    used after its restart: answers are right while the master is killed, and hits come back."""
    tokens = system.tokens
    talks: list[Ids] = [tokens(300 + 40 * i) for i in range(3)]
    system.stored_tokens(talks[0])
    system.empty()
    assert system.stored_tokens(talks[0]) > 0
    system.master.kill()
    talks = take_turns(system.pair, system.reference, talks, 2, NEW_TOKENS, lambda: tokens(30))
    system.empty(stored=False)
    system.master.start()

    def served() -> bool:
        loaded = system.stored_tokens(talks[0])
        system.empty()
        return loaded > 0

    until(served, 60.0)
    take_turns(system.pair, system.reference, talks, 2, NEW_TOKENS, lambda: tokens(30))
    system.settle()


def test_new_weights_on_both(system: System, model: Path, tmp_path: Path) -> None:
    """Guards against an answer from KV of other weights: after an update of both servers no earlier
    page is hit, in a tree or in the store; and after the way back, no page of the new weights."""
    other = build(tmp_path / "other", seed=1)
    prompt = system.tokens(333)
    (old,) = system.reference.answers([prompt], NEW_TOKENS)
    (new,) = answers_with(system.reference, other, [prompt], NEW_TOKENS)
    assert old != new
    assert system.stored_tokens(prompt, old) == 0
    # First no page of the other weights is found, then the pages of these.
    for weights, answer, is_known in ((other, new, False), (model, old, True)):
        system.update(weights)
        assert (system.stored_tokens(prompt, answer) > 0) == is_known
        system.empty()
        assert system.stored_tokens(prompt, answer) > 0
    system.settle()
