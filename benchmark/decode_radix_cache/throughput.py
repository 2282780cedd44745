"""How many requests run at once, and how fast, on a decode pool that two long prefixes nearly fill.

Arms, each on freshly started servers of the same sizes: the stock release; the patch set without
any flag; with the flag; and the flag again with ``--max-running-requests`` at the stock release's
concurrency, which tells the gain of moving and holding less apart from that of a larger batch. One
more, if asked for: the flag with NIXL's progress thread spinning, as it does in the stock release.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from benchmark.decode_radix_cache.plot import draw
from benchmark.harness import report
from benchmark.harness.arm import Measured, measure, warm_up
from benchmark.harness.client import Request
from benchmark.harness.environment import describe
from benchmark.harness.models import random_qwen3
from benchmark.harness.pair import Pair, PairConfig
from benchmark.harness.servers import Sizes
from benchmark.harness.variants import FLAG, Variant, variants
from benchmark.harness.workload import shared_prefix, token_range

SHAPE = {"layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 32}
"""Attention on a CPU costs each request its whole context anew at every step, so that a step's time
grows with the batch and hides what the batch is worth. This model has as little of it as can be; on
a GPU a step's time depends little on the batch as well."""

LEAN = ("--skip-tokenizer-init", "--incremental-streaming-output")
"""Token ids in and out, each once: helper processes share the cores with the two schedulers."""


@dataclass(frozen=True)
class Load:
    """The load and the sizes, the same for all arms. Lengths and pools in tokens."""

    requests: int = 24
    groups: int = 2
    prefix_tokens: int = 3000
    suffix_tokens: int = 100
    generated_tokens: int = 160
    decode_pool: int = 8000
    prefill_pool: int = 16000
    reserved_decode_tokens: int = 512
    chunked_prefill_tokens: int = 512
    max_running: int = 32
    seed: int = 0


def run(
    out: Path,
    model: Path | None,
    console: Console,
    repeats: int = 1,
    load: Load = Load(),  # noqa: B008
    *,
    spinning: bool = False,
) -> int:
    """Measures all arms, writes the results and prints the table; non-zero if outputs differ."""
    model = model or random_qwen3(out / "model-throughput", **SHAPE)
    vocabulary = token_range(model)
    prompts = shared_prefix(
        vocabulary,
        groups=load.groups,
        requests=load.requests,
        prefix_tokens=load.prefix_tokens,
        suffix_tokens=load.suffix_tokens,
        seed=load.seed,
    )
    requests = [Request(p.ids, load.generated_tokens, label=p.label) for p in prompts]
    raw = out / "throughput.requests.jsonl"
    raw.unlink(missing_ok=True)

    runs: dict[str, list[Measured]] = {}

    def arm(variant: Variant, max_running: int = load.max_running, name: str = "") -> Measured:
        name = name or variant.name
        done = runs.setdefault(name, [])
        console.print(f"[bold]{name}[/], run {len(done) + 1} of {repeats}: starting fresh servers")
        config = configure(model, load, variant, max_running)
        with Pair(config, out / "logs" / name.replace(",", "").replace(" ", "-")) as pair:
            seconds = warm_up(pair, vocabulary)
            console.print(f"  up, warmed up in {seconds:.1f} s; {len(requests)} requests at once")
            measured = measure(pair, lambda: pair.send(requests))
        done.append(measured)
        report.write_requests(raw, name, measured.results)
        console.print(f"  {measured.summary.requests_per_s:.2f} requests/s")
        return measured

    for _ in range(repeats):  # arms in turn, so that a busy machine hits all of them
        stock, *_ = [arm(variant) for variant in variants(spinning=spinning)]
        arm(FLAG, stock.peak_running, "flag capped")

    same = report.same_answers([m.results for repeated in runs.values() for m in repeated])
    arms = {name: median_run(repeated) for name, repeated in runs.items()}
    report.print_table(
        f"{load.requests} requests at once over {load.groups} prefixes of "
        f"{load.prefix_tokens:,} tokens; decode pool {load.decode_pool:,} tokens",
        ["", *arms],
        rows(load, list(arms.values()), list(runs.values()), same),
        console,
    )
    report.write_summary(
        out / "throughput.summary.json",
        {
            **describe(),
            "load": dataclasses.asdict(load),
            "outputs_identical": same,
            "runs": {n: [_without_results(m) for m in repeated] for n, repeated in runs.items()},
        },
    )
    draw(out / "throughput.png", arms)
    return 0 if same else 1


