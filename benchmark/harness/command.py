"""How a benchmark's command line ends."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.markup import escape

from benchmark.harness.process import ServerFailed


class RunFailed(RuntimeError):
    """What was measured cannot be used; the message says why."""


def status(run: Callable[[], int], console: Console) -> int:
    """The exit status of ``run``, or one line for what ended it: 1 for a server or a run that
    failed, 2 for what the user can put right, 130 for Ctrl-C."""
    try:
        return run()
    except ServerFailed as failure:
        console.print(f"[red]{failure.name}: {failure.diagnosis}[/] (log: {failure.log})")
        return 1
    except RunFailed as failure:
        console.print(f"[red]{escape(str(failure))}[/]")
        return 1
    except (ValueError, OSError) as error:
        console.print(f"[red]{escape(str(error))}[/]")
        return 2
    except KeyboardInterrupt:
        return 130
