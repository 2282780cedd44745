"""Whether this side kept up, and how many requests were under way. Pure functions of outcomes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmark.agentic.replay.outcome import Outcome
from benchmark.harness.report import percentile

LATE_S = 0.05
"""Above this the client is called the bottleneck."""


@dataclass(frozen=True)
class Client:
    """Seconds."""

    late_p50_s: float
    late_p99_s: float
    late_max_s: float
    loop_lag_p99_s: float
    """Over requests: the longest lag of the event loop while each was open."""
    out_of_files: int
    """Requests that failed as this process had no open file left."""

    @property
    def was_the_bottleneck(self) -> bool:
        """Whether these numbers are the client's more than the server's: it sent requests late, so
        that the server saw less load; or it read late, so that TTFT and TPOT hold that lag; or it
        ran out of open files."""
        return max(self.late_p99_s, self.loop_lag_p99_s) > LATE_S or self.out_of_files > 0


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
    """Requests that were under way at once, at most."""
    steps = sorted(
        step for o in outcomes for step in ((o.started_s, 1), (o.finished_s, -1))
    )  # an end sorts before a start at the same time
    most = count = 0
    for _, change in steps:
        count += change
        most = max(most, count)
    return most
