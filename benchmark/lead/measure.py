"""Fresh servers for each arm in each round; a JSON line for each play whose answers are right."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmark.harness import checks, metrics, report
from benchmark.harness.arm import warm_up
from benchmark.harness.client import Request, Result, Target, send_all
from benchmark.harness.command import RunFailed
from benchmark.harness.environment import describe
from benchmark.harness.models import on_current, random_qwen3
from benchmark.harness.pair import Aggregated, Pair, running
from benchmark.harness.report import Spread, spread, summarize
from benchmark.harness.workload import token_range
from benchmark.lead.arms import (
    ARMS,
    BURST,
    LOADS,
    SHAPES,
    Arm,
    configure,
    plays,
    prefill_sizes,
)
from benchmark.lead.load import Load, play

Answers = dict[str, list[int]]
"""Tokens by ``LOAD SEED LABEL``."""
COLD_PROMPTS = 40
"""Of each cold client, whose answers the aggregated server gives."""


@dataclass(frozen=True)
class Measured:
    """A play. Times in seconds, of the sessions' requests unless it says cold."""

    requests_per_s: float
    ttft_later_s: Spread
    """All requests of a burst."""
    gap_s: Spread
    """From one token of an answer to the next."""
    latency_s: Spread
    cold_answered_per_s: float
    """Cold prompts that were answered while the sessions ran."""
    running: Spread
    """Requests in decode's batch, as it logs them."""
    running_max: int
    retracted: float
    reasons: dict[str, float]
    """Requests by who computed them and why, as the choice counts them."""


def run(kind: str, out: Path, rounds: int, notes: Mapping[str, str], console: Console) -> int:
    """Measures all arms of a kind in turn, and appends what they cost to ``rounds.jsonl``.

    Raises:
        RunFailed: a request failed, or an answer differs from the aggregated server's.
        ServerFailed: a server died, or failed SGLang's memory check.
    """
    model = random_qwen3(out / f"model-{kind}", **SHAPES[kind])
    expected = _expected(kind, out, model, console)
    path = out / "rounds.jsonl"
    done = read(path) if path.exists() else []
    first = 1 + max((row["round"] for row in done if row["kind"] == kind), default=0)
    for number in range(first, first + rounds):
        for arm in ARMS[kind]:  # in turn, so that a busy machine hits all of them
            console.print(f"[bold]{arm.name}[/], round {number}: fresh servers", highlight=False)
            logs = out / "logs" / kind / arm.name.replace(" + ", "-")
            with Pair(configure(kind, arm, model), logs) as pair:
                warm_up(pair)
                for name, seed in _plays(kind):
                    measured = _measure(pair, name, seed, arm, expected)
                    row = {**describe(), **notes, "kind": kind, "arm": arm.name, "load": name}
                    row |= {"round": number, "seed": seed, **report.plain(measured)}
                    with path.open("a") as lines:
                        lines.write(json.dumps(row) + "\n")
                    console.print(f"  {name}: {_line(measured)}", highlight=False)
    return 0


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of ``rounds.jsonl``."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def wrong(results: Sequence[Result], prefix: str, expected: Answers) -> list[str]:
    """What failed, and what was answered differently, one text a request."""
    found = []
    for r in results:
        if r.error is not None:
            found.append(f"{r.label}: {r.error}")
        elif expected.get(f"{prefix} {r.label}") != r.output_ids:
            found.append(f"{r.label}: another answer than the aggregated server's")
    return found


def numbers(
    later: Sequence[Result],
    every: Sequence[Result],
    cold: Sequence[Result],
    batches: Sequence[int],
    gained: Mapping[str, float],
) -> Measured:
    """``later``: requests whose TTFT counts; ``every``: all but the cold ones; ``batches``: sizes
    of decode's batch; ``gained``: what its counters gained, turns by ``WHERE REASON``."""
    all_of, ended = summarize(every), max(r.finished_at for r in every)
    began = min(r.started_at for r in every)
    return Measured(
        requests_per_s=all_of.requests_per_s,
        ttft_later_s=summarize(later).ttft_s,
        gap_s=spread(b - a for r in every for a, b in pairwise(r.token_times)),
        latency_s=all_of.latency_s,
        cold_answered_per_s=sum(began <= r.finished_at <= ended for r in cold) / all_of.duration_s,
        running=spread(batches),
        running_max=max(batches, default=0),
        retracted=gained.get(RETRACTED, 0.0),
        reasons={name: n for name, n in gained.items() if name != RETRACTED and n},
    )


