"""All arms in turn, round after round: results, tables, a plot, and what is claimed of them."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from benchmark.agentic.fleet.spec import Arm
from benchmark.harness import report
from benchmark.harness.client import Result
from benchmark.harness.environment import describe
from benchmark.harness.models import random_qwen3
from benchmark.local_turns import measure, page
from benchmark.local_turns.load import Load, Played
from benchmark.local_turns.measure import Measured

SHAPE = {
    "layers": 1,
    "heads": 2,
    "kv_heads": 1,
    "head_dim": 32,
    "hidden": 256,
    "intermediate": 1536,
}
"""SGLang's attention on a CPU computes the whole square of a prompt, also where most is cached: a
short turn costs as much as its history. This model has little of it, so that a turn costs by its
new tokens, as on a GPU: about a fortieth of a cold prompt."""


def run(
    out: Path,
    model: Path | None,
    console: Console,
    load: Load,
    rounds: int,
    only: str,
    notes: Mapping[str, str],
    bounds: bool = False,
) -> int:
    """Measures the arms that ``only`` matches and writes the results; non-zero where an answer
    differs or fails.

    ``notes``: what else the summary says of this run; ``bounds``: the arms are those of the bound
    on inter-token latency.
    """
    arms, name = (measure.arms, "summary")
    if bounds:
        arms, name = (measure.bounded_arms, "bounds")
    began = time.monotonic()
    model = model or random_qwen3(out / "model", **SHAPE)
    raw = out / "requests.jsonl"
    raw.unlink(missing_ok=True)
    runs: dict[str, dict[int, list[Measured]]] = {}
    results: list[list[Result]] = []

    def one(arm: Arm, number: int) -> None:
        answers: list[Result] = []

        def done(clients: int, measured: Measured, played: Played) -> None:
            runs.setdefault(arm.title, {}).setdefault(clients, []).append(measured)
            answers.extend([*played.talks, *played.cold])
            for some in (played.talks, played.cold):
                report.write_requests(raw, f"{arm.title}, round {number}, {clients}", some)
            console.print(f"  {clients} cold clients: {_line(measured)}", highlight=False)

        console.print(f"[bold]{arm.title}[/], round {number} of {rounds}: fresh servers")
        measure.run(arm, model, load, out / "logs" / arm.title.replace(" ", "-"), done)
        results.append(answers)

    for number in range(1, rounds + 1):  # in turn, so that a busy machine hits all of them
        for arm in arms(load):
            if re.search(only, arm.title):
                one(arm, number)

    same = same_answers(results)
    content = {**describe(), **notes, "seconds": time.monotonic() - began, "rounds": rounds}
    content |= {"load": load, "outputs_identical": same, "runs": runs}
    report.write_summary(out / f"{name}.json", content)
    summary = report.plain(content)
    if not bounds:
        page.draw(out / "local_turns.png", summary)
    table = page.bounds if bounds else page.table
    for clients in dict.fromkeys(load.cold_clients):
        report.print_table(page.title(summary, clients), *table(summary, clients), console)
    for claim in (page.bounds_kept if bounds else page.claims)(summary):
        console.print(str(claim), highlight=False)
    console.print("Outputs are identical." if same else "[red]Outputs differ, or one failed.[/]")
    return 0 if same else 1


def same_answers(arms: Sequence[Sequence[Result]]) -> bool:
    """Whether no request failed, and what every arm was asked was answered with the same tokens.

    How many cold prompts a client sends is up to how soon they are answered.
    """
    common = set.intersection(*({r.label for r in arm} for arm in arms))
    failed = any(r.error is not None for arm in arms for r in arm)
    return not failed and report.same_answers(
        [[r for r in arm if r.label in common] for arm in arms]
    )


def _line(m: Measured) -> str:
    """The most important of a load, for who watches the run."""
    took = ", ".join(f"{name} {report.milliseconds(each)}" for name, each in m.took_s.items())
    return (
        f"{m.requests_per_s:.2f} requests/s; TTFT p50 of later turns "
        f"{report.milliseconds(m.ttft_later_s.p50)}; ITL p99 {report.milliseconds(m.gap_s.p99)}; "
        f"{m.failed} failed; {m.reasons or ''} {took}"
    )
