"""Prefill servers that hang, die and come back: two of them, with one decode server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmark.harness import metrics, servers
from benchmark.harness.client import Result
from benchmark.harness.fleet import Pair, start
from benchmark.harness.process import ServerProcess
from benchmark.harness.servers import ServerConfig
from benchmark.harness.watchdog import kill_group
from e2e.support import (
    Ids,
    Reference,
    ask_decode,
    assert_right,
    frozen,
    pair_config,
    prompt_maker,
    until,
)
from sglang.srt.disaggregation.delta.metrics import METRICS

NEW_TOKENS = 8
INTERVAL_S = 2.0  # the minimum that SGLang accepts
HEARTBEATS = 2
#: A heartbeat takes at most one interval, and one may just have begun.
BOUND_S = (HEARTBEATS + 1) * 2 * INTERVAL_S
ENV = {
    "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": str(INTERVAL_S),
    "SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE": str(HEARTBEATS),
    "SGLANG_DISAGGREGATION_QUARANTINE_TIMEOUT": "40",
}


@dataclass
class Prefill:
    """One prefill server that can be killed and restarted on the same ports."""

    config: ServerConfig
    logs: Path
    process: ServerProcess

    def restart(self) -> None:
        self.process = start(self.config, self.logs / f"again{time.monotonic_ns()}")
        self.process.wait_ready()


@dataclass
class Cluster:
    pair: Pair
    first: Prefill
    second: Prefill

    async def ask(self, prompts: list[Ids], more: list[Ids]) -> tuple[list[Result], list[Result]]:
        """Return decode's answers to ``prompts`` through the first prefill server, and to ``more``
        through the second one, all sent at once."""
        first, second = await asyncio.gather(
            ask_decode(self.pair, prompts, NEW_TOKENS, self.first.config),
            ask_decode(self.pair, more, NEW_TOKENS, self.second.config),
        )
        return first, second


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    logs = tmp_path_factory.mktemp("faults")
    config = pair_config(model, logs, page_size=16, env=ENV)
    with Pair(config, logs) as pair:
        template = pair.layout[0]
        second = servers.engine("prefill", model, config.prefill_sizes, env=template.env)
        process = start(second, logs / "second")
        process.wait_ready()
        cluster = Cluster(
            pair,
            Prefill(template, logs, pair.processes["prefill"]),
            Prefill(second, logs, process),
        )
        try:
            yield cluster
        finally:
            cluster.first.process.stop()
            cluster.second.process.stop()


def check_failed(results: list[Result], bound_s: float, *texts: str) -> None:
    """Check that each request got one error, in time, with one of ``texts``."""
    for result in results:
        assert result.error is not None and not result.output_ids, result
        assert any(text in result.error for text in texts), result.error
        assert result.finished_at - result.started_at < bound_s, result
        assert len(result.finish_reasons) <= 1


def test_a_prefill_server_that_hangs(cluster: Cluster, model: Path, reference: Reference) -> None:
    """Guards against requests that wait for their timeout because a prefill scheduler hangs while
    its HTTP processes answer SGLang's own heartbeat. They must fail within the heartbeat bound and
    name the server. Requests of the other prefill server go on; and once the server runs again,
    decode uses it, with right answers and without leaks of the failed requests."""
    tokens = prompt_maker(model, seed=31)
    prompts, more = [tokens(200 + i) for i in range(4)], [tokens(150 + i) for i in range(4)]
    expected, expected_more = (reference.answers(p, NEW_TOKENS) for p in (prompts, more))
    warm, other = asyncio.run(cluster.ask([more[0]], [more[1]]))
    assert_right(warm, expected_more[:1])
    assert_right(other, expected_more[1:2])
    with frozen(cluster.first.process):
        lost, served = asyncio.run(cluster.ask(prompts, more))
    check_failed(lost, BOUND_S + 2, "lost prefill server")
    assert_right(served, expected_more)
    back, _ = asyncio.run(cluster.ask(prompts, []))
    assert_right(back, expected)
    cluster.pair.check()
    url = cluster.pair.decode_url
    # Gauges are set once a second.
    until(lambda: metrics.scrape(url)["sglang:num_decode_deferred_kv_release_reqs"] == 0, 10.0)
    counted = metrics.scrape(url)
    assert counted[metrics.FAILED_ROOMS] >= len(prompts)
    gauges = {
        metric.name
        for metric in METRICS.values()
        if (metric.kind, metric.side) == ("gauge", "decode")
    }
    assert {f"sglang:{name}" for name in gauges} <= counted.keys()


@pytest.mark.hazard("dead-peer-leftovers")
def test_a_prefill_server_that_dies(cluster: Cluster, model: Path, reference: Reference) -> None:
    """Guards against requests that outlive a killed prefill server by more than the heartbeat
    bound, against failures of the other server's requests, and against a server that decode does
    not use after its restart at the same address."""
    tokens = prompt_maker(model, seed=32)
    prompts, more = [tokens(900 + i) for i in range(4)], [tokens(150 + i) for i in range(4)]
    expected, expected_more = (reference.answers(p, NEW_TOKENS) for p in (prompts, more))

    async def kill_while_asked() -> tuple[list[Result], list[Result]]:
        asked = asyncio.create_task(cluster.ask(prompts, more))
        await asyncio.sleep(0.3)
        kill_group(cluster.first.process.pid)
        return await asked

    lost, served = asyncio.run(kill_while_asked())
    assert_right(served, expected_more)
    ended_early = [result for result in lost if result.error is None]
    assert_right(ended_early, [expected[lost.index(result)] for result in ended_early])
    late = [result for result in lost if result.error is not None]
    assert late, "all requests ended before the server was killed"
    check_failed(late, BOUND_S + 2, "lost prefill server", "Could not fetch", "connect")
    cluster.first.restart()
    cluster.pair.processes["prefill"] = cluster.first.process
    back, _ = asyncio.run(cluster.ask(prompts, []))
    assert_right(back, expected)
    cluster.pair.check()
