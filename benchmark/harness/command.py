"""What the command lines of benchmarks have in common: options, and how they end."""

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
        console.print(f"[red]{escape(str(failure))}[/]", soft_wrap=True)
        return 1
    except (ValueError, OSError) as error:
        console.print(f"[red]{escape(str(error))}[/]", soft_wrap=True)
        return 2
    except KeyboardInterrupt:
        return 130


def reported(command: Callable[[list[str]], int]) -> Callable[[list[str]], int]:
    """A command that ends as ``status`` says; what ended it goes to standard error."""

    @functools.wraps(command)
    def wrapped(argv: list[str]) -> int:
        return status(lambda: command(argv), Console(stderr=True))

    return wrapped


def retyped(argv: Sequence[str]) -> str:
    """What to type to repeat a run: files by name, and not where its results went."""
    shown: list[str] = []
    given = iter(argv)
    for word in given:
        if word in _NOT_RETYPED:
            next(given, None)
        elif word != "--resume" and word.partition("=")[0] not in _NOT_RETYPED:
            shown.append(Path(word).name if "/" in word else word)
    return shlex.join(shown)
