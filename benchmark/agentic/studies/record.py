"""A run's folder: ``run.json``, and ``requests.jsonl``, a line a request, written as it ends."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import msgspec

from benchmark.agentic.load.outcome import Outcome
from benchmark.agentic.studies.spec import Study
from benchmark.harness.report import write_summary

RUN, REQUESTS = "run.json", "requests.jsonl"


class Line(msgspec.Struct, frozen=True):
    """Of ``requests.jsonl``; the outcome's fields stand beside these."""

    arm: str
    round: int
    load: float
    cold: bool = False


class Cell(msgspec.Struct):
    """One arm at one load in one round."""

    arm: str
    round: int
    load: float
    """Sessions at once, requests/s, or the trace's speed."""
    gained: dict[str, dict[str, float]] = {}
    """By role: what the counters gained."""
    samples: list[dict[str, float]] = []
    """See ``Servers.sampled``."""
    unflushed: list[str] = []
    """Servers that did not empty their cache, and why."""
    via: str = "directly"
    """How requests reached the servers."""
    outcomes: list[Outcome] = []
    cold: list[Outcome] = []
    """Of cold clients."""


class Run(msgspec.Struct):
    """A study that was measured."""

    study: Study
    titles: dict[str, str]
    """Of the arms that were measured, in their order."""
    missing: list[str]
    """Arms that the fleet did not have."""
    fleet: dict[str, Any]
    environment: dict[str, str]
    command: str
    trace: dict[str, Any]
    cells: list[Cell] = []
    servers: dict[str, dict[str, int]] = {}
    """By arm and role, how many; 0 of all behind a router that hides them. Earlier versions kept
    none."""

    def at(self, arm: str, load: float) -> list[Cell]:
        """Its rounds."""
        return [cell for cell in self.cells if cell.arm == arm and cell.load == load]

    @property
    def loads(self) -> tuple[float, ...]:
        return tuple(dict.fromkeys(cell.load for cell in self.cells))

    @property
    def unit(self) -> str:
        """What a load counts."""
        return self.study.load.unit


def begin(folder: Path, earlier: Run | None) -> IO[bytes]:
    """The file of requests, with those of a run that goes on and no others."""
    out = (folder / REQUESTS).open("wb")
    for cell in earlier.cells if earlier else ():
        for outcomes, cold in ((cell.outcomes, False), (cell.cold, True)):
            for outcome in outcomes:
                append(out, cell, outcome, cold)
    return out


def append(out: IO[bytes], cell: Cell, outcome: Outcome, cold: bool) -> None:
    line = {**msgspec.to_builtins(Line(cell.arm, cell.round, cell.load, cold))}
    out.write(msgspec.json.encode({**line, **msgspec.to_builtins(outcome)}) + b"\n")
    out.flush()  # a run that is stopped keeps what it has


def save(folder: Path, run: Run) -> None:
    content = msgspec.to_builtins(run)
    for cell in content["cells"]:
        del cell["outcomes"], cell["cold"]
        cell["gained"] = {role: _told(values) for role, values in cell["gained"].items()}
    write_summary(folder / RUN, content)


def load(folder: Path) -> Run:
    """A run that was saved, with its requests.

    Raises:
        ValueError: the folder holds none; the message names the file.
    """
    path = folder / RUN
    if not path.exists():
        raise ValueError(f"{folder} holds no {RUN}: it is not the folder of a study's run")
    try:
        run = msgspec.json.decode(path.read_bytes(), type=Run)
        cells = {(cell.arm, cell.round, cell.load): cell for cell in run.cells}
        with (folder / REQUESTS).open("rb") as lines:
            for line in lines:
                if not line.endswith(b"\n"):  # torn as the run was killed
                    break
                of = msgspec.json.decode(line, type=Line)
                if (cell := cells.get((of.arm, of.round, of.load))) is None:
                    continue  # its load did not end
                outcome = msgspec.json.decode(line, type=Outcome)
                (cell.cold if of.cold else cell.outcomes).append(outcome)
    except msgspec.DecodeError as error:
        raise ValueError(f"{folder}: {error} is not a run of this version") from error
    return run


def _told(values: Mapping[str, float]) -> dict[str, float]:
    """Counters that gained something and are SGLang's."""
    return {name: value for name, value in values.items() if value and name.startswith("sglang:")}
