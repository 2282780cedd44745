"""Costs from the records of any run, against any servers.

    python -m benchmark.agentic calibrate RECORDS... --model NAME [--arm PATTERN]

``RECORDS`` are JSON lines as a replay or a study writes them. Prefill and latency are fitted to the
TTFT of requests that were alone from when they were sent until their first token, so that the load
must have such: many lengths, some with a warm prefix. Steps are fitted to the time a token of all
requests, by how many answers were under way and how long their contexts were. What a request waits
without keeping a worker busy, the transfer among it, is ``latency_s``.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import yaml

from benchmark.harness.command import reported
from benchmark.harness.environment import describe
from benchmark.harness.report import solve
from benchmark.kv_transfer import shapes

#: Observations that a fit of three numbers needs, at least.
FEWEST = 8


class Seen(msgspec.Struct):
    """What is read of a record; other fields are ignored. Seconds on one clock a run, tokens."""

    prompt_tokens: int
    started_s: float
    finished_s: float
    first_token_s: float | None = None
    tpot_s: float | None = None
    cached_tokens: int | None = None
    output_tokens: int = 0
    error: str | None = None
    arm: str = ""
    round: int = 0
    load: float = 0.0


def read(paths: Iterable[Path], arm: str = "") -> list[list[Seen]]:
    """Requests of each arm, round and load, also those that failed: they kept a server busy.
    ``arm``: a pattern.

    Raises:
        ValueError: a line is no JSON object.
    """
    runs: dict[tuple[str, str, int, float], list[Seen]] = defaultdict(list)
    for path in paths:
        for line in path.read_text().splitlines():
            if "started_s" not in json.loads(line):
                continue  # what a run says of itself
            seen = msgspec.json.decode(line, type=Seen)
            if re.search(arm, seen.arm):
                runs[str(path), seen.arm, seen.round, seen.load].append(seen)
    return list(runs.values())


def prefill(runs: Sequence[Sequence[Seen]]) -> tuple[float, float, float]:
    """Seconds a new token, a pair of a new token and one that it attends to, and the rest.

    Raises:
        ValueError: too few requests were alone.
    """
    rows, times = [], []
    for run in runs:
        for one in run:
            if one.error is not None or one.first_token_s is None:
                continue
            began, ended = one.started_s, one.first_token_s
            others = (x for x in run if x is not one)
            if all(x.finished_s <= began or x.started_s >= ended for x in others):
                cached = one.cached_tokens or 0
                new = one.prompt_tokens - cached
                rows.append((new, new * (cached + new / 2), 1))
                times.append(ended - began)
    token, pair, rest = _fit(rows, times, "requests that were alone until their first token")
    return token, pair, rest


def step(runs: Sequence[Sequence[Seen]]) -> tuple[float, float, float]:
    """Seconds a step, a request of its batch, and a token of their contexts.

    Raises:
        ValueError: too few answers of several tokens.
    """
    rows, times = [], []
    for run in runs:
        for one in run:
            if one.error is not None or one.tpot_s is None or one.first_token_s is None:
                continue
            began, ended = one.first_token_s, one.finished_s
            batch = context = 0.0
            for other in run:
                if other.first_token_s is None:
                    continue
                since = max(began, other.first_token_s)
                share = max(min(ended, other.finished_s) - since, 0.0) / (ended - began)
                batch += share
                context += share * (other.prompt_tokens + other.output_tokens / 2)
            rows.append((1, batch, context))
            times.append(one.tpot_s)
    fixed, request, token = _fit(rows, times, "answers of several tokens")
    return fixed, request, token


def _fit(rows: Sequence[Sequence[float]], times: Sequence[float], what: str) -> list[float]:
    if len(rows) < FEWEST:
        raise ValueError(f"{len(rows)} {what}: at least {FEWEST} are needed")
    return solve(rows, times)


@reported
def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmark.agentic calibrate")
    parser.add_argument("records", type=Path, nargs="+")
    parser.add_argument(
        "--model",
        required=True,
        help="model as in `capacity`: sets the KV bytes per token",
    )
    parser.add_argument("--kv-dtype", choices=sorted(shapes.DTYPES), help="dtype of the KV pool")
    parser.add_argument("--arm", default="", help="only arms whose names match this pattern")
    parser.add_argument("--out", type=Path, default=Path("costs.yaml"))
    args = parser.parse_args(argv)
    runs = read(args.records, args.arm)
    names = ", ".join(path.name for path in args.records)
    prefill_token, prefill_pair, latency = prefill(runs)
    step_s, step_request, step_context = step(runs)
    costs = {
        "kv_token_bytes": shapes.load(args.model, args.kv_dtype).token_bytes,
        "prefill_batch_s": 0.0,
        "prefill_token_s": prefill_token,
        "prefill_pair_s": prefill_pair,
        "step_s": step_s,
        "step_request_s": step_request,
        "step_context_s": step_context,
        "transfer": {"curve": [[1e9, 0.0]], "latency_s": latency},
    }
    source = f"calibrate, {names}, commit {describe()['commit']}"
    sources = dict.fromkeys(costs, source) | {"kv_token_bytes": args.model}
    args.out.write_text(yaml.safe_dump({**costs, "sources": sources}, sort_keys=False))
    print(f"{args.out} written, from {sum(map(len, runs))} requests")
    return 0
