"""Rounds of all arms, each at all loads, in turn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path

import msgspec

from benchmark.agentic.fleet import rig, servers
from benchmark.agentic.fleet.servers import Servers
from benchmark.agentic.fleet.spec import Arm, FleetFile
from benchmark.agentic.load.outcome import Outcome
from benchmark.agentic.load.prepare import Bodies
from benchmark.agentic.load.run import Settings, load
from benchmark.agentic.load.sessions import (
    Turn,
    begun,
    by_session,
    made_sessions,
    trace_sessions,
    turns,
)
from benchmark.agentic.studies import record
from benchmark.agentic.studies.load import SEED, Trace
from benchmark.agentic.studies.record import Cell, Run
from benchmark.agentic.studies.spec import Study
from benchmark.aiperf import Program, profile
from benchmark.harness.command import RunFailed
from benchmark.harness.metrics import loopback_bytes
from benchmark.harness.models import random_qwen3


@dataclass(frozen=True)
class Plan:
    """What is to be measured."""

    study: Study
    arms: dict[str, Arm]
    fleet: FleetFile
    trace: Trace | None
    """None: sessions are made, or AIPerf reads the trace itself."""
    out: Path
    aiperf: Program | None = None
    """What sends, instead of our client."""


def cells(plan: Plan, told: Callable[[Cell], None], earlier: Run | None) -> Iterator[Cell]:
    """Measures every arm at every load in every round; each cell as it ends. ``told``: after each
    request of a cell. ``earlier``: a run that was stopped, whose loads are left out.

    Raises:
        ServerFailed: a server of the rig did not start, died, or failed its memory check.
        RunFailed: a server by address cannot be reached, or did not answer a warm-up.
    """
    names, out = list(plan.arms), plan.out
    done = {cell.key for cell in (earlier.cells if earlier else ())}
    with record.begin(out, earlier) as lines:
        for number in range(plan.study.rounds):
            for name in order(names, number):
                left = [at for at in plan.study.points if (name, number, at) not in done]
                if not left:
                    continue
                with _running(plan, name) as running:
                    running.warm_up()
                    running.check()
                    for at in left:
                        cell = Cell(name, number, at.load, at.over, via=running.via)

                        def ended(outcome: Outcome, cell: Cell = cell) -> None:
                            cell.outcomes.append(outcome)
                            record.append(lines, cell, outcome)
                            told(cell)

                        _measure(plan, cell, running, ended)
                        yield cell


def order(names: list[str], number: int) -> list[str]:
    """Of the arms in a round: two have the same, the second turned around."""
    turn = number // 2 % len(names)
    names = names[turn:] + names[:turn]
    return names[::-1] if number % 2 else names


def _running(plan: Plan, name: str) -> AbstractContextManager[Servers]:
    arm, fleet = plan.arms[name], plan.fleet
    if fleet.rig is None:
        words = arm.routing(fleet.block_tokens)
        return servers.reach(fleet.named()[arm.setup or name], fleet, arm.policy, words)
    model = random_qwen3(plan.out / "model-random", **fleet.rig.shape)
    doze = all(each.sleeps for each in plan.study.arms.values())
    return rig.started(arm, fleet, fleet.rig, model, plan.out / "logs" / name, doze)


def _measure(plan: Plan, cell: Cell, running: Servers, ended: Callable[[Outcome], None]) -> None:
    """Fills the cell."""
    cell.unflushed = running.flush() if plan.fleet.flush else []
    before = running.counters()
    carried = loopback_bytes() if plan.fleet.rig else None
    send = _send if plan.aiperf is None else _profile
    with running.sampled() as cell.samples:
        cell.window = send(plan, cell, running, ended)
    if carried is not None:
        cell.loopback = loopback_bytes() - carried
    running.check()  # also lets the last transfers be counted
    cell.gained = running.gained(before)


def _send(
    plan: Plan, cell: Cell, running: Servers, ended: Callable[[Outcome], None]
) -> tuple[float, float] | None:
    """By our client. Each round has sessions of its own, so that intervals over rounds are also
    about which ones were sent: other seeds, or `_replayed`."""
    study, how = plan.study, plan.study.load
    settings = Settings(
        headers=running.about.all_headers,
        think_s=how.think_s,
        timeout_s=how.timeout_s,
        sessions=int(cell.load) if how.sessions else None,
    )
    with ExitStack() as stack:
        if study.made is not None:
            made = cell.key[2].made(study.made)
            classes = made.classes
            made = msgspec.structs.replace(made, seed=made.seed + cell.round)
            page = plan.fleet.block_tokens if plan.fleet.rig else 1
            sessions = made_sessions(made, running.vocabulary, settings.sessions or 0, page)
        else:
            found, prompts = _replayed(plan, cell), running.prompts(SEED)
            classes = list({turn.kind for session in found for turn in session})
            if how.window and settings.sessions:
                found = begun(found, len(found) // study.rounds, settings.sessions)
            sessions = trace_sessions(found, stack.enter_context(Bodies(prompts)))
        work = load(running.target, sessions, settings, ended, how.window, classes)
        return asyncio.run(work)


def _replayed(plan: Plan, cell: Cell) -> list[list[Turn]]:
    """The trace's sessions, a later part of them first in each round."""
    assert plan.trace is not None
    how = plan.study.load
    records, classes = plan.trace.at(how, cell.load), plan.trace.classes
    found = by_session(turns(records, plan.fleet.block_tokens, classes))
    first = cell.round * len(found) // plan.study.rounds if how.sessions else 0
    return found[first:] + found[:first]


def _profile(
    plan: Plan, cell: Cell, running: Servers, ended: Callable[[Outcome], None]
) -> tuple[float, float] | None:
    """By AIPerf."""
    about, how = running.about, plan.study.load
    assert plan.aiperf is not None
    if running.target.prefill_url is not None:
        raise RunFailed("AIPerf knows no bootstrap rooms: give the pair's `router`")
    cell.via += ", by AIPerf"
    found, window = profile(
        plan.aiperf,
        running.target.url,
        [turn for session in _replayed(plan, cell) for turn in session] if plan.trace else None,
        running.prompts(SEED),
        plan.out / "aiperf" / f"{cell.arm}-{cell.load:g}-{cell.round}",
        how.window,
        how.think_s or 0.0,
        model=about.model,
        endpoint=about.endpoint,
        block_tokens=about.block_tokens,
        sessions=int(cell.load) if how.sessions else None,
        timeout_s=how.timeout_s,
        tokenizer=about.tokenizer,
        headers=about.all_headers,
    )
    for outcome in found:
        ended(outcome)
    return window
