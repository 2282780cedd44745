"""Finds tracebacks, broken invariants and leaks in server logs."""

from __future__ import annotations

import re
from pathlib import Path

from benchmark.harness.checks import LEAK_MARKS

_TRACEBACK = "Traceback (most recent call last)"
_MARKS = (_TRACEBACK, "InvariantError", *LEAK_MARKS)
_EXCERPT_LINES = 40
_FAILED_STORE = re.compile(rf"(HiCache store \S+: \w+ failed: [^\n]*\n){re.escape(_TRACEBACK)}")
"""A store call raised: the guard logs its traceback once, until the store works again."""
_KILLED_PEER = re.compile(
    r"(Unexpected transfer worker error for room \d+\n)"
    rf"{re.escape(_TRACEBACK)}(?=[^\[]*left a handle running)"
)
"""SGLang 0.5.23: a transfer worker found its peer dead and ends the room."""

NO_VOCABULARY = re.compile(r"initialize OpenAIServingResponses.*?HarmonyError", re.DOTALL)
"""gpt-oss: the vocabulary for another API is not on this machine."""


def log_problems(log: Path, killed_at: int | None = None) -> list[str]:
    """Return one entry for each kind of problem in a log, with the line of its first occurrence.

    A server that was not killed may log no traceback, because SGLang answers aborted requests,
    vanished clients and dead peers with log lines. Exceptions: a HiCache store call (the server
    computes instead), a transfer worker of SGLang 0.5.23 whose peer was killed, and an API of
    gpt-oss that no test uses.
    ``killed_at``: size of the log in bytes when the server was killed; later lines are ignored.
    """
    text = log.read_bytes()[:killed_at].decode(errors="replace")
    text = _KILLED_PEER.sub(r"\1", _FAILED_STORE.sub(r"\1", text))
    text = NO_VOCABULARY.sub("", text)
    problems = []
    for mark in _MARKS:
        offset = text.find(mark)
        if offset >= 0:
            last = (
                _last_line(text[offset:]) if mark == _TRACEBACK else text[offset:].splitlines()[0]
            )
            line = text.count("\n", 0, offset) + 1
            problems.append(f"{log.name}:{line}: {mark}: {last[:400]} ({text.count(mark)} times)")
    return problems


def _last_line(trace: str) -> str:
    """Return the line of a traceback that names the error: the first unindented one."""
    for line in trace.splitlines()[1:_EXCERPT_LINES]:
        bare = re.sub(r"^\[[^\]]*\] ", "", line)
        if bare and not bare.startswith((" ", "\t", "|")):
            return bare
    return "(cut off)"
