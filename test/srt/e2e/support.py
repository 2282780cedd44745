"""Shared by the end-to-end tests: reference answers, pairs with event logs, page accounting."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from benchmark.harness import servers
from benchmark.harness.client import Request, Result, Target, open_session, send
from benchmark.harness.fleet import start
from benchmark.harness.pair import Aggregated, Pair, PairConfig
from benchmark.harness.ports import allocate_ports
from benchmark.harness.servers import Sizes
from benchmark.harness.workload import token_range
from sglang.srt.disaggregation.delta.event_log import Admitted, Event, Sent
from sglang.srt.patchset.environment import EVENT_LOG

Ids = list[int]

#: The stand-in can fork SGLang's processes, which halves a start; ``spawn`` is SGLang's own way.
START_METHOD = "SGLANG_CPU_STANDIN_START_METHOD"

#: Not for a stock prefill server, which would sleep while handshakes are under way.
DOZE = ("--sleep-on-idle",)


@dataclass
class Reference:
    """The aggregated server's greedy answers; each prompt is asked once."""

    server: Aggregated
    _known: dict[tuple[tuple[int, ...], int], Ids] = field(default_factory=dict)

    def answers(self, prompts: Sequence[Ids], max_new_tokens: int) -> list[Ids]:
        """The first ``max_new_tokens`` tokens that follow each prompt."""
        keys = [(tuple(prompt), max_new_tokens) for prompt in prompts]
        missing = list(dict.fromkeys(key for key in keys if key not in self._known))
        found = self.server.generate([list(key[0]) for key in missing], max_new_tokens)
        self._known.update(zip(missing, found, strict=True))
        return [self._known[key] for key in keys]


def pair_config(model: Path, logs: Path, **changes: Any) -> PairConfig:
    """A pair with the decode radix cache on, event logs, and our invariants checked when idle."""
    page = changes.pop("page_size", 1)
    decode_tokens = changes.pop("decode_tokens", 8000)
    chunk = changes.pop("chunked_prefill_tokens", 256)
    env = {
        EVENT_LOG.name: str(logs / "events"),
        START_METHOD: "fork",
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
    config = servers.router(allocate_ports(2), [pair.layout[0]], [pair.layout[1]])
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

    def read(self) -> tuple[list[Admitted], list[Sent]]:
        """New admissions and new sends, each in the order of its server."""
        admitted: list[Admitted] = []
        sent: list[Sent] = []
        for path in sorted(self._folder.glob("*.jsonl")):
            lines = path.read_bytes().splitlines()
            for line in lines[self._seen.get(path, 0) :]:
                event = msgspec.json.decode(line, type=Event)
                if isinstance(event, Admitted):
                    admitted.append(event)
                elif isinstance(event, Sent):
                    sent.append(event)
            self._seen[path] = len(lines)
        return admitted, sent


def assert_tiled(admitted: list[Admitted], sent: list[Sent], page_bytes: int) -> None:
    """Each room's destination pages were filled in order, once; bytes are those of its pages."""
    for admission in admitted:
        chunks = [event for event in sent if event.room == admission.room]
        pages = [page for chunk in chunks for page in chunk.destination_pages]
        assert pages == admission.pages
        assert sum(chunk.bytes for chunk in chunks) == len(pages) * page_bytes


@dataclass
class RankLogs:
    """Event logs by scheduler process (rank), of a whole run."""

    admitted: dict[Path, list[Admitted]]
    sent: dict[Path, list[Sent]]

    @classmethod
    def read(cls, logs: Path) -> RankLogs:
        """The logs of every process that wrote one."""
        admitted: dict[Path, list[Admitted]] = {}
        sent: dict[Path, list[Sent]] = {}
        for path in sorted((logs / "events").glob("*.jsonl")):
            for line in path.read_bytes().splitlines():
                event = msgspec.json.decode(line, type=Event)
                if isinstance(event, Admitted):
                    admitted.setdefault(path, []).append(event)
                elif isinstance(event, Sent):
                    sent.setdefault(path, []).append(event)
        return cls(admitted, sent)

    def rooms(self) -> list[int]:
        """Every room that was admitted, by whichever ranks."""
        return sorted({e.room for events in self.admitted.values() for e in events if e.room})


def assert_tiled_by_rank(logs: RankLogs, decode_ranks: int, rank_page_bytes: int) -> None:
    """Each room's pages were filled on each of its decode ranks, in order, once from each sender.

    ``decode_ranks`` admit a room together and must agree on it; ``rank_page_bytes`` are the bytes
    of a page on one of them, which all the prefill ranks that write to it move between them.
    """
    for room in logs.rooms():
        admissions = [e for events in logs.admitted.values() for e in events if e.room == room]
        assert len(admissions) == decode_ranks
        assert len({(e.rid, e.prefix_tokens) for e in admissions}) == 1
        pages = admissions[0].pages
        assert all(e.pages == pages for e in admissions)
        moved: dict[str, int] = {}
        for events in logs.sent.values():
            chunks: dict[str, list[Sent]] = {}
            for event in events:
                if event.room == room:
                    chunks.setdefault(event.peer, []).append(event)
            for peer, of_peer in chunks.items():
                assert [page for chunk in of_peer for page in chunk.destination_pages] == pages
                moved[peer] = moved.get(peer, 0) + sum(chunk.bytes for chunk in of_peer)
        expected = [len(pages) * rank_page_bytes] * decode_ranks if pages else []
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


async def send_and_leave(
    target: Target, requests: list[Request], patience_s: list[float | None]
) -> list[Result | None]:
    """All at once; a client with a patience disconnects from both servers after it."""

    async def one(
        session: aiohttp.ClientSession, request: Request, patience: float | None
    ) -> Result | None:
        try:
            return await asyncio.wait_for(send(session, target, request), patience)
        except asyncio.TimeoutError:
            return None

    async with open_session() as session:
        return list(
            await asyncio.gather(
                *(one(session, r, p) for r, p in zip(requests, patience_s, strict=True))
            )
        )


def settle(pair: Pair) -> None:
    """Both servers idle and balanced: SGLang's strict memory check and our invariants passed."""
    pair.check()
    for role in ("prefill", "decode"):
        log = pair.processes[role].log_text()
        assert "InvariantError" not in log
        assert "Traceback" not in log, log[log.index("Traceback") :][:3000]
