"""Numbers of a run: a table of requests, a table of cells, and ratios with intervals.

A cell is one arm at one load in one round. Rounds differ in the sessions that were sent and in the
other work of the machine. All arms of a round get the same sessions; requests that begin in the
window count, and a slower arm begins fewer in the same time. A number of an arm is the mean over
its rounds; a ratio of two arms is the geometric mean of the rounds' ratios. Intervals are of
Student's t over the rounds, those of ratios computed on logarithms.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy.stats import t

from benchmark.agentic.fleet.servers import DEVICE_MEMORY, MEMORY
from benchmark.agentic.fleet.spec import Slo
from benchmark.agentic.load.outcome import Outcome
from benchmark.agentic.report.events import events
from benchmark.agentic.studies.record import Cell, Run
from benchmark.harness import metrics
from benchmark.harness.report import percentile

QUANTITIES = ("ttft", "tpot", "e2e")
NAMES = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "end-to-end time"}
STATISTICS = ("mean", "p50", "p90", "p99")
STAGES = ("queue", "build", "post", "wire")
"""Stages of a transfer, as prefill counts them."""
TIERS = ("device", "host", "storage")
"""Tiers of a hierarchical cache."""
CELL = ["point", "arm", "round"]
ROUNDS = 3
"""Fewer rounds give no verdict, because the spread between two runs of one arm is then unknown."""
COMPUTED = "computed"
"""Prompt tokens that servers computed, over those that an endless cache of the load would not
hold."""
AGAINST = {
    **{f"{quantity}_mean": name for quantity, name in NAMES.items()},
    "itl_p99": "ITL p99",
    "goodput": "goodput",
}
"""Quantities that arms are compared by."""


class Interval(NamedTuple):
    """A value, with the bounds that contain the true value at the requested confidence."""

    value: float
    low: float
    high: float


def interval(values: Iterable[float], sure: float = 0.95, least: int = 2) -> Interval:
    """Return the interval of the mean of some values; no bounds for fewer than ``least`` values,
    which is two or more."""
    finite = np.array([value for value in values if math.isfinite(value)])
    if not len(finite):
        return Interval(math.nan, math.nan, math.nan)
    mean = float(finite.mean())
    if len(finite) < least:
        return Interval(mean, math.nan, math.nan)
    quantile = t.ppf((1 + sure) / 2, len(finite) - 1)
    half = float(quantile * finite.std(ddof=1) / math.sqrt(len(finite)))
    return Interval(mean, mean - half, mean + half)


def ratio(ratios: Iterable[float], sure: float = 0.95) -> Interval:
    """Return the interval of the geometric mean of the rounds' ratios. NaN if one arm has 0 or no
    value in a round, because the other rounds alone would show it as better than it is. No bounds,
    and so no verdict, for fewer than ``ROUNDS`` rounds."""
    logs = [math.log(ratio) if ratio > 0 else math.nan for ratio in ratios]
    if not all(map(math.isfinite, logs)):
        logs = []
    return Interval(*map(math.exp, interval(logs, sure, ROUNDS)))


@dataclass(frozen=True)
class Numbers:
    """Numbers of a run."""

    requests: pd.DataFrame
    """One row for each request that counts: the columns of ``CELL`` and of ``_request``."""
    cells: pd.DataFrame
    """One row for each cell, by ``CELL``: the columns of ``described`` and of ``_cell``."""

    def ratio(
        self, point: str, arms: tuple[str, str], column: str, kind: str = "", sure: float = 0.95
    ) -> Interval:
        """Return the ratio of the first arm to the second. Means of a round are over the requests
        that both arms count, because the windows of two arms contain different requests.
        ``kind``: use this class alone."""
        cells = [self.cells.loc[point, arm][column] for arm in arms]
        there = pd.concat(cells, axis=1, keys=arms, join="inner")  # rounds that both arms have
        if (quantity := column.removesuffix("_mean")) != column:
            mine = self.requests[self.requests["point"] == point]
            mine = mine[mine["kind"] == kind] if kind else mine
            pairs = mine.pivot_table(quantity, ["round", "index"], "arm").reindex(columns=arms)
            there = pairs.dropna().groupby("round").mean().reindex(there.index)
        return ratio(there[arms[0]] / there[arms[1]], sure)


def numbers(run: Run) -> Numbers:
    rows = [
        {**_named(cell), **_request(run, outcome)} for cell in run.cells for outcome in cell.counted
    ]
    requests = pd.DataFrame(rows, columns=[*CELL, "index", *QUANTITIES, "kind", "error"])
    requests = requests.astype(dict.fromkeys(QUANTITIES, float))
    cells = pd.DataFrame([{**_named(cell), **_cell(run, cell)} for cell in run.cells])
    whole = cells.set_index(CELL).join(described(requests.groupby(CELL)))
    return Numbers(requests, whole.sort_index())


def described(groups: Any) -> pd.DataFrame:
    """Return ``ttft_mean``, ``ttft_p50`` and so on of each group of requests, in seconds."""
    parts = [groups[list(QUANTITIES)].mean().add_suffix("_mean")]
    for p in (50, 90, 99):
        parts.append(groups[list(QUANTITIES)].quantile(p / 100).add_suffix(f"_p{p}"))
    return pd.concat(parts, axis=1)


def met(o: Outcome, slo: Slo) -> bool:
    """Return True if a request met the SLO; an answer of one token has no TPOT to miss."""
    return (
        o.error is None
        and (o.ttft_s is None or o.ttft_s <= slo.ttft_s)
        and (o.tpot_s is None or o.tpot_s <= slo.tpot_s)
    )


def _named(cell: Cell) -> dict[str, Any]:
    return {"point": cell.key[2].name, "arm": cell.arm, "round": cell.round}


def _request(run: Run, o: Outcome) -> dict[str, Any]:
    """Return the times in seconds. A failed request counts as the time limit, without a TPOT."""
    lost = run.study.load.timeout_s
    times = (lost, math.nan, lost) if o.error else (o.ttft_s, o.tpot_s, o.e2e_s)
    values = {name: math.nan if x is None else x for name, x in zip(QUANTITIES, times, strict=True)}
    return {**values, "index": o.index, "kind": o.request_class, "error": o.error}


def _cell(run: Run, cell: Cell) -> dict[str, float]:
    """Return a cell's numbers, except times of requests. Unknown ones are NaN or left out."""
    outcomes, counted = cell.outcomes, cell.counted
    began, ended = cell.span
    span = max(ended - began, 1e-9)
    inside = [o for o in outcomes if began < o.finished_s <= ended]
    held = [min(o.finished_s, ended) - max(o.started_s, began) for o in outcomes]
    # Sorts an end before a start at the same time.
    steps = sorted(
        (when, step) for o in outcomes for when, step in ((o.started_s, 1), (o.finished_s, -1))
    )
    gaps = [gap for o in counted for gap in o.itl_s]
    good = [met(o, run.study.slo) for o in counted]
    late, lag = ([getattr(o, name) for o in counted] for name in ("late_s", "loop_lag_s"))
    return {
        "requests": len(counted),
        "failed": sum(o.error is not None for o in counted),
        "requests_per_s": sum(o.error is None for o in inside) / span,
        "goodput": sum(met(o, run.study.slo) for o in inside) / span,
        "slo": sum(good) / len(good) if good else math.nan,
        "itl_p99": percentile(gaps, 99),
        "hit_rate": _hit_rate(counted),
        COMPUTED: _computed(counted),
        "at_once": sum(max(0.0, seconds) for seconds in held) / span,
        "at_most": int(max(np.cumsum([step for _, step in steps]), default=0)),
        "late_p99": percentile(late, 99),
        "read_late_p99": percentile(lag, 99),
        "loopback_bytes": (math.nan if cell.loopback is None else cell.loopback) / len(outcomes),
        **_counters(cell),
        **_workers(counted),
        **events(cell),
    }


