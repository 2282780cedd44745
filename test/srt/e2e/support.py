"""Shared by the end-to-end tests: reference answers, pairs with event logs, page accounting."""

from __future__ import annotations

import asyncio
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import requests

from benchmark.harness import servers
from benchmark.harness.client import Request, Result, Target, open_session, send
from benchmark.harness.fleet import Aggregated, Pair, PairConfig, start
from benchmark.harness.models import token_range
from benchmark.harness.ports import allocate_ports
from benchmark.harness.process import ServerProcess
from benchmark.harness.servers import HOST, ServerConfig, Sizes
from chaos.faults import scheduler_of, signal_all, wait_stopped
from chaos.logs import NO_VOCABULARY
from sglang.srt.disaggregation.delta.observability import Admitted, RoomEvent, Sent
from sglang.srt.patchset.environment import EVENT_LOG

Ids = list[int]

#: Not for a stock prefill server, which would sleep during handshakes.
DOZE = ("--sleep-on-idle",)

#: Decode retracts some of its running requests every seventh step.
RETRACTS = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "7"}


@dataclass
class Reference:
    """The aggregated server's greedy answers; each prompt is sent once."""

    server: Aggregated
    model: Path
    _known: dict[tuple[tuple[int, ...], int], Ids] = field(default_factory=dict)

    def answers(self, prompts: Sequence[Ids], max_new_tokens: int) -> list[Ids]:
        """Return the greedy answers of ``max_new_tokens`` tokens."""
        keys = [(tuple(prompt), max_new_tokens) for prompt in prompts]
        missing = list(dict.fromkeys(key for key in keys if key not in self._known))
        answers = self.server.generate([list(key[0]) for key in missing], max_new_tokens)
        self._known.update(zip(missing, answers, strict=True))
        return [self._known[key] for key in keys]


def post(url: str, route: str, **body: Any) -> None:
    """Send a command to a server; raise for an error status."""
    requests.post(url + route, json=body, timeout=120).raise_for_status()


def answers_with(
    reference: Reference, weights: Path, prompts: Sequence[Ids], max_new_tokens: int
) -> list[Ids]:
    """Return the greedy answers of other ``weights``, which the reference server loads for this
    call: that is faster than the start of another server."""
    url, own_weights = reference.server.config.url, reference.model
    post(url, "/update_weights_from_disk", model_path=str(weights))
    try:
        return reference.server.generate(prompts, max_new_tokens)
    finally:
        post(url, "/update_weights_from_disk", model_path=str(own_weights))


@contextmanager
def reference_server(
    model: Path,
    logs: Path,
    pool_tokens: int,
    page_size: int = 1,
    args: tuple[str, ...] = (),
    env: Mapping[str, str] | None = None,
) -> Iterator[Reference]:
    """Start stock SGLang's aggregated server."""
    sizes = Sizes(pool_tokens, page_size=page_size, chunked_prefill_tokens=2048)
    # Without ``DOZE`` an idle server would spin on one of the few cores.
    more: dict[str, Any] = {
        "extra_args": (*DOZE, *args),
        "env": env or {},
    }
    with Aggregated(model, logs, sizes, **more) as server:
        yield Reference(server, model)


def pair_config(model: Path, logs: Path, **changes: Any) -> PairConfig:
    """Return a pair with decode's radix cache, event logs, and checks of invariants when idle."""
    page = changes.pop("page_size", 1)
    decode_tokens = changes.pop("decode_tokens", 8000)
    chunk = changes.pop("chunked_prefill_tokens", 256)
    env = {
        EVENT_LOG.name: str(logs / "events"),
        "SGLANG_DISAGGREGATION_CHECK_INVARIANTS": "1",
        **changes.pop("env", {}),
    }
    defaults: dict[str, Any] = {
        "radix": True,
        "prefill_sizes": Sizes(pool_tokens=32_000, page_size=page, chunked_prefill_tokens=chunk),
        "decode_sizes": Sizes(pool_tokens=decode_tokens, page_size=page),
        "env": env,
        # Three servers share two cores, so an idle server must not spin.
        "decode_args": DOZE,
        "prefill_args": () if changes.get("stock_prefill") or changes.get("stock") else DOZE,
    }
    return PairConfig(model=model, **{**defaults, **changes})


