"""Stock, patched, with the radix cache, with local turns, on fresh servers: a chat, a shared-prefix
load, one table, one picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from benchmark.demo import chat
from benchmark.harness import plot, report
from benchmark.harness.arm import Measured, measure, warm_up
from benchmark.harness.pair import Pair, PairConfig
from benchmark.harness.servers import Sizes
from benchmark.harness.variants import FLAG, Variant, local_turns, variants
from benchmark.harness.workload import SharedPrefixes, token_range

LOAD = SharedPrefixes(
    requests=16, groups=2, prefix_tokens=1200, suffix_tokens=40, generated_tokens=48
)
SIZES = Sizes(pool_tokens=3600, max_running=32, reserved_decode_tokens=64)
"""Both prefixes, and little more: without the flag two requests fit, with it a dozen."""
LOCAL_TOKENS = 256
PICTURE = "demo.svg"


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
    return PairConfig.of(
        variant,
        model,
        router=True,
        router_port=router_port,
        prefill_sizes=Sizes(pool_tokens=16_000, max_running=SIZES.max_running),
        decode_sizes=SIZES,
        prefill_args=name,
        decode_args=(*name, "--decode-log-interval", "1"),
    )


def play(model: Path, out: Path, console: Console) -> bool:
    """Runs all arms, prints the table, keeps it as ``demo.txt`` and draws ``demo.svg``; returns
    whether every answer was the same.

    Raises:
        ServerFailed: a server did not start, died, or failed SGLang's memory check.
    """
    conversations = chat.load_conversations()
    arms = []
    for variant in settings():
        with Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            console=console,
        ) as progress:
            logs = out / variant.name.replace(" ", "-")
            arms.append(_arm(model, logs, variant, conversations, progress))
    same = all(
        report.same_answers([part(arm).results for arm in arms])
        for part in (lambda arm: arm.chat, lambda arm: arm.shared)
    )
    _show_chat(conversations, arms[-1].chat, console)
    kept = StringIO()
    for to in (console, Console(file=kept, width=120)):
        _show_table(arms, same, to)
    (out / "demo.txt").write_text(kept.getvalue())
    plot.bars(out / PICTURE, quantities(arms))
    return same


def _arm(
    model: Path,
    logs: Path,
    variant: Variant,
    conversations: Sequence[Sequence[chat.Turn]],
    progress: Progress,
) -> Arm:
    turns = sum(map(len, conversations))

    def does(what: str) -> str:
        return f"[bold]{variant.name:11}[/] {what}"

    task = progress.add_task(does("starting prefill, decode, load balancer"), total=None)
    with Pair(configure(model, variant), logs) as pair:
        warm_up(pair)
        what = does(f"chat: {len(conversations)} sessions, {turns} turns")
        progress.update(task, description=what, total=turns + 1)
        chatted = measure(
            pair, lambda: chat.play(pair.target, conversations, lambda: progress.advance(task))
        )
        what = does(f"{LOAD.requests} requests over {LOAD.groups} prefixes")
        progress.update(task, description=what)
        shared = measure(pair, lambda: pair.send(LOAD.sent(token_range(model))))
        progress.update(task, description=does("done"), completed=turns + 1)
    return Arm(chatted, shared)


def _show_chat(
    conversations: Sequence[Sequence[chat.Turn]], measured: Measured, console: Console
) -> None:
    """Three turns of the first session, as the model answered them."""
    console.print("\n[bold]From the chat[/] (the tiny model, with local turns)")
    for turn, result in zip(conversations[0][:3], measured.results, strict=False):
        console.print(f"  [cyan]user[/]  {turn.question}", highlight=False)
        answer = result.text.strip().replace("\n", " / ")
        console.print(f"  [green]model[/] {escape(answer)}", highlight=False)
    right = chat.right_answers(conversations, measured.results)
    console.print(f"  {right} of {len(measured.results)} answers are correct\n")


ROWS: dict[str, Callable[[Measured], str]] = {
    "requests/s": lambda m: f"{m.summary.requests_per_s:.2f}",
    "TTFT p50": lambda m: report.milliseconds(m.summary.ttft_s.p50),
    "ITL p50": lambda m: report.milliseconds(m.summary.itl_s.p50),
    "KV bytes moved": lambda m: report.megabytes(m.traffic.bytes_moved),
    "tokens skipped": lambda m: f"{m.traffic.skipped_tokens:,.0f}",
    "computed by decode": lambda m: f"{m.traffic.local_tokens:,.0f}",
    "peak running requests": lambda m: str(m.peak_running),
    "failed requests": lambda m: str(m.summary.failed),
}


def quantities(arms: Sequence[Arm]) -> dict[str, dict[str, float]]:
    """Title of a panel -> arm -> value: TTFT and the KV that was moved, of both loads."""
    panels: dict[str, Callable[[Arm], float]] = {
        "chat: TTFT p50 of later turns, s": lambda arm: _later_ttft(arm.chat),
        "chat: KV moved, MB": lambda arm: arm.chat.traffic.bytes_moved / 1e6,
        "shared prefixes: TTFT p50, s": lambda arm: arm.shared.summary.ttft_s.p50,
        "shared prefixes: KV moved, MB": lambda arm: arm.shared.traffic.bytes_moved / 1e6,
    }
    return {
        title: {variant.name: value(arm) for variant, arm in zip(settings(), arms, strict=True)}
        for title, value in panels.items()
    }


def _later_ttft(measured: Measured) -> float:
    later = [result for result in measured.results if not result.label.endswith(".0")]
    return report.summarize(later).ttft_s.p50


def _show_table(arms: Sequence[Arm], same: bool, console: Console) -> None:
    columns = [*(arm.chat for arm in arms), *(arm.shared for arm in arms)]
    first, *more = (variant.name for variant in settings())
    rows = [[name, *map(cell, columns)] for name, cell in ROWS.items()]
    rows.append(["output identical", *["yes" if same else "NO"] * len(columns)])
    report.print_table(
        "The stock release; patched; with --disaggregation-decode-enable-radix-cache (flag); with "
        f"--disaggregation-decode-local-tokens {LOCAL_TOKENS} too (local turns)",
        ["", f"chat: {first}", *more, f"prefixes: {first}", *more],
        rows,
        console,
    )
    console.print(
        f"Decode pool {SIZES.pool_tokens:,} tokens, --num-reserved-decode-tokens "
        f"{SIZES.reserved_decode_tokens}. Chat: {len(arms[0].chat.results)} turns. "
        f"Shared prefixes: {LOAD.requests} requests over {LOAD.groups} prefixes of "
        f"{LOAD.prefix_tokens:,} tokens. Fresh servers for each; one warm-up request each, not "
        "counted.",
        highlight=False,
    )
