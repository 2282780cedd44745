"""Start the ended servers of a demo again."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

from rich.console import Console

from benchmark.harness.fleet import Fleet
from benchmark.harness.process import ServerFailed, ServerProcess

EARLY_S = 20.0
"""A server that serves for less than this has ended early."""
MAX_EARLY = 3
"""Number of early ends in a row after which a server is not started again."""


class Restarts:
    """The ended servers of running fleets, and how long each has served."""

    def __init__(
        self,
        fleets: Sequence[Fleet],
        console: Console,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``fleets``: in the order in which their servers start; no two servers share a name."""
        self._fleets, self._console, self._clock = fleets, console, clock
        now = clock()
        self._serves_since = {name: now for fleet in fleets for name in fleet.processes}
        #: Server -> early ends in a row.
        self._early: Counter[str] = Counter()

    def restart_ended(self) -> list[str]:
        """Start the servers that have ended again, and return their names.

        Raises:
            ServerFailed: one did not become ready, or has ended early ``MAX_EARLY`` times in a row.
        """
        restarted: list[str] = []
        for fleet in self._fleets:
            ended = [name for name, process in fleet.processes.items() if not process.alive]
            for name in ended:
                self._restart(fleet, name)
            for name in ended:
                self._wait(fleet.processes[name])
            restarted += ended
        return restarted

    def _wait(self, process: ServerProcess) -> None:
        """Wait until the process is ready, or has ended: then the next call starts it again."""
        try:
            process.wait_ready()
        except ServerFailed:
            if process.alive:
                raise
        else:
            self._print(f"{process.name} serves again")
        self._serves_since[process.name] = self._clock()

    def _restart(self, fleet: Fleet, name: str) -> None:
        failure = fleet.processes[name].failure()
        served_s = self._clock() - self._serves_since[name]
        self._early[name] = self._early[name] + 1 if served_s < EARLY_S else 0
        if self._early[name] == MAX_EARLY:
            often = f"it ended {MAX_EARLY} times in a row, each within {EARLY_S:g} s of serving"
            raise ServerFailed(name, f"{often}: {failure.diagnosis}", failure.log, failure.tail)
        log = fleet.restart(name)
        self._print(f"{name}: {failure.diagnosis}. Starting it again (log of the ended one: {log})")

    def _print(self, text: str) -> None:
        # A path must not be wrapped.
        line = f"{time.strftime('%H:%M:%S')} {text}"
        self._console.print(line, highlight=False, soft_wrap=True)
