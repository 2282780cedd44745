"""A run's folder: ``run.json``; and ``requests.jsonl``, one line a request, written as it ends."""

from __future__ import annotations

import math
from pathlib import Path
from typing import IO, Any

import msgspec

from benchmark.agentic.load.outcome import Outcome
from benchmark.agentic.studies.spec import Point, Study
from benchmark.harness.cpu import Contention
from benchmark.harness.report import write_summary

RUN = "run.json"
REQUESTS = "requests.jsonl"


class Where(msgspec.Struct):
    """Cell of a line of ``requests.jsonl``; the line has the outcome's fields too."""

    arm: str
    round: int
    load: float
    """Concurrent sessions, or the trace's speed."""
    over: tuple[tuple[str, float], ...] = ()
    """Fields of ``made`` that the grid sets for this cell."""

    @property
    def key(self) -> tuple[str, int, Point]:
        return self.arm, self.round, Point(self.load, self.over)


class Cell(Where):
    """One arm at one load in one round."""

    gained: dict[str, dict[str, float]] = {}
    """Role -> increase of the counters."""
    samples: list[float] = []
    """See ``Servers.sampled``."""
    loopback: float | None = None
    """Bytes that the kernel carried over the loopback interface; None for a fleet by address."""
    contention: Contention | None = None
    """CPU time that others took; None for a fleet by address."""
    unflushed: list[str] = []
    """Servers that failed to empty their cache, with the reason."""
    via: str = "directly"
    """How requests reached the servers."""
    window: tuple[float, float] | None = None
    """For a steady load: span in which requests that count began; None: all requests count."""
    outcomes: list[Outcome] = []

    @property
    def counted(self) -> list[Outcome]:
        return [o for o in self.outcomes if o.counted]

    @property
    def span(self) -> tuple[float, float]:
        """Span for rates: the window, or from the first request to the last answer."""
        began = min((o.started_s for o in self.outcomes), default=0.0)
        return self.window or (began, max((o.finished_s for o in self.outcomes), default=0.0))


class Run(msgspec.Struct):
    """A measured study."""

    study: Study
    titles: dict[str, str]
    """Titles of the measured arms, in their order."""
    missing: list[str]
    """Arms that the fleet does not have."""
    fleet: dict[str, Any]
    environment: dict[str, str]
    command: str
    trace: dict[str, Any]
    cells: list[Cell] = []
    servers: dict[str, dict[str, int]] = {}
    """Number of servers by arm and role; all 0 behind a router that hides them."""

    @property
    def points(self) -> list[Point]:
        """The measured loads."""
        return list(dict.fromkeys(cell.key[2] for cell in self.cells))


def begin(folder: Path, earlier: Run | None) -> IO[bytes]:
    """Open the file of requests. It keeps the requests of ``earlier``, a run to be continued, and
    no others; without ``earlier`` the folder's previous run is removed."""
    if earlier is None:
        (folder / RUN).unlink(missing_ok=True)
    new = folder / f"{REQUESTS}.new"
    with new.open("wb") as out:
        for cell in earlier.cells if earlier else ():
            for outcome in cell.outcomes:
                append(out, cell, outcome)
    new.replace(folder / REQUESTS)  # atomic, so that a kill loses nothing
    return (folder / REQUESTS).open("ab")


def append(out: IO[bytes], cell: Cell, outcome: Outcome) -> None:
    line = {name: getattr(cell, name) for name in Where.__struct_fields__}
    out.write(msgspec.json.encode({**line, **msgspec.to_builtins(outcome)}) + b"\n")
    out.flush()  # keeps the request if the run is stopped


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
    new.replace(folder / RUN)  # atomic, as in ``begin``


def load(folder: Path) -> Run:
    """Return a saved run with its requests.

    Raises:
        ValueError: the folder contains none; the message names the file.
    """
    path = folder / RUN
    if not path.exists():
        raise ValueError(f"{folder} holds no {RUN}: it is not the folder of a study's run")
    try:
        run = msgspec.json.decode(path.read_bytes(), type=Run)
        cells = {cell.key: cell for cell in run.cells}
        with (folder / REQUESTS).open("rb") as lines:
            for line in lines:
                if not line.endswith(b"\n"):  # incomplete because the run was killed
                    break
                cell = cells.get(msgspec.json.decode(line, type=Where).key)
                if cell is not None:  # None if its load did not end
                    cell.outcomes.append(msgspec.json.decode(line, type=Outcome))
    except msgspec.DecodeError as error:
        raise ValueError(f"{folder}: {error} is not a run of this version") from error
    return run
