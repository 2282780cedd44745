"""Buffer-only HiCache servers over one store, for the end-to-end tests: servers, their checks, and
the scenarios that every store shares."""

from __future__ import annotations

import contextlib
import json
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests

from benchmark.harness import checks
from benchmark.harness.client import Request, Target
from benchmark.harness.fleet import Fleet
from benchmark.harness.process import ServerProcess
from benchmark.harness.servers import ServerConfig, Sizes, aggregated
from chaos import store
from chaos.logs import log_problems
from e2e.support import Ids, Reference, prompt_maker, send_and_leave, until

NEW_TOKENS = 16
STAGE_PAGES = 32
MAX_RUNNING = 16
TESTS = str(Path(__file__).parents[1])
"""Folder from which servers import modules of the tests."""


def page_size(default: int) -> int:
    """Return the page size to test with: ``HICACHE_PAGE_SIZE`` if set, otherwise ``default``."""
    return int(os.environ.get("HICACHE_PAGE_SIZE", default))


@dataclass(frozen=True)
class Backend:
    """The settings of a server for its store."""

    name: str
    extra_config: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    model: Path | None = None
    """None for the model of all servers."""
    ranks: int = 1
    """Number of tensor-parallel ranks."""
    args: tuple[str, ...] = ()
    """More arguments of the server, in addition to those of HiCache."""


@dataclass(frozen=True)
class Server:
    """A running server with a stage."""

    process: ServerProcess
    url: str

    def answers(self, prompts: list[Ids]) -> list[dict[str, Any]]:
        """Return the answers of ``/generate`` to all prompts, sent at once."""
        sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
        body = {"input_ids": prompts, "sampling_params": sampling}
        answer = requests.post(f"{self.url}/generate", json=body, timeout=120)
        assert answer.status_code == 200, answer.text[:500]
        answers: list[dict[str, Any]] = answer.json()
        return answers

    def generated(self, prompts: list[Ids]) -> list[Ids]:
        """Return the generated tokens of each prompt."""
        return [answer["output_ids"] for answer in self.answers(prompts)]

    def flush(self) -> None:
        """Empty the tree, as soon as the server is idle and its writes to the store have ended."""

        def flushed() -> bool:
            with contextlib.suppress(RuntimeError):
                checks.flush(self.url, wait_s=30.0)
                return True
            return False

        until(flushed)

    def stage(self) -> dict[str, float]:
        """Return the stage's metrics, without their common prefix."""
        return store.stage(self.url)

    def wait_drained(self, timeout_s: float = 60.0) -> dict[str, float]:
        """Wait until the server is idle and nothing is staged or queued to be written.

        Check its health and memory. Return the stage's metrics.
        """
        checks.wait_idle(self.process, self.url, timeout_s)
        store.wait_drained(self.url, timeout_s)
        checks.assert_healthy(self.process)
        assert not log_problems(self.process.log)
        assert checks.load(self.url).tokens == 0, "an idle server holds tokens"
        return self.stage()


@contextmanager
def servers(
    model: Path, logs: Path, page: int, backends: Sequence[Backend], deadline_s: float
) -> Iterator[list[Server]]:
    """Start a server for each backend, all together; they do not know of each other.

    ``deadline_s``: deadline of the store calls.
    """
    layout = [_config(model, page, backend, deadline_s) for backend in backends]
    with Fleet(layout, logs) as fleet:
        yield [
            Server(process, config.url)
            for process, config in zip(fleet.processes.values(), layout, strict=True)
        ]


def _config(model: Path, page: int, backend: Backend, deadline_s: float) -> ServerConfig:
    extra = {**backend.extra_config, "prefetch_threshold": page}
    arguments = (
        "--enable-hierarchical-cache",
        *("--hicache-host-memory-mode", "buffer_only"),
        *("--hicache-buffer-pages", str(STAGE_PAGES)),
        *("--hicache-storage-backend", backend.name),
        *("--hicache-storage-prefetch-policy", "wait_complete"),
        *("--hicache-io-backend", "direct", "--hicache-mem-layout", "page_first_direct"),
        *("--hicache-storage-backend-extra-config", json.dumps(extra)),
        "--sleep-on-idle",  # so that the other server gets the core
        *backend.args,
    )
    env = {
        "PYTHONPATH": os.pathsep.join(filter(None, (TESTS, os.environ.get("PYTHONPATH")))),
        # A slow machine must not turn hits into timeouts.
        "SGLANG_HICACHE_BUFFER_READ_TIMEOUT": "60",
        # Otherwise nothing is fetched: a model this small computes faster than any store answers.
        "SGLANG_HICACHE_BUFFER_ALWAYS_FETCH": "1",
        "SGLANG_HICACHE_STORE_DEADLINE": str(deadline_s),
        **backend.env,
    }
    sizes = Sizes(24_000, page, chunked_prefill_tokens=256, max_running=MAX_RUNNING)
    return aggregated(
        backend.model or model,
        sizes,
        stock=False,
        ranks=backend.ranks,
        extra_args=arguments,
        env=env,
    )


