"""A report for the terminal."""

from __future__ import annotations

import math
from collections.abc import Iterable

from rich.console import Console
from rich.markup import escape

from benchmark.agentic.replay.report import LATE_S, Group, Report
from benchmark.harness.report import Spread, print_table


def show(report: Report, console: Console, late_limit_s: float = LATE_S) -> None:
    """Prints tables, the client's side, and warnings last, where they are seen."""
    groups = [("all", report.overall), *report.by_class.items()]
    print_table(
        "Latency, ms: p50 / p90 / p99",
        ["class", "requests", "failed", "TTFT", "TPOT", "ITL", "E2E"],
        [
            [name, f"{g.requests}", f"{g.failed}", *map(_spread, _latencies(g))]
            for name, g in groups
        ],
        console,
    )
    console.print(escape(report.classes))
    print_table(
        "Throughput and cached tokens",
        ["", "requests/s", "output tokens/s", "prompt tokens", "cached", "hit rate"],
        [_rates(name, g) for name, g in (*groups, *_workers(report))],
        console,
    )
    if report.errors:
        print_table(
            "Errors",
            ["kind", "requests"],
            [[kind, str(count)] for kind, count in report.errors.items()],
            console,
        )
    client = report.client
    console.print(
        f"{report.duration_s:,.1f} s, at most {report.most_open} requests at once. Send lateness "
        f"p50 {_ms(client.late_p50_s)}, p99 {_ms(client.late_p99_s)}, max "
        f"{_ms(client.late_max_s)}; event loop lag p99 {_ms(client.loop_lag_p99_s)}."
    )
    for warning in client.warnings(late_limit_s):
        console.print(f"[bold red]The client was the bottleneck:[/] {escape(warning)}")


def _workers(report: Report) -> Iterable[tuple[str, Group]]:
    if report.by_prefill_worker.keys() == report.by_decode_worker.keys():
        return report.by_prefill_worker.items()
    return (
        *((f"prefill {name}", g) for name, g in report.by_prefill_worker.items()),
        *((f"decode {name}", g) for name, g in report.by_decode_worker.items()),
    )


def _rates(name: str, group: Group) -> list[str]:
    return [
        escape(name),
        f"{group.requests_per_s:.2f}",
        f"{group.output_tokens_per_s:,.0f}",
        f"{group.prompt_tokens:,}",
        f"{group.cached_tokens:,}",
        f"{group.hit_rate:.1%}",
    ]


def _latencies(group: Group) -> tuple[Spread, ...]:
    return group.ttft_s, group.tpot_s, group.itl_s, group.e2e_s


def _spread(values: Spread) -> str:
    if math.isnan(values.p50):
        return "-"
    digits = 0 if values.p99 >= 0.1 else 1
    return "/".join(f"{value * 1e3:,.{digits}f}" for value in (values.p50, values.p90, values.p99))


def _ms(seconds: float) -> str:
    return "-" if math.isnan(seconds) else f"{seconds * 1e3:.1f} ms"
