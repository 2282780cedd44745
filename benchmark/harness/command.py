"""What the command lines of benchmarks have in common: options, and how they end."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.markup import escape

from benchmark.harness.process import ServerFailed

T = TypeVar("T")


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


def add_fields(parser: argparse.ArgumentParser, load: Any, **helps: str) -> None:
    """An option for each named field of a dataclass ``load``, whose value is the default."""
    for name, text in helps.items():
        value = getattr(load, name)
        several = isinstance(value, tuple)
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=type(value[0] if several else value),
            nargs="+" if several else None,
            default=value,
            help=text,
        )


def replaced(load: T, args: argparse.Namespace) -> T:
    """``load`` with the fields that ``args`` has."""
    fields = {field.name for field in dataclasses.fields(load)}  # type: ignore[arg-type]
    given = {name: value for name, value in vars(args).items() if name in fields}
    lists = {name: tuple(v) if isinstance(v, list) else v for name, v in given.items()}
    return dataclasses.replace(load, **lists)  # type: ignore[type-var]


def add_common(parser: argparse.ArgumentParser, results: Path) -> None:
    """What every benchmark that starts servers takes."""
    add = parser.add_argument
    add("--model", type=Path, help="model folder; a random one is made without it")
    add("--out", type=Path, default=results, help="for JSON, the plot and the servers' logs")


def repeated(args: argparse.Namespace, parser: argparse.ArgumentParser) -> str:
    """What to type to repeat a run: the options that were not left as they are, without paths."""
    words = [parser.prog]
    for name, value in vars(args).items():
        if value != parser.get_default(name) and name not in ("out", "note", "model"):
            values = value if isinstance(value, (list, tuple)) else [value]
            names = [each.name if isinstance(each, Path) else str(each) for each in values]
            words += [f"--{name.replace('_', '-')}", *names]
    return " ".join(words)
