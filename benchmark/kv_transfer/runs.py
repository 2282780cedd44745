"""The runs that answer one question each; every one returns the parts of its results page."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmark.harness.report import print_table, spread
from benchmark.kv_transfer.cases import Case, Options, arm_of, run_case, run_cases, take_rooms
from benchmark.kv_transfer.output import Lines, markdown, number, p50_p99
from benchmark.kv_transfer.records import Round
from benchmark.kv_transfer.summary import Summary, of_peer, summarize, thread_groups, totals


@dataclass(frozen=True)
class Verdict:
    """A bound and whether it held."""

    text: str
    holds: bool

    def __str__(self) -> str:
        return f"{'holds' if self.holds else 'DOES NOT HOLD'}: {self.text}"


@dataclass(frozen=True)
class Answer:
    """What a run found: Markdown parts, and the bounds that it was to show."""

    parts: Sequence[str]
    verdicts: Sequence[Verdict] = ()
    #: The numbers, for whoever draws them.
    summaries: Mapping[tuple[str, Case], Summary] = dataclasses.field(default_factory=dict)


COLUMNS = [
    "arm", "load", "room MB", "rooms (failed)", "send us", "its CPU us", "queue ms", "build ms",
    "post ms", "wire ms", "total ms", "descriptors", "GB/s", "CPU s/GB", "decode CPU s/GB",
    "cores",
]  # fmt: skip


def row(arm: str, load: str, found: Summary) -> list[str]:
    """A line of the table; pairs are p50 / p99."""
    return [
        arm,
        load,
        number(found.room_bytes / 1e6, 1),
        f"{found.rooms} ({found.failed})",
        p50_p99(found.send, 1e-6),
        p50_p99(found.send_cpu, 1e-6),
        p50_p99(found.queue, 1e-3),
        p50_p99(found.build, 1e-3),
        p50_p99(found.post, 1e-3),
        p50_p99(found.wire, 1e-3),
        p50_p99(found.total, 1e-3),
        number(found.descriptors, 0),
        number(found.gb_per_s),
        number(found.cpu_s_per_gb),
        number(found.peer_cpu_s_per_gb),
        number(found.cores),
    ]


def load_name(case: Case) -> str:
    """A case in words."""
    words = f"{case.tokens:,} tokens, {case.pages:,} {case.pattern} pages"
    if case.chunks > 1:
        words += f" in {case.chunks} chunks"
    if case.rooms > 1:
        words += f"; {case.rooms} rooms"
        words += f" on {case.peers} peers" if case.peers > 1 else ""
        words += f", {case.in_flight} at once"
    return words


def tabulate(
    options: Options, title: str, measured: Mapping[tuple[str, Case], list[Round]], lines: Lines
) -> dict[tuple[str, Case], Summary]:
    """Print the table of all loads, and write a summary line for each."""
    summaries = {key: summarize(rounds) for key, rounds in measured.items() if rounds}
    rows = [row(arm, load_name(case), found) for (arm, case), found in summaries.items()]
    print_table(f"{title}; p50 / p99", COLUMNS, rows, options.console)
    for (arm, case), found in summaries.items():
        lines.write(
            {
                "kind": "summary",
                "arm": arm,
                **dataclasses.asdict(case),
                **dataclasses.asdict(found),
            }
        )
    return summaries


def as_markdown(summaries: Mapping[tuple[str, Case], Summary]) -> str:
    """The same table for the results page."""
    rows = [row(arm, load_name(case), found) for (arm, case), found in summaries.items()]
    return markdown(COLUMNS, rows)


def run_loads(options: Options, cases: Sequence[Case], lines: Lines, title: str) -> Answer:
    """``sweep`` and whatever else only compares the arms on some loads."""
    summaries = tabulate(options, title, run_cases(options, cases, lines), lines)
    return Answer([as_markdown(summaries)], summaries=summaries)


def run_send(options: Options, case: Case, lines: Lines) -> Answer:
    """What a call of ``send`` costs the scheduler."""
    answer = run_loads(options, [case], lines, "send")
    verdicts = []
    if {("ours", case), ("stock", case)} <= set(answer.summaries):
        ours, stock = answer.summaries["ours", case].send, answer.summaries["stock", case].send
        verdicts = [
            Verdict(f"send p99 of ours is {ours.p99 * 1e6:.0f} us, at most 100", ours.p99 <= 1e-4),
            Verdict(
                f"send p99 of ours ({ours.p99 * 1e6:.0f} us) is {stock.p50 / ours.p99:.0f} times "
                f"less than stock's p50 ({stock.p50 * 1e6:,.0f} us), at least 20 (p50 to p50: "
                f"{stock.p50 / ours.p50:.0f})",
                stock.p50 / ours.p99 >= 20,
            ),
        ]
    return dataclasses.replace(answer, verdicts=verdicts)


def run_fleet(options: Options, case: Case, lines: Lines) -> Answer:
    """Many rooms on several peers at once."""
    answer = run_loads(options, [case], lines, "fleet")
    found = {arm: summary for (arm, _), summary in answer.summaries.items()}
    verdicts = []
    if "ours" in found:
        stock = f" (stock: {found['stock'].tail:.2f})" if "stock" in found else ""
        tail = found["ours"].tail
        verdicts.append(
            Verdict(f"p99 of a room is {tail:.2f} times its p50, at most 3{stock}", tail <= 3)
        )
    if {"ours", "bare"} <= set(found):
        share = found["ours"].gb_per_s / found["bare"].gb_per_s
        stock = ""
        if "stock" in found:
            stock = f" (stock: {found['stock'].gb_per_s / found['bare'].gb_per_s:.2f})"
        verdicts.append(
            Verdict(
                f"throughput is {share:.2f} of the bare library's, at least 0.95{stock}; cores "
                f"kept busy: {found['ours'].cores:.2f} and {found['bare'].cores:.2f}",
                share >= 0.95,
            )
        )
    return dataclasses.replace(answer, verdicts=verdicts)


def run_load(options: Options, case: Case, lines: Lines) -> Answer:
    """CPU time for what was moved."""
    answer = run_loads(options, [case], lines, "load")
    found = {arm: summary for (arm, _), summary in answer.summaries.items()}
    verdicts = []
    if {"ours", "stock"} <= set(found):
        ours, stock = found["ours"].cpu_s_per_gb, found["stock"].cpu_s_per_gb
        text = f"prefill's CPU seconds a GB: {ours:.2f}, stock's {stock:.2f}, at most as many"
        verdicts = [Verdict(text, ours <= stock)]
    return dataclasses.replace(answer, verdicts=verdicts)


def run_idle(options: Options, case: Case, lines: Lines, seconds: float) -> Answer:
    """CPU use of the prefill process with nothing to do, after it has moved something."""
    rows, verdicts = [], []
    for arm in options.arms:
        with arm_of(options, arm, [case]) as fleet:
            run_case(fleet, options, case, rounds=1)
            time.sleep(1.0)
            uses = fleet.idle(seconds)
        groups = thread_groups(uses, seconds)
        lines.write({"kind": "idle", "arm": arm, "seconds": seconds, "threads": uses, **groups})
        rows.append([arm, *(f"{100 * share:.2f} %" for share in groups.values())])
        if arm == "ours":
            share = groups["workers"]
            text = f"idle workers use {100 * share:.2f} % of a core, less than 1 %"
            verdicts = [Verdict(text, share < 0.01)]
    columns = ["idle prefill process, share of a core", *groups]
    print_table(f"idle for {seconds:.0f} s", columns, rows, options.console)
    return Answer([markdown(columns, rows)], verdicts)


def run_stall(options: Options, case: Case, lines: Lines, deadline_s: float) -> Answer:
    """One of several peers is stopped while its rooms are sent; what becomes of the others'."""
    stopped = case.peers - 1
    others = list(range(stopped))
    rows, verdicts, notes = [], [], []
    limit_s = deadline_s + 15.0
    env = {"SGLANG_DISAGGREGATION_TRANSFER_TIMEOUT": f"{deadline_s:g}"}
    for arm in options.arms:
        options.console.print(f"[bold]{arm}[/]")
        with arm_of(options, arm, [case], env) as fleet:
            name = fleet.peers[stopped].name
            running = run_case(fleet, options, case)
            halted = []
            # In the other arms nothing ends the stopped peer's rooms, which would be left behind.
            for _ in range(options.rounds if arm == "ours" else 1):
                plans = case.plans(take_rooms(case), options.seed)
                fleet.announce(plans)
                halted.append(
                    fleet.send_announced(
                        plans, in_flight=case.in_flight, limit_s=limit_s, stopped=stopped
                    )
                )
                time.sleep(1.0)  # what was under way lands
        lines.rounds(arm, case, running, stopped=None)
        lines.rounds(arm, case, halted, stopped=stopped)
        before, after = (spread(totals(each, peers=others)) for each in (running, halted))
        growth = after.p99 / before.p99 - 1
        wanted = len(halted) * sum(plan.peer != stopped for plan in plans)
        done = len(totals(halted, peers=others))
        its_rooms = of_peer(halted, stopped)
        failed = [times for times in its_rooms if times.outcome == "failed"]
        named = [times for times in failed if name in times.error]
        waited = spread([times.total for times in failed])
        rows.append(
            [
                arm,
                p50_p99(before, 1e-3),
                p50_p99(after, 1e-3),
                "-" if math.isnan(growth) else f"{100 * growth:+.0f} %",
                f"{done} of {wanted}",
                f"{len(failed)} of {len(its_rooms)}",
                number(waited.p50, 1) + " / " + number(waited.p99, 1),
                f"{len(named)}",
            ]
        )
        for error in sorted({times.error.replace(name, "<peer>") for times in failed})[:2]:
            notes.append(f"{arm}, an error of the stopped peer's rooms: `{error[:300]}`")
        if arm == "ours":
            verdicts = [
                Verdict(f"all {wanted} rooms of the others are done", done == wanted),
                Verdict(f"the others' p99 changes by {100 * growth:+.0f} %, at most +20 %",
                        growth <= 0.2),
                Verdict(
                    f"{len(failed)} of the stopped peer's {len(its_rooms)} rooms fail, "
                    f"{len(named)} with its name, p99 after {waited.p99:.1f} s (deadline "
                    f"{deadline_s:g} s)",
                    len(named) == len(its_rooms) and waited.p99 <= deadline_s + 2.0,
                ),
            ]  # fmt: skip
    columns = [
        "arm", "others, all running: total ms", "others, one stopped: total ms", "p99 changes",
        "others' rooms done", "stopped peer's rooms failed", "after s", "with its name",
    ]  # fmt: skip
    print_table(f"stall: {load_name(case)}", columns, rows, options.console)
    return Answer([markdown(columns, rows), *notes], verdicts)
