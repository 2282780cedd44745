"""Environment variables of the delta layer: read where they are used, refused when wrong."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

Number = TypeVar("Number", int, float)


def _read(name: str, kind: str, parse: Callable[[str], Number]) -> Number | None:
    """The variable parsed, or None where it is not set; ``kind`` says what it must be."""
    text = os.environ.get(name)
    if text is None:
        return None
    try:
        return parse(text)
    except ValueError:
        raise ValueError(f"{name} must be {kind}, not {text!r}") from None


def env_int(name: str, default: int, *, minimum: int = 0) -> int:
    """``name`` as an integer of at least ``minimum``.

    Raises:
        ValueError: the variable is set to something else; the message names it.
    """
    value = _read(name, "an integer", int)
    if value is None:
        return default
    if value < minimum:
        raise ValueError(f"{name} must be at least {minimum}, not {value}")
    return value


def env_seconds(name: str, default: float) -> float:
    """``name`` as a duration in seconds, zero or more.

    Raises:
        ValueError: the variable is set to something else; the message names it.
    """
    value = _read(name, "a number of seconds", float)
    if value is None:
        return default
    if not 0 <= value < float("inf"):
        raise ValueError(f"{name} must be zero or more seconds, not {value}")
    return value
