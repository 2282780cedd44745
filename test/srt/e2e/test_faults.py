"""Servers that hang, die and come back: two prefill servers, one decode server."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmark.harness import metrics, servers
from benchmark.harness.client import Request, Result, Target, open_session, send
from benchmark.harness.fleet import start
from benchmark.harness.pair import Pair
from benchmark.harness.ports import allocate_ports
from benchmark.harness.process import ServerProcess
from benchmark.harness.servers import HOST, ServerConfig
from benchmark.harness.watchdog import kill_group
from chaos.faults import scheduler_of, signal_all
from e2e.support import Ids, Reference, pair_config, prompt_maker
from sglang.srt.disaggregation.delta.metrics import DECODE_GAUGES

NEW_TOKENS = 8
INTERVAL_S = 2.0  # the least that SGLang takes
HEARTBEATS = 2
#: A look takes at most an interval, and one may just have begun.
BOUND_S = (HEARTBEATS + 1) * 2 * INTERVAL_S
ENV = {
    "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": str(INTERVAL_S),
    "SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE": str(HEARTBEATS),
    "SGLANG_DISAGGREGATION_QUARANTINE_TIMEOUT": "40",
}


@dataclass
class Prefill:
    """One prefill server that can be killed and started again at its ports."""

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

    def halves(self, prefill: Prefill, prompt: Ids) -> tuple[Request, Request]:
        """The two halves of a request, to be sent and judged apart."""
        room = random.getrandbits(62)
        extra = {
            "bootstrap_host": HOST,
            "bootstrap_port": prefill.config.bootstrap_port,
            "bootstrap_room": room,
        }
        return (
            Request(prompt, NEW_TOKENS, extra=extra, label="prefill"),
            Request(prompt, NEW_TOKENS, extra=extra, label="decode"),
        )

    async def ask(self, prefill: Prefill, prompt: Ids) -> Result:
        """Decode's answer to a request whose prefill half nobody waits for."""
        to_prefill, to_decode = self.halves(prefill, prompt)
        async with open_session() as session:
            half = asyncio.create_task(send(session, Target(prefill.config.url), to_prefill))
            try:
                return await send(session, Target(self.pair.decode_url), to_decode)
            finally:
                half.cancel()
                await asyncio.gather(half, return_exceptions=True)

    async def ask_both(
        self, prompts: list[Ids], more: list[Ids]
    ) -> tuple[list[Result], list[Result]]:
        """``prompts`` by way of the first prefill server, ``more`` by the second, all at once."""
        tasks = [self.ask(self.first, prompt) for prompt in prompts]
        tasks += [self.ask(self.second, prompt) for prompt in more]
        results = await asyncio.gather(*tasks)
        return results[: len(prompts)], results[len(prompts) :]


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    logs = tmp_path_factory.mktemp("faults")
    config = pair_config(model, logs, page_size=16, env=ENV)
    with Pair(config, logs) as pair:
        template = pair.layout[0]
        ports = allocate_ports(3)
        second = servers.prefill(
            model,
            (ports[0], ports[1], ports[2]),
            config.prefill_sizes,
            env={**template.env},
        )
        process = start(second, logs / "second")
        process.wait_ready()
        made = Cluster(
            pair,
            Prefill(template, logs, pair.processes["prefill"]),
            Prefill(second, logs, process),
        )
        try:
            yield made
        finally:
            made.first.process.stop()
            made.second.process.stop()


def right(results: list[Result], expected: list[Ids]) -> None:
    assert [result.error for result in results] == [None] * len(results)
    assert [result.output_ids for result in results] == expected


def failed(results: list[Result], bound_s: float, *texts: str) -> None:
    """Each got one error, in time, that names one of ``texts``."""
    for result in results:
        assert result.error is not None and not result.output_ids, result
        assert any(text in result.error for text in texts), result.error
        assert result.finished_at - result.started_at < bound_s, result
        assert len(result.finish_reasons) <= 1


def test_a_prefill_server_that_hangs(cluster: Cluster, model: Path, reference: Reference) -> None:
    """Its scheduler process stands still while its HTTP side answers on: SGLang's own heartbeat
    sees nothing, and requests would wait for their timeout. They must fail within the heartbeat
    bound, by name; requests of the other prefill server must not notice; and once it runs again,
    decode uses it again, with the right answers, and nothing is left of the failed ones."""
    tokens = prompt_maker(model, seed=31)
    prompts, more = [tokens(200 + i) for i in range(4)], [tokens(150 + i) for i in range(4)]
    expected, expected_more = (reference.answers(p, NEW_TOKENS) for p in (prompts, more))
    warm, other = asyncio.run(cluster.ask_both([more[0]], [more[1]]))
    right(warm, expected_more[:1])
    right(other, expected_more[1:2])
    hung = scheduler_of(cluster.first.process.pid)
    signal_all([hung], signal.SIGSTOP)
    try:
        lost, served = asyncio.run(cluster.ask_both(prompts, more))
    finally:
        signal_all([hung], signal.SIGCONT)
    failed(lost, BOUND_S + 2, "lost prefill server")
    right(served, expected_more)
    back, _ = asyncio.run(cluster.ask_both(prompts, []))
    right(back, expected)
    cluster.pair.check()
    deadline = time.monotonic() + 10
    while True:  # gauges are set once a second
        counted = metrics.scrape(cluster.pair.decode_url)
        if not counted["sglang:decode_protected_tokens"] or time.monotonic() > deadline:
            break
        time.sleep(0.2)
    assert counted[metrics.FAILED_ROOMS] >= len(prompts)
    assert {f"sglang:{gauge}" for gauge in DECODE_GAUGES} <= counted.keys()
    assert counted["sglang:decode_prefix_leases"] == counted["sglang:decode_protected_tokens"] == 0


@pytest.mark.hazard("dead-peer-leftovers")
def test_a_prefill_server_that_dies(cluster: Cluster, model: Path, reference: Reference) -> None:
    """Killed with requests under way. They fail within the heartbeat bound, those of the other
    server do not notice, and a server that is started at its address is picked up without touching
    decode."""
    tokens = prompt_maker(model, seed=32)
    prompts, more = [tokens(900 + i) for i in range(4)], [tokens(150 + i) for i in range(4)]
    expected, expected_more = (reference.answers(p, NEW_TOKENS) for p in (prompts, more))

    async def kill_while_asked() -> tuple[list[Result], list[Result]]:
        asked = asyncio.create_task(cluster.ask_both(prompts, more))
        await asyncio.sleep(0.3)
        kill_group(cluster.first.process.pid)
        return await asked

    lost, served = asyncio.run(kill_while_asked())
    right(served, expected_more)
    ended_early = [result for result in lost if result.error is None]
    right(ended_early, [expected[lost.index(result)] for result in ended_early])
    late = [result for result in lost if result.error is not None]
    assert late, "all were done before the server was killed: this shows nothing"
    failed(late, BOUND_S + 2, "lost prefill server", "Could not fetch", "connect")
    cluster.first.restart()
    cluster.pair.processes["prefill"] = cluster.first.process
    back, _ = asyncio.run(cluster.ask_both(prompts, []))
    right(back, expected)
    cluster.pair.check()
