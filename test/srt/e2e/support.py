"""Shared by the end-to-end tests: reference answers, pairs with event logs, page accounting."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from benchmark.harness.pair import Aggregated, Pair, PairConfig
from benchmark.harness.servers import Sizes
from benchmark.harness.workload import token_range
from sglang.srt.disaggregation.delta.events import ENV as EVENT_LOG
from sglang.srt.disaggregation.delta.events import Admitted, Sent

Ids = list[int]

#: The stand-in can fork SGLang's processes, which halves a start; ``spawn`` is SGLang's own way.
START_METHOD = "SGLANG_CPU_STANDIN_START_METHOD"


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
        EVENT_LOG: str(logs / "events"),
        START_METHOD: "fork",
        "SGLANG_DISAGGREGATION_CHECK_INVARIANTS": "1",
        **changes.pop("env", {}),
    }
    defaults: dict[str, Any] = {
        "radix": True,
        "prefill_sizes": Sizes(pool_tokens=32_000, page_size=page, chunked_prefill_tokens=chunk),
        "decode_sizes": Sizes(pool_tokens=decode_tokens, page_size=page),
        "env": env,
    }
    return PairConfig(model=model, **{**defaults, **changes})


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
                event = msgspec.json.decode(line, type=Admitted | Sent)
                (admitted if isinstance(event, Admitted) else sent).append(event)
            self._seen[path] = len(lines)
        return admitted, sent


def assert_tiled(admitted: list[Admitted], sent: list[Sent], page_bytes: int) -> None:
    """Each room's destination pages were filled in order, once; bytes are those of its pages."""
    for admission in admitted:
        chunks = [event for event in sent if event.room == admission.room]
        pages = [page for chunk in chunks for page in chunk.destination_pages]
        assert pages == admission.pages
        assert sum(chunk.bytes for chunk in chunks) == len(pages) * page_bytes


def settle(pair: Pair) -> None:
    """Both servers idle and balanced: SGLang's strict memory check and our invariants passed."""
    pair.check()
    for role in ("prefill", "decode"):
        log = pair.processes[role].log_text()
        assert "InvariantError" not in log
        assert "Traceback" not in log, log[log.index("Traceback") :][:3000]
