"""The closed forms of ``worth-it``: lengths and pools in tokens, times in seconds, rates a second.

No queue is modelled: each form describes one request, or a server that is always busy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from benchmark.traces.describe import Description


@dataclass(frozen=True)
class Workload:
    """A mean turn."""

    shared: float
    """P: prompt tokens of the prefix, which several sessions have."""
    history: float
    """H: further prompt tokens, of earlier turns of the session; decode had their KV."""
    new: float
    """N: the other prompt tokens."""
    answer: float
    """A: tokens of the answer."""
    again: float = 0.0
    """R: tokens of H that prefill computes again: the last answer. Only decode has its KV."""
    prefixes: int = 1
    """G: distinct prefixes in use."""
    sessions: int = 1
    """Sessions at once."""

    @property
    def prompt(self) -> float:
        """L: tokens of the prompt."""
        return self.shared + self.history + self.new

    @property
    def own(self) -> float:
        """Tokens of the prompt and the answer that no other session has."""
        return self.history + self.new + self.answer


def of_sizes(
    prefix: int, new: int, answer: int, turns: int, prefixes: int, sessions: int
) -> Workload:
    """Return the mean turn of sessions of ``turns`` turns, each behind all earlier ones."""
    history = (new + answer) * (turns - 1) / 2
    again = answer * (turns - 1) / turns
    return Workload(prefix, history, new, answer, again, prefixes, sessions)


def of_trace(trace: Description, prefixes: int, sessions: int) -> Workload:
    """Return the mean turn of a trace. An answer counts as new tokens of the next turn, because a
    trace gives its blocks other numbers there."""
    prompt = trace["input_tokens"].mean
    shared, history = prompt * trace["hit_across"], prompt * trace["hit_within"]
    answer = trace["output_tokens"].mean
    new = prompt - shared - history
    return Workload(shared, history, new, answer, prefixes=prefixes, sessions=sessions)


def holds(
    pool: float, prefix: float, suffix: float, prefixes: int, *, shared: bool, reserved: float = 0
) -> int:
    """Return the number of requests that fit into one decode pool.

    Each request has one of ``prefixes`` prefixes, a suffix of its own, and ``reserved`` tokens for
    its answer. With ``shared``, a prefix is held once for all requests that have it; the first
    ``prefixes`` requests are assumed to have different ones.
    """
    unshared = suffix + reserved
    without_sharing = math.floor(pool / (prefix + unshared))
    if not shared or without_sharing < prefixes:
        return without_sharing
    return math.floor((pool - prefixes * prefix) / unshared)


def hit_tokens(work: Workload, kept: float, page: int, hit_rate: float | None = None) -> int:
    """Return the prompt tokens that decode's tree holds, in whole pages.

    ``kept``: share of the sessions whose history is in the tree. ``hit_rate``: a measured share of
    the prompt, instead.
    """
    hit = work.shared + work.history * kept if hit_rate is None else work.prompt * hit_rate
    return math.floor(hit / page) * page


def moved_tokens(prompt: float, hit: int, page: int) -> int:
    """Return the tokens of KV that prefill sends: whole pages, without those that decode holds."""
    return math.ceil(prompt / page) * page - hit


def remote_s(computed: float, moved_bytes: float, prefill_rate: float, wire_rate: float) -> float:
    """Return the TTFT of a turn that prefill computes: computing, then sending."""
    return computed / prefill_rate + moved_bytes / wire_rate


def local_s(new: float, rate: float, step_s: float, chunk: float) -> float:
    """Return the TTFT of a turn that decode computes: chunks, with a decode step between two."""
    return new / rate + max(0.0, new / chunk - 1) * step_s


def chunk_tokens(chunk: int, rate: float, itl_s: float | None, step_s: float) -> float:
    """Return the tokens of a chunk: the setting, or fewer, if the bound on ITL is shorter."""
    return chunk if itl_s is None else min(chunk, max(0.0, itl_s - step_s) * rate)


@dataclass(frozen=True)
class Rates:
    """Speeds of the servers."""

    prefill: float
    """Vp: tokens/s that a prefill server computes."""
    local: float
    """Vd: tokens/s that a decode server computes in a chunk."""
    wire: float
    """W: bytes/s into a decode server."""
    step_s: float = 0.0
    """s: time of a decode step; 0: unknown."""


def longest_local(
    work: Workload, lost: float, rates: Rates, token_bytes: float, chunk: float
) -> float:
    """Return the tokens of a prompt that decode may lack, so that a local turn has a lower TTFT
    than one that prefill computes; infinity if at each length.

    ``lost``: history that decode's tree lost and prefill's has. The result solves, for ``m``,
    ``local_s(m) = remote_s(m - lost + R, m x token_bytes)``.
    """
    if chunk <= 0:
        return 0.0
    lead_s = (work.again - lost) / rates.prefill
    per_token_s = 1 / rates.local - 1 / rates.prefill - token_bytes / rates.wire
    if lead_s - chunk * per_token_s >= 0:  # a turn of one chunk wins, so longer ones may
        lead_s, per_token_s = lead_s + rates.step_s, per_token_s + rates.step_s / chunk
    if per_token_s <= 1e-15:
        return math.inf if lead_s >= 0 else 0.0
    return max(0.0, lead_s / per_token_s)


@dataclass(frozen=True)
class Split:
    """The same number of servers, aggregated and split."""

    prefill_servers: int
    decode_servers: int
    prefill_s: float
    """Seconds of an aggregated server to compute a turn's new tokens."""
    remote_s: float
    """Seconds of a prefill server, which computes the last answer again."""
    decode_s: float
    """Seconds of a decode server for a turn's answer, shared with the running requests."""

    @property
    def disaggregated(self) -> float:
        """Turns/s of the split servers, of which one side may idle."""
        by_prefill = self.prefill_servers / self.remote_s
        return min(by_prefill, self.decode_servers / self.decode_s)

    @property
    def aggregated(self) -> tuple[float, float]:
        """Turns/s of as many aggregated servers, among which the running requests are divided: if
        a decode step takes as long for fewer requests, and if it takes less in proportion."""
        servers = self.prefill_servers + self.decode_servers
        fewer = servers / self.decode_servers
        return (
            servers / (self.prefill_s + self.decode_s * fewer),
            servers / (self.prefill_s + self.decode_s),
        )

    @property
    def ratios(self) -> tuple[float, float]:
        """Throughput of the split servers over that of the aggregated ones: least and most."""
        low, high = self.aggregated
        return self.disaggregated / high, self.disaggregated / low
