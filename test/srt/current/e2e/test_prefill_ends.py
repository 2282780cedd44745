"""Prefill servers of SGLang 0.5.23 that die and come back, and stock ones beside the lead.

Most tests share one decode server with the lead, while the prefill servers at its peer's address
come and go. The client reads only decode's half of a request, because a dead server answers
nothing.
"""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest

from benchmark.harness import checks, metrics
from benchmark.harness.client import Request, Result, Target, open_session, send
from benchmark.harness.fleet import Pair, PairConfig, start
from benchmark.harness.servers import patchset_env
from current.e2e.support import LEAD, NEW, SIZES, Ids, Talks, variables

#: Bound on a failure: SGLang queries an unknown server 15 times, once a second. A known server is
#: lost after two heartbeats, which is sooner.
STOCK_S = 15.0 + 10.0
ENV = {
    # Decode computes later turns; prefill computes first turns, which are short enough for decode.
    "SGLANG_DISAGGREGATION_DECODE_LOCAL_TOKENS": "128",
    "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "2",
    "SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE": "2",
    "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT": "5",
}
nixl = pytest.mark.parametrize("servers", ["nixl"], indirect=True)
backends = pytest.mark.parametrize("servers", ["nixl", "mooncake"], indirect=True)


class Servers(Pair):
    """A pair with a prefill server that can be killed, and restarted on its ports."""

    def ask(self, prompts: Sequence[Ids]) -> list[Result]:
        """Return decode's answers."""
        return asyncio.run(self.asked(prompts))

    async def asked(self, prompts: Sequence[Ids]) -> list[Result]:
        async with open_session() as session:
            requests = [Request(prompt, NEW, extra=self.target.route()) for prompt in prompts]
            halves = [
                asyncio.create_task(send(session, Target(self.prefill_url), request))
                for request in requests
            ]
            try:
                decode = Target(self.decode_url)
                return await asyncio.gather(
                    *(send(session, decode, request) for request in requests)
                )
            finally:
                for half in halves:
                    half.cancel()
                await asyncio.gather(*halves, return_exceptions=True)

    def kill_prefill(self) -> None:
        """Send SIGKILL to all processes of prefill."""
        self.processes["prefill"].stop()

    def start_prefill(self, *, stock: bool) -> None:
        """Replace the prefill server."""
        self.kill_prefill()
        config = self.layout[0]
        config = replace(config, env={**config.env, **patchset_env(stock)})
        name = f"prefill.{time.monotonic_ns()}"
        self.processes["prefill"] = start(config, self._log_folder, name)
        self.processes["prefill"].wait_ready()

    def turns(self) -> dict[tuple[str, ...], float]:
        """Return decode's counts of turns by side and reason."""
        page = metrics.page(self.decode_url)
        return metrics.by_labels(page, metrics.TURNS, "where", "reason")

    def check_decode_empty(self) -> None:
        """Check that decode passes SGLang's memory check, holds no tokens, and can be flushed."""
        checks.wait_idle(self.processes["decode"], self.decode_url)
        until(lambda: not checks.load(self.decode_url).tokens)
        checks.flush(self.decode_url)
        checks.wait_idle(self.processes["decode"], self.decode_url)
        assert checks.load(self.decode_url) == checks.Load(0, 0)
        checks.assert_healthy(self.processes["decode"])

    def in_transfer(self) -> int:
        """Return the number of requests in decode's transfer queue."""
        with urllib.request.urlopen(f"{self.decode_url}/v1/loads", timeout=30) as answer:
            (rank,) = json.loads(answer.read())["loads"]
        return int(rank["disaggregation"]["decode_transfer_queue_reqs"])


def until(reached: Callable[[], bool], limit_s: float = 30.0) -> None:
    """Wait until ``reached``; fail after ``limit_s``."""
    deadline = time.monotonic() + limit_s
    while not reached():
        assert time.monotonic() < deadline, f"not reached in {limit_s} s"
        time.sleep(0.01)


def check_right(results: Sequence[Result], answers: Sequence[Ids]) -> None:
    assert [result.error for result in results] == [None] * len(results)
    assert [result.output_ids for result in results] == list(answers)


