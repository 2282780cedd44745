"""Quantities of an arm at a load, over rounds, and how sure they are.

Every arm gets the same requests, so that a draw of the bootstrap takes the same rounds and the same
sessions of each: what differs between two arms is then not which requests were drawn. Sessions are
drawn whole, as their turns wait for each other.

A draw of three rounds never lies outside of the three, so that draws alone would call a quarter of
all differences between busy and quiet rounds real. A ratio's interval therefore is no narrower than
Student's t makes it of the rounds' own ratios.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from benchmark.agentic.fleet.spec import Slo
from benchmark.agentic.load.outcome import NAMES as CLASSES
from benchmark.agentic.load.outcome import Outcome, most_open
from benchmark.agentic.load.steady import MADE_CLASSES
from benchmark.agentic.studies.record import Cell, Run
from benchmark.agentic.studies.spec import Point
from benchmark.harness import metrics
from benchmark.harness.arm import Traffic, traffic

Values = npt.NDArray[np.float64]
Statistic = Callable[[Values, Values], Values]
"""Of values and a matrix of weights, a row a draw; one result a row."""

DRAWS = 1000
QUANTITIES = ("ttft", "tpot", "e2e")
STAGES = ("queue", "build", "post", "wire")
"""Of a transfer, as prefill counts them."""
NAMES = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "end-to-end time"}


def mean(values: Values, weights: Values) -> Values:
    result: Values = weights @ values / weights.sum(axis=1)
    return result


def quantile(p: float) -> Statistic:
    """The least value that ``p`` percent of the weight do not exceed."""

    def of(values: Values, weights: Values) -> Values:
        order = np.argsort(values)
        upto = np.cumsum(weights[:, order], axis=1)
        found: Values = values[order][np.argmax(upto >= upto[:, -1:] * (p / 100), axis=1)]
        return found

    return of


STATISTICS: Mapping[str, Statistic] = {
    "mean": mean,
    "p50": quantile(50),
    "p90": quantile(90),
    "p99": quantile(99),
}


COMPARED = ("mean", "p90")
"""Statistics of an arm that are held against the first arm's."""


def plain(values: Values, statistic: Statistic = mean) -> float:
    """Of the values that there are, each once; NaN of none."""
    there = values[~np.isnan(values)]
    return float(statistic(there, np.ones((1, len(there))))[0]) if len(there) else float("nan")


class Interval(NamedTuple):
    """A value, and where 95 % of the bootstrap's draws lie."""

    value: float
    low: float
    high: float

    @property
    def excludes_one(self) -> bool:
        """Whether a ratio is a difference."""
        return self.high < 1 or self.low > 1


