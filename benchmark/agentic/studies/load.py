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
"""Of generated traces, of sampling, and of the tokens of prompts."""


@dataclass(frozen=True)
class Trace:
    """What is replayed, and where it comes from."""

    source: str
    records: list[Record]
    """Scaled, at the trace's own times."""
    described: Description
    """The sampled records before they were scaled."""
    ratio: float
    """Of the window's sessions, what thinning kept."""
    left_out: int
    """Requests that were longer than the fleet takes."""
    classes: Classes
    notes: tuple[str, ...] = ()
    """What there is to tell: lines left out, requests asked for in vain."""

    def at(self, load: LoadSpec, level: float) -> list[Record]:
        """The records of a level: their times at its speed."""
        if load.sessions:
            return self.records
        return [msgspec.structs.replace(r, timestamp=r.timestamp / level) for r in self.records]


def prepare(spec: TraceSpec, fleet: FleetFile) -> Trace:
    """Reads the trace, or generates one.

    Raises:
        ValueError: the file is no trace, or nothing of it is left.
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
    sampled, ratio = whole, 1.0
    if spec.requests:
        sampled, ratio = sample(whole, spec, spec.requests)
    sized, most = [_sized(record, fleet) for record in sampled], limit(fleet)
    records = [r for r in sized if r.input_length + r.output_length <= most]
    if not records:
        raise ValueError(f"no request of {source} has at most {most} tokens")
    described = describe(survey(sampled))
    classes = Classes().scaled(fleet.block_tokens)
    notes = left_out(skipped)
    if spec.requests and len(records) != spec.requests:
        notes.append(
            f"{len(records)} requests are sent where about {spec.requests} were asked for: "
            f"sampling keeps whole sessions and gave {len(sized)}, and "
            f"{len(sized) - len(records)} with more than {most:,} tokens are left out"
        )
    return Trace(
        source, records, described, ratio, len(sized) - len(records), classes, tuple(notes)
    )


def limit(fleet: FleetFile) -> int:
    """Tokens of a request at most: half a pool."""
    pool = fleet.rig.pool_tokens if fleet.rig is not None else fleet.pool_tokens
    return pool // 2 if pool else 1 << 60


def sample(whole: Sequence[Record], spec: TraceSpec, requests: int) -> tuple[list[Record], float]:
    """About so many requests in whole sessions, and the share of sessions kept.

    Raises:
        ValueError: so few that no whole session is among them.
    """
    plan = Plan(max_single_turn=spec.max_single_turn, seed=SEED)
    found = survey(whole)
    everything = window_and_thin(found, dataclasses.replace(plan, ratio=1.0))
    ratio = min(1.0, requests / everything.requests)
    try:
        selection = window_and_thin(found, dataclasses.replace(plan, ratio=ratio))
    except ValueError as error:
        raise ValueError(
            f"about {requests} requests of {len(whole):,} contain no whole session: use more "
            "(`--requests`, or the study's `trace: {requests: null}` for the whole trace)"
        ) from error
    return list(chosen(whole, selection)), ratio


def _sized(record: Record, fleet: FleetFile) -> Record:
    """As the fleet file says."""
    found = scaled(record, fleet.block_tokens)
    tokens = found.output_length
    if fleet.answers is not None:
        tokens = max(1, round(record.output_length * fleet.answers))
    tokens = min(tokens, fleet.max_answer_tokens or tokens)
    return msgspec.structs.replace(found, output_length=tokens)
