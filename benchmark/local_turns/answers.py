"""``python -m benchmark.local_turns.answers``: how soon prefill answers what decode computes.

A request is at the prefill server, and decode's message comes that it computes it. How long until
the client has its empty answer: on an idle server, and on one whose scheduler is always in the
middle of a chunk of a cold prompt? The messages are this command's own; a decode server does
nothing but send them too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from aiohttp import ClientSession
from rich.console import Console

from benchmark.harness import metrics, report
from benchmark.harness.client import Request, Target, open_session, send
from benchmark.harness.command import RunFailed, status
from benchmark.harness.environment import describe
from benchmark.harness.models import random_qwen3
from benchmark.harness.pair import Pair, PairConfig
from benchmark.harness.servers import HOST, Sizes
from benchmark.harness.workload import token_range
from benchmark.lead.load import SHAPE, Load

BOUND_S = 0.05
"""What is claimed of all of them."""
COMPUTED = ("sglang:realtime_tokens_total", "mode", "prefill_compute")
TURN_TOKENS = 400
ARRIVE_S = 0.05
"""From sending a request to sending the message."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmark.local_turns.answers")
    parser.add_argument(
        "--count",
        type=int,
        default=100,
        help="number of answers, idle and busy each",
    )
    parser.add_argument(
        "--cold-clients",
        type=int,
        default=2,
        help="cold clients that keep prefill busy",
    )
    parser.add_argument(
        "--tp",
        type=int,
        default=1,
        help="tensor parallel ranks of the prefill server",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("out/local_turns"),
        help="folder for answers.json and the servers' logs",
    )
    args = parser.parse_args()
    console = Console()
    os.environ.setdefault("SGLANG_CPU_STANDIN_START_METHOD", "fork")
    return status(lambda: run(args.out, args.count, args.cold_clients, args.tp, console), console)


def run(out: Path, count: int, clients: int, tp: int, console: Console) -> int:
    """Measures, prints and writes ``answers.json``; non-zero where prefill computed one of them."""
    load = Load()
    model = random_qwen3(out / "model", **SHAPE)
    sizes = Sizes(load.pool_tokens, chunked_prefill_tokens=load.chunk_tokens)
    config = PairConfig(
        model, radix=True, prefill_sizes=sizes, decode_sizes=sizes, prefill_tp=tp, decode_tp=tp
    )
    with Pair(config, out / "logs" / "answers") as pair:
        found, computed = asyncio.run(_measure(pair, load, count, clients))
        pair.check()
    rows = [
        [
            name,
            str(len(of)),
            *(f"{report.percentile(of, p) * 1e3:.1f} ms" for p in (50, 99, 100)),
            f"{sum(each > BOUND_S for each in of)}",
        ]
        for name, of in found.items()
    ]
    head = ["prefill is", "answers", "p50", "p99", "longest", f"above {BOUND_S * 1e3:.0f} ms"]
    report.print_table("From decode's message to the client's answer", head, rows, console)
    for name, tokens in computed.items():
        line = f"{name}: prefill computed {tokens:.0f} tokens that no cold client sent"
        console.print(line, highlight=False)
    content = {**describe(), "clients": clients, "tp": tp, "seconds": found, "computed": computed}
    report.write_summary(out / "answers.json", content)
    return int(any(computed.values()))


async def _measure(
    pair: Pair, load: Load, count: int, clients: int
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Seconds of each answer, idle and busy; and the prompt tokens that prefill computed meanwhile
    by its own counter, without those of the cold clients, none of which it has in its cache."""
    from sglang.srt.disaggregation.delta.wire import ComputedByDecode, PeerSockets

    rng, words = random.Random(load.seed), token_range(pair.config.model)
    host, port = _first_rank(pair)
    sockets = PeerSockets()

    async def one(session: ClientSession) -> float:
        route = pair.target.route()
        request = Request(rng.choices(words, k=TURN_TOKENS), 8, extra=route)
        half = asyncio.create_task(send(session, Target(pair.prefill_url), request))
        await asyncio.sleep(ARRIVE_S)
        sent = time.monotonic()
        sockets.send(host, port, ComputedByDecode(route["bootstrap_room"]))
        result = await half
        if result.error is not None or result.output_ids:
            raise RunFailed(f"prefill's answer is not empty: {result}")
        return result.finished_at - sent

    async def cold(session: ClientSession, done: asyncio.Event) -> int:
        """Sends one after the other; returns their tokens."""
        tokens = 0
        while not done.is_set():
            prompt = rng.choices(words, k=load.cold_tokens)
            result = await send(session, pair.target, Request(prompt, load.cold_answer_tokens))
            if result.error is not None:
                raise RunFailed(f"a cold prompt failed: {result.error}")
            tokens += len(prompt)
        return tokens

    def computed() -> float:
        name, label, mode = COMPUTED
        page = metrics.page(pair.prefill_url)
        return metrics.by_labels(page, name, label).get((mode,), 0.0)

    async with open_session() as session:
        await one(session)  # the first of everything
        before = computed()
        idle = [await one(session) for _ in range(count)]
        between = computed()
        done = asyncio.Event()
        colds = [asyncio.create_task(cold(session, done)) for _ in range(clients)]
        await asyncio.sleep(1.0)
        busy = [await one(session) for _ in range(count)]
        done.set()
        others = sum(await asyncio.gather(*colds))
    found = {"idle": idle, "busy": busy}
    return found, {"idle": between - before, "busy": computed() - between - others}


def _first_rank(pair: Pair) -> tuple[str, int]:
    """Where the prefill rank that clients hear takes messages."""
    names: Sequence[str] = (
        "prefill_dp_rank",
        "prefill_cp_rank",
        "target_tp_rank",
        "target_pp_rank",
    )
    query = "&".join(f"{name}=0" for name in names)
    url = f"http://{HOST}:{pair.layout[0].bootstrap_port}/route?{query}"
    with urllib.request.urlopen(url, timeout=30) as answer:
        rank = json.load(answer)
    return rank["rank_ip"], int(rank["rank_port"])


if __name__ == "__main__":
    sys.exit(main())
