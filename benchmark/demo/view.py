"""What a pair does, from the metrics of both servers: the numbers of two readings, as a table that
is redrawn in a terminal and as lines in a pipe."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass

from rich.console import Console
from rich.live import Live
from rich.table import Table

from benchmark.harness import metrics
from benchmark.harness.report import milliseconds, number

Values = Mapping[str, float]
#: Role -> what ``samples`` found on its page; None: the server does not answer.
Reading = Mapping[str, Values | None]

WINDOW = 10
"""Readings of the table's first column; and the seconds between two lines in a pipe."""


@dataclass(frozen=True)
class Row:
    """Requests and tokens at the second of two readings, and what was counted from the first to it.

    NaN: not known, since a server did not answer. ``ttft_s`` is NaN without a request, too.
    """

    silent: tuple[str, ...]
    """Servers that do not answer."""
    running: float
    """Requests in decode's batch."""
    waiting: float
    """Requests that wait for memory or a place in decode's batch."""
    in_transfer: float
    """Requests whose KV decode awaits."""
    prefill_waiting: float
    used_tokens: float
    """Of decode's pool, as ``evictable_tokens`` and ``pool_tokens`` are."""
    evictable_tokens: float
    pool_tokens: float
    prompt_tokens: float
    hit_tokens: float
    """Prompt tokens that decode held."""
    moved_bytes: float
    """KV that decode asked for."""
    saved_bytes: float
    """KV of the prompts that decode did not ask for: held, or computed by it."""
    local_turns: float
    remote_turns: float
    ttft_s: float
    """Mean, as decode's HTTP server sees it."""


def samples(page: str) -> Values:
    """The samples of a metrics page by name; of turns also ``local turns`` and ``remote turns``.

    SGLang writes its counts of requests in the steps of the scheduler, and on an idle server every
    30 s. So they are 0 here while no request is open at the HTTP server.
    """
    found = metrics.parse(page)
    for (where, reason), count in metrics.by_labels(page, metrics.TURNS, "where", "reason").items():
        if reason != "not_shared":  # a probe of the load balancer, once a minute
            found[f"{where} turns"] = found.get(f"{where} turns", 0.0) + count
    if not metrics.by_labels(page, metrics.OPEN_REQUESTS, "method").get(("POST",)):
        for name in metrics.REQUESTS:
            found[name] = 0.0
    return found


def row(before: Reading, now: Reading, token_bytes: int) -> Row:
    """``token_bytes``: KV of one token. Exact where a page is one token: else the last page of each
    prompt makes ``saved_bytes`` too small."""

    def gauge(role: str, *names: str) -> float:
        values = now[role]
        return math.nan if values is None else sum(values.get(name, 0.0) for name in names)

    def gained(name: str) -> float:
        first, last = before.get("decode"), now["decode"]
        if first is None or last is None:
            return math.nan
        return last.get(name, 0.0) - first.get(name, 0.0)

    answered, moved = gained(f"{metrics.TTFT}_count"), gained(metrics.REQUESTED_BYTES)
    return Row(
        silent=tuple(role for role, values in now.items() if values is None),
        running=gauge("decode", metrics.RUNNING),
        waiting=gauge("decode", metrics.PREALLOC_QUEUE, metrics.QUEUE),
        in_transfer=gauge("decode", metrics.TRANSFER_QUEUE),
        prefill_waiting=gauge("prefill", metrics.BOOTSTRAP_QUEUE, metrics.QUEUE),
        used_tokens=gauge("decode", metrics.USED_TOKENS),
        evictable_tokens=gauge("decode", metrics.EVICTABLE_TOKENS),
        pool_tokens=gauge("decode", metrics.POOL_TOKENS),
        prompt_tokens=gained(metrics.PROMPT_TOKENS),
        hit_tokens=gained(metrics.HIT_TOKENS),
        moved_bytes=moved,
        saved_bytes=gained(metrics.PROMPT_TOKENS) * token_bytes - moved,
        local_turns=gained("local turns"),
        remote_turns=gained("remote turns"),
        ttft_s=gained(f"{metrics.TTFT}_sum") / (answered or math.nan),
    )


def _count(value: float) -> str:
    return number(value, 0)


def _megabytes(count: float) -> str:
    return number(count / 1e6, 2)


NOW: Mapping[str, Callable[[Row], str]] = {
    "running": lambda r: _count(r.running),
    "waiting": lambda r: (
        f"{_count(r.waiting)} on decode, {_count(r.in_transfer)} in transfer, "
        f"{_count(r.prefill_waiting)} on prefill"
    ),
    "decode pool": lambda r: (
        f"{_count(r.used_tokens)} used + {_count(r.evictable_tokens)} evictable of "
        f"{_count(r.pool_tokens)} tokens"
    ),
}
COUNTED: Mapping[str, Callable[[Row], str]] = {
    "prefix hits": lambda r: f"{_count(r.hit_tokens)} of {_count(r.prompt_tokens)} tokens",
    "KV saved": lambda r: (
        f"{_megabytes(r.saved_bytes)} of {_megabytes(r.saved_bytes + r.moved_bytes)} MB"
    ),
    "turns": lambda r: f"{_count(r.local_turns)} local, {_count(r.remote_turns)} remote",
    "mean TTFT": lambda r: milliseconds(r.ttft_s),
}


def _silence(r: Row) -> str:
    return "; ".join(f"{role} does not answer" for role in r.silent)


def table(last: Row, whole: Row) -> Table:
    """``last``: of the last readings; ``whole``: since the first one."""
    shown = Table("", f"now, or last {WINDOW} s", "since the start", caption=_silence(whole))
    shown.caption_style = "bold red"
    for name, cell in NOW.items():
        shown.add_row(name, cell(whole))
    for name, cell in COUNTED.items():
        shown.add_row(name, cell(last), cell(whole))
    return shown


def line(whole: Row) -> str:
    """The same in one line, without the last readings."""
    cells = [f"{name} {cell(whole)}" for name, cell in (NOW | COUNTED).items()]
    return "; ".join(filter(None, [*cells, _silence(whole)]))


def show(
    readings: Iterable[Reading],
    token_bytes: int,
    console: Console,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Shows readings, which come about once a second, as they come.

    A terminal has a table that is redrawn. Elsewhere a line is printed when something has changed,
    at most one in ten seconds.
    """
    first: dict[str, Values | None] = {}
    recent: deque[Reading] = deque(maxlen=WINDOW + 1)
    said, next_line_at = "", -math.inf
    redraws = console.is_terminal and not console.is_dumb_terminal
    with Live(console=console, auto_refresh=False) if redraws else nullcontext() as live:
        for now in readings:
            first.update({role: now[role] for role in now if first.get(role) is None})
            recent.append(now)
            whole = row(first, now, token_bytes)
            if live is not None:
                live.update(table(row(recent[0], now, token_bytes), whole), refresh=True)
            elif clock() >= next_line_at and (text := line(whole)) != said:
                said, next_line_at = text, clock() + WINDOW
                stamp = time.strftime("%H:%M:%S")
                console.print(f"{stamp} {text}", soft_wrap=True, highlight=False, markup=False)
