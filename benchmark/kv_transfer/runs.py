"""The runs that answer one question each, their tables, and what must hold of them."""

from __future__ import annotations

import dataclasses
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmark.harness.report import Spread, Verdict, markdown, number, print_table, spread
from benchmark.kv_transfer.cases import Case, Measured, Options, arm_of, run_case, run_cases
from benchmark.kv_transfer.summary import (
    Summary,
    of_peer,
    summarize,
    summarize_turns,
    thread_groups,
    totals,
)


@dataclass(frozen=True)
class Answer:
    """What a run found: Markdown parts, and the bounds that it was to show."""

    parts: Sequence[str]
    verdicts: Sequence[Verdict] = ()


#: Column -> cell; pairs are p50 / p99.
COLUMNS: dict[str, Callable[[Summary], str]] = {
    "room MB": lambda found: number(found.room_bytes / 1e6, 1),
    "rooms (failed)": lambda found: f"{found.rooms} ({found.failed})",
    "send us": lambda found: p50_p99(found.send, 1e-6),
    "its CPU us": lambda found: p50_p99(found.send_cpu, 1e-6),
    "queue ms": lambda found: p50_p99(found.queue, 1e-3),
    "build ms": lambda found: p50_p99(found.build, 1e-3),
    "post ms": lambda found: p50_p99(found.post, 1e-3),
    "wire ms": lambda found: p50_p99(found.wire, 1e-3),
    "total ms": lambda found: p50_p99(found.total, 1e-3),
    "until decode sees it ms": lambda found: p50_p99(found.arrival, 1e-3),
    "descriptors": lambda found: number(found.descriptors, 0),
    "GB/s": lambda found: number(found.gb_per_s),
    "CPU s/GB": lambda found: number(found.cpu_s_per_gb),
    "decode CPU s/GB": lambda found: number(found.peer_cpu_s_per_gb),
    "cores": lambda found: number(found.cores),
}


def p50_p99(spread: Spread, unit: float) -> str:
    """Two percentiles in units of ``unit`` seconds; a dash where there are none."""
    if math.isnan(spread.p50):
        return "-"
    return " / ".join(
        f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
        for value in (spread.p50 / unit, spread.p99 / unit)
    )


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


def _table(
    options: Options, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]
) -> str:
    """Printed, and as Markdown."""
    print_table(title, columns, rows, options.console)
    return markdown(columns, rows)


Found = Mapping[tuple[str, Case], Summary]


def run_loads(
    options: Options, cases: Sequence[Case], title: str
) -> tuple[Answer, Found, Measured]:
    """``sweep``, ``delay`` and whatever else compares the arms on some loads: a row a load."""
    measured = run_cases(options, cases)
    found = {key: summarize(rounds) for key, rounds in measured.items() if rounds}
    for (arm, case), summary in found.items():
        options.write("summary", arm, case, **dataclasses.asdict(summary))
    rows = [
        [arm, load_name(case), *(cell(summary) for cell in COLUMNS.values())]
        for (arm, case), summary in found.items()
    ]
    table = _table(options, f"{title}; p50 / p99", ["arm", "load", *COLUMNS], rows)
    return Answer([table]), found, measured


def run_send(options: Options, case: Case) -> Answer:
    """What a call of ``send`` costs the scheduler."""
    answer, found, _ = run_loads(options, [case], "send")
    if not {("ours", case), ("stock", case)} <= found.keys():
        return answer
    ours, stock = found["ours", case].send, found["stock", case].send
    verdicts = [
        Verdict(f"send p99 of ours is {ours.p99 * 1e6:.0f} us, at most 100", ours.p99 <= 1e-4),
        Verdict(
            f"send p99 of ours ({ours.p99 * 1e6:.0f} us) is {stock.p50 / ours.p99:.0f} times less "
            f"than stock's p50 ({stock.p50 * 1e6:,.0f} us), at least 20 (p50 to p50: "
            f"{stock.p50 / ours.p50:.0f})",
            stock.p50 / ours.p99 >= 20,
        ),
    ]
    return Answer(answer.parts, verdicts)


def run_fleet(options: Options, case: Case) -> Answer:
    """Many rooms on several peers at once."""
    answer, by_case, _ = run_loads(options, [case], "fleet")
    found = {arm: summary for (arm, _), summary in by_case.items()}
    verdicts = []
    for arm in [arm for arm in ("ours", "radix") if arm in found]:
        tail = found[arm].total.p99 / found[arm].total.p50
        text = f"{arm}: p99 of a room is {tail:.2f} times its p50, at most 3"
        verdicts.append(Verdict(text, tail <= 3))
        if "bare" in found:
            share = found[arm].gb_per_s / found["bare"].gb_per_s
            text = f"{arm}: throughput is {share:.2f} of the bare library's, at least 0.95"
            verdicts.append(Verdict(text, share >= 0.95))
    return Answer(answer.parts, verdicts)