@contextmanager
def balancer(pair: Pair, logs: Path, *, mini: bool) -> Iterator[str]:
    """Start one of SGLang's load balancers for a running pair, written in Rust or (``mini``) the
    small one in Python (``--mini-lb``). Yield its URL."""
    config = servers.router(pair.layout[:2])
    if mini:
        config = replace(config, role="mini-lb", command=(*config.command, "--mini-lb"))
    with start(config, logs) as process:
        process.wait_ready()
        yield config.url


def prompt_maker(model: Path, seed: int) -> Any:
    """Return a function that returns ``count`` random ordinary tokens of the model."""
    rng = random.Random(seed)
    vocabulary = token_range(model)
    return lambda count: rng.choices(vocabulary, k=count)


class EventLogs:
    """The event logs of both servers; ``read`` returns the new events."""

    def __init__(self, logs: Path) -> None:
        self._folder = logs / "events"
        self._seen: dict[Path, int] = {}

    def read(self) -> tuple[list[Admitted], list[tuple[Path, Sent]]]:
        """Return new admissions, and new sends with the log of the sending process (rank), each in
        the order of its process."""
        admitted: list[Admitted] = []
        sent: list[tuple[Path, Sent]] = []
        for path in sorted(self._folder.glob("*.jsonl")):
            lines = path.read_bytes().splitlines()
            for line in lines[self._seen.get(path, 0) :]:
                event = msgspec.json.decode(line, type=RoomEvent)
                if isinstance(event, Admitted):
                    admitted.append(event)
                elif isinstance(event, Sent):
                    sent.append((path, event))
            self._seen[path] = len(lines)
        return admitted, sent

    def wait_admitted(self, count: int) -> None:
        """Wait until ``count`` more requests have been announced to prefill."""
        count_so_far = 0

        def announced() -> bool:
            nonlocal count_so_far
            count_so_far += len(self.read()[0])
            return count_so_far >= count

        until(announced, 60.0)


def assert_tiled(
    admitted: list[Admitted], sent: list[tuple[Path, Sent]], page_bytes: int, decode_ranks: int = 1
) -> None:
    """Check that each room's pages were written on each decode rank, in order, once by each sender.

    ``decode_ranks`` admit a room together and must agree on it. ``page_bytes`` is the size of a
    page on one of them; all prefill ranks that write to it send that many bytes together.
    """
    for room in {event.room for event in admitted if event.room}:
        admissions = [event for event in admitted if event.room == room]
        assert len(admissions) == decode_ranks
        assert len({(e.rid, e.prefix_tokens, tuple(e.pages)) for e in admissions}) == 1
        pages = admissions[0].pages
        chunks: dict[tuple[Path, str], list[Sent]] = {}
        for sender, event in sent:
            if event.room == room:
                chunks.setdefault((sender, event.peer), []).append(event)
        moved: Counter[str] = Counter()
        for (_, peer), of_peer in chunks.items():
            assert [page for chunk in of_peer for page in chunk.destination_pages] == pages
            moved[peer] += sum(chunk.bytes for chunk in of_peer)
        expected = [len(pages) * page_bytes] * decode_ranks if pages else []
        assert sorted(moved.values()) == expected


def take_turns(
    pair: Pair,
    reference: Reference,
    prompts: list[Ids],
    turns: int,
    new_tokens: int,
    more: Callable[[], Ids],
) -> list[Ids]:
    """Hold conversations that begin with ``prompts`` and continue with the answer and ``more``.

    Every answer must be the reference's. Return the prompts of the next turn.
    """
    for _ in range(turns):
        expected = reference.answers(prompts, new_tokens)
        assert pair.generate(prompts, new_tokens) == expected
        prompts = [
            [*prompt, *answer, *more()] for prompt, answer in zip(prompts, expected, strict=True)
        ]
    return prompts


def prompts_that_share(tokens: Callable[[int], Ids]) -> list[Ids]:
    """Return three prompts with a common prefix, and one without. ``tokens``: a
    ``prompt_maker``."""
    shared = tokens(150)
    return [[*shared, *tokens(120 + 61 * i)] for i in range(3)] + [tokens(300)]


def dp_attention(ranks: int = 2) -> tuple[str, ...]:
    """Return a server's arguments for attention data parallelism, in addition to its ranks."""
    # By default SGLang derives ports from the server's own, which a server beside it may use: six
    # from this one on, and the 13th after it (PortArgs.init_new,
    # DP_ATTENTION_HANDSHAKE_PORT_DELTA).
    first_port = allocate_ports(14, in_a_row=True)[0]
    return (
        *("--dp-size", str(ranks), "--enable-dp-attention"),
        *("--dist-init-addr", f"127.0.0.1:{first_port}"),
    )


