"""All environment variables of this package: name, unit, default, bounds and meaning.

``NAME.read()`` returns the value or raises an error that names the variable. The tables in
``docs/`` are printed from here, as by ``python -m sglang.srt.patchset --environment``. Imports
almost nothing, because every process of an environment may load it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar  # Any: the value of any variable

from sglang.srt.patchset.table import BASE, LEAD
from sglang.srt.patchset.table import GROUPS as FEATURES

T = TypeVar("T")


@dataclass(frozen=True)
class Variable(Generic[T]):
    """One variable."""

    name: str
    #: Its table (``VARIABLE_GROUPS``).
    group: str
    #: Meaning, in Markdown.
    text: str
    default: T
    #: Allowed values, as text.
    allowed: str
    #: Parses a text; raises ValueError if it is not allowed.
    parse: Callable[[str], T]
    #: The default as text, if it is not ``str(default)``.
    shown: str = ""

    def read(self, default: T | None = None) -> T:
        """Return the current value. ``default`` replaces the variable's own default.

        Raises:
            ValueError: the variable has a value that is not allowed; the message names it.
        """
        text = os.environ.get(self.name)
        if text is None:
            return self.default if default is None else default
        try:
            return self.parse(text)
        except ValueError:
            raise ValueError(f"{self.name} must be {self.allowed}, not {text!r}") from None

    def write(self, text: str | None, name: str) -> str | None:
        """Set the variable in this process and those that it starts, or remove it; return its text
        before.

        Raises:
            ValueError: ``text`` is not allowed; the message has ``name``.
        """
        before = os.environ.pop(self.name, None)
        if text is not None:
            os.environ[self.name] = text
            try:
                self.parse(text)
            except ValueError:
                self.write(before, self.name)
                raise ValueError(f"{name} must be {self.allowed}, not {text!r}") from None
        return before


#: Maximum duration in seconds (11 days), because Python's waits raise on very large ones.
_MAX_S = 1_000_000
#: Maximum integer.
_MAX = 2**31 - 1


def _number(parse: Callable[[str], Any], least: float, most: float) -> Callable[[str], Any]:
    def within(text: str) -> Any:
        value = parse(text)
        if not least <= value <= most:
            raise ValueError
        return value

    return within


def _seconds(
    name: str, group: str, default: float, text: str, *, least: float = 0
) -> Variable[float]:
    parse = _number(float, least, _MAX_S)
    allowed = f"a number of seconds from {least:g} to {_MAX_S}"
    return Variable(name, group, text, default, allowed, parse, f"{default:g} s")


def _integer(
    name: str, group: str, default: int, text: str, *, least: int = 0, most: int = _MAX,
    unit: str = "", shown: str = "",
) -> Variable[int]:  # fmt: skip
    allowed = f"an integer from {least} to {most}" + (f" ({unit})" if unit else "")
    shown = shown or " ".join(filter(None, (str(default), unit)))
    return Variable(name, group, text, default, allowed, _number(int, least, most), shown)


# Spellings of switches.
_ON = ("1", "true", "yes", "y", "on")
_OFF = ("0", "false", "no", "n", "off", "")
_SPELLINGS = "`1`, `true`, `yes`, `y`, `on`, or `0`, `false`, `no`, `n`, `off`"


def _boolean(text: str) -> bool:
    """Parse the spellings of SGLang's own variables, and ``on`` and ``off``."""
    word = text.strip().lower()
    if word not in (*_ON, *_OFF):
        raise ValueError
    return word in _ON


def _switch(name: str, group: str, text: str) -> Variable[bool]:
    return Variable(name, group, text, False, _SPELLINGS, _boolean, "off")


