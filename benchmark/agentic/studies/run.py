"""Measure all arms at all loads, in rounds."""

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
from benchmark.harness import cpu
from benchmark.harness.command import RunFailed
from benchmark.harness.metrics import loopback_bytes
from benchmark.harness.models import random_qwen3


@dataclass(frozen=True)
class Plan:
    """The measurements to take."""

    study: Study
    arms: dict[str, Arm]
    fleet: FleetFile
    trace: Trace | None
    """None: sessions are made from sizes, or AIPerf reads the trace itself."""
    out: Path
    aiperf: Program | None = None
    """AIPerf program that sends the load; None: our client does."""


def cells(plan: Plan, on_request: Callable[[Cell], None], earlier: Run | None) -> Iterator[Cell]:
    """Measure every arm at every load in every round; yield each cell as it ends.

    ``on_request``: called after each request of a cell. ``earlier``: a stopped run, whose loads
    are skipped.

    Raises:
        ServerFailed: a server of the rig did not start, died, or failed its memory check.
        RunFailed: a server by address cannot be reached, or failed a warm-up request.
    """
    names, out = list(plan.arms), plan.out
    done = {cell.key for cell in (earlier.cells if earlier else ())}
    with record.begin(out, earlier) as lines:
        for number in range(plan.study.rounds):
            for name in order(names, number):
                left = [point for point in plan.study.points if (name, number, point) not in done]
                if not left:
                    continue
                with _running(plan, name) as running:
                    running.warm_up()
                    running.check()
                    for point in left:
                        cell = Cell(name, number, point.load, point.over, via=running.via)

                        def ended(outcome: Outcome, cell: Cell = cell) -> None:
                            cell.outcomes.append(outcome)
                            record.append(lines, cell, outcome)
                            on_request(cell)

                        _measure(plan, cell, running, ended)
                        yield cell


def order(names: list[str], number: int) -> list[str]:
    """Return the arms in the order of a round; each second round reverses the one before it."""
    turn = number // 2 % len(names)
    names = names[turn:] + names[:turn]
    return names[::-1] if number % 2 else names


def _running(plan: Plan, name: str) -> AbstractContextManager[Servers]:
    arm, fleet = plan.arms[name], plan.fleet
    if fleet.rig is None:
        words = arm.routing(fleet.block_tokens)
        return servers.reach(fleet.named()[arm.setup or name], fleet, arm.policy, words)
    model = fleet.rig.model or random_qwen3(plan.out / "model-random", **fleet.rig.shape)
    return rig.started(arm, fleet, fleet.rig, model, plan.out / "logs" / name, dozes(plan))


def dozes(plan: Plan) -> bool:
    """Return True if idle servers of the rig sleep, which is the same in all arms."""
    return all(arm.sleeps for arm in plan.study.arms.values())


def _measure(plan: Plan, cell: Cell, running: Servers, ended: Callable[[Outcome], None]) -> None:
    """Measure one cell."""
    cell.unflushed = running.flush() if plan.fleet.flush else []
    before = running.counters()
    carried = loopback_bytes() if plan.fleet.rig else None
    started = cpu.now() if plan.fleet.rig else None
    send = _send if plan.aiperf is None else _profile
    with running.sampled() as cell.samples:
        cell.window = send(plan, cell, running, ended)
    if started is not None:
        cell.contention = cpu.contention(started, cpu.now())
    if carried is not None:
        cell.loopback = loopback_bytes() - carried
    running.check()  # also gives the servers time to count the last transfers
    cell.gained = running.gained(before)


def _send(
    plan: Plan, cell: Cell, running: Servers, ended: Callable[[Outcome], None]
) -> tuple[float, float] | None:
    """Send the load with our client. Each round has different sessions, by other seeds or by
    ``_replayed``, so that intervals over rounds also cover the choice of sessions."""
    study, load_spec = plan.study, plan.study.load
    settings = Settings(
        headers=running.about.all_headers,
        think_s=load_spec.think_s,
        timeout_s=load_spec.timeout_s,
        sessions=int(cell.load) if load_spec.sessions else None,
    )
    with ExitStack() as stack:
        if study.made is not None:
            made = cell.key[2].made(study.made)
            classes = made.classes
            made = msgspec.structs.replace(made, seed=made.seed + cell.round)
            page = 1
            if plan.fleet.rig is not None:
                page = plan.fleet.rig.page_tokens or plan.fleet.block_tokens
            rate = cell.load if load_spec.requests_per_s else None
            at_once = settings.sessions or 0
            sessions = made_sessions(made, running.vocabulary, at_once, page, rate)
        else:
            replayed, prompts = _replayed(plan, cell), running.prompts(SEED)
            classes = list({turn.kind for session in replayed for turn in session})
            if load_spec.window and settings.sessions:
                replayed = begun(replayed, len(replayed) // study.rounds, settings.sessions)
            sessions = trace_sessions(replayed, stack.enter_context(Bodies(prompts)))
        work = load(running.target, sessions, settings, ended, load_spec.window, classes)
        return asyncio.run(work)


def _replayed(plan: Plan, cell: Cell) -> list[list[Turn]]:
    """Return the trace's sessions; each round begins with a later part of them."""
    assert plan.trace is not None
    load_spec = plan.study.load
    records, classes = plan.trace.at(load_spec, cell.load), plan.trace.classes
    sessions = by_session(turns(records, plan.fleet.block_tokens, classes))
    first = cell.round * len(sessions) // plan.study.rounds if load_spec.sessions else 0
    return sessions[first:] + sessions[:first]


def _profile(
    plan: Plan, cell: Cell, running: Servers, ended: Callable[[Outcome], None]
) -> tuple[float, float] | None:
    """Send the load with AIPerf."""
    about, load_spec = running.about, plan.study.load
    assert plan.aiperf is not None
    if running.target.prefill_url is not None:
        raise RunFailed("AIPerf does not support bootstrap rooms: give the pair's `router`")
    cell.via += ", by AIPerf"
    outcomes, window = profile(
        plan.aiperf,
        running.target.url,
        [turn for session in _replayed(plan, cell) for turn in session] if plan.trace else None,
        running.prompts(SEED),
        plan.out / "aiperf" / f"{cell.arm}-{cell.load:g}-{cell.round}",
        load_spec.window,
        load_spec.think_s or 0.0,
        model=about.model,
        endpoint=about.endpoint,
        block_tokens=about.block_tokens,
        sessions=int(cell.load) if load_spec.sessions else None,
        timeout_s=load_spec.timeout_s,
        tokenizer=about.tokenizer,
        headers=about.all_headers,
    )
    for outcome in outcomes:
        ended(outcome)
    return window
