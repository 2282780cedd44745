"""A run's folder: ``run.json``, and ``requests.jsonl``, a line a request, written as it ends."""

from __future__ import annotations

import math
from pathlib import Path
from typing import IO, Any

import msgspec

from benchmark.agentic.load.outcome import Outcome
from benchmark.agentic.studies.spec import Point, Study
from benchmark.harness.report import write_summary

RUN, REQUESTS = "run.json", "requests.jsonl"


class Where(msgspec.Struct):
    """Of a line of ``requests.jsonl``; the outcome's fields stand beside these."""

    arm: str
    round: int
    load: float
    """Sessions at once, or the trace's speed."""
    over: tuple[tuple[str, float], ...] = ()
    """Fields of ``made`` that a grid has otherwise."""

    @property
    def key(self) -> tuple[str, int, Point]:
        return self.arm, self.round, Point(self.load, self.over)


class Cell(Where):
    """One arm at one load in one round."""

    gained: dict[str, dict[str, float]] = {}
    """By role: what the counters gained."""
    samples: list[float] = []
    """See ``Servers.sampled``."""
    loopback: float | None = None
    """Bytes that the kernel carried over the loopback interface; by address not known."""
    unflushed: list[str] = []
    """Servers that did not empty their cache, and why."""
    via: str = "directly"
    """How requests reached the servers."""
    window: tuple[float, float] | None = None
    """Of a steady load: from when to when requests began that count; None: all count."""
    outcomes: list[Outcome] = []

    @property
    def counted(self) -> list[Outcome]:
        return [o for o in self.outcomes if o.counted]

    @property
    def span(self) -> tuple[float, float]:
        """What rates are taken over: the window, or from the first request to the last answer."""
        began = min((o.started_s for o in self.outcomes), default=0.0)
        return self.window or (began, max((o.finished_s for o in self.outcomes), default=0.0))


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
    """By arm and role, how many; 0 of all behind a router that hides them."""

    @property
    def points(self) -> list[Point]:
        """The loads that were measured."""
        return list(dict.fromkeys(cell.key[2] for cell in self.cells))


def begin(folder: Path, earlier: Run | None) -> IO[bytes]:
    """The file of requests, with those of a run that goes on and no others; what the folder says of
    another run goes, as its requests do."""
    if earlier is None:
        (folder / RUN).unlink(missing_ok=True)
    new = folder / f"{REQUESTS}.new"
    with new.open("wb") as out:
        for cell in earlier.cells if earlier else ():
            for outcome in cell.outcomes:
                append(out, cell, outcome)
    new.replace(folder / REQUESTS)  # a kill before it loses nothing
    return (folder / REQUESTS).open("ab")


def append(out: IO[bytes], cell: Cell, outcome: Outcome) -> None:
    line = {name: getattr(cell, name) for name in Where.__struct_fields__}
    out.write(msgspec.json.encode({**line, **msgspec.to_builtins(outcome)}) + b"\n")
    out.flush()  # a run that is stopped keeps what it has


def save(folder: Path, run: Run) -> None:
    content = msgspec.to_builtins(run)
    for cell in content["cells"]:
        del cell["outcomes"]
        cell["gained"] = {
            role: {
                name: n
                for name, n in values.items()
                if n and math.isfinite(n) and name.startswith("sglang:")
            }
            for role, values in cell["gained"].items()
        }
    new = folder / f"{RUN}.new"
    write_summary(new, content)
    new.replace(folder / RUN)  # as above


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
        cells = {cell.key: cell for cell in run.cells}
        with (folder / REQUESTS).open("rb") as lines:
            for line in lines:
                if not line.endswith(b"\n"):  # torn as the run was killed
                    break
                cell = cells.get(msgspec.json.decode(line, type=Where).key)
                if cell is not None:  # else its load did not end
                    cell.outcomes.append(msgspec.json.decode(line, type=Outcome))
    except msgspec.DecodeError as error:
        raise ValueError(f"{folder}: {error} is not a run of this version") from error
    return run
