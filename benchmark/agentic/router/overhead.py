"""What the router adds to a request's latency, against workers without a model.

python -m benchmark.agentic.router.overhead [--out FILE]

Workers, routers and this client are processes of their own. Each arm gets its load in slices that
alternate with the other arms', so that all see the machine alike. What is added is the difference
between two arms' percentiles: routed less direct, over the same prompts and arrival times.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import aiohttp
import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.progress import track

from benchmark.agentic.router import launch
from benchmark.agentic.router.cli import new_loop
from benchmark.harness.client import Request, Result, Target, open_session, send
from benchmark.harness.environment import describe
from benchmark.harness.models import REPOSITORY
from benchmark.harness.ports import allocate_ports
from benchmark.harness.process import ServerProcess
from benchmark.harness.report import print_table
from benchmark.harness.servers import HOST, ServerConfig

VOCABULARY = 150_000


@dataclass
class Arm:
    """One way to the workers."""

    name: str
    target: Target
    results: list[Result] = field(default_factory=list)
    late_s: list[float] = field(default_factory=list)
    """How long after its time each request was sent."""

    def milliseconds(self, what: str) -> npt.NDArray[np.float64]:
        """``ttft_s`` or ``latency_s`` of all requests."""
        return np.array([getattr(result, what) for result in self.results]) * 1000


def stub(role: str, port: int, gap_ms: float, bootstrap_port: int | None = None) -> ServerConfig:
    command = [sys.executable, "-m", "benchmark.agentic.router.stub", "--port", str(port)]
    command += ["--role", role, "--gap-ms", str(gap_ms)]
    env = {"PYTHONPATH": str(REPOSITORY)}
    return ServerConfig(role, port, tuple(command), env, bootstrap_port)


def prompts(count: int, tokens: int, seed: int) -> list[Request]:
    """Distinct prompts, half of whose tokens all share."""
    draw = random.Random(seed)
    shared = [draw.randrange(VOCABULARY) for _ in range(tokens // 2)]
    return [
        Request([*shared, *(draw.randrange(VOCABULARY) for _ in range(tokens - len(shared)))], 8)
        for _ in range(count)
    ]


async def load(
    arm: Arm, session: aiohttp.ClientSession, requests: Sequence[Request], rate: float, seed: int
) -> None:
    """Sends each request at its time, whatever became of those before it (Poisson arrivals)."""
    gaps = random.Random(seed)
    due = time.monotonic() + 0.05
    sent = []
    for request in requests:
        await asyncio.sleep(due - time.monotonic())
        arm.late_s.append(time.monotonic() - due)
        sent.append(asyncio.create_task(send(session, arm.target, request)))
        due += gaps.expovariate(rate)
    arm.results += await asyncio.gather(*sent)


async def compare(arms: Sequence[Arm], args: argparse.Namespace) -> None:
    """All slices of all arms, after one of each that does not count."""
    count = int(args.rate * args.slice)
    requests = prompts(count, args.tokens, args.seed)
    async with open_session() as session:
        for arm in arms:
            await load(arm, session, requests, args.rate, args.seed)
            arm.results.clear()
            arm.late_s.clear()
        for round_ in track(range(args.rounds), "rounds of all arms"):
            for arm in arms:
                await load(arm, session, requests, args.rate, args.seed + round_)


def summary(arms: Sequence[Arm]) -> dict[str, dict[str, float]]:
    """Percentiles of each arm, ms."""
    rows = {}
    for arm in arms:
        row = {"requests": float(len(arm.results))}
        row["errors"] = float(sum(result.error is not None for result in arm.results))
        for what, name in (("ttft_s", "ttft"), ("latency_s", "e2e")):
            values = arm.milliseconds(what)
            row |= {f"{name}_p{q}": float(np.percentile(values, q)) for q in (50, 99)}
        row["late_p99"] = float(np.percentile(np.array(arm.late_s) * 1000, 99))
        rows[arm.name] = row
    return rows


def added(rows: dict[str, dict[str, float]], kind: str) -> dict[str, float]:
    """Routed less direct, ms."""
    routed, direct = rows[f"{kind} routed"], rows[f"{kind} direct"]
    return {key: routed[key] - direct[key] for key in routed if "_p" in key and "late" not in key}


def main(argv: list[str]) -> int:
    """Exit status 1 if the router adds more than it may."""
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    made.add_argument("--rate", type=float, default=200.0, help="requests/s of each arm")
    made.add_argument("--slice", type=float, default=2.5, help="s of load before the next arm")
    made.add_argument("--rounds", type=int, default=10, help="slices of each arm")
    made.add_argument("--tokens", type=int, default=2000, help="token ids of a prompt")
    made.add_argument("--gap-ms", type=float, default=2.0, help="between an answer's 8 tokens")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--limit-p50", type=float, default=1.0, help="ms that may be added")
    made.add_argument("--limit-p99", type=float, default=3.0, help="ms that may be added")
    made.add_argument("--own-core", action="store_true", help="the routers' core 0, the rest's 1")
    made.add_argument("--router-args", default="", help="passed on to the routers")
    made.add_argument("--out", type=Path, help="JSON of the numbers")
    args = made.parse_args(argv)
    p, boot, d, w, pd, colocated = allocate_ports(6)
    stubs = [stub("prefill", p, 0, boot), stub("decode", d, args.gap_ms)]
    stubs.append(stub("colocated", w, args.gap_ms))
    extra = tuple(args.router_args.split())
    routers = [
        launch.config(pd, stubs[:1], stubs[1:2], extra_args=extra),
        launch.config(colocated, workers=stubs[2:], extra_args=extra),
    ]
    if args.own_core:  # as a router has in a fleet; both arms of a pair lose the same
        os.sched_setaffinity(0, {1})
        routers = [replace(r, command=("taskset", "-c", "0", *r.command)) for r in routers]
    arms = [
        Arm("colocated direct", Target(stubs[2].url)),
        Arm("colocated routed", Target(routers[1].url)),
        Arm("pd direct", Target(stubs[1].url, stubs[0].url, HOST, boot)),
        Arm("pd routed", Target(routers[0].url)),
    ]
    with TemporaryDirectory() as folder, ExitStack() as stack:
        for group in (stubs, routers):
            started = [_start(server, Path(folder)) for server in group]
            for process in started:
                stack.enter_context(process)
            for process in started:
                process.wait_ready(60)
        loop = new_loop()
        loop.run_until_complete(compare(arms, args))
        loop.close()
    rows = summary(arms)
    differences = {kind: added(rows, kind) for kind in ("colocated", "pd")}
    keys = ["ttft_p50", "ttft_p99", "e2e_p50", "e2e_p99"]
    table = [
        [name, *(f"{row[key]:.2f}" for key in [*keys, "late_p99"])] for name, row in rows.items()
    ]
    table += [
        [f"{k} added", *(f"{row[key]:.2f}" for key in keys), ""] for k, row in differences.items()
    ]
    print_table(f"ms at {args.rate:g} requests/s", ["", *keys, "late_p99"], table, Console())
    result = {"environment": describe(), "arms": rows, "added_ms": differences}
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    errors = sum(row["errors"] for row in rows.values())
    limits = {"p50": args.limit_p50, "p99": args.limit_p99}
    over = [
        f"{kind} {key} {value:.2f} ms"
        for kind, row in differences.items()
        for key, value in row.items()
        if value > limits[key[-3:]]
    ]
    print(f"{errors:.0f} errors; over the limit: {', '.join(over) or 'nothing'}")
    return 1 if errors or over else 0


def _start(server: ServerConfig, folder: Path) -> ServerProcess:
    log = folder / f"{server.role}-{server.port}.log"
    return ServerProcess(server.role, server.command, server.environment(), log, server.ready_url)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