RETRACTED = "sglang:num_retracted_requests_total"


def _plays(kind: str) -> list[tuple[str, int]]:
    if kind == "burst":
        return [("burst", BURST.seed)]
    return [(name, load.seed) for name in LOADS[kind] for load in plays(name)]


def _send(target: Target, name: str, seed: int, vocabulary: range) -> tuple[list[Result], ...]:
    """Requests whose TTFT counts, all of them, the cold ones."""
    if name == "burst":
        sent = asyncio.run(send_all(target, BURST.sent(vocabulary)))
        return sent, sent, []
    load = plays(name)[seed]
    played = play(target, load, vocabulary, load.cold_clients[0])
    later = [r for r in played.talks if not r.label.endswith(".0")]
    return later, played.talks, played.cold


def _measure(pair: Pair, name: str, seed: int, arm: Arm, expected: Answers) -> Measured:
    pair.check()
    for url in (pair.prefill_url, pair.decode_url):
        checks.flush(url)
    decode = pair.processes["decode"]
    logged, before = len(decode.log_text()), _counters(pair.decode_url)
    vocabulary = token_range(pair.config.model)
    later, every, cold = _send(pair.target, name, seed, vocabulary)
    pair.check()  # also lets the last transfers be counted
    if found := wrong([*every, *cold], f"{name} {seed}", expected):
        raise RunFailed(f"{arm.name}, {name}: {'; '.join(found[:5])}")
    gained = metrics.gained(before, _counters(pair.decode_url))
    return numbers(later, every, cold, running(decode.log_text()[logged:]), gained)


def _counters(url: str) -> dict[str, float]:
    page = metrics.page(url)
    turns = metrics.by_labels(page, metrics.TURNS, "where", "reason")
    retracted = metrics.parse(page).get(RETRACTED, 0.0)
    return {RETRACTED: retracted, **{" ".join(key): n for key, n in turns.items()}}


def _expected(kind: str, out: Path, model: Path, console: Console) -> Answers:
    """What an aggregated server of the stock release answers, asked once for a folder."""
    path = out / f"answers-{kind}.json"
    if not path.exists():
        console.print("[bold]aggregated[/]: the answers")
        found: Answers = {}
        sizes = prefill_sizes(kind)
        with Aggregated(model, out / "logs" / kind, sizes, env=on_current()) as server:
            for name, seed in _plays(kind):
                _, every, cold = _send(server.target, name, seed, token_range(model))
                asked = {r.label for r in cold}
                if cold:
                    load = plays(name)[seed]
                    rest = [each for each in _cold(load, model) if each.label not in asked]
                    cold += server.send(rest, concurrency=2)
                for r in (*every, *cold):
                    if r.error is not None:
                        raise RunFailed(f"aggregated, {name}: {r.label}: {r.error}")
                    found[f"{name} {seed} {r.label}"] = list(r.output_ids)
            server.check()
        path.write_text(json.dumps(found))
    answers: Answers = json.loads(path.read_text())
    return answers


def _cold(load: Load, model: Path) -> list[Request]:
    (clients,) = load.cold_clients
    labels = [f"cold {clients}.{c}.{n}" for n in range(COLD_PROMPTS) for c in range(clients)]
    vocabulary, tokens = token_range(model), load.cold_answer_tokens
    return [Request(load.cold_prompt(vocabulary, each), tokens, label=each) for each in labels]


def _line(m: Measured) -> str:
    """The most important of a play, for who watches the run."""
    return (
        f"{m.requests_per_s:.2f} requests/s; TTFT p50 of later turns "
        f"{report.milliseconds(m.ttft_later_s.p50)}; ITL p99 {report.milliseconds(m.gap_s.p99)}; "
        f"running {m.running.mean:.1f}, at most {m.running_max}; retracted {m.retracted:.0f}; "
        f"{m.reasons}"
    )