def median_run(repeated: Sequence[Measured]) -> Measured:
    """The run with the median requests/s (of two, the slower one)."""
    ordered = sorted(repeated, key=lambda m: m.summary.requests_per_s)
    return ordered[(len(ordered) - 1) // 2]


def configure(model: Path, load: Load, variant: Variant, max_running: int) -> PairConfig:
    """An arm: pools are the same on all of them."""
    return PairConfig(
        model,
        stock=variant.stock,
        radix=variant.radix,
        env=variant.env,
        # Small chunks: requests that enter together reach the decode server one after another.
        prefill_sizes=Sizes(
            pool_tokens=load.prefill_pool,
            max_running=load.max_running,
            chunked_prefill_tokens=load.chunked_prefill_tokens,
        ),
        decode_sizes=Sizes(
            pool_tokens=load.decode_pool,
            max_running=max_running,
            reserved_decode_tokens=load.reserved_decode_tokens,
        ),
        prefill_args=LEAN,
        # A log line every other batch: the peak is exact enough, and logging stays cheap.
        decode_args=(*LEAN, "--decode-log-interval", "2", *variant.decode_args),
    )


def rows(
    load: Load, arms: Sequence[Measured], runs: Sequence[Sequence[Measured]], same: bool
) -> list[list[str]]:
    """The table: a row a quantity, a column an arm; the median run of each."""
    base = arms[0].summary.requests_per_s

    def row(name: str, *cells: str) -> list[str]:
        return [name, *cells]

    return [
        row("requests/s", *(f"{m.summary.requests_per_s:.2f}" for m in arms)),
        row(
            "requests/s, each run",
            *(" ".join(f"{m.summary.requests_per_s:.2f}" for m in run) for run in runs),
        ),
        row("against stock", *(f"{m.summary.requests_per_s / base:.2f}x" for m in arms)),
        row("peak running requests", *(str(m.peak_running) for m in arms)),
        row("TTFT p50", *(report.milliseconds(m.summary.ttft_s.p50) for m in arms)),
        row("TTFT p99", *(report.milliseconds(m.summary.ttft_s.p99) for m in arms)),
        row("ITL p50", *(report.milliseconds(m.summary.itl_s.p50) for m in arms)),
        row("ITL p99", *(report.milliseconds(m.summary.itl_s.p99) for m in arms)),
        row("latency p50", *(report.milliseconds(m.summary.latency_s.p50) for m in arms)),
        row("KV moved", *(report.megabytes(m.traffic.bytes_moved) for m in arms)),
        row("tokens skipped", *(f"{m.traffic.skipped_tokens:,.0f}" for m in arms)),
        row("failed requests", *(str(m.summary.failed) for m in arms)),
        row("outputs identical", *["yes" if same else "NO"] * len(arms)),
        row("decode pool, tokens", *[f"{load.decode_pool:,}"] * len(arms)),
        row("prefill pool, tokens", *[f"{load.prefill_pool:,}"] * len(arms)),
        row("--num-reserved-decode-tokens", *[str(load.reserved_decode_tokens)] * len(arms)),
    ]


def _without_results(measured: Measured) -> dict[str, object]:
    fields = {f.name: getattr(measured, f.name) for f in dataclasses.fields(measured)}
    del fields["results"]
    return fields
