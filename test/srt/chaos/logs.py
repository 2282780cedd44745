"""What server logs must not say."""

from __future__ import annotations

import re
from pathlib import Path

from benchmark.harness.checks import LEAK_MARKS

_TRACEBACK = "Traceback (most recent call last)"
_MARKS = (_TRACEBACK, "InvariantError", *LEAK_MARKS)
_EXCERPT_LINES = 40
_FAILED_STORE = re.compile(rf"(HiCache store \S+: \w+ failed: [^\n]*\n){re.escape(_TRACEBACK)}")
"""Of a store that raised: the guard logs where, once until it works again."""
_KILLED_PEER = re.compile(
    r"(Unexpected transfer worker error for room \d+\n)"
    rf"{re.escape(_TRACEBACK)}(?=[^\[]*left a handle running)"
)
"""Of SGLang 0.5.23: a worker found its peer dead, and ends the room."""

NO_VOCABULARY = re.compile(r"initialize OpenAIServingResponses.*?HarmonyError", re.DOTALL)
"""Of gpt-oss: the vocabulary of another API is not on this machine."""


def log_problems(log: Path, killed_at: int | None = None) -> list[str]:
    """One entry for each kind of trouble in a log, with where it starts.

    No traceback is tolerated in a server that we did not kill: SGLang answers aborted requests,
    vanished clients and dead peers with log lines. That of a call of HiCache's store is left out:
    the server computes instead. So is that of a worker of SGLang 0.5.23 whose peer was killed, and
    that of an API of gpt-oss that no test uses.
    ``killed_at``: the size of the log in bytes when we killed its server; what its processes wrote
    after that is left out.
    """
    text = log.read_bytes()[:killed_at].decode(errors="replace")
    text = _KILLED_PEER.sub(r"\1", _FAILED_STORE.sub(r"\1", text))
    text = NO_VOCABULARY.sub("", text)
    problems = []
    for mark in _MARKS:
        at = text.find(mark)
        if at >= 0:
            last = _last_line(text[at:]) if mark == _TRACEBACK else text[at:].splitlines()[0]
            line = text.count("\n", 0, at) + 1
            problems.append(f"{log.name}:{line}: {mark}: {last[:400]} ({text.count(mark)} times)")
    return problems


def _last_line(trace: str) -> str:
    """The line of a traceback that names the error: the first after it that is not indented."""
    for line in trace.splitlines()[1:_EXCERPT_LINES]:
        bare = re.sub(r"^\[[^\]]*\] ", "", line)
        if bare and not bare.startswith((" ", "\t", "|")):
            return bare
    return "(cut off)"
