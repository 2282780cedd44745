"""How many streams the replayer holds on one core, and how late it then sends.

    python -m benchmark.agentic.replay.lateness [--streams N] [--requests N] [--out FILE]

The replayer, with the process that makes its request bodies, has one core; the stub has another.
Requests arrive at random (Poisson) at a rate that keeps more than ``--streams`` open at once. Exit
status 1 unless that many were, nearly all of the time, with send lateness p99 under ``--late-ms``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import resource
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from benchmark.agentic.replay import stub
from benchmark.agentic.replay.limits import raise_open_files
from benchmark.agentic.replay.outcome import Outcome
from benchmark.agentic.replay.prepare import PromptSource
from benchmark.agentic.replay.report import client, open_over_time
from benchmark.agentic.replay.run import replay
from benchmark.harness import environment
from benchmark.harness.report import percentile, write_summary
from benchmark.traces.record import BLOCK_TOKENS, Record, blocks

_MORE = 1.25  # mean of the streams over --streams: arrivals are random
_HELD = 0.95  # share of the steady time in which --streams must have been open


@dataclass(frozen=True)
class Measured:
    requests: int
    failed: int
    prompt_tokens_mean: float
    output_tokens: int
    """Of each request."""
    events_per_s: float
    """Tokens that came as an event each, in the steady time."""
    streams_asked: int
    streams_p5: float
    """Open streams over the steady time: fewer in 5% of it."""
    streams_mean: float
    streams_most: int
    streams_most_by_stub: int
    """The stub's own count."""
    held_share: float
    """Share of the steady time with at least ``streams_asked``."""
    late_p50_ms: float
    late_p99_ms: float
    late_max_ms: float
    loop_lag_p99_ms: float
    itl_p50_ms: float
    itl_p99_ms: float
    replayer_cpu_share: float
    """Of its core, the process that makes bodies included."""
    bodies_cpu_share: float
    """Of it, that process."""
    cpu_wait_share: float
    """Share of the run in which the sending thread waited while other programs had its core. The
    lateness that comes from it is the machine's."""

    def passed(self, late_ms: float) -> bool:
        return not self.failed and self.late_p99_ms < late_ms and self.held_share >= _HELD


def trace(
    requests: int, per_s: float, prompt: tuple[int, int], output: int, seed: int
) -> Iterator[Record]:
    """Poisson arrivals; each prompt begins with one of 16 blocks and is otherwise new."""
    rng = random.Random(seed)
    at, fresh = 0.0, 16
    for i in range(requests):
        length = rng.randint(*prompt)
        count = blocks(length) - 1
        ids = (rng.randrange(16), *range(fresh, fresh + count))
        fresh += count
        yield Record(at * 1e3, length, output, ids, session_id=str(i), turn=0)
        at += rng.expovariate(per_s)


def over_time(outcomes: Sequence[Outcome], begin: float, end: float) -> list[tuple[int, float]]:
    """Open streams between two times: (how many, for how many seconds)."""
    steps = open_over_time(outcomes)
    spans = []
    for (at, count), (until, _) in zip(steps, steps[1:], strict=False):
        seconds = min(until, end) - max(at, begin)
        if seconds > 0:
            spans.append((count, seconds))
    return spans


def weighted_percentile(spans: Sequence[tuple[int, float]], p: float) -> float:
    """The count below which ``p`` percent of the seconds lie."""
    left = sum(seconds for _, seconds in spans) * p / 100
    for count, seconds in sorted(spans):
        left -= seconds
        if left <= 0:
            return count
    return 0.0


