"""Costs measured on a real pair of the stock release, whose decode pool holds all at once.

    python -m benchmark.agentic.capacity.calibrate [--model FOLDER] [--out FILE]

Least squares without negative terms over: cold prompts of some lengths (TTFT), a warm prompt alone
(TTFT) and many at once (time to the last TTFT), and batches of some sizes and contexts (ITL).
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import yaml
from rich.console import Console

from benchmark.decode_radix_cache.throughput import SHAPE, Load, configure
from benchmark.harness.arm import warm_up
from benchmark.harness.client import Request, Result
from benchmark.harness.environment import describe
from benchmark.harness.models import random_qwen3
from benchmark.harness.pair import Pair
from benchmark.harness.workload import kv_bytes_per_token, shared_prefix, token_range


@dataclass(frozen=True)
class Prefilled:
    """``seconds`` until ``requests`` sent at once had their first tokens; ``context`` was warm."""

    requests: int
    new: int
    context: int
    seconds: float


@dataclass(frozen=True)
class Stepped:
    """The median ITL of a batch whose requests had ``context`` tokens on average."""

    batch: int
    context: float
    seconds: float


def fit_prefill(seen: Sequence[Prefilled], chunk: int) -> tuple[float, float, float, float]:
    """Seconds a batch, a new token, and a pair, and the latency that keeps no worker busy."""
    rows = [
        (-(-s.requests * s.new // chunk), s.requests * s.new, s.requests * _pairs(s), 1)
        for s in seen
    ]
    batch, token, pair, latency = _fit(rows, [s.seconds for s in seen])
    return batch, token, pair, latency


def fit_step(seen: Sequence[Stepped]) -> tuple[float, float, float]:
    """Seconds a step, a request, and a token of context."""
    rows = [(1, s.batch, s.batch * s.context) for s in seen]
    step, request, context = _fit(rows, [s.seconds for s in seen])
    return step, request, context


def _pairs(seen: Prefilled) -> float:
    return seen.new * (seen.context + seen.new / 2)


def _fit(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Non-negative least squares of the relative error, as times span two orders."""
    from scipy.optimize import nnls

    times = np.asarray(seconds, dtype=float)
    matrix = np.asarray(rows, dtype=float) / times[:, None]
    scale = np.abs(matrix).max(axis=0)
    solution, _ = nnls(matrix / scale, np.ones_like(times))
    return [float(v) for v in solution / scale]


def measure(model: Path, logs: Path, console: Console) -> tuple[list[Prefilled], list[Stepped]]:
    """All observations, from one pair."""
    load = dataclasses.replace(Load(), decode_pool=64_000, prefill_pool=64_000)
    vocabulary = token_range(model)
    seed = iter(range(1, 10_000))

    def prompts(requests: int, prefix: int, suffix: int, seed: int) -> list[tuple[int, ...]]:
        made = shared_prefix(
            vocabulary,
            groups=1,
            requests=requests,
            prefix_tokens=prefix,
            suffix_tokens=suffix,
            seed=seed,
        )
        return [p.ids for p in made]

    with Pair(configure(model, load, stock=True, max_running=32), logs) as pair:
        warm_up(pair, vocabulary)

        def send(ids: Sequence[tuple[int, ...]], tokens: int) -> list[Result]:
            results = pair.send([Request(p, tokens, label=str(i)) for i, p in enumerate(ids)])
            if errors := [r.error for r in results if r.error]:
                raise RuntimeError(f"calibration request failed: {errors[0]}")
            return results

        prefilled = []
        for new in (100, 500, 1000, 2000, 3000):
            times = [send(prompts(1, new - 10, 10, next(seed)), 1)[0].ttft_s for _ in range(4)]
            prefilled.append(Prefilled(1, new, 0, median(times)))
        for burst in (1, 1, 4, 16, 24):
            known = next(seed)
            made = prompts(burst + 1, 3000, 100, known)
            send(made[:1], 1)  # the prefix is warm from here on
            last = max(r.ttft_s for r in send(made[1:], 1))
            prefilled.append(Prefilled(burst, 100, 3000, last))
        stepped = []
        generated = 200
        for context in (100, 3000):
            for batch in (1, 2, 4, 8, 12):
                made = prompts(batch + 1, context, 100, next(seed))
                send(made[:1], 1)
                gaps = [r.itl_s for r in send(made[1:], generated) if r.itl_s is not None]
                stepped.append(Stepped(batch, context + 100 + generated / 2, median(gaps)))
    console.print(*prefilled, *stepped, sep="\n")
    return prefilled, stepped


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmark.agentic.capacity.calibrate")
    parser.add_argument("--model", type=Path, help="model folder; a random one is made without it")
    parser.add_argument("--out", type=Path, default=Path("costs.yaml"))
    args = parser.parse_args(argv)
    console = Console()
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or random_qwen3(Path(folder) / "model", **SHAPE)
        prefilled, stepped = measure(model, Path(folder) / "logs", console)
        token_bytes = kv_bytes_per_token(model)
    batch, token, pair, latency = fit_prefill(prefilled, Load().chunked_prefill_tokens)
    step, request, context = fit_step(stepped)
    where = describe()
    source = f"calibrate on stock, {where['machine']}, {where['date']}, commit {where['commit']}"
    costs = {
        "kv_token_bytes": token_bytes,
        "prefill_batch_s": batch,
        "prefill_token_s": token,
        "prefill_pair_s": pair,
        "step_s": step,
        "step_request_s": request,
        "step_context_s": context,
        # A few hundred KB of shared memory: part of the latency that was measured.
        "transfer": {"curve": [[1e9, 0.0]], "latency_s": latency},
    }
    content = {
        **costs,
        "sources": dict.fromkeys(costs, source) | {"kv_token_bytes": "the model's config.json"},
    }
    observed = "".join(f"# {seen}\n" for seen in (*prefilled, *stepped))
    args.out.write_text(observed + yaml.safe_dump(content, sort_keys=False))
    console.print(f"{args.out} written")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
