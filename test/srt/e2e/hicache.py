"""Buffer-only HiCache servers over one store, for the end-to-end tests: start, ask, see the stage
empty."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests

from benchmark.harness import checks
from benchmark.harness.fleet import Fleet
from benchmark.harness.ports import allocate_ports
from benchmark.harness.process import ServerProcess
from benchmark.harness.servers import ServerConfig, Sizes, aggregated, tensor_parallel
from chaos import store
from chaos.logs import log_problems
from e2e.support import START_METHOD, Ids

NEW_TOKENS = 16
STAGE_PAGES = 32
MAX_RUNNING = 16
TESTS = str(Path(__file__).parents[1])
"""Where servers find modules of the tests."""


def page_size(default: int) -> int:
    """The page size to test with: ``HICACHE_PAGE_SIZE`` where it is set."""
    return int(os.environ.get("HICACHE_PAGE_SIZE", default))


@dataclass(frozen=True)
class Backend:
    """What a server is told of its store."""

    name: str
    extra_config: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    stage: bool = True
    """False: the stock release, with its own host cache."""
    model: Path | None = None
    """None: the model of all servers."""
    ranks: int = 1
    """Tensor parallel."""


@dataclass(frozen=True)
class Server:
    """A running server with a stage."""

    process: ServerProcess
    url: str

    def post(self, prompts: list[Ids], new_tokens: int = NEW_TOKENS, **fields: Any) -> Any:
        """What ``/generate`` says to all prompts, asked at once."""
        sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
        body = {"input_ids": prompts, "sampling_params": sampling, **fields}
        answer = requests.post(f"{self.url}/generate", json=body, timeout=120)
        assert answer.status_code == 200, answer.text[:500]
        return answer.json()

    def answers(self, prompts: list[Ids]) -> list[dict[str, Any]]:
        """The answers to all prompts, asked at once."""
        found: list[dict[str, Any]] = self.post(prompts)
        return found

    def generated(self, prompts: list[Ids]) -> list[Ids]:
        """The tokens that follow each prompt."""
        return [answer["output_ids"] for answer in self.answers(prompts)]

    def abort(self, rid: str = "", *, everything: bool = False) -> None:
        """Ask to abort the requests whose id starts so, or all of them."""
        body = {"abort_all": True} if everything else {"rid": rid}
        requests.post(f"{self.url}/abort_request", json=body, timeout=30).raise_for_status()

    def running(self) -> int:
        """Requests that run."""
        ranks = requests.get(f"{self.url}/get_load", timeout=30).json()
        return sum(rank["num_reqs"] - rank["num_waiting_reqs"] for rank in ranks)

    def flush(self) -> None:
        """Empty the tree, as soon as the server is idle and the store has all that it takes."""

        def flushed() -> bool:
            with contextlib.suppress(RuntimeError):
                checks.flush(self.url, wait_s=30.0)
                return True
            return False

        until(flushed)

    def stage(self) -> dict[str, float]:
        """The stage's metrics, without their common prefix."""
        return store.stage(self.url)

    def drained(self, timeout_s: float = 60.0) -> dict[str, float]:
        """Idle, healthy, memory checked, and nothing staged or waiting to be written; the stage's
        metrics then."""
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
    """A server for each backend, started together; they know nothing of each other.

    ``deadline_s``: of the calls of a store.
    """
    layout = [_config(model, page, backend, deadline_s) for backend in backends]
    with Fleet(layout, logs) as fleet:
        yield [
            Server(process, config.url)
            for process, config in zip(fleet.processes.values(), layout, strict=True)
        ]


def _config(model: Path, page: int, backend: Backend, deadline_s: float) -> ServerConfig:
    http, nccl = allocate_ports(2)
    extra = {**backend.extra_config, "prefetch_threshold": page}
    parallel, parallel_env = tensor_parallel(backend.ranks)
    stage = ("--hicache-host-memory-mode", "buffer_only", "--hicache-buffer-pages")
    arguments = (
        "--enable-hierarchical-cache",
        *((*stage, str(STAGE_PAGES)) if backend.stage else ()),
        *("--hicache-storage-backend", backend.name),
        *("--hicache-storage-prefetch-policy", "wait_complete"),
        *("--hicache-io-backend", "direct", "--hicache-mem-layout", "page_first_direct"),
        *("--hicache-storage-backend-extra-config", json.dumps(extra)),
        "--sleep-on-idle",  # the other server needs the core
        *parallel,
    )
    env = {
        **parallel_env,
        START_METHOD: "fork",
        "PYTHONPATH": os.pathsep.join(filter(None, (TESTS, os.environ.get("PYTHONPATH")))),
        # A slow machine must not turn hits into timeouts.
        "SGLANG_HICACHE_BUFFER_READ_TIMEOUT": "60",
        # A model this small computes faster than any store answers.
        "SGLANG_HICACHE_BUFFER_ALWAYS_FETCH": "1",
        "SGLANG_HICACHE_STORE_DEADLINE": str(deadline_s),
        "SGLANG_HICACHE_STORE_LONGEST_RETRY": "2",
        **backend.env,
    }
    sizes = Sizes(24_000, page, chunked_prefill_tokens=256, max_running=MAX_RUNNING)
    return aggregated(
        backend.model or model,
        (http, nccl),
        sizes,
        stock=not backend.stage,
        extra_args=arguments,
        env=env,
    )


@contextmanager
def asked(server: Server, *args: Any, **fields: Any) -> Iterator[Future[Any]]:
    """Requests on their way; their answers are waited for at the end."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(server.post, *args, **fields)


def until(condition: Any, timeout_s: float = 30.0) -> None:
    """Wait for servers to bring a condition about."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.02)


def from_store(answers: Sequence[dict[str, Any]]) -> list[int]:
    """How many tokens of each answer's prompt the store had; never has the host any."""
    # There are no details where nothing was found.
    details = [answer["meta_info"]["cached_tokens_details"] or {} for answer in answers]
    assert not any(one.get("host") for one in details)
    return [int(one.get("storage", 0)) for one in details]


def works_again(server: Server, prompts: list[Ids], expected: list[Ids]) -> None:
    """A store that is well again is used again: it gets what is computed, and is asked for it.

    That takes until the next probe, which requests start.
    """

    def served() -> bool:
        server.flush()
        answers = server.answers(prompts)
        assert [answer["output_ids"] for answer in answers] == expected
        return all(from_store(answers))

    until(served, 60.0)