def run_gap(options: Options, case: Case) -> Answer:
    """How long prefill's loop stands still while many rooms are under way."""
    answer, _, measured = run_loads(options, [case], "gap")
    rows, verdicts = [], []
    for (arm, _), rounds in measured.items():
        gaps = summarize_turns([turn for each in rounds for turn in each.turns])
        options.write("gaps", arm, case, **dataclasses.asdict(gaps))
        turns, *seconds = dataclasses.astuple(gaps)
        rows.append([arm, f"{turns:,}", *(number(1e3 * each) for each in seconds)])
        if arm in ("ours", "radix"):
            text = f"the largest gap of {arm} is {1e3 * gaps.largest:.1f} ms, below 5"
            verdicts.append(Verdict(text, gaps.largest < 5e-3))
    columns = ["arm", "turns", "gap ms: p50", "p99", "largest"]
    columns += ["without waiting for a core: p99", "largest", "most time blocked", "CPU of a turn"]
    title = f"{1e3 * options.work_s:g} ms of work and {1e3 * options.pause_s:g} ms of pause a turn"
    return Answer([_table(options, title, columns, rows), *answer.parts], verdicts)


def run_idle(options: Options, case: Case, seconds: float) -> Answer:
    """CPU use of the prefill process with nothing to do, after it has moved something."""
    rows, verdicts = [], []
    groups: dict[str, float] = {}
    for arm in options.arms:
        with arm_of(options, arm, [case]) as fleet:
            run_case(fleet, options, case, rounds=1)
            time.sleep(1.0)
            uses = fleet.idle(seconds)
        groups = thread_groups(uses, seconds)
        options.write("idle", arm, case, seconds=seconds, threads=uses, **groups)
        rows.append([arm, *(f"{100 * share:.2f} %" for share in groups.values())])
        if arm == "ours":
            share = groups["workers"]
            text = f"idle workers use {100 * share:.2f} % of a core, less than 1 %"
            verdicts = [Verdict(text, share < 0.01)]
    columns = ["idle prefill process, share of a core", *groups]
    return Answer([_table(options, f"idle for {seconds:.0f} s", columns, rows)], verdicts)


def run_stall(options: Options, case: Case, deadline_s: float) -> Answer:
    """One of several peers is stopped while its rooms are sent; what becomes of the others'."""
    stopped = case.peers - 1
    others = list(range(stopped))
    rows, verdicts, notes = [], [], []
    env = {"SGLANG_DISAGGREGATION_TRANSFER_TIMEOUT": f"{deadline_s:g}"}
    for arm in options.arms:
        options.console.print(f"[bold]{arm}[/]")
        with arm_of(options, arm, [case], env) as fleet:
            name = fleet.peers[stopped].name
            running = run_case(fleet, options, case)
            halted = []
            # In the other arms nothing ends the stopped peer's rooms, which would be left behind.
            for _ in range(options.rounds if arm == "ours" else 1):
                plans = case.plans(options.seed)
                fleet.announce(plans)
                halted.append(
                    fleet.send_announced(
                        plans, in_flight=case.in_flight, limit_s=deadline_s + 15.0, stopped=stopped
                    )
                )
                time.sleep(1.0)  # what was under way lands
        before, after = (spread(totals(each, peers=others)) for each in (running, halted))
        growth = after.p99 / before.p99 - 1
        wanted = len(halted) * sum(plan.peer != stopped for plan in plans)
        done = len(totals(halted, peers=others))
        its_rooms = of_peer(halted, stopped)
        failed = [times for times in its_rooms if times.outcome == "failed"]
        named = [times for times in failed if name in times.error]
        waited = spread([times.total for times in failed])
        ends = Counter(times.outcome for times in its_rooms)
        options.write("stalled", arm, case, before=before, after=after, waited=waited, ends=ends)
        rows.append(
            [
                arm,
                p50_p99(before, 1e-3),
                p50_p99(after, 1e-3),
                "-" if math.isnan(growth) else f"{100 * growth:+.0f} %",
                f"{done} of {wanted}",
                f"{len(failed)} of {len(its_rooms)}",
                p50_p99(waited, 1.0),
                f"{len(named)}",
            ]
        )
        for error in sorted({times.error.replace(name, "<peer>") for times in failed})[:2]:
            notes.append(f"{arm}, an error of the stopped peer's rooms: `{error[:300]}`")
        if arm == "ours":
            change = f"the others' p99 changes by {100 * growth:+.0f} %, at most +20 %"
            verdicts = [
                Verdict(f"all {wanted} rooms of the others are done", done == wanted),
                Verdict(change, growth <= 0.2),
                Verdict(
                    f"{len(failed)} of the stopped peer's {len(its_rooms)} rooms fail, "
                    f"{len(named)} with its name, p99 after {waited.p99:.1f} s (deadline "
                    f"{deadline_s:g} s)",
                    len(named) == len(its_rooms) and waited.p99 <= deadline_s + 2.0,
                ),
            ]
    columns = ["arm", "others, all running: total ms", "others, one stopped: total ms"]
    columns += ["p99 changes", "others' rooms done", "stopped peer's rooms failed", "after s"]
    columns += ["with its name"]
    return Answer([_table(options, f"stall: {load_name(case)}", columns, rows), *notes], verdicts)
