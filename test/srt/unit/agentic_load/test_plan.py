"""Which request goes out when, and after which."""

from __future__ import annotations

from benchmark.agentic.load.plan import Job, chains, gap_s, jobs
from benchmark.traces.record import Record

# Two sessions whose turns are mixed, and a single request. The trace begins at 1 s.
RECORDS = [
    Record(1000, 4, 1, (1,), session_id="a", turn=0),
    Record(2000, 4, 1, (2,), session_id="b", turn=0),
    Record(3000, 8, 1, (1, 3), session_id="a", turn=1),
    Record(3500, 4, 1, (9,), session_id="c", turn=0),
    Record(7000, 8, 1, (2, 4), session_id="b", turn=1),
    Record(9000, 12, 1, (1, 3, 5), session_id="a", turn=2),
]


def work() -> list[Job]:
    return list(jobs(RECORDS, block_tokens=4))


def order(found: object) -> list[tuple[float, list[int]]]:
    return [(c.start_s, [job.index for job in c.jobs]) for c in found]  # type: ignore[attr-defined]


def test_times_count_from_the_first_request() -> None:
    """Guards against a pause as long as the time at which a cut-out trace begins."""
    assert [job.at_s for job in work()] == [0, 1, 2, 2.5, 6, 8]
    assert [job.trace_new_tokens for job in work()] == [4, 4, 4, 4, 4, 4]


def test_think_time_chains_the_turns_of_a_session() -> None:
    """Guards against turns out of order, or of two sessions in one chain."""
    assert order(chains(work())) == [(0, [0, 2, 5]), (1, [1, 4]), (2.5, [3])]


def test_the_gap_is_recorded_or_given() -> None:
    first, _, second, *_ = work()
    assert gap_s(first, second, None) == 2
    assert gap_s(first, second, 0.25) == 0.25


def test_sessions_are_derived_where_the_trace_names_none() -> None:
    """Guards against a conversation taken apart, as Mooncake's traces have blocks only."""
    bare = [Record(r.timestamp, r.input_length, 1, r.hash_ids) for r in RECORDS]
    names = [job.record.session_id for job in jobs(bare, block_tokens=4)]
    assert None not in names
    assert names[0] == names[2] == names[5]
    assert names[1] == names[4] != names[0]
