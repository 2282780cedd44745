"""The runs that answer one question each: loads on every arm in turn, in fresh processes and with
the same rooms; their tables, and what must hold of them."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from rich.console import Console

from benchmark.harness.report import Spread, Verdict, markdown, number, print_table, spread
from benchmark.kv_transfer.fleet import ArmFailed, Fleet
from benchmark.kv_transfer.records import FleetConfig, Pages, RoomPlan, Round
from benchmark.kv_transfer.shapes import Shape
from benchmark.kv_transfer.summary import (
    Summary,
    of_peer,
    summarize,
    summarize_turns,
    thread_groups,
    totals,
)

_rooms = itertools.count(1000)


def pages_for(count: int, rooms: int, seed: int) -> list[Pages]:
    """``count`` scattered pages for each of ``rooms`` rooms, no page twice, never page 0 (SGLang's
    pools keep it for padding). The pool has ``rooms * count + 1`` pages."""
    every = np.arange(1, rooms * count + 1, dtype=np.int32)
    return list(np.random.default_rng(seed).permutation(every).reshape(rooms, count))


@dataclass(frozen=True)
class Case:
    """One load: ``rooms`` rooms of ``tokens`` tokens, ``in_flight`` of them at once."""

    tokens: int
    page_size: int = 16
    rooms: int = 1
    in_flight: int = 1
    peers: int = 1
    chunks: int = 1

    @property
    def pages(self) -> int:
        """Pages of a room."""
        return -(-self.tokens // self.page_size)

    @property
    def rooms_a_peer(self) -> int:
        """The most that one peer gets of a round."""
        return -(-self.rooms // self.peers)

    @property
    def pool_tokens(self) -> int:
        """Of all pools: every room under way at a peer has destination pages of its own; prefill's
        pool is as large as a peer's, since rooms of different peers may send the same pages."""
        return (self.peers + 1) * self.rooms_a_peer * self.tokens

    def plans(self, seed: int) -> list[RoomPlan]:
        """A round of it, with numbers that no room had: rooms are dealt to the peers in turn; those
        of one peer share no page on either side."""
        if self.chunks > self.pages:
            raise ValueError(f"--chunks {self.chunks}: a room has only {self.pages} pages")
        first, *_ = itertools.islice(_rooms, self.rooms)
        # Another order on each side: neighbours by chance on both sides would be merged.
        sources, destinations = (
            pages_for(self.pages, self.rooms_a_peer, seed + side) for side in (0, 1)
        )
        dealt = [divmod(i, self.peers) for i in range(self.rooms)]
        return [
            RoomPlan(first + i, peer, sources[slot], destinations[slot], slot, self.chunks)
            for i, (slot, peer) in enumerate(dealt)
        ]


@dataclass(frozen=True)
class Options:
    """What all runs have in common."""

    backend: str
    shape: Shape
    arms: Sequence[str]
    transport: str
    device: str
    #: Times that every arm is started afresh.
    passes: int
    #: Measured rounds of each case in each pass, after one that is only checked.
    rounds: int
    limit_s: float
    pause_s: float
    #: Python work of prefill's loop in each turn (run ``gap``).
    work_s: float
    max_bytes: int
    #: Of decode's loop between two looks.
    decode_pause_s: float
    seed: int
    console: Console = field(repr=False)
    #: What the run writes to its file: a JSON object a line.
    lines: list[dict[str, Any]] = field(default_factory=list, repr=False)

    def write(self, kind: str, arm: str, case: Case, **more: Any) -> None:
        """One line."""
        self.lines.append({"kind": kind, "arm": arm, **asdict(case), **more})

    def check_memory(self, cases: Sequence[Case]) -> None:
        """Raises ValueError where a case needs more than ``max_bytes``."""
        for case in cases:
            if (wanted := case.pool_tokens * self.shape.token_bytes) > self.max_bytes:
                raise ValueError(
                    f"{case.rooms} rooms of {case.tokens:,} tokens on {case.peers} peers take "
                    f"{wanted / 1e9:.1f} GB of pools, and --max-bytes is "
                    f"{self.max_bytes / 1e9:.1f} GB: fewer --layers, --tokens or --rooms"
                )


@contextmanager
def arm_of(
    options: Options, arm: str, cases: Sequence[Case], env: dict[str, str] | None = None
) -> Iterator[Fleet]:
    """The processes of one arm, with pools for the largest of these cases, which have one page size
    and one number of peers."""
    (page_size,) = {case.page_size for case in cases}
    (peers,) = {case.peers for case in cases}
    config = FleetConfig(
        arm=arm,
        backend=options.backend,
        shape=options.shape,
        page_size=page_size,
        pool_pages=max(case.rooms_a_peer * case.pages for case in cases) + 1,
        slots=max(case.rooms_a_peer for case in cases),
        peers=peers,
        transport=options.transport,
        device=options.device,
        prefill_pause_s=options.pause_s,
        prefill_work_s=options.work_s,
        decode_pause_s=options.decode_pause_s,
        env=env or {},
    )
    with Fleet(config) as fleet:
        yield fleet


def run_case(fleet: Fleet, options: Options, case: Case, rounds: int | None = None) -> list[Round]:
    """One round that makes the connections and is checked for its contents, then the measured ones.

    Raises:
        ArmFailed: pages arrived wrong, or a room failed in the first round.
    """
    first = _round(fleet, options, case, check=True)
    for times in first.rooms:
        if times.outcome != "done":
            raise ArmFailed(
                f"{fleet.config.arm}, {case}: room {times.room} {times.outcome}: {times.error}"
            )
    measured = options.rounds if rounds is None else rounds
    return [_round(fleet, options, case) for _ in range(measured)]


def _round(fleet: Fleet, options: Options, case: Case, check: bool = False) -> Round:
    plans = case.plans(options.seed)
    return fleet.round(plans, in_flight=case.in_flight, limit_s=options.limit_s, check=check)


Measured = dict[tuple[str, Case], list[Round]]


def run_cases(options: Options, cases: Sequence[Case]) -> Measured:
    """Every case on every arm, ``passes`` times, each time in fresh processes; arms take turns."""
    options.check_memory(cases)
    measured: Measured = {(arm, case): [] for case in cases for arm in options.arms}
    for turn in range(options.passes):
        # Who is first changes, since the machine may warm up or tire.
        first = turn % len(options.arms)
        for arm in [*options.arms[first:], *options.arms[:first]]:
            options.console.print(f"pass {turn + 1}, [bold]{arm}[/]: {len(cases)} loads")
            with arm_of(options, arm, cases) as fleet:
                for case in cases:
                    try:
                        rounds = run_case(fleet, options, case)
                    except ArmFailed as failure:
                        error = str(failure).splitlines()[0]
                        options.console.print(f"[red]{arm}: {error}[/]")
                        options.write("failure", arm, case, error=error)
                        if not fleet.alive:
                            break
                        continue
                    measured[arm, case] += rounds
    return measured


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
    "total ms": lambda found: p50_p99(found.total, 1e-3),
    "until decode sees it ms": lambda found: p50_p99(found.arrival, 1e-3),
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
    words = f"{case.tokens:,} tokens, {case.pages:,} pages"
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


def run_loads(
    options: Options, cases: Sequence[Case], title: str
) -> tuple[Answer, dict[tuple[str, Case], Summary], Measured]:
    """Compares the arms on some loads: a row a load."""
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
        if "stock" in found:
            share = found[arm].gb_per_s / found["stock"].gb_per_s
            text = f"{arm}: throughput is {share:.2f} of stock's, at least 1"
            verdicts.append(Verdict(text, share >= 1))
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
