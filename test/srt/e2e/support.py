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
from sglang.srt.disaggregation.delta.observability import Admitted, Event, Sent
from sglang.srt.patchset.environment import EVENT_LOG

Ids = list[int]

#: Not for a stock prefill server, which would sleep while handshakes are under way.
DOZE = ("--sleep-on-idle",)

#: Decode retracts some of its running requests every seventh step.
RETRACTS = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "7"}


@dataclass
class Reference:
    """The aggregated server's greedy answers; each prompt is asked once."""

    server: Aggregated
    model: Path
    _known: dict[tuple[tuple[int, ...], int], Ids] = field(default_factory=dict)

    def answers(self, prompts: Sequence[Ids], max_new_tokens: int) -> list[Ids]:
        """The first ``max_new_tokens`` tokens that follow each prompt."""
        keys = [(tuple(prompt), max_new_tokens) for prompt in prompts]
        missing = list(dict.fromkeys(key for key in keys if key not in self._known))
        found = self.server.generate([list(key[0]) for key in missing], max_new_tokens)
        self._known.update(zip(missing, found, strict=True))
        return [self._known[key] for key in keys]


def post(url: str, route: str, **body: Any) -> None:
    """Have a server carry out a command; an error status raises."""
    requests.post(url + route, json=body, timeout=120).raise_for_status()


def answers_with(
    reference: Reference, weights: Path, prompts: Sequence[Ids], max_new_tokens: int
) -> list[Ids]:
    """The greedy answers of other ``weights``, which the reference server takes for a moment: that
    is faster than the start of another server."""
    url, own = reference.server.config.url, reference.model
    post(url, "/update_weights_from_disk", model_path=str(weights))
    try:
        return reference.server.generate(prompts, max_new_tokens)
    finally:
        post(url, "/update_weights_from_disk", model_path=str(own))


@contextmanager
def reference_server(
    model: Path,
    logs: Path,
    pool_tokens: int,
    page_size: int = 1,
    args: tuple[str, ...] = (),
    env: Mapping[str, str] | None = None,
) -> Iterator[Reference]:
    """SGLang's own aggregated server, stock."""
    sizes = Sizes(pool_tokens, page_size=page_size, chunked_prefill_tokens=2048)
    # Between its own requests it would spin on one of the few cores.
    more: dict[str, Any] = {
        "extra_args": (*DOZE, *args),
        "env": env or {},
    }
    with Aggregated(model, logs, sizes, **more) as server:
        yield Reference(server, model)


def pair_config(model: Path, logs: Path, **changes: Any) -> PairConfig:
    """A pair with the decode radix cache on, event logs, and our invariants checked when idle."""
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
        # Three servers share two cores; one that waits for requests leaves them to the others.
        "decode_args": DOZE,
        "prefill_args": () if changes.get("stock_prefill") or changes.get("stock") else DOZE,
    }
    return PairConfig(model=model, **{**defaults, **changes})


@contextmanager
def balancer(pair: Pair, logs: Path, *, mini: bool) -> Iterator[str]:
    """The URL of one of SGLang's load balancers in front of a running pair: the one in Rust, or the
    small one in Python (``--mini-lb``)."""
    config = servers.router(pair.layout[:2])
    if mini:
        config = replace(config, role="mini-lb", command=(*config.command, "--mini-lb"))
    with start(config, logs) as process:
        process.wait_ready()
        yield config.url


def prompt_maker(model: Path, seed: int) -> Any:
    """A function that returns ``count`` random ordinary tokens of the model."""
    rng = random.Random(seed)
    vocabulary = token_range(model)
    return lambda count: rng.choices(vocabulary, k=count)


class EventLogs:
    """The event logs of both servers, and what has been added since the last ``read``."""

    def __init__(self, logs: Path) -> None:
        self._folder = logs / "events"
        self._seen: dict[Path, int] = {}

    def read(self) -> tuple[list[Admitted], list[tuple[Path, Sent]]]:
        """New admissions, and new sends with the log of the process (rank) that sent; each in the
        order of its process."""
        admitted: list[Admitted] = []
        sent: list[tuple[Path, Sent]] = []
        for path in sorted(self._folder.glob("*.jsonl")):
            lines = path.read_bytes().splitlines()
            for line in lines[self._seen.get(path, 0) :]:
                event = msgspec.json.decode(line, type=Event)
                if isinstance(event, Admitted):
                    admitted.append(event)
                elif isinstance(event, Sent):
                    sent.append((path, event))
            self._seen[path] = len(lines)
        return admitted, sent

    def wait_admitted(self, count: int) -> None:
        """Until ``count`` more requests have been announced to prefill."""
        found = 0

        def announced() -> bool:
            nonlocal found
            found += len(self.read()[0])
            return found >= count

        until(announced, 60.0)