def _hit_rate(counted: Sequence[Outcome]) -> float:
    """Return the cached share of the prompt tokens of answered requests; NaN if never reported."""
    reported = _cache_reported(counted)
    prompts = sum(o.prompt_tokens for o in reported)
    return sum(o.cached_tokens or 0 for o in reported) / max(1, prompts) if reported else math.nan


def _computed(counted: Sequence[Outcome]) -> float:
    """Return computed over new prompt tokens. Tokens are new if no earlier request of the load had
    them, or by the trace if that is unknown. NaN if no server reported cached tokens."""
    reported = _cache_reported(counted)
    new = sum(
        o.trace_new_tokens if o.load_new_tokens is None else o.load_new_tokens for o in reported
    )
    computed = sum(o.prompt_tokens - (o.cached_tokens or 0) for o in reported)
    return computed / max(1, new) if reported else math.nan


def _cache_reported(counted: Sequence[Outcome]) -> list[Outcome]:
    """Return the requests whose cached tokens are known. On OpenAI's endpoints SGLang omits the
    number if nothing of a prompt was cached."""
    if all(o.cached_tokens is None for o in counted):
        return []
    return [o for o in counted if o.error is None or o.cached_tokens is not None]


def _counters(cell: Cell) -> dict[str, float]:
    """Return the servers' counters per request, and the gauges that were sampled."""
    values: dict[str, float] = {}
    if cell.samples:
        values = {"usage_p50": percentile(cell.samples, 50), "usage_max": max(cell.samples)}
    engines = metrics.total(counts for role, counts in cell.gained.items() if role != "store")
    if MEMORY in engines:
        store_bytes = cell.gained.get("store", {}).get(MEMORY, 0.0)
        values |= {"host_bytes": engines[MEMORY], "store_bytes": store_bytes}
        values["memory_bytes"] = engines.get(DEVICE_MEMORY, 0.0) + engines[MEMORY] + store_bytes
        values["device_bytes"] = engines.get(DEVICE_MEMORY, 0.0)
        # Leave out decode servers, which report prefill's cached tokens again.
        computing = cell.gained.get("aggregated") or cell.gained.get("prefill", {})
        prompts = max(1.0, computing.get(metrics.ALL_PROMPT_TOKENS, 0.0))
        for tier in TIERS:
            values[tier] = computing.get(f"{metrics.CACHED_TOKENS} {tier}", 0.0) / prompts
    if "prefill" not in cell.gained:
        return values
    prefill, decode = (cell.gained.get(role, {}) for role in ("prefill", "decode"))
    sent = len(cell.outcomes)
    # The stock release counts the pages of each whole prompt, all of which it sends.
    stock = prefill.get(metrics.STOCK_TRANSFER_MB, 0.0) * 2**20
    values["bytes_moved"] = prefill.get(metrics.SENT_BYTES, stock) / sent
    values["hit_tokens"] = decode.get(metrics.HIT_TOKENS, 0.0) / sent
    values["local_tokens"] = decode.get(metrics.LOCAL_TOKENS, 0.0) / sent
    for stage in STAGES:
        name = f"sglang:kv_transfer_{stage}_seconds"
        if count := prefill.get(f"{name}_count", 0.0):
            values |= {"transfers": count / sent, stage: prefill.get(f"{name}_sum", 0.0) / count}
    return values


def _workers(counted: Sequence[Outcome]) -> dict[str, float]:
    """Return the busiest decoding server's share of the prompt tokens, over an even share."""
    tokens = Counter[str]()
    for o in counted:
        if o.error is None and o.decode_worker is not None:
            tokens[o.decode_worker] += o.prompt_tokens
    if len(tokens) < 2:
        return {}
    return {"imbalance": max(tokens.values()) * len(tokens) / tokens.total()}