def from_store(answers: Sequence[dict[str, Any]]) -> list[int]:
    """Return the tokens of each prompt that came from the store. The host must have none."""
    # There are no details if there was no hit.
    details = [answer["meta_info"]["cached_tokens_details"] or {} for answer in answers]
    assert not any(detail.get("host") for detail in details)
    return [int(detail.get("storage", 0)) for detail in details]


def wait_used_again(server: Server, prompts: list[Ids], expected: list[Ids]) -> None:
    """Wait until a recovered store is used again for writes and for reads.

    That takes until the next probe, which requests start.
    """

    def served() -> bool:
        server.flush()
        answers = server.answers(prompts)
        assert [answer["output_ids"] for answer in answers] == expected
        return all(from_store(answers))

    until(served, 60.0)


@dataclass(frozen=True)
class Questions:
    """Prompts and the aggregated server's answers."""

    prompts: list[Ids]
    expected: list[Ids]
    spare: list[tuple[Ids, Ids]]
    """More prompts and answers, for ``fresh``."""

    def fresh(self) -> tuple[list[Ids], list[Ids]]:
        """Return two prompts that share a prefix, and one that no server has received yet."""
        prompts, expected = self._pick(0, 2)
        prompt, answer = self.spare.pop()
        return [*prompts, prompt], [*expected, answer]

    def some(self) -> tuple[list[Ids], list[Ids]]:
        """Return two prompts that share a prefix, and one that shares nothing."""
        return self._pick(0, 2, -1)

    def others(self) -> tuple[list[Ids], list[Ids]]:
        """Return two prompts that share nothing with those of ``some``."""
        return self._pick(1, -2)

    def _pick(self, *indices: int) -> tuple[list[Ids], list[Ids]]:
        return [self.prompts[i] for i in indices], [self.expected[i] for i in indices]


def questions(model: Path, reference: Reference, seed: int) -> Questions:
    """Return 16 prompts, of which 12 start with one of two prefixes."""
    tokens = prompt_maker(model, seed)
    prefixes = [tokens(330), tokens(410)]
    prompts: list[Ids] = [[*prefixes[i % 2], *tokens(140 + 17 * i)] for i in range(12)]
    prompts += [tokens(500 + 31 * i) for i in range(4)]
    spare = [tokens(300) for _ in range(8)]
    answers = reference.answers([*prompts, *spare], NEW_TOKENS)
    return Questions(prompts, answers[:16], list(zip(spare, answers[16:], strict=True)))


def check_answers(writer: Server, reader: Server, asked: Questions, page: int) -> None:
    """Check the answers of a cold server, after a flush, and of another server of the store."""
    prompts, expected = asked.prompts, asked.expected
    assert writer.generated(prompts) == expected
    writer.flush()
    again = writer.answers(prompts)
    assert [answer["output_ids"] for answer in again] == expected
    check_all_from_store(prompts, again, page)
    after = writer.wait_drained()
    assert 0 < after["peak_pages"] <= STAGE_PAGES
    unique = {tuple(p[: end * page]) for p in prompts for end in _whole(p, page)}
    assert after["store_written_pages_total"] >= len(unique)
    assert after.get("dropped_tokens_total", 0) == 0
    assert after["prefetch_timeouts_total"] == 0

    elsewhere = reader.answers(prompts)
    assert [answer["output_ids"] for answer in elsewhere] == expected
    check_all_from_store(prompts, elsewhere, page)
    reader.wait_drained()


def check_disconnects(server: Server, asked: Questions) -> None:
    """Send 16 prompts at once and disconnect their clients during reads and writes: half of the
    prompts are in the store, the other half is new."""
    rng = random.Random(1)
    server.flush()
    fresh = [rng.sample(prompt, len(prompt)) for prompt in asked.prompts[8:]]
    fickle = [*asked.prompts[:8], *fresh]
    patience: list[float | None] = [rng.uniform(0.02, 1.5) for _ in fickle]
    left = [Request(prompt, NEW_TOKENS) for prompt in fickle]
    assert None in send_and_leave(Target(server.url), left, patience)
    server.flush()
    prompts, expected = asked.some()
    assert server.generated(prompts) == expected
    server.wait_drained()


def check_all_from_store(prompts: list[Ids], answers: list[dict[str, Any]], page: int) -> None:
    """Check that all whole pages of each prompt were hits, and some of them in the store."""
    for prompt, answer, stored in zip(prompts, answers, from_store(answers), strict=True):
        meta = answer["meta_info"]
        assert meta["cached_tokens"] == (len(prompt) - 1) // page * page
        assert stored > 0
        assert meta["cached_tokens_details"]["device"] + stored == meta["cached_tokens"]


def _whole(prompt: Ids, page: int) -> range:
    """Return 1, 2, ... up to the number of whole pages of a prompt."""
    return range(1, len(prompt) // page + 1)
