"""The page, in Markdown. Every number on it comes from the run that writes it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from benchmark.agentic.report.findings import findings, ratio
from benchmark.agentic.report.load import Load, Trace
from benchmark.agentic.report.measure import Measured
from benchmark.harness.report import Spread
from benchmark.traces.record import BLOCK_TOKENS


def page(
    arms: Sequence[Measured],
    trace: Trace,
    load: Load,
    environment: Mapping[str, str],
    command: str,
    figures: Mapping[str, str],
) -> str:
    """``figures``: title to file, relative to the page."""
    parts = [
        "# Agentic traffic on real servers",
        f"{environment['date']}, {environment['machine']}; SGLang {environment['sglang']}, "
        f"commit {environment['commit']}. Written by `{command}`; every number below comes from "
        "that run. Fresh servers for each arm, with a KV pool of "
        f"{load.pool_tokens:,} tokens each; one run an arm, so differences of a few percent mean "
        "nothing. Servers run at a lower priority than the client and the router, as they share "
        "the machine's cores with them.",
        "## What it says",
        "\n".join(f"- {sentence}" for sentence in findings(arms)),
        "## The load",
        _load(trace, load, arms),
        *_groups(arms),
        "## By class",
        arms[0].report.classes
        + ". New tokens are those that an endless cache, shared by all, would not hold.",
        _table(["arm", "class", "requests", *_TIMES, "hit rate"], _by_class(arms)),
        "## By worker",
        "Requests and cached prompt tokens as the workers report them (prefill's cache, or "
        "a colocated worker's own). SGLang's router does not say which worker it chose.",
        _table(["arm", "worker", "requests", "prompt tokens", "cached"], _by_worker(arms)),
        "## Figures",
        *(f"![{title}]({file})" for title, file in figures.items()),
        "## The client",
        "How late requests were sent, and how late this program was in reading. Above 50 ms (p99) "
        "the numbers would be the client's, and the list at the top would say so.",
        _table(["arm", "late p50", "late p99", "late max", "event loop p99"], _client(arms)),
    ]
    return "\n\n".join(parts) + "\n"


_TIMES = ("TTFT p50 / p90 / p99", "TPOT p50 / p90 / p99", "E2E p50 / p90 / p99")


def _load(trace: Trace, load: Load, arms: Sequence[Measured]) -> str:
    of = trace.described
    lengths = ", ".join(
        f"{what} tokens mean {x.mean:,.0f}, p50 {x.p50:,.0f}, p90 {x.p90:,.0f}, p99 {x.p99:,.0f}"
        for what, x in (("input", of.input_tokens), ("output", of.output_tokens))
    )
    left_out = f"{trace.left_out} longer than half a pool were left out. " if trace.left_out else ""
    prompt = sum(record.input_length for record in trace.records)
    return (
        f"From {trace.source}: sessions that begin in its densest {load.window_s:g} s, "
        f"{trace.ratio:.0%} of them kept, single-turn sessions capped at "
        f"{load.max_single_turn:.0%} of the sessions: {of.requests:,} requests in {of.sessions:,} "
        f"sessions, {of.multi_turn_sessions:.0%} of several turns, {lengths}. An endless cache "
        f"would hit {of.hit:.1%} of the input tokens ({of.hit_within:.1%} within sessions, "
        f"{of.hit_across:.1%} across).\n\n"
        f"Scaled to the machine: a block of {BLOCK_TOKENS} tokens became {load.block_tokens}, "
        f"answers shrank alike, and time runs {trace.speed:.1f} times as fast. {left_out}"
        f"Replayed: {len(trace.records):,} requests with {prompt:,} prompt tokens in "
        f"{load.seconds:g} s of trace. Sessions begin at the trace's times, whatever is still "
        "under way; each later turn is sent its recorded gap after the answer to the one before."
    )


def _groups(arms: Sequence[Measured]) -> Iterator[str]:
    for name, members in groupby(arms, key=lambda measured: measured.arm.group):
        group = list(members)
        yield f"## {name}"
        pools = any(measured.arm.decodes for measured in group)
        columns = ["arm", "router policy", "requests/s", "failed", *_TIMES, "hit rate"]
        columns += ["largest batch", "pool used"]
        if pools:
            columns += ["KV moved", "of the first", "decode hit"]
        yield _table(columns, [_row(m, group[0], pools) for m in group])


def _row(measured: Measured, first: Measured, pools: bool) -> list[str]:
    overall, moved = measured.report.overall, measured.traffic
    row = [measured.arm.name, measured.arm.policy]
    row += [f"{overall.requests_per_s:.2f}", str(overall.failed)]
    row += [*map(_spread, (overall.ttft_s, overall.tpot_s, overall.e2e_s))]
    row += [f"{overall.hit_rate:.1%}", " + ".join(map(str, measured.peak_running))]
    row += [" + ".join(f"{usage:.0%}" for usage in measured.peak_usage)]
    if pools:
        share = ratio(moved.hit_tokens, moved.prompt_tokens)
        row += [f"{moved.bytes_moved / 1e6:,.1f} MB"]
        row += [f"{ratio(moved.bytes_moved, first.traffic.bytes_moved):.2f}"]
        row += ["none" if math.isnan(share) else f"{share:.1%}"]
    return row


def _by_class(arms: Sequence[Measured]) -> Iterator[list[str]]:
    for measured in arms:
        for name, group in measured.report.by_class.items():
            if group.requests:
                times = map(_spread, (group.ttft_s, group.tpot_s, group.e2e_s))
                yield [
                    *(measured.arm.name, name, str(group.requests), *times),
                    f"{group.hit_rate:.1%}",
                ]


def _by_worker(arms: Sequence[Measured]) -> Iterator[list[str]]:
    for measured in arms:
        if measured.arm.policy.startswith("sglang-router"):
            kinds = {"all": measured.report.by_decode_worker}
        elif measured.arm.colocated:
            kinds = {"worker": measured.report.by_decode_worker}
        else:
            kinds = {
                "prefill": measured.report.by_prefill_worker,
                "decode": measured.report.by_decode_worker,
            }
        for kind, groups in kinds.items():
            for number, group in enumerate(groups.values()):
                name = kind if len(groups) == 1 else f"{kind} {number}"
                yield [
                    *(measured.arm.name, name, str(group.requests), f"{group.prompt_tokens:,}"),
                    f"{group.hit_rate:.1%}",
                ]


def _client(arms: Sequence[Measured]) -> Iterator[list[str]]:
    for measured in arms:
        of = measured.report.client
        times = (of.late_p50_s, of.late_p99_s, of.late_max_s, of.loop_lag_p99_s)
        yield [measured.arm.name, *(f"{seconds * 1e3:.1f} ms" for seconds in times)]


def _spread(values: Spread) -> str:
    """Milliseconds."""
    if math.isnan(values.p50):
        return "-"
    parts = [f"{value * 1e3:,.0f}" for value in (values.p50, values.p90, values.p99)]
    return " / ".join(parts) + " ms"


def _table(columns: Sequence[str], rows: Iterator[list[str]] | Sequence[list[str]]) -> str:
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)
