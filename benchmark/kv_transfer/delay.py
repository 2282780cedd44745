"""What the pauses between a worker's looks cost a room: ``delay``.

A worker sends the note that completes a room when it sees that its writes are done. Workers look
after pauses (``delta/prefill/send_queue.py``); the arm ``ours-spin`` looks without any. What a room
takes longer until decode sees it complete is the price.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmark.harness.report import print_table
from benchmark.kv_transfer.cases import Case, Options, run_cases
from benchmark.kv_transfer.output import Lines, markdown, number, p50_p99
from benchmark.kv_transfer.runs import Answer, Verdict
from benchmark.kv_transfer.summary import summarize

#: The most that the pauses may add at the median: seconds, and a share of the wire time. Below
#: ``_SHORTEST_S`` nothing is said of the share: threads do not wake up that exactly.
BOUND_S, BOUND_SHARE, _SHORTEST_S = 1e-3, 0.05, 1e-4

_COLUMNS = [
    "tokens", "arm", "until decode sees it, ms", "wire ms", "added at p50, us", "of the wire time",
    "CPU s/GB",
]  # fmt: skip


def run(options: Options, cases: Sequence[Case], lines: Lines) -> Answer:
    """Rooms one at a time, of each size."""
    found = {key: summarize(rounds) for key, rounds in run_cases(options, cases, lines).items()}
    rows, verdicts = [], []
    for case in cases:
        spinning = found.get(("ours-spin", case))
        for arm in options.arms:
            each = found[arm, case]
            added = each.arrival.p50 - spinning.arrival.p50 if spinning else float("nan")
            share = added / spinning.wire.p50 if spinning and spinning.wire.p50 else float("nan")
            rows.append(
                [
                    f"{case.tokens:,}",
                    arm,
                    p50_p99(each.arrival, 1e-3),
                    p50_p99(each.wire, 1e-3),
                    number(1e6 * added, 0),
                    number(100 * share, 1) + " %",
                    number(each.cpu_s_per_gb),
                ]
            )
            if arm == "ours" and spinning:
                verdicts.append(
                    Verdict(
                        f"{case.tokens:,} tokens: pauses add {1e6 * added:,.0f} us at the median, "
                        f"{100 * share:.1f} % of the wire time; at most {1e6 * BOUND_S:,.0f} us "
                        f"and {100 * BOUND_SHARE:.0f} % (or {1e6 * _SHORTEST_S:.0f} us)",
                        added < BOUND_S and (added < _SHORTEST_S or share < BOUND_SHARE),
                    )
                )
            lines.write({"kind": "delay", "arm": arm, "tokens": case.tokens, "added_s": added})
    print_table("delay: one room at a time", _COLUMNS, rows, options.console)
    return Answer([markdown(_COLUMNS, rows)], verdicts)
