"""Environment variables of the delta layer: read where they are used, refused when wrong."""

from __future__ import annotations

import os


def env_int(name: str, default: int, *, minimum: int = 0) -> int:
    """``name`` as an integer of at least ``minimum``.

    Raises:
        ValueError: the variable is set to something else; the message names it.
    """
    text = os.environ.get(name)
    if text is None:
        return default
    try:
        value = int(text)
    except ValueError:
        raise ValueError(f"{name} must be an integer, not {text!r}") from None
    if value < minimum:
        raise ValueError(f"{name} must be at least {minimum}, not {value}")
    return value


def env_seconds(name: str, default: float) -> float:
    """``name`` as a duration in seconds, zero or more.

    Raises:
        ValueError: the variable is set to something else; the message names it.
    """
    text = os.environ.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{name} must be a number of seconds, not {text!r}") from None
    if not 0 <= value < float("inf"):
        raise ValueError(f"{name} must be zero or more seconds, not {text}")
    return value