class Level:
    """All arms at one load. Arrays have a row a round, and a column a request of the trace."""

    def __init__(self, run: Run, point: Point, slo: Slo) -> None:
        self.point, self.load, self._slo = point, point.load, slo
        head, *over = point.name.split(", ")
        self.said = ", ".join((f"{head} {run.unit}", *over))
        self.timeout_s = run.study.load.timeout_s
        self.cold_gap_s = run.study.trace.cold_gap_s
        self.cells: dict[str, list[Cell]] = {arm: run.at(arm, point) for arm in run.titles}
        self.cells = {arm: cells for arm, cells in self.cells.items() if cells}
        # A steady load has other requests in each arm, as faster ones get further. An index is the
        # same request in all of them.
        sent = {o.index: o for cells in self.cells.values() for cell in cells for o in cell.counted}
        self.requests = max(sent, default=-1) + 1
        self._sessions: dict[str, list[int]] = {}
        for index, o in sorted(sent.items()):
            self._sessions.setdefault(o.session_id or f"i{index}", []).append(index)
        self.classes = [sent[i].request_class if i in sent else "" for i in range(self.requests)]

    @property
    def kinds(self) -> list[str]:
        """Classes that it has requests of, in the page's order."""
        known = dict.fromkeys((*CLASSES, *MADE_CLASSES, *self.classes))
        return [name for name in known if name and name in self.classes]

    @property
    def rounds(self) -> int:
        """That all arms have."""
        return min(len(cells) for cells in self.cells.values())

    def values(self, arm: str, quantity: str, of: str | None = None) -> Values:
        """Seconds; for ``slo``, 1 where a request met it. NaN where there is no value; a failed
        request took the time limit. ``of``: requests of this class only."""
        found = np.full((self.rounds, self.requests), np.nan)
        for row, cell in enumerate(self.cells[arm][: self.rounds]):
            for o in cell.counted:
                if of is None or self.classes[o.index] == of:
                    found[row, o.index] = self._value(o, quantity)
        return found

    def means(self, arm: str, quantity: str) -> list[float]:
        """Of each round."""
        return [plain(row) for row in self.values(arm, quantity)]

    def _value(self, o: Outcome, quantity: str) -> float:
        if quantity == "slo":
            return float(met(o, self._slo))
        if o.error is not None:
            return float("nan") if quantity == "tpot" else self.timeout_s
        value = {"ttft": o.ttft_s, "tpot": o.tpot_s, "e2e": o.e2e_s}[quantity]
        return float("nan") if value is None else value

    @cached_property
    def _weights(self) -> Values:
        """How often each draw has each request of each round: a row a draw."""
        rng = np.random.default_rng(0)
        session_of = np.zeros(self.requests, dtype=np.intp)
        for number, turns in enumerate(self._sessions.values()):
            session_of[turns] = number
        rounds, sessions = self.rounds, len(self._sessions)
        drawn_rounds = rng.multinomial(rounds, [1 / rounds] * rounds, size=DRAWS)
        drawn_sessions = rng.multinomial(sessions, [1 / sessions] * sessions, size=DRAWS)
        weights = drawn_rounds[:, :, None] * drawn_sessions[:, None, session_of]
        return weights.reshape(DRAWS, -1).astype(float)

    def _drawn(self, values: Values, statistic: Statistic) -> Values:
        """The statistic in each draw; NaN where it has no value."""
        flat = values.ravel()
        there = ~np.isnan(flat)
        weights = self._weights[:, there]
        found = np.full(DRAWS, np.nan)
        some = weights.sum(axis=1) > 0 if there.any() else np.zeros(DRAWS, dtype=bool)
        if some.any():
            found[some] = statistic(flat[there], weights[some])
        return found

    def interval(self, values: Values, statistic: Statistic = mean) -> Interval:
        return spanned(plain(values, statistic), self._drawn(values, statistic))

    def ratio(
        self, values: Values, base: Values, statistic: Statistic = mean, sure: float = 0.95
    ) -> Interval:
        """``statistic`` of one over that of the other, drawn alike; see the module. ``sure``: how
        likely the interval holds the ratio."""
        one, other = self._drawn(values, statistic), self._drawn(base, statistic)
        value = _over(plain(values, statistic), plain(base, statistic))
        drawn = spanned(value, one / np.where(other == 0, np.nan, other), sure)
        rounds = [
            _over(plain(mine, statistic), plain(its, statistic))
            for mine, its in zip(values, base, strict=True)
        ]
        return widened(drawn, rounds, sure)

    def compared(self, arm: str, base: str, quantity: str, sure: float = 0.95) -> Interval:
        """One arm's over the other's: of a mean time, or of what a round has one number of, by
        Student's t over the rounds alone."""
        if quantity in QUANTITIES:
            one, other = (self.values(each, quantity) for each in (arm, base))
            return self.ratio(one, other, sure=sure)
        of = {"itl": self.itl_p99s, "goodput": self.goodputs}[quantity]
        value = _over(float(np.mean(of(arm))), float(np.mean(of(base))))
        return widened(Interval(value, value, value), list(map(_over, of(arm), of(base))), sure)

    def outcomes(self, arm: str) -> list[Outcome]:
        """Those that count."""
        return [o for cell in self.cells[arm] for o in cell.counted]

    def per_s(self, arm: str, of: Callable[[Outcome], bool]) -> float:
        """Requests a second that are so, the mean over rounds."""
        return float(np.mean([cell.per_s(of) for cell in self.cells[arm]]))

    def goodputs(self, arm: str) -> list[float]:
        """Requests a second that met the SLO, of each round."""
        return [cell.per_s(lambda o: met(o, self._slo)) for cell in self.cells[arm]]

    def itl_p99s(self, arm: str) -> list[float]:
        """The 99th percentile of all gaps between two tokens at the client, of each round; NaN
        where none are known."""
        return [
            plain(np.array([gap for o in cell.counted for gap in o.itl_s]), STATISTICS["p99"])
            for cell in self.cells[arm]
        ]

    def goodput(self, arm: str) -> float:
        """The same, the mean over rounds."""
        return float(np.mean(self.goodputs(arm)))

    def failed(self, arm: str) -> int:
        return sum(o.error is not None for o in self.outcomes(arm))

    def hit_rate(self, arm: str) -> float:
        """Cached prompt tokens of all that were answered; NaN where no server ever said so. On
        OpenAI's endpoints SGLang says nothing of a prompt of which nothing was cached."""
        found = self.outcomes(arm)
        if all(o.cached_tokens is None for o in found):
            return float("nan")
        told = [o for o in found if o.error is None or o.cached_tokens is not None]
        return _over(sum(o.cached_tokens or 0 for o in told), sum(o.prompt_tokens for o in told))

    def moved(self, arm: str) -> Traffic | None:
        """Between prefill and decode, the mean of the rounds; None where nothing counts it."""
        of = [cell.gained for cell in self.cells[arm] if "prefill" in cell.gained]
        if not of:
            return None
        summed = [
            metrics.total(gained.get(role, {}) for gained in of) for role in ("prefill", "decode")
        ]
        return traffic(*({k: v / len(of) for k, v in each.items()} for each in summed))

    def usage(self, arm: str) -> list[float]:
        """Of KV pools, all samples."""
        return [row["usage"] for cell in self.cells[arm] for row in cell.samples if "usage" in row]

    def pool(self, arm: str) -> tuple[float, float] | None:
        """KV pools in use: the median of the samples, and the most; None where none were taken."""
        usage = sorted(self.usage(arm))
        return (usage[len(usage) // 2], usage[-1]) if usage else None

    def open(self, arm: str) -> tuple[float, int]:
        """Requests under way at once: on average, and at most."""
        cells = self.cells[arm]
        mean = float(np.mean([cell.open() for cell in cells]))
        return mean, max(most_open(cell.outcomes) for cell in cells)

    def by_worker(self, arm: str) -> list[tuple[float, float]]:
        """Of each decoding server its share of the prompt tokens and the hit rate there, over all
        rounds, busiest of each first. Servers that answered nothing are not known."""
        tokens, hits = Counter[int](), Counter[int]()
        for cell in self.cells[arm]:
            prompt, cached = Counter[str](), Counter[str]()
            for o in cell.outcomes:
                if o.error is None and o.decode_worker is not None:
                    prompt[o.decode_worker] += o.prompt_tokens
                    cached[o.decode_worker] += o.cached_tokens or 0
            for rank, (worker, count) in enumerate(prompt.most_common()):
                tokens[rank] += count
                hits[rank] += cached[worker]
        return [
            (_over(tokens[rank], tokens.total()), _over(hits[rank], tokens[rank]))
            for rank in sorted(tokens)
        ]

    def transfers(self, arm: str) -> float:
        """Chunks that prefill sent, of a round; 0 where nothing counts them."""
        return self._gained(arm, "kv_transfer_wire_seconds_count") / len(self.cells[arm])

    def stages(self, arm: str) -> dict[str, float] | None:
        """Mean seconds of a transfer's stages; None where nothing counts them."""
        count = {name: self._gained(arm, f"kv_transfer_{name}_seconds_count") for name in STAGES}
        if not count["wire"]:
            return None
        return {
            n: _over(self._gained(arm, f"kv_transfer_{n}_seconds_sum"), count[n]) for n in STAGES
        }

    def _gained(self, arm: str, name: str) -> float:
        return sum(c.gained.get("prefill", {}).get(f"sglang:{name}", 0.0) for c in self.cells[arm])


def met(o: Outcome, slo: Slo) -> bool:
    """Whether a request met the SLO; an answer of one token has no TPOT to miss."""
    return (
        o.error is None
        and (o.ttft_s is None or o.ttft_s <= slo.ttft_s)
        and (o.tpot_s is None or o.tpot_s <= slo.tpot_s)
    )


def levels(run: Run) -> list[Level]:
    """Of a run, by load."""
    return [Level(run, point, run.study.slo) for point in run.points]


def spanned(value: float, drawn: Values, sure: float = 0.95) -> Interval:
    """A value, and where its draws lie."""
    there = drawn[~np.isnan(drawn)]
    if not len(there):
        return Interval(value, float("nan"), float("nan"))
    low, high = np.quantile(there, ((1 - sure) / 2, (1 + sure) / 2))
    return Interval(value, float(low), float(high))


def widened(of: Interval, rounds: Sequence[float], sure: float = 0.95) -> Interval:
    """A ratio whose interval holds that of Student's t over the rounds' logarithms as well."""
    from scipy.stats import t

    logs = [math.log(ratio) for ratio in rounds if ratio > 0]  # NaN is not
    if len(logs) < 2:
        return of
    quantile_of_t = float(t.ppf((1 + sure) / 2, len(logs) - 1))
    middle, half = np.mean(logs), quantile_of_t * np.std(logs, ddof=1) / math.sqrt(len(logs))
    low, high = (float(np.exp(middle + x)) for x in (-half, half))
    return Interval(of.value, min(of.low, low), max(of.high, high))


def _over(value: float, base: float) -> float:
    return value / base if base else float("nan")
