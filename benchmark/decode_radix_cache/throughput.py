"""How many requests run at once, and how fast, on a decode pool that two long prefixes nearly fill.

Arms, each on freshly started servers of the same sizes: the stock release; the patch set without
any flag; with the flag; and the flag again with ``--max-running-requests`` at the stock release's
concurrency, which tells the gain of moving and holding less apart from that of a larger batch. One
more, if asked for: the flag with NIXL's progress thread spinning, as it does in the stock release.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from benchmark.decode_radix_cache import page
from benchmark.harness import report
from benchmark.harness.arm import Measured, on_fresh_pair
from benchmark.harness.environment import describe
from benchmark.harness.models import random_qwen3
from benchmark.harness.pair import PairConfig
from benchmark.harness.servers import LEAN, Sizes
from benchmark.harness.variants import FLAG, Variant, variants
from benchmark.harness.workload import SharedPrefixes, token_range

SHAPE = {"layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 32}
"""Attention on a CPU costs each request its whole context anew at every step, so that a step's time
grows with the batch and hides what the batch is worth. This model has as little of it as can be; on
a GPU a step's time depends little on the batch as well."""


@dataclass(frozen=True)
class Load(SharedPrefixes):
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


def run(
    out: Path, model: Path | None, console: Console, repeats: int = 1, *, spinning: bool = False
) -> int:
    """Measures all arms, writes the results and prints the table; non-zero if outputs differ."""
    load = Load()
    model = model or random_qwen3(out / "model-throughput", **SHAPE)
    requests = load.sent(token_range(model))
    raw = out / "throughput.requests.jsonl"
    raw.unlink(missing_ok=True)
    runs: dict[str, list[Measured]] = {}

    def arm(variant: Variant, max_running: int = load.max_running, name: str = "") -> Measured:
        name = name or variant.name
        done = runs.setdefault(name, [])
        console.print(f"[bold]{name}[/], run {len(done) + 1} of {repeats}: starting fresh servers")
        config = configure(model, load, variant, max_running)
        logs = out / "logs" / name.replace(",", "").replace(" ", "-")
        measured = on_fresh_pair(config, logs, lambda pair: pair.send(requests))
        done.append(measured)
        report.write_requests(raw, name, measured.results)
        console.print(f"  {measured.summary.requests_per_s:.2f} requests/s")
        return measured

    for _ in range(repeats):  # arms in turn, so that a busy machine hits all of them
        stock, *_ = [arm(variant) for variant in variants(spinning=spinning)]
        arm(FLAG, stock.peak_running, "flag capped")

    same = report.same_answers([m.results for repeated in runs.values() for m in repeated])
    told = {name: [m.told() for m in repeated] for name, repeated in runs.items()}
    content = {**describe(), "load": load, "outputs_identical": same, "runs": told}
    summary = report.plain(content)
    report.write_summary(out / "throughput.summary.json", content)
    title = (
        f"{load.requests} requests at once over {load.groups} prefixes of "
        f"{load.prefix_tokens:,} tokens; decode pool {load.decode_pool:,} tokens; outputs are "
        f"{'' if same else 'NOT '}identical"
    )
    report.print_table(title, *page.throughput(summary), console)
    page.draw(out / "throughput.png", summary)
    return 0 if same else 1


def configure(model: Path, load: Load, variant: Variant, max_running: int) -> PairConfig:
    """An arm: pools are the same on all of them."""
    return PairConfig.of(
        variant,
        model,
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
        decode_args=(*LEAN, "--decode-log-interval", "2"),
    )
