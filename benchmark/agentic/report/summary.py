"""``summary.json``: the numbers of the page, for programs. Times in seconds; where a number has an
interval, it stands with it as ``[value, low, high]``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from benchmark.agentic.load.outcome import client
from benchmark.agentic.report.events import events
from benchmark.agentic.report.numbers import COMPARED, QUANTITIES, STATISTICS, Level, plain
from benchmark.agentic.report.verdict import answer, answers, breaks, claims, warnings
from benchmark.agentic.studies.record import Run


def summary(run: Run, levels: Sequence[Level]) -> dict[str, Any]:
    """The file's content."""
    return {
        **_environment(run),
        "command": run.command,
        "study": msgspec.to_builtins(run.study),
        "fleet": run.fleet,
        "servers": run.servers,
        "trace": run.trace,
        "answer": answer(run, levels),
        "breaks": list(breaks(run, levels)),
        "warnings": list(warnings(run, levels)),
        "claims": [
            {**msgspec.to_builtins(of.claim), **of._asdict(), "claim": of.claim.text}
            for of in claims(run, levels)
        ],
        "answers": answers(run),
        "loads": {
            level.point.name: {arm: _arm(run, level, arm) for arm in level.cells}
            for level in levels
        },
    }


def _environment(run: Run) -> Mapping[str, Any]:
    """By address it is the sender's: what the servers are is not known."""
    if run.fleet["rig"]:
        return run.environment
    sender = dict(run.environment)
    return {"date": sender.pop("date"), "sent_from": sender}


def _arm(run: Run, level: Level, arm: str) -> dict[str, Any]:
    base = next(iter(level.cells))
    at_once, most = level.open(arm)
    moved, pool, sender = level.moved(arm), level.pool(arm), client(level.outcomes(arm))
    values = {quantity: level.values(arm, quantity) for quantity in QUANTITIES}
    return {
        "requests": len(level.outcomes(arm)),
        "failed": level.failed(arm),
        "requests_per_s": level.per_s(arm, lambda o: o.error is None),
        "goodput_per_s": level.goodput(arm),
        "itl_p99": level.itl_p99s(arm),
        "slo": level.interval(level.values(arm, "slo")),
        "hit_rate": level.hit_rate(arm),
        "rounds": level.means(arm, run.study.by),
        **{
            quantity: {name: level.interval(mine, of) for name, of in STATISTICS.items()}
            for quantity, mine in values.items()
        },
        "of_first_arm": None
        if arm == base
        else {
            quantity: {
                name: level.ratio(mine, level.values(base, quantity), STATISTICS[name])
                for name in COMPARED
            }
            for quantity, mine in values.items()
        },
        "classes": {name: _class(level, arm, name) for name in level.kinds},
        "at_once": {"mean": at_once, "most": most},
        "pool": None if pool is None else {"p50": pool[0], "max": pool[1]},
        "bytes_moved": None if moved is None else moved.bytes_moved,
        "local_tokens": None if moved is None else moved.local_tokens,
        "by_worker": [
            {"prompt_tokens": share, "hit_rate": hit} for share, hit in level.by_worker(arm)
        ],
        "transfers": level.transfers(arm),
        "stages": level.stages(arm),
        "prefill_events": None if (of := events(level, arm)) is None else vars(of),
        "reached": level.cells[arm][0].via,
        "client": {"late_p99": sender.late_p99_s, "read_late_p99": sender.loop_lag_p99_s},
    }


def _class(level: Level, arm: str, name: str) -> dict[str, Any]:
    """Without intervals, as on the page."""
    told: dict[str, Any] = {"requests": level.classes.count(name)}
    for quantity in QUANTITIES:
        values = level.values(arm, quantity, name)
        told[quantity] = {each: plain(values, of) for each, of in STATISTICS.items()}
    return told