def assert_tiled(
    admitted: list[Admitted], sent: list[tuple[Path, Sent]], page_bytes: int, decode_ranks: int = 1
) -> None:
    """Each room's pages were filled on each of its decode ranks, in order, once by each sender.

    ``decode_ranks`` admit a room together and must agree on it; ``page_bytes`` are the bytes of a
    page on one of them, which all the prefill ranks that write to it move between them.
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
    """Conversations that begin with ``prompts`` and go on with the answer and ``more``; every
    answer is the reference's. Returns what the next turn would ask."""
    for _ in range(turns):
        expected = reference.answers(prompts, new_tokens)
        assert pair.generate(prompts, new_tokens) == expected
        prompts = [
            [*prompt, *answer, *more()] for prompt, answer in zip(prompts, expected, strict=True)
        ]
    return prompts


def prompts_that_share(tokens: Callable[[int], Ids]) -> list[Ids]:
    """Three prompts with a common prefix, and another one. ``tokens``: a ``prompt_maker``."""
    shared = tokens(150)
    return [[*shared, *tokens(120 + 61 * i)] for i in range(3)] + [tokens(300)]


def dp_attention(ranks: int = 2) -> tuple[str, ...]:
    """Arguments of a server with attention data parallelism, beside its tensor parallelism."""
    # From its own port on SGLang would take others that a server beside it may have: the six from
    # this one on, and the 13th after it (PortArgs.init_new, DP_ATTENTION_HANDSHAKE_PORT_DELTA).
    first_port = allocate_ports(14, in_a_row=True)[0]
    return (
        *("--dp-size", str(ranks), "--enable-dp-attention"),
        *("--dist-init-addr", f"127.0.0.1:{first_port}"),
    )


def route(pair: Pair, prefill: ServerConfig | None = None) -> dict[str, Any]:
    """The fields that bring the halves of a new request together at ``prefill``; by default the
    pair's own."""
    server = prefill or pair.layout[0]
    return Target(pair.decode_url, server.url, HOST, server.bootstrap_port).route()


def ask_both(pair: Pair, ids: Ids, params: dict[str, Any], **more: Any) -> list[requests.Response]:
    """One request to both servers at the same time: what prefill and decode answer."""
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
    """Decode's answers to requests that are sent at once, also where ``prefill`` (by default the
    pair's own) never ends its halves: these are dropped with decode's. ``rids``: ids on decode."""
    server = prefill or pair.layout[0]

    async def one(session: aiohttp.ClientSession, number: int) -> Result:
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
        return list(await asyncio.gather(*(one(session, i) for i in range(len(prompts)))))


def assert_right(results: Sequence[Result], expected: Sequence[Ids]) -> None:
    """All are answered, with the tokens that are expected."""
    assert [(result.error, result.output_ids) for result in results] == [
        (None, answer) for answer in expected
    ]


def send_and_leave(
    target: Target, asked: list[Request], patience_s: list[float | None]
) -> list[Result | None]:
    """All at once; a client with a patience disconnects from both servers after it."""

    async def one(
        session: aiohttp.ClientSession, request: Request, patience: float | None
    ) -> Result | None:
        try:
            return await asyncio.wait_for(send(session, target, request), patience)
        except asyncio.TimeoutError:
            return None

    async def all_of_them() -> list[Result | None]:
        async with open_session() as session:
            each = zip(asked, patience_s, strict=True)
            return list(await asyncio.gather(*(one(session, *of) for of in each)))

    return asyncio.run(all_of_them())


@contextmanager
def frozen(process: ServerProcess) -> Iterator[None]:
    """The scheduler of a server stands still meanwhile; its HTTP side answers on."""
    pid = scheduler_of(process.pid)
    signal_all([pid], signal.SIGSTOP)
    wait_stopped([pid])
    try:
        yield
    finally:
        signal_all([pid], signal.SIGCONT)


def until(condition: Callable[[], object], timeout_s: float = 30.0) -> None:
    """Wait for servers to bring a condition about."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.02)


def running(url: str) -> int:
    """Requests in the batch of a server."""
    ranks = requests.get(f"{url}/get_load", timeout=30).json()
    return sum(rank["num_reqs"] - rank["num_waiting_reqs"] for rank in ranks)


def has_retracted(pair: Pair) -> bool:
    """True if decode has retracted a request."""
    log = pair.processes["decode"].log_text()
    return re.search("#retracted_reqs: [1-9]", log) is not None


def settle(pair: Pair) -> None:
    """Both servers idle and balanced: SGLang's strict memory check and our invariants passed."""
    pair.check()
    for role in ("prefill", "decode"):
        log = NO_VOCABULARY.sub("", pair.processes[role].log_text())
        assert "InvariantError" not in log
        assert "Traceback" not in log, log[log.index("Traceback") :][:3000]
