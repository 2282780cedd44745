"""Which request of a trace goes out when, and after which other one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from benchmark.agentic.load.outcome import Classes
from benchmark.traces.record import Record
from benchmark.traces.sessions import annotate
from benchmark.traces.sharing import EndlessCache


@dataclass(frozen=True)
class Turn:
    """A request as its outcome names it."""

    index: int
    session_id: str | None
    turn: int | None
    """In its session, from 0."""
    prompt_tokens: int
    wanted_tokens: int
    new_tokens: int
    """Prompt tokens that an endless cache would not hold."""
    kind: str
    """Its class."""


@dataclass(frozen=True)
class Job:
    """One request."""

    index: int
    """Among the records that are replayed, from 0."""
    record: Record
    trace_new_tokens: int
    """Prompt tokens that an endless cache would not hold."""
    at_s: float
    """Arrival, seconds after the trace's first request."""

    def turn(self, classes: Classes) -> Turn:
        of, new = self.record, self.trace_new_tokens
        lengths = (of.input_length, of.output_length, new)
        return Turn(self.index, of.session_id, of.turn, *lengths, classes.of(new))


@dataclass(frozen=True)
class Chain:
    """Requests of which each goes out after the one before it has finished."""

    start_s: float
    """When the first one goes out."""
    jobs: tuple[Job, ...]


def jobs(records: Iterable[Record], block_tokens: int) -> Iterator[Job]:
    """The records in their order, with sessions where the trace names none."""
    cache = EndlessCache()
    began: float | None = None
    for index, record in enumerate(annotate(records, block_tokens)):
        began = record.timestamp if began is None else began
        new = max(0, record.input_length - cache.hits(record) * block_tokens)
        yield Job(index, record, new, (record.timestamp - began) / 1000)


def chains(work: Iterable[Job]) -> list[Chain]:
    """A chain a session, by start. Sessions start at their times; see ``gap_s`` for later turns.

    Holds all records: the turn after next may stand anywhere in the trace.
    """
    sessions: dict[str, list[Job]] = {}
    for job in work:
        # A record without a session is a session of its own.
        name = job.record.session_id
        sessions.setdefault(f"s{name}" if name is not None else f"i{job.index}", []).append(job)
    found = [Chain(turns[0].at_s, tuple(turns)) for turns in sessions.values()]
    return sorted(found, key=lambda chain: (chain.start_s, chain.jobs[0].index))


def gap_s(before: Job, after: Job, think_s: float | None) -> float:
    """From the end of one turn to the sending of the next.

    ``think_s``, or the recorded gap. A trace has arrivals only, so that its gap holds the time that
    the recorded server took to answer as well.
    """
    return after.at_s - before.at_s if think_s is None else think_s
