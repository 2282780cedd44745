"""Stock, patched, with the radix cache, with local turns, on fresh servers: a chat, a shared-prefix
load, one table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from benchmark.demo import chat
from benchmark.harness import report
from benchmark.harness.arm import Measured, measure, warm_up
from benchmark.harness.client import Request
from benchmark.harness.pair import Pair, PairConfig
from benchmark.harness.servers import Sizes
from benchmark.harness.variants import FLAG, Variant, local_turns, variants
from benchmark.harness.workload import Prompt, shared_prefix, token_range

REQUESTS, PREFIXES = 16, 2
PREFIX_TOKENS, SUFFIX_TOKENS, GENERATED_TOKENS = 1200, 40, 48
SIZES = Sizes(pool_tokens=3600, max_running=32, reserved_decode_tokens=64)
"""Both prefixes, and little more: without the flag two requests fit, with it a dozen."""
LOCAL_TOKENS = 256


@dataclass(frozen=True)
class Arm:
    """What one variant did."""

    chat: Measured
    shared: Measured


def settings() -> tuple[Variant, ...]:
    """What is shown, in this order."""
    return (*variants(), local_turns(LOCAL_TOKENS))


def configure(
    model: Path, variant: Variant = FLAG, *, router_port: int | None = None
) -> PairConfig:
    """Prefill, decode and SGLang's load balancer; the sizes are the same for all variants."""
    name = ("--served-model-name", model.name)
    return PairConfig(
        model,
        stock=variant.stock,
        radix=variant.radix,
        env=variant.env,
        router=True,
        router_port=router_port,
        prefill_sizes=Sizes(pool_tokens=16_000, max_running=SIZES.max_running),
        decode_sizes=SIZES,
        prefill_args=name,
        decode_args=(*name, "--decode-log-interval", "1", *variant.decode_args),
    )


def play(model: Path, out: Path, console: Console) -> bool:
    """Runs all arms, prints the table and keeps it; returns whether every answer was the same.

    Raises:
        ServerFailed: a server did not start, died, or failed SGLang's memory check.
    """
    conversations = chat.load_conversations()
    prompts = shared_prefix(
        token_range(model),
        groups=PREFIXES,
        requests=REQUESTS,
        prefix_tokens=PREFIX_TOKENS,
        suffix_tokens=SUFFIX_TOKENS,
    )
    arms = []
    for variant in settings():
        with Progress(
            SpinnerColumn(),
            TextColumn("[bold]{task.fields[arm]}[/] {task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            console=console,
        ) as progress:
            logs = out / variant.name.replace(" ", "-")
            arms.append(_arm(model, logs, variant, conversations, prompts, progress))
    same = report.same_answers([a.chat.results for a in arms]) and report.same_answers(
        [a.shared.results for a in arms]
    )
    _show_chat(conversations, arms[-1].chat, console)
    kept = StringIO()
    for to in (console, Console(file=kept, width=120)):
        _show_table(arms, same, to)
    (out / "demo.txt").write_text(kept.getvalue())
    return same


def _arm(
    model: Path,
    logs: Path,
    variant: Variant,
    conversations: Sequence[Sequence[chat.Turn]],
    prompts: Sequence[Prompt],
    progress: Progress,
) -> Arm:
    turns = sum(map(len, conversations))
    name = f"{variant.name:11}"
    task = progress.add_task("starting prefill, decode, load balancer", arm=name, total=None)
    with Pair(configure(model, variant), logs) as pair:
        warm_up(pair, token_range(model))
        progress.update(
            task,
            description=f"chat: {len(conversations)} conversations, {turns} turns",
            total=turns + 1,
        )
        chatted = measure(
            pair, lambda: chat.play(pair.target, conversations, lambda: progress.advance(task))
        )
        progress.update(task, description=f"{len(prompts)} requests over {PREFIXES} prefixes")
        requests = [Request(p.ids, GENERATED_TOKENS, label=p.label) for p in prompts]
        shared = measure(pair, lambda: pair.send(requests))
        progress.update(task, description="done", completed=turns + 1)
    return Arm(chatted, shared)


def _show_chat(
    conversations: Sequence[Sequence[chat.Turn]], measured: Measured, console: Console
) -> None:
    """Three turns of the first conversation, as the model answered them."""
    console.print("\n[bold]From the chat[/] (the tiny model, with local turns)")
    for turn, result in zip(conversations[0][:3], measured.results, strict=False):
        console.print(f"  [cyan]user[/]  {turn.question}", highlight=False)
        answer = result.text.strip().replace("\n", " / ")
        console.print(f"  [green]model[/] {escape(answer)}", highlight=False)
    right = chat.right_answers(conversations, measured.results)
    console.print(f"  {right} of {len(measured.results)} answers right\n")


def _show_table(arms: Sequence[Arm], same: bool, console: Console) -> None:
    columns = [*(arm.chat for arm in arms), *(arm.shared for arm in arms)]
    names = [variant.name for variant in settings()]

    def row(name: str, cells: Sequence[str]) -> list[str]:
        return [name, *cells]

    report.print_table(
        "The stock release; patched; with --disaggregation-decode-enable-radix-cache (flag); with "
        f"--disaggregation-decode-local-tokens {LOCAL_TOKENS} too (local turns)",
        ["", f"chat: {names[0]}", *names[1:], f"prefixes: {names[0]}", *names[1:]],
        [
            row("requests/s", [f"{m.summary.requests_per_s:.2f}" for m in columns]),
            row("TTFT p50", [report.milliseconds(m.summary.ttft_s.p50) for m in columns]),
            row("ITL p50", [report.milliseconds(m.summary.itl_s.p50) for m in columns]),
            row("KV bytes moved", [report.megabytes(m.traffic.bytes_moved) for m in columns]),
            row("tokens skipped", [f"{m.traffic.skipped_tokens:,.0f}" for m in columns]),
            row("computed by decode", [f"{m.traffic.local_tokens:,.0f}" for m in columns]),
            row("peak running requests", [str(m.peak_running) for m in columns]),
            row("failed requests", [str(m.summary.failed) for m in columns]),
            row("output identical", ["yes" if same else "NO"] * len(columns)),
        ],
        console,
    )
    console.print(
        f"Decode pool {SIZES.pool_tokens:,} tokens, --num-reserved-decode-tokens "
        f"{SIZES.reserved_decode_tokens}. Chat: {len(arms[0].chat.results)} turns. "
        f"Shared prefixes: {REQUESTS} requests over {PREFIXES} prefixes of {PREFIX_TOKENS:,} "
        "tokens. Fresh servers for each; one warm-up request each, not counted.",
        highlight=False,
    )