def check_lost(result: Result) -> None:
    """Check that a request failed in time, with an error that names the loss."""
    assert result.error is not None and "no prefill server" in result.error, result.error
    assert result.latency_s < STOCK_S


@pytest.fixture(scope="module")
def servers(
    request: pytest.FixtureRequest, talks: Talks, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Servers]:
    """A pair with the lead on both servers, over a transfer backend."""
    config = PairConfig(
        talks.model,
        backend=request.param,
        radix=True,
        prefill_sizes=SIZES,
        decode_sizes=SIZES,
        skip_warmup=True,
        env=variables(**LEAD | ENV),
    )
    with Servers(config, tmp_path_factory.mktemp("ends")) as pair:
        yield pair


@nixl
def test_killed_while_idle(servers: Servers, talks: Talks) -> None:
    """Guards against later turns that fail with a prefill server that they do not need, and against
    long prompts that wait longer than on stock. Decode does not know of the loss in the first turn
    after it, and knows in the next one."""
    check_right(servers.ask(talks.prompts[0]), talks.answers[0])
    servers.kill_prefill()
    check_right(servers.ask(talks.prompts[1]), talks.answers[1])
    until(lambda: "Lost connection with prefill" in servers.processes["decode"].log_text())
    *short, long = servers.ask([*talks.prompts[2], talks.prompts[3][-1]])
    check_right(short, talks.answers[2])
    check_lost(long)
    assert servers.turns()["local", "no_prefill"] >= len(short)
    servers.check_decode_empty()


@backends
def test_killed_in_the_middle_of_a_transfer(servers: Servers, talks: Talks) -> None:
    """Guards against a restarted server that is not used, and against partly arrived KV of a
    prompt: short prompts are recomputed, the long one fails, nothing is leaked."""
    servers.start_prefill(stock=False)
    *short, long = talks.prompts[3]
    check_right(servers.ask([long]), talks.answers[3][-1:])  # too long for decode
    servers.check_decode_empty()
    checks.wait_idle(servers.processes["prefill"], servers.prefill_url)
    checks.flush(servers.prefill_url)  # so that it recomputes the long prompt
    log = servers.processes["prefill"].log
    chunks = log.read_text().count("Prefill batch")

    async def kill() -> list[Result]:
        first = asyncio.create_task(servers.asked([long]))
        await asyncio.to_thread(until, lambda: log.read_text().count("Prefill batch") > chunks)
        rest = asyncio.create_task(servers.asked(short))
        await asyncio.to_thread(until, lambda: servers.in_transfer() == len(talks.prompts[3]))
        servers.kill_prefill()
        return [*await rest, *await first]

    *results, last = asyncio.run(kill())
    check_right(results, talks.answers[3][:-1])
    check_lost(last)
    assert servers.turns()["local", "transfer_failed"] >= len(short)
    servers.check_decode_empty()


@nixl
def test_a_stock_prefill_server(servers: Servers, talks: Talks) -> None:
    """Guards against a local turn beside a server that cannot release the other half: stock prefill
    computes all turns."""
    servers.start_prefill(stock=True)
    before = servers.turns()
    for turn in range(3):
        check_right(servers.ask(talks.prompts[turn]), talks.answers[turn])
    gained = metrics.gained(before, servers.turns())
    assert {key for key, count in gained.items() if count} == {("remote", "peer")}
    servers.check_decode_empty()
    servers.check()


def test_a_stock_decode_server(talks: Talks, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Guards against a prefill server with the lead that stock decode does not understand."""
    config = PairConfig(
        talks.model,
        radix=True,
        prefill_sizes=SIZES,
        decode_sizes=SIZES,
        skip_warmup=True,
        env=variables(**LEAD),
        decode_env=patchset_env(stock=True),
    )
    with Pair(config, tmp_path_factory.mktemp("stock_decode")) as pair:
        for turn in range(3):
            assert pair.generate(talks.prompts[turn], NEW) == talks.answers[turn]
        pair.check()
        assert "sglang:decode_turns_total" not in metrics.page(pair.decode_url)
