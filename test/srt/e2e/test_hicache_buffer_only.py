"""Greedy output of buffer-only HiCache servers is the aggregated server's, token by token."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests

from benchmark.harness import checks, metrics
from benchmark.harness.client import Request, Target, open_session, send
from benchmark.harness.pair import start
from benchmark.harness.ports import allocate_ports
from benchmark.harness.process import ServerProcess
from benchmark.harness.servers import Sizes, aggregated
from component.store_parts.masters import Master
from e2e.support import START_METHOD, Ids, Reference, prompt_maker

NEW_TOKENS = 16
STAGE_PAGES = 32
#: The servers update their metrics once a second, and a sleeping scheduler wakes once a second.
METRICS_S = 2.5


@dataclass(frozen=True)
class Server:
    """A running server with a stage."""

    process: ServerProcess
    url: str

    def answers(self, prompts: list[Ids]) -> list[dict[str, Any]]:
        """What ``/generate`` says to all prompts, asked at once."""
        body = {
            "input_ids": prompts,
            "sampling_params": {
                "temperature": 0,
                "max_new_tokens": NEW_TOKENS,
                "ignore_eos": True,
            },
        }
        answer = requests.post(f"{self.url}/generate", json=body, timeout=120)
        assert answer.status_code == 200, answer.text[:500]
        found: list[dict[str, Any]] = answer.json()
        return found

    def buffer(self) -> dict[str, float]:
        """Our metrics."""
        prefix = "sglang:hicache_buffer_"
        now = metrics.scrape(self.url)
        return {k.removeprefix(prefix): v for k, v in now.items() if k.startswith(prefix)}

    def drained(self) -> dict[str, float]:
        """Idle, healthy, and nothing staged or waiting to be written; our metrics then."""
        checks.wait_idle(self.process, self.url)
        deadline = time.monotonic() + 60
        quiet_since = None
        while quiet_since is None or time.monotonic() - quiet_since < METRICS_S:
            now = self.buffer()
            held = {k: now[k] for k in ("write_pages", "read_pages", "pending_intents")}
            if any(held.values()):
                quiet_since = None
            elif quiet_since is None:
                quiet_since = time.monotonic()
            assert time.monotonic() < deadline, f"an idle server holds {held}"
            time.sleep(0.1)
        checks.assert_healthy(self.process)
        assert "Traceback" not in self.process.log_text()
        return now


@contextmanager
def store(backend: str, folder: Path) -> Iterator[tuple[dict[str, Any], dict[str, str]]]:
    """An empty store: extra configuration and environment of the servers that use it."""
    if backend == "file":
        folder.mkdir(parents=True)
        yield {}, {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(folder)}
        return
    master = Master()
    try:
        yield master.extra_config, {"MC_FORCE_TCP": "1"}
    finally:
        master.kill()


@contextmanager
def two_servers(model: Path, logs: Path, backend: str, page_size: int) -> Iterator[list[Server]]:
    """Two servers over one store, started together; they know nothing of each other."""
    with ExitStack() as stack:
        extra, env = stack.enter_context(store(backend, logs / "store"))
        arguments = (
            "--enable-hierarchical-cache",
            *("--hicache-host-memory-mode", "buffer_only"),
            *("--hicache-buffer-pages", str(STAGE_PAGES)),
            *("--hicache-storage-backend", backend),
            *("--hicache-storage-prefetch-policy", "wait_complete"),
            *("--hicache-io-backend", "direct", "--hicache-mem-layout", "page_first_direct"),
            "--hicache-storage-backend-extra-config",
            json.dumps({**extra, "prefetch_threshold": page_size}),
            "--sleep-on-idle",  # the other server needs the core
        )
        servers = []
        for name in ("writer", "reader"):
            http, nccl = allocate_ports(2)
            config = aggregated(
                model,
                (http, nccl),
                Sizes(pool_tokens=24_000, page_size=page_size, chunked_prefill_tokens=256),
                stock=False,
                extra_args=arguments,
                # A slow machine must not turn hits into timeouts.
                env={START_METHOD: "fork", "SGLANG_HICACHE_BUFFER_READ_TIMEOUT": "60", **env},
            )
            servers.append(Server(stack.enter_context(start(config, logs / name)), config.url))
        with ThreadPoolExecutor(len(servers)) as pool:
            list(pool.map(lambda server: server.process.wait_ready(), servers))
        yield servers


def assert_from_store(prompts: list[Ids], answers: list[dict[str, Any]], page_size: int) -> None:
    """All whole pages of all prompts were hits, of each prompt some in the store, none on the
    host."""
    for prompt, answer in zip(prompts, answers, strict=True):
        meta = answer["meta_info"]
        assert meta["cached_tokens"] == (len(prompt) - 1) // page_size * page_size
        details = meta["cached_tokens_details"]
        assert details["host"] == 0
        assert details["storage"] > 0
        assert details["device"] + details["storage"] == meta["cached_tokens"]


async def leave(url: str, prompts: list[Ids], patience_s: list[float]) -> int:
    """Asks all prompts at once and disconnects from each after its patience; how many left."""

    async def one(session: Any, prompt: Ids, patience: float) -> bool:
        request = Request(prompt, NEW_TOKENS)
        try:
            await asyncio.wait_for(send(session, Target(url), request), patience)
        except asyncio.TimeoutError:
            return True
        return False

    async with open_session() as session:
        left = await asyncio.gather(
            *(one(session, *each) for each in zip(prompts, patience_s, strict=True))
        )
    return sum(left)


@pytest.mark.parametrize(("backend", "page_size"), [("mooncake", 16), ("file", 64)])
def test_cold_from_the_store_and_in_another_process(
    model: Path, reference: Reference, logs: Path, backend: str, page_size: int
) -> None:
    """Pages under a wrong key, a stage page reused before the store or the device had copied it,
    or a prefix published at the wrong place would change what is generated. 16 requests at once
    share 32 staging pages, many times less than what they write and read. Clients that go away
    must leave nothing in the stage, whatever was under way for them."""
    rng = random.Random(page_size)
    tokens = prompt_maker(model, seed=page_size)
    prefixes = [tokens(330), tokens(410)]
    prompts: list[Ids] = [[*prefixes[i % 2], *tokens(140 + 17 * i)] for i in range(12)]
    prompts += [tokens(500 + 31 * i) for i in range(4)]
    expected = reference.answers(prompts, NEW_TOKENS)
    with two_servers(model, logs, backend, page_size) as (writer, reader):
        cold = writer.answers(prompts)
        assert [a["output_ids"] for a in cold] == expected
        after = writer.drained()
        assert 0 < after["peak_pages"] <= STAGE_PAGES
        unique = {tuple(p[: end * page_size]) for p in prompts for end in _whole(p, page_size)}
        assert after["store_written_pages_total"] >= len(unique)
        assert after.get("dropped_tokens_total", 0) == 0

        checks.flush(writer.url)
        again = writer.answers(prompts)
        assert [a["output_ids"] for a in again] == expected
        assert_from_store(prompts, again, page_size)
        after = writer.drained()
        assert after["prefetch_timeouts_total"] == 0

        elsewhere = reader.answers(prompts)
        assert [a["output_ids"] for a in elsewhere] == expected
        assert_from_store(prompts, elsewhere, page_size)
        reader.drained()

        # Half of them are in the store, the others are new: reads and writes are both under way.
        checks.flush(reader.url)
        fickle = [*prompts[:8], *(tokens(400) for _ in range(8))]
        patience = [rng.uniform(0.02, 1.5) for _ in fickle]
        assert asyncio.run(leave(reader.url, fickle, patience)) > 0
        reader.drained()
        assert [a["output_ids"] for a in reader.answers(prompts)] == expected
        reader.drained()


def _whole(prompt: Ids, page_size: int) -> range:
    """1, 2, ... up to the whole pages of a prompt."""
    return range(1, len(prompt) // page_size + 1)
