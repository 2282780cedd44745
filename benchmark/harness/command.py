"""Common parts of the benchmarks' command lines: options, and exit statuses."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from benchmark.harness.process import ServerFailed

_NOT_RETYPED = ("--out", "--page")


class RunFailed(RuntimeError):
    """The measurement cannot be used; the message says why."""


def status(run: Callable[[], int], console: Console) -> int:
    """Return the exit status of ``run``, and print one line about its error: 1 for a server or a
    run that failed, 2 for an error that the user can correct, 130 for Ctrl-C."""
    try:
        return run()
    except ServerFailed as failure:
        text = f"[red]{failure.name}: {escape(failure.diagnosis)}[/] (log: {failure.log})"
        console.print(text, soft_wrap=True)
        return 1
    except RunFailed as failure:
        console.print(f"[red]{escape(str(failure))}[/]", soft_wrap=True)
        return 1
    except (ValueError, OSError) as error:
        console.print(f"[red]{escape(str(error))}[/]", soft_wrap=True)
        return 2
    except KeyboardInterrupt:
        return 130


def reported(command: Callable[[list[str]], int]) -> Callable[[list[str]], int]:
    """Return a command that ends as described at ``status``, with errors on standard error."""

    @functools.wraps(command)
    def wrapped(argv: list[str]) -> int:
        return status(lambda: command(argv), Console(stderr=True))

    return wrapped


def retyped(argv: Sequence[str]) -> str:
    """Return the arguments that repeat a run: file names without folders, no output folder."""
    shown: list[str] = []
    words = iter(argv)
    for word in words:
        if word in _NOT_RETYPED:
            next(words, None)
        elif word != "--resume" and word.partition("=")[0] not in _NOT_RETYPED:
            shown.append(Path(word).name if "/" in word else word)
    return shlex.join(shown)
