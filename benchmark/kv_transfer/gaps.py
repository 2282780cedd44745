"""How long prefill's loop stands still while 64 rooms are under way: ``gap``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from benchmark.harness.report import percentile, print_table
from benchmark.kv_transfer.cases import Case, Options, run_cases
from benchmark.kv_transfer.output import Lines, markdown, number
from benchmark.kv_transfer.records import Round
from benchmark.kv_transfer.runs import Answer, Verdict
from benchmark.kv_transfer.summary import summarize
from benchmark.kv_transfer.turns import Turn

#: The largest gap of the scheduler's loop that a fleet should see, seconds.
BOUND_S = 5e-3


@dataclass(frozen=True)
class Gaps:
    """Of all turns of an arm. Seconds, but ``turns``."""

    turns: int
    p50: float
    p99: float
    largest: float
    #: The same without the time for which the loop was ready to run and had no core.
    on_core_p99: float
    on_core_largest: float
    #: Most of what one turn waited for no core: its pause, and locks.
    most_blocked: float
    cpu_p50: float


def summarize_turns(turns: Sequence[Turn]) -> Gaps:
    """Percentiles; NaN of nothing."""
    took = [turn.took for turn in turns]
    on_core = [turn.took - turn.ready for turn in turns]
    return Gaps(
        turns=len(turns),
        p50=percentile(took, 50),
        p99=percentile(took, 99),
        largest=max(took, default=math.nan),
        on_core_p99=percentile(on_core, 99),
        on_core_largest=max(on_core, default=math.nan),
        most_blocked=max((turn.blocked for turn in turns), default=math.nan),
        cpu_p50=percentile([turn.cpu for turn in turns], 50),
    )


_COLUMNS = [
    "arm", "turns", "gap ms: p50", "p99", "largest", "without waiting for a core: p99", "largest",
    "most time blocked ms", "a turn's CPU ms", "GB/s", "CPU s/GB", "decode CPU s/GB", "cores used",
]  # fmt: skip


def run(options: Options, case: Case, lines: Lines) -> Answer:
    """Every arm, and the bound on ours."""
    found: dict[str, Gaps] = {}
    rows = []
    for (arm, _), rounds in run_cases(options, [case], lines).items():
        if rounds:
            found[arm] = summarize_turns([turn for each in rounds for turn in each.turns])
            lines.write({"kind": "gaps", "arm": arm, **vars(found[arm])})
            rows.append(_row(arm, found[arm], rounds))
    print_table(
        f"gap: {case.rooms} rooms on {case.peers} peers, {1e3 * options.work_s:g} ms of work and "
        f"{1e3 * options.pause_s:g} ms of pause a turn",
        _COLUMNS,
        rows,
        options.console,
    )
    verdicts = []
    if "ours" in found:
        stock = f" (stock: {1e3 * found['stock'].largest:,.0f})" if "stock" in found else ""
        largest = found["ours"].largest
        verdicts.append(
            Verdict(
                f"the largest gap of ours is {1e3 * largest:.1f} ms, below "
                f"{1e3 * BOUND_S:g}{stock}; without waiting for a core "
                f"{1e3 * found['ours'].on_core_largest:.1f}",
                largest < BOUND_S,
            )
        )
    return Answer([markdown(_COLUMNS, rows)], verdicts)


def _row(arm: str, found: Gaps, rounds: Sequence[Round]) -> list[str]:
    gaps = (
        found.p50, found.p99, found.largest, found.on_core_p99, found.on_core_largest,
        found.most_blocked, found.cpu_p50,
    )  # fmt: skip
    summary = summarize(rounds)
    return [
        arm,
        f"{found.turns:,}",
        *(number(1e3 * seconds) for seconds in gaps),
        number(summary.gb_per_s),
        number(summary.cpu_s_per_gb),
        number(summary.peer_cpu_s_per_gb),
        number(summary.cores),
    ]
