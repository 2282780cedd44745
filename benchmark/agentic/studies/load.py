"""The trace of a study: sampled by window and thinning, then scaled to the fleet."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from benchmark.agentic.fleet.spec import FleetFile
from benchmark.agentic.load.outcome import Classes
from benchmark.agentic.studies.spec import LoadSpec, TraceSpec
from benchmark.traces.describe import Description, describe
from benchmark.traces.generate import AGENTIC, at_rate, generate
from benchmark.traces.record import Record, left_out, read, scaled
from benchmark.traces.sample import Plan, chosen, survey, window_and_thin
from benchmark.traces.sessions import annotate

SEED = 42
"""Seed of generated traces, of sampling, and of the tokens of prompts."""


@dataclass(frozen=True)
class Trace:
    """The requests to replay, and their source."""

    source: str
    records: list[Record]
    """Scaled to the fleet, at the trace's own times."""
    described: Description
    """The sampled records before they were scaled."""
    ratio: float
    """Share of the window's sessions that thinning kept."""
    left_out: int
    """Requests that are too long for the fleet."""
    classes: Classes
    notes: tuple[str, ...] = ()
    """Messages for the user: skipped lines, dropped sessions, and too few requests."""

    def at(self, load: LoadSpec, level: float) -> list[Record]:
        """Return the records of a level: at its speed, if the load sets one."""
        if load.sessions:
            return self.records
        return [msgspec.structs.replace(r, timestamp=r.timestamp / level) for r in self.records]


def prepare(spec: TraceSpec, fleet: FleetFile) -> Trace:
    """Read the trace, or generate one.

    Raises:
        ValueError: the file is not a trace, or none of its requests fits.
    """
    path = Path(spec.file) if spec.file else None
    source = "a generated trace" if path is None else path.name
    skipped: list[str] = []
    if path is None:
        rate = spec.generated_per_s
        shape = AGENTIC if rate is None else at_rate(AGENTIC, rate, SEED)
        whole = list(generate(spec.generated, SEED, shape))
    else:
        whole = list(annotate(read(path, skipped if spec.skip_invalid else None)))
    sampled, ratio, dropped = whole, 1.0, 0
    if spec.requests:
        sampled, ratio, dropped = sample(whole, spec, spec.requests)
    sized, max_tokens = [_sized(record, fleet) for record in sampled], limit(fleet)
    records = [r for r in sized if r.input_length + r.output_length <= max_tokens]
    if not records:
        raise ValueError(f"no request of {source} has at most {max_tokens} tokens")
    described = describe(survey(sampled))
    classes = Classes().scaled(fleet.block_tokens)
    notes = left_out(skipped)
    if dropped and path is not None:
        notes.append(
            f"{dropped:,} sampled sessions of a single turn were dropped: the study's "
            f"`trace: {{max_single_turn: {spec.max_single_turn:g}}}` is their maximum share"
        )
    if spec.requests and len(records) != spec.requests:
        notes.append(
            f"{len(records)} requests are sent instead of about {spec.requests}: "
            f"sampling keeps whole sessions and gave {len(sized)}, and "
            f"{len(sized) - len(records)} with more than {max_tokens:,} tokens are left out"
        )
    return Trace(
        source, records, described, ratio, len(sized) - len(records), classes, tuple(notes)
    )


def limit(fleet: FleetFile) -> int:
    """Return the maximum tokens of a request: half a pool."""
    pool = fleet.rig.pool_tokens if fleet.rig is not None else fleet.pool_tokens
    return pool // 2 if pool else 1 << 60


def sample(
    whole: Sequence[Record], spec: TraceSpec, requests: int
) -> tuple[list[Record], float, int]:
    """Return about ``requests`` requests in whole sessions, the share of sessions kept, and the
    number of sessions that were dropped because they have a single turn.

    Raises:
        ValueError: ``requests`` is too small for one whole session, or each has a single turn.
    """
    plan = Plan(max_single_turn=spec.max_single_turn, seed=SEED)
    trace_survey = survey(whole)
    try:
        everything = window_and_thin(trace_survey, dataclasses.replace(plan, ratio=1.0))
        ratio = min(1.0, requests / everything.requests)
        selection = window_and_thin(trace_survey, dataclasses.replace(plan, ratio=ratio))
    except ValueError as error:
        raise ValueError(
            f"about {requests} requests of {len(whole):,} contain no whole session: use more "
            "(`--requests`, or the study's `trace: {requests: null}` for the whole trace), or "
            "admit more sessions of a single turn (the study's "
            f"`trace: {{max_single_turn: {spec.max_single_turn:g}}}`)"
        ) from error
    return list(chosen(whole, selection)), ratio, selection.dropped


def _sized(record: Record, fleet: FleetFile) -> Record:
    """Return the record with the lengths that the fleet file sets."""
    sized = scaled(record, fleet.block_tokens)
    tokens = sized.output_length
    if fleet.answers is not None:
        tokens = max(1, round(record.output_length * fleet.answers))
    tokens = min(tokens, fleet.max_answer_tokens or tokens)
    return msgspec.structs.replace(sized, output_length=tokens)