def route(pair: Pair, prefill: ServerConfig | None = None) -> dict[str, Any]:
    """Return the fields that connect the halves of a new request, at ``prefill`` or by default at
    the pair's own prefill server."""
    server = prefill or pair.layout[0]
    return Target(pair.decode_url, server.url, HOST, server.bootstrap_port).route()


def ask_both(pair: Pair, ids: Ids, params: dict[str, Any], **more: Any) -> list[requests.Response]:
    """Send one request to both servers at the same time; return prefill's and decode's answers."""
    body = {"input_ids": ids, "sampling_params": params, **route(pair), **more}
    urls = [f"{url}/generate" for url in (pair.prefill_url, pair.decode_url)]
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda url: requests.post(url, json=body, timeout=60), urls))


async def ask_decode(
    pair: Pair,
    prompts: Sequence[Ids],
    new_tokens: int,
    prefill: ServerConfig | None = None,
    rids: Sequence[str] | None = None,
) -> list[Result]:
    """Return decode's answers to requests that are sent at once.

    ``prefill`` (by default the pair's own) may never end its halves: they are dropped when decode's
    end. ``rids``: ids on decode.
    """
    server = prefill or pair.layout[0]

    async def send_one(session: aiohttp.ClientSession, number: int) -> Result:
        extra = route(pair, server)
        to_prefill = Request(prompts[number], new_tokens, extra=extra)
        named = extra if rids is None else {**extra, "rid": rids[number]}
        to_decode = Request(prompts[number], new_tokens, extra=named)
        half = asyncio.create_task(send(session, Target(server.url), to_prefill))
        try:
            return await send(session, Target(pair.decode_url), to_decode)
        finally:
            half.cancel()
            await asyncio.gather(half, return_exceptions=True)

    async with open_session() as session:
        return list(await asyncio.gather(*(send_one(session, i) for i in range(len(prompts)))))


def assert_right(results: Sequence[Result], expected: Sequence[Ids]) -> None:
    """Check that all requests were answered with the expected tokens."""
    assert [(result.error, result.output_ids) for result in results] == [
        (None, answer) for answer in expected
    ]


def send_and_leave(
    target: Target, asked: list[Request], patience_s: list[float | None]
) -> list[Result | None]:
    """Send all requests at once. A client disconnects from both servers after its patience."""

    async def send_one(
        session: aiohttp.ClientSession, request: Request, patience: float | None
    ) -> Result | None:
        try:
            return await asyncio.wait_for(send(session, target, request), patience)
        except asyncio.TimeoutError:
            return None

    async def send_requests() -> list[Result | None]:
        async with open_session() as session:
            clients = zip(asked, patience_s, strict=True)
            return list(await asyncio.gather(*(send_one(session, *client) for client in clients)))

    return asyncio.run(send_requests())


@contextmanager
def frozen(process: ServerProcess) -> Iterator[None]:
    """Stop a server's scheduler within the context; its HTTP processes still answer."""
    pid = scheduler_of(process.pid)
    signal_all([pid], signal.SIGSTOP)
    wait_stopped([pid])
    try:
        yield
    finally:
        signal_all([pid], signal.SIGCONT)


def until(condition: Callable[[], object], timeout_s: float = 30.0) -> None:
    """Wait until ``condition`` is true."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true in time"
        time.sleep(0.02)


def running(url: str) -> int:
    """Return the number of running requests of a server."""
    ranks = requests.get(f"{url}/get_load", timeout=30).json()
    return sum(rank["num_reqs"] - rank["num_waiting_reqs"] for rank in ranks)


def has_retracted(pair: Pair) -> bool:
    """True if decode has retracted a request."""
    log = pair.processes["decode"].log_text()
    return re.search("#retracted_reqs: [1-9]", log) is not None


def settle(pair: Pair) -> None:
    """Wait until both servers are idle, and check their memory, invariants and logs."""
    pair.check()
    for role in ("prefill", "decode"):
        log = NO_VOCABULARY.sub("", pair.processes[role].log_text())
        assert "InvariantError" not in log
        assert "Traceback" not in log, log[log.index("Traceback") :][:3000]
