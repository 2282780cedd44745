"""Numbers from outcomes. Pure functions; ``tables`` prints them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmark.agentic.replay.classes import NAMES, Classes
from benchmark.agentic.replay.outcome import Outcome
from benchmark.harness.report import Spread, percentile, spread

LATE_S = 0.05
"""Above this the client is called the bottleneck; see ``Client.warnings``."""


@dataclass(frozen=True)
class Group:
    """Some of the requests. Times in seconds, over the ones that were answered in full."""

    requests: int
    failed: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    hit_rate: float
    """Cached over prompt tokens, of requests for which the server reported them."""
    requests_per_s: float
    output_tokens_per_s: float
    ttft_s: Spread
    tpot_s: Spread
    itl_s: Spread
    """Over all tokens of all requests."""
    e2e_s: Spread


@dataclass(frozen=True)
class Client:
    """Whether this side kept up. Seconds."""

    late_p50_s: float
    late_p99_s: float
    late_max_s: float
    loop_lag_p99_s: float
    """Over requests: the longest lag of the event loop while each was open."""
    out_of_files: int
    """Requests that failed as this process had no open file left."""

    def warnings(self, limit_s: float = LATE_S) -> list[str]:
        """Where these numbers are the client's more than the server's; empty if nowhere."""
        found = []
        if self.late_p99_s > limit_s:
            found.append(
                f"requests were sent late: p99 {_ms(self.late_p99_s)} after their time, over the "
                f"limit of {_ms(limit_s)}; the server saw less load than the trace holds"
            )
        if self.loop_lag_p99_s > limit_s:
            found.append(
                f"this process was late in reading: its event loop lagged by "
                f"{_ms(self.loop_lag_p99_s)} (p99 over requests), over the limit of "
                f"{_ms(limit_s)}; TTFT, TPOT and ITL hold that lag"
            )
        if self.out_of_files:
            found.append(f"{self.out_of_files} requests found no open file left (ulimit -n)")
        return found


@dataclass(frozen=True)
class Report:
    duration_s: float
    """From the first request's start to the last one's end, on the replay's clock."""
    most_open: int
    """Requests that were under way at once, at most."""
    classes: str
    overall: Group
    by_class: dict[str, Group]
    by_prefill_worker: dict[str, Group]
    """Prompts and hits are prefill's; where a worker is colocated, so is the rest."""
    by_decode_worker: dict[str, Group]
    errors: dict[str, int]
    client: Client


def report(outcomes: Sequence[Outcome], classes: Classes) -> Report:
    """``classes`` need not be those of the run: each request is classed anew."""
    duration = _duration(outcomes)
    class_of = {
        name: [o for o in outcomes if classes.of(o.trace_new_tokens, o.new_tokens) == name]
        for name in NAMES
    }
    return Report(
        duration_s=duration,
        most_open=most_open(outcomes),
        classes=str(classes),
        overall=group(outcomes, duration),
        by_class={name: group(members, duration) for name, members in class_of.items()},
        by_prefill_worker=_by((o.prefill_worker for o in outcomes), outcomes, duration),
        by_decode_worker=_by((o.decode_worker for o in outcomes), outcomes, duration),
        errors=dict(Counter(o.error for o in outcomes if o.error is not None).most_common()),
        client=client(outcomes),
    )


def group(outcomes: Sequence[Outcome], duration_s: float) -> Group:
    good = [o for o in outcomes if o.error is None]
    counted = [o for o in outcomes if o.cached_tokens is not None]
    prompt, cached = (
        sum(o.prompt_tokens for o in counted),
        sum(o.cached_tokens or 0 for o in counted),
    )
    output = sum(o.output_tokens for o in good)
    return Group(
        requests=len(outcomes),
        failed=len(outcomes) - len(good),
        prompt_tokens=prompt,
        cached_tokens=cached,
        output_tokens=output,
        hit_rate=cached / prompt if prompt else 0.0,
        requests_per_s=len(good) / duration_s if duration_s else 0.0,
        output_tokens_per_s=output / duration_s if duration_s else 0.0,
        ttft_s=spread([o.ttft_s for o in good if o.ttft_s is not None]),
        tpot_s=spread([o.tpot_s for o in good if o.tpot_s is not None]),
        itl_s=spread([gap for o in good for gap in o.itl_s]),
        e2e_s=spread([o.e2e_s for o in good]),
    )


def client(outcomes: Sequence[Outcome]) -> Client:
    late = [o.late_s for o in outcomes]
    return Client(
        late_p50_s=percentile(late, 50),
        late_p99_s=percentile(late, 99),
        late_max_s=max(late, default=0.0),
        loop_lag_p99_s=percentile([o.loop_lag_s for o in outcomes], 99),
        out_of_files=sum(o.error == "open_files" for o in outcomes),
    )


def most_open(outcomes: Iterable[Outcome]) -> int:
    return max((count for _, count in open_over_time(outcomes)), default=0)


def open_over_time(outcomes: Iterable[Outcome]) -> list[tuple[float, int]]:
    """Requests under way after each start and end, by time."""
    steps = sorted(
        step for o in outcomes for step in ((o.started_s, 1), (o.finished_s, -1))
    )  # an end sorts before a start at the same time
    result, count = [], 0
    for at, change in steps:
        count += change
        result.append((at, count))
    return result


def _duration(outcomes: Sequence[Outcome]) -> float:
    if not outcomes:
        return 0.0
    return max(o.finished_s for o in outcomes) - min(o.started_s for o in outcomes)


def _by(
    names: Iterable[str | None], outcomes: Sequence[Outcome], duration: float
) -> dict[str, Group]:
    members: defaultdict[str, list[Outcome]] = defaultdict(list)
    for name, outcome in zip(names, outcomes, strict=True):
        members[name or "unknown"].append(outcome)
    return {name: group(members[name], duration) for name in sorted(members)}


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