def _choice(*words: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in words:
            raise ValueError
        return text

    return parse


#: Feature groups of both releases that can be switched off.
SWITCHED = (*(group.name for group in FEATURES if group.name != BASE), LEAD)


def _switched(text: str) -> tuple[str, ...]:
    names = tuple(name for part in text.split(",") if (name := part.strip()))
    if not set(names) <= set(SWITCHED):
        raise ValueError
    return names


#: Tables of variables -> title.
VARIABLE_GROUPS = {
    "package": "The package",
    "both": "Prefill and decode",
    "decode": "Decode",
    "prefill": "Prefill",
    "nixl": "Asynchronous NIXL transfer",
    "store": "HiCache with buffer-only host memory",
    "lead": "On SGLang 0.5.23",
    "tests": "Tests",
}

ACTIVE: Variable[bool] = Variable(
    "SGLANG_PATCHSET", "package", "`0` turns the package off.", True, _SPELLINGS, _boolean, "on",
)  # fmt: skip
DISABLED_GROUPS: Variable[tuple[str, ...]] = Variable(
    "SGLANG_PATCHSET_DISABLE",
    "package",
    "Feature groups that stay stock: `delta`, `nixl_async`, `mooncake_delta`, `decode_radix`, "
    "`buffer_only`, `decode_offload`; on SGLang 0.5.23 `lead`. The decode radix cache needs "
    "`decode_radix`, `delta` and the group of its backend. A prefill server needs the latter two, "
    "or it sends whole prompts.",
    (),
    f"comma-separated names of {', '.join(SWITCHED)}",
    _switched,
    "none",
)

QUARANTINE_TIMEOUT = _seconds(
    "SGLANG_DISAGGREGATION_QUARANTINE_TIMEOUT", "both", 60.0,
    "Deferred release: the longest time for which decode holds the pages of an aborted or failed "
    "transfer that prefill may still write to. Set it on both sides. A prefill process that did "
    "not run for half of this time posts nothing more for earlier rooms. A transfer that the "
    "transport failed counts as under way for this time.",
    least=10,
)  # fmt: skip
EVENT_LOG: Variable[str] = Variable(
    "SGLANG_DISAGGREGATION_EVENT_LOG", "both",
    "Folder of the event log: one JSON line for each admission, announcement, send, delivery and "
    "arrival, each local turn, and each end of an answer on decode (not of one that was aborted "
    "before it ran).",
    "", "a folder", str, "none",
)  # fmt: skip

ADMISSION_TIMEOUT = _seconds(
    "SGLANG_DISAGGREGATION_DECODE_ADMISSION_TIMEOUT", "decode", 300.0,
    "Longest time for which a request waits for decode memory. Then its client gets status 503 "
    "and the reason.",
    least=1,
)  # fmt: skip
EXPLAIN: Variable[bool] = Variable(
    "SGLANG_DISAGGREGATION_EXPLAIN", "decode",
    "Each answer of `/generate` says in `meta_info`, under `cached_tokens_details`, where its new "
    "tokens were computed and why, what it hit and requested, and how long it waited. `0` omits "
    "this.",
    True, _SPELLINGS, _boolean, "on",
)  # fmt: skip
LOCAL_CHUNK = _integer(
    "SGLANG_DISAGGREGATION_DECODE_LOCAL_CHUNK", "decode", 512,
    "Local and fallback prefill: the largest number of prompt tokens that decode "
    "computes between two decode steps. At least a page.",
    least=1, unit="tokens",
)  # fmt: skip
HANDSHAKE_TIMEOUT = _seconds(
    "SGLANG_DISAGGREGATION_HANDSHAKE_TIMEOUT", "decode", 5.0,
    "Longest time of one query of decode to a prefill's bootstrap server. Queries run in the "
    "background.",
    least=0.1,
)  # fmt: skip

TRANSFER_TIMEOUT = _seconds(
    "SGLANG_DISAGGREGATION_TRANSFER_TIMEOUT", "prefill", 120.0,
    "Longest time of a chunk, over NIXL and over Mooncake, from prefill's queue to its end. Then "
    "its room fails with the reason `timeout`, and its error names the decode ranks that it did "
    "not reach.",
    least=1,
)  # fmt: skip
CLAIM_TIMEOUT = _seconds(
    "SGLANG_DISAGGREGATION_CLAIM_TIMEOUT", "prefill", 120.0,
    "Longest time for which a room that decode announced waits for its request on prefill. Then "
    "decode is notified. Time in which prefill compiles, loads or is paused counts, so set it "
    "above the longest such time.",
    least=10,
)  # fmt: skip
PEER_TIMEOUT = _seconds(
    "SGLANG_DISAGGREGATION_PEER_TIMEOUT", "prefill", 120.0,
    "Time without a ping after which prefill forgets a decode rank that used to ping: three times "
    "the rank's `SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL`, if that is longer. Of ranks that never "
    "ping (stock, or without the flag) the longest unused are forgotten beyond 4,096.",
    least=10,
)  # fmt: skip

QUEUES = _integer(
    "SGLANG_DISAGGREGATION_QUEUE_SIZE", "nixl", 4,
    "Transfer queues, each with a thread. All chunks of a room use the same queue. Over NIXL each "
    "thread has a UCX worker, with an endpoint for each decode rank. More than 256 count as 256.",
    least=1,
)  # fmt: skip
THREADS = _integer(
    "SGLANG_DISAGGREGATION_THREAD_POOL_SIZE", "nixl", 4,
    "Over Mooncake: the largest number of engine calls at one time. A value below "
    "`SGLANG_DISAGGREGATION_QUEUE_SIZE` ends the server at start (SGLang's assertion). Over NIXL "
    "it has no effect.",
    least=1, shown="min(max(4, cpus / 2 / 8), 12)",
)  # fmt: skip
NIXL_PROGRESS_DELAY = _integer(
    "SGLANG_DISAGGREGATION_NIXL_PROGRESS_DELAY", "nixl", 1000,
    "Pause of NIXL's own progress thread, on prefill and decode. With `0` it polls without a "
    "pause, as in stock SGLang.",
    most=100_000, unit="microseconds",
)  # fmt: skip

BUFFER_READ_TIMEOUT = _seconds(
    "SGLANG_HICACHE_BUFFER_READ_TIMEOUT", "store", 10.0,
    "Longest wait of a request for its prefetch; after that its tokens are computed. Only steps in "
    "which the scheduler could admit the request count.",
)  # fmt: skip
BUFFER_ALWAYS_FETCH = _switch(
    "SGLANG_HICACHE_BUFFER_ALWAYS_FETCH", "store",
    "Fetch every storage hit, also one that is expected to take longer than its computation.",
)  # fmt: skip
STORE_DEADLINE = _seconds(
    "SGLANG_HICACHE_STORE_DEADLINE", "store", 10.0,
    "Longest time of a store call. After a longer one the store counts as down until it answers a "
    "probe.",
    least=0.1,
)  # fmt: skip

LOCAL_TOKENS = _integer(
    "SGLANG_DISAGGREGATION_DECODE_LOCAL_TOKENS", "lead", 0,
    "Decode: the largest number of new tokens of a turn that this server computes itself. "
    "Prefill: with any number above 0 it releases the requests that decode computes, with status "
    "200 and an empty answer.",
    unit="tokens", shown="0 (off)",
)  # fmt: skip

LOCAL_SHARE: Variable[float] = Variable(
    "SGLANG_DISAGGREGATION_DECODE_LOCAL_SHARE", "lead",
    "Decode: the part of the time that local prefill may take while requests run.",
    0.5, "a number above 0 and at most 1", _number(float, math.ulp(0.0), 1),
)  # fmt: skip

LOCAL_MAX_ITL_MS: Variable[float] = Variable(
    "SGLANG_DISAGGREGATION_DECODE_LOCAL_MAX_ITL_MS", "lead",
    "Decode: a bound on the inter-token latency of running requests, in milliseconds. Chunks are "
    "sized so that 99 of 100 gaps between tokens with a chunk in them are shorter.",
    0.0, f"a number of milliseconds from 0 to {_MAX}", _number(float, 0, _MAX), "0 (no bound)",
)  # fmt: skip

FALLBACK_PREFILL_TOKENS = _integer(
    "SGLANG_DISAGGREGATION_DECODE_FALLBACK_PREFILL_TOKENS", "lead", 0,
    "Decode: the largest number of new tokens that this server may compute itself if the prefill "
    "server is lost or cannot be reached, or the transfer failed. Works with or without "
    "`SGLANG_DISAGGREGATION_DECODE_LOCAL_TOKENS`.",
    unit="tokens", shown="0 (the request fails)",
)  # fmt: skip

DECODE_ADMISSION: Variable[str] = Variable(
    "SGLANG_DISAGGREGATION_DECODE_ADMISSION", "lead",
    "Decode: what admission reserves. `remaining`: what each request can still generate, at most "
    "`--num-reserved-decode-tokens`; a retracted request resumes with the prefix that the tree "
    "holds. `stock`: that number for each request.",
    "stock", "`stock` or `remaining`", _choice("stock", "remaining"),
)  # fmt: skip

CHECK_INVARIANTS = _switch(
    "SGLANG_DISAGGREGATION_CHECK_INVARIANTS", "tests",
    "Check decode's pools, tree and tables whenever the server becomes idle. If they are not "
    "consistent, the server ends.",
)  # fmt: skip

VARIABLES: tuple[Variable[Any], ...] = tuple(
    value for value in list(globals().values()) if isinstance(value, Variable)
)


#: Variables of other groups that also have an effect on SGLang 0.5.23.
ALSO_LEAD = (EXPLAIN, LOCAL_CHUNK, HANDSHAKE_TIMEOUT, NIXL_PROGRESS_DELAY)


def is_active() -> bool:
    """Return False if the package is turned off. An invalid value counts as on, so that the server
    refuses it (``wrong``)."""
    return os.environ.get(ACTIVE.name, "1").strip().lower() not in _OFF


def wrong() -> str:
    """Read every variable, also unused ones. Return the errors of invalid values, with which a
    server does not start; empty if none."""
    errors = []
    for variable in VARIABLES:
        try:
            variable.read()
        except ValueError as error:
            errors.append(str(error))
    return "; ".join(errors)


def given(group: str, *also: Variable[Any]) -> list[str]:
    """Return the variables of a group, and ``also``, that are set, each as ``NAME=text``."""
    names = [each.name for each in VARIABLES if each.group == group or each in also]
    return [f"{name}={os.environ[name]}" for name in names if name in os.environ]


def sglang_names(name: str) -> list[str]:
    """Return the comma-separated names in SGLang's own variable ``name``; empty if not set."""
    return [word for part in os.environ.get(name, "").split(",") if (word := part.strip())]


def sglang_switch(name: str) -> bool:
    """Return True if SGLang reads its own variable ``name`` as on."""
    return os.environ.get(name, "").strip().lower() in ("1", "true", "t", "yes", "y", "on")


def table(group: str) -> str:
    """Return the variables of a group as a Markdown table."""
    rows = [
        f"| `{var.name}` | {var.text} | {var.shown or var.default} | {var.allowed} |\n"
        for var in VARIABLES
        if var.group == group
    ]
    return "".join(["| Variable | Meaning | Default | Allowed |\n|---|---|---|---|\n", *rows])
