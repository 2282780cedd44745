"""Any number of servers as one object: started together, checked together, ended together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from typing_extensions import Self

from benchmark.harness import checks, metrics
from benchmark.harness.process import ServerProcess
from benchmark.harness.servers import ServerConfig


def start(config: ServerConfig, log_folder: Path, name: str | None = None) -> ServerProcess:
    """Starts the server of a configuration; its log is ``NAME.log`` in the folder, by default
    ``ROLE.log``."""
    name = name or config.role
    return ServerProcess(
        name, config.command, config.environment(), log_folder / f"{name}.log", config.ready_url
    )


def names(layout: Sequence[ServerConfig]) -> list[str]:
    """A name for each server: its role, or ``ROLE-0``, ``ROLE-1`` where several have it."""
    several = {role for role, n in Counter(c.role for c in layout).items() if n > 1}
    numbers: Counter[str] = Counter()
    result = []
    for config in layout:
        role = config.role
        result.append(f"{role}-{numbers[role]}" if role in several else role)
        numbers[role] += 1
    return result


class Fleet:
    """Running servers by name. A context manager: they start on entry, in parallel, load balancers
    after the engines, and end on exit."""

    def __init__(
        self,
        layout: Sequence[ServerConfig],
        log_folder: Path | str,
        start_timeout_s: float = 240.0,
    ) -> None:
        self.layout = list(layout)
        self._configs = dict(zip(names(self.layout), self.layout, strict=True))
        self._log_folder = Path(log_folder)
        self._timeout_s = start_timeout_s
        self.processes: dict[str, ServerProcess] = {}

    def __enter__(self) -> Self:
        try:
            # A load balancer drops servers that are not up yet, so it comes after them.
            for balancers in (False, True):
                group = {
                    n: c for n, c in self._configs.items() if (c.role == "router") == balancers
                }
                for name, config in group.items():
                    self.processes[name] = start(config, self._log_folder, name)
                self._wait(list(group))
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def _wait(self, started: Sequence[str]) -> None:
        """Waits for all at once, so that the first one to fail ends the wait."""
        if not started:
            return
        with ThreadPoolExecutor(len(started)) as pool:
            waits = [pool.submit(self.processes[n].wait_ready, self._timeout_s) for n in started]
            try:
                for wait in waits:
                    wait.result()
            except BaseException:
                self.stop()  # ends the other waits too
                raise

    def stop(self) -> None:
        """Ends all servers. Safe to call twice."""
        for process in reversed(list(self.processes.values())):
            process.stop()

    def urls(self, role: str) -> list[str]:
        """Of the servers in a role, in the layout's order."""
        return [config.url for config in self.layout if config.role == role]

    def scrape(self, role: str) -> list[Mapping[str, float]]:
        """The counters of each server in a role, now."""
        return [metrics.scrape(url) for url in self.urls(role)]

    def check(self, timeout_s: float = 60.0) -> None:
        """Waits until all engines are idle and asserts that they passed SGLang's memory check.

        Raises:
            ServerFailed: a server died, or reported a leak.
            TimeoutError: requests are left after ``timeout_s``.
        """
        # Decode first: prefill's last transfers end with it.
        for name, config in sorted(self._configs.items(), key=lambda item: item[1].role):
            if config.role != "router":
                checks.wait_idle(self.processes[name], config.url, timeout_s)
        for process in self.processes.values():
            checks.assert_healthy(process)
