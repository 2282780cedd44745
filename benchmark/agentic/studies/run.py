"""Rounds of all arms, each at all loads, in turn."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO

import msgspec

from benchmark.agentic.fleet import rig, servers
from benchmark.agentic.fleet.servers import Servers
from benchmark.agentic.fleet.spec import Arm, FleetFile
from benchmark.agentic.load.outcome import Classes, Outcome
from benchmark.agentic.load.plan import chains, jobs
from benchmark.agentic.load.run import replay
from benchmark.agentic.load.steady import Session, made_sessions, steady, trace_sessions
from benchmark.agentic.studies import load, record
from benchmark.agentic.studies.load import Trace
from benchmark.agentic.studies.record import Cell, Run
from benchmark.agentic.studies.spec import Study
from benchmark.aiperf import Program, profile
from benchmark.harness.command import RunFailed
from benchmark.harness.models import random_qwen3

Told = Callable[[Cell], None]
"""After each request of a cell."""


def cells(
    study: Study,
    arms: dict[str, Arm],
    fleet: FleetFile,
    trace: Trace | None,
    out: Path,
    told: Told,
    earlier: Run | None = None,
    aiperf: Program | None = None,
) -> Iterator[Cell]:
    """Measures every arm at every load in every round; each cell as it ends.

    ``earlier``: a run of the same study that was stopped, whose loads are left out. ``aiperf``: the
    program that sends, instead of our client.

    The order of arms changes from round to round, so that none always follows the same one.

    Raises:
        ServerFailed: a server of the rig did not start, died, or failed its memory check.
        RunFailed: a server by address cannot be reached, or did not answer a warm-up.
    """
    names = list(arms)
    done = {cell.key for cell in (earlier.cells if earlier else ())}
    with record.begin(out, earlier) as lines:
        for number in range(study.rounds):
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                left = [at for at in study.points if (name, number, at) not in done]
                if not left:
                    continue
                with _running(name, arms[name], fleet, out) as running:
                    running.warm_up()
                    running.check()
                    for at in left:
                        cell = Cell(name, number, at.load, at.over, via=running.via)
                        if aiperf is not None:
                            _profile(cell, running, study, trace, aiperf, out / "aiperf")
                            for outcome in cell.outcomes:
                                record.append(lines, cell, outcome, cold=False)
                            told(cell)
                        else:
                            _measure(cell, running, arms[name], study, trace, lines, told)
                        yield cell


def _running(name: str, arm: Arm, fleet: FleetFile, out: Path) -> AbstractContextManager[Servers]:
    if fleet.rig is None:
        words = arm.routing(fleet.block_tokens)
        return servers.reach(fleet.named()[arm.setup or name], fleet, arm.policy, words)
    model = random_qwen3(out / "model-random", **fleet.rig.shape)
    return rig.started(arm, fleet, fleet.rig, model, out / "logs" / name)


def _profile(
    cell: Cell, running: Servers, study: Study, trace: Trace | None, program: Program, out: Path
) -> None:
    """Fills the cell with what AIPerf measures."""
    about, how = running.about, study.load
    if running.target.prefill_url is not None:
        raise RunFailed("AIPerf knows no bootstrap rooms: give the pair's `router`")
    cell.unflushed = running.flush() if about.flush else []
    cell.via += ", by AIPerf"
    before = running.counters()
    with running.sampled() as cell.samples:
        cell.outcomes, cell.window = profile(
            program,
            running.target.url,
            trace.at(how, cell.load) if trace else (),
            out / f"{cell.arm}-{cell.load:g}-{cell.round}",
            trace.classes if trace else Classes(),
            how.window,
            model=about.model,
            endpoint=about.endpoint,
            block_tokens=about.block_tokens,
            sessions=int(cell.load) if how.sessions else None,
            timeout_s=how.timeout_s,
            tokenizer=about.tokenizer,
            headers=about.all_headers,
        )
    running.check()
    cell.gained = running.gained(before)


def _measure(
    cell: Cell,
    running: Servers,
    arm: Arm,
    study: Study,
    trace: Trace | None,
    lines: IO[bytes],
    told: Told,
) -> None:
    """Fills the cell."""
    about, how = running.about, study.load
    cell.unflushed = running.flush() if about.flush else []
    before = running.counters()
    prompts = running.prompts(study.trace.seed)
    classes = trace.classes if trace else Classes()
    common = {"think_s": how.think_s, "timeout_s": how.timeout_s, "classes": classes}
    sessions = int(cell.load) if how.sessions else None
    settings = running.settings(**common, sessions=sessions)

    zeros: list[float] = []
    beside_load: list[tuple[float, Outcome]] = []

    def ended(outcome: Outcome) -> None:
        zeros.append(_zero(outcome))
        cell.outcomes.append(outcome)
        record.append(lines, cell, outcome, cold=False)
        told(cell)

    def cold_ended(outcome: Outcome) -> None:
        beside_load.append((_zero(outcome), outcome))

    async def go() -> None:
        beside = [
            asyncio.create_task(
                replay(
                    running.target,
                    load.cold(study.trace, about, client),
                    prompts,
                    running.settings(**{**common, "think_s": study.trace.cold_gap_s}),
                    on_outcome=cold_ended,
                )
            )
            for client in range(arm.cold_clients)
        ]
        try:
            if how.window is not None:
                source, names = _sessions(cell, running, study, trace, classes)
                cell.window = await steady(
                    running.target, source, how.window, names, settings, ended
                )
            elif trace is not None:
                records = trace.at(how, cell.load)
                await replay(running.target, records, prompts, settings, on_outcome=ended)
        finally:
            for task in beside:
                task.cancel()
            ended_so = await asyncio.gather(*beside, return_exceptions=True)
        for error in ended_so:
            if isinstance(error, Exception):  # else the load had less beside it than the page says
                raise error

    with running.sampled() as cell.samples:
        asyncio.run(go())
    for zero, outcome in beside_load:
        cell.cold.append(later(outcome, zero - zeros[0]))
        record.append(lines, cell, cell.cold[-1], cold=True)
    running.check()  # also lets the last transfers be counted
    cell.gained = running.gained(before)


def _sessions(
    cell: Cell, running: Servers, study: Study, trace: Trace | None, classes: Classes
) -> tuple[Iterator[Session], Sequence[str]]:
    """Of a steady load, and the classes of which a window must have enough."""
    if study.made is not None:
        made = cell.key[2].made(study.made)
        return made_sessions(made, running.vocabulary), made.classes
    assert trace is not None
    prompts = running.prompts(study.trace.seed)
    jobs_of = jobs(trace.records, prompts.block_tokens)
    return trace_sessions(chains(jobs_of), prompts, classes), ()


def _zero(outcome: Outcome) -> float:
    """When its replay's clock showed 0, as it ends: each client has a clock of its own."""
    return time.monotonic() - outcome.finished_s


def later(outcome: Outcome, seconds: float) -> Outcome:
    """Its times on a clock that began so much earlier."""
    names = ("scheduled_s", "started_s", "sent_s", "first_token_s", "finished_s")
    there = {name: at for name in names if (at := getattr(outcome, name)) is not None}
    return msgspec.structs.replace(
        outcome, **{name: round(at + seconds, 6) for name, at in there.items()}
    )