def measured(
    outcomes: Sequence[Outcome],
    streams: int,
    by_stub: int,
    cpu: tuple[float, float, float],
    wall: float,
) -> Measured:
    """``cpu``: seconds of the replayer, of its child, and waited for. ``wall``: that they had."""
    life = percentile([o.e2e_s for o in outcomes], 50)
    begin = outcomes[0].started_s + life  # by then as many end as begin
    end = max(o.started_s for o in outcomes)
    spans = over_time(outcomes, begin, end)
    seconds = sum(length for _, length in spans) or 1e-9
    steady = [o for o in outcomes if o.finished_s > begin and o.started_s < end]
    shares = [
        o.output_tokens * (min(o.finished_s, end) - max(o.started_s, begin)) / o.e2e_s
        for o in steady
    ]
    late = client(outcomes)
    itl = [gap for o in outcomes for gap in o.itl_s]
    mean = sum(count * length for count, length in spans) / seconds
    return Measured(
        requests=len(outcomes),
        failed=sum(o.error is not None for o in outcomes),
        prompt_tokens_mean=sum(o.prompt_tokens for o in outcomes) / len(outcomes),
        output_tokens=outcomes[0].wanted_tokens,
        events_per_s=sum(shares) / seconds,
        streams_asked=streams,
        streams_p5=weighted_percentile(spans, 5),
        streams_mean=mean,
        streams_most=max((count for count, _ in spans), default=0),
        streams_most_by_stub=by_stub,
        held_share=sum(length for count, length in spans if count >= streams) / seconds,
        late_p50_ms=late.late_p50_s * 1e3,
        late_p99_ms=late.late_p99_s * 1e3,
        late_max_ms=late.late_max_s * 1e3,
        loop_lag_p99_ms=late.loop_lag_p99_s * 1e3,
        itl_p50_ms=percentile(itl, 50) * 1e3,
        itl_p99_ms=percentile(itl, 99) * 1e3,
        replayer_cpu_share=(cpu[0] + cpu[1]) / wall,
        bodies_cpu_share=cpu[1] / wall,
        cpu_wait_share=cpu[2] / wall,
    )


def measure(args: argparse.Namespace) -> Measured:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise OSError("one core for the replayer and one for the stub are needed, there is 1")
    life = args.output / args.tokens_per_s
    records = list(
        trace(args.requests, args.streams * _MORE / life, args.prompt, args.output, args.seed)
    )
    raise_open_files(args.requests)
    flags = ["--tokens-per-s", str(args.tokens_per_s), "--core", str(cores[1])]
    with stub.process(*flags, *(["--incremental"] if args.incremental else [])) as url:
        os.sched_setaffinity(0, {cores[0]})
        before, began = _cpu(), time.monotonic()
        outcomes = asyncio.run(replay(url, records, PromptSource(range(1000, 30000), BLOCK_TOKENS)))
        wall = time.monotonic() - began
        # The stub still runs, and is not among the children that have ended.
        own, child, waited = (now - then for now, then in zip(_cpu(), before, strict=True))
        with urllib.request.urlopen(f"{url}/streams", timeout=10) as answer:
            most = json.load(answer)["most"]
    return measured(outcomes, args.streams, most, (own, child, waited), wall)


def _cpu() -> tuple[float, float, float]:
    """Seconds of CPU of this process and of its children that have ended; seconds that its first
    thread waited for a CPU."""
    uses = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    own, child = (use.ru_utime + use.ru_stime for use in uses)
    return own, child, int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmark.agentic.replay.lateness")
    add = parser.add_argument
    add("--streams", type=int, default=200, help="that must be open at once")
    add("--requests", type=int, default=4000)
    add("--tokens-per-s", type=float, default=20.0, help="of each stream")
    add("--prompt", type=int, nargs=2, default=(2000, 8000), help="tokens, from and to")
    add("--output", type=int, default=128, help="tokens of each answer")
    add("--incremental", action="store_true", help="events hold new token ids only")
    add("--late-ms", type=float, default=50.0, help="p99 must be under it")
    add("--seed", type=int, default=0)
    add("--out", type=Path, help="JSON")
    args = parser.parse_args()
    args.prompt = tuple(args.prompt)
    console = Console(highlight=False)
    result = measure(args)
    for name, value in asdict(result).items():
        text = f"{value:,.2f}" if isinstance(value, float) else f"{value:,}"
        console.print(f"{name:22} {text:>10}")
    passed = result.passed(args.late_ms)
    console.print("[green]held[/]" if passed else "[red]not held[/]")
    if args.out:
        environment_ = environment.describe()
        write_summary(args.out, {**environment_, **asdict(result), "held": passed})
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
