"""The result of a request, and the events of its stream: SGLang's and OpenAI's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

Json = dict[str, Any]
ErrorKind = Literal[
    "connect",  # no connection, or closed before an answer began
    "timeout",  # no end of the answer within the session's time limit
    "http_4xx",
    "http_5xx",
    "broken_stream",  # the stream ended, or had an unreadable event, before the answer's end
    "abort",  # the server reported an abort
    "short_answer",  # ended in order, with fewer tokens than requested
    "aiperf",  # an error of AIPerf; see the message
    "open_files",  # this process ran out of open files: a fault of the client
]
TEXT = 300
"""Number of characters kept of an error page."""


@dataclass
class Result:
    """The result of a request. Times are seconds on this process's monotonic clock."""

    label: str
    started_at: float
    token_times: list[float] = field(default_factory=list)
    """Arrival of each piece of the answer; a piece is one token unless the server merged some."""
    output_ids: list[int] = field(default_factory=list)
    """Empty for OpenAI's endpoints, which return text only, and for messages."""
    text: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that prefill found in its cache, as the server reports them."""
    cached_told: bool = False
    """True if the server reported ``cached_tokens``."""
    completion_tokens: int = 0
    counted: bool = False
    """True if the server reported the number of output tokens; else each piece counts as one."""
    totals: list[int] = field(default_factory=list)
    """Total output tokens after each of ``token_times``."""
    drafted_tokens: int = 0
    """With speculation: tokens that the draft model proposed."""
    accepted_tokens: int = 0
    """Drafted tokens that the target model accepted."""
    sent_at: float | None = None
    """Time at which its body was written to a connection (for a pair, to both)."""
    finished_at: float = 0.0
    error: str | None = None
    kind: ErrorKind | None = None
    finish_reasons: list[Json] = field(default_factory=list)
    """The server's reasons for the end: one entry, unless it ended the answer twice or never.
    OpenAI's endpoints give the ``type`` alone."""
    ended: bool = False
    """True once the server gave a reason for the end."""
    prefill_worker: str | None = None
    decode_worker: str | None = None
    """From a router's headers, else the address."""

    def fail(self, kind: ErrorKind, text: str) -> None:
        """Record a failure, unless one is recorded."""
        if self.error is None:
            self.kind, self.error = kind, text

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token."""
        return (self.token_times[0] if self.token_times else self.finished_at) - self.started_at

    @property
    def latency_s(self) -> float:
        return self.finished_at - self.started_at


class Failed(Exception):
    """A request without a complete answer."""

    def __init__(self, kind: ErrorKind, message: str) -> None:
        self.kind: ErrorKind = kind
        super().__init__(message)


class _Meta(msgspec.Struct):
    completion_tokens: int | None = None
    """An abort may lack it, and ``prompt_tokens``."""
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    finish_reason: dict[str, Any] | None = None
    spec_draft_token_num: int = 0
    spec_accept_token_num: int = 0


class _Piece(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Piece | None = None
    finish_reason: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Event(msgspec.Struct):
    meta_info: _Meta | None = None
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


class _Whole(_Event):
    output_ids: list[int] | None = None
    text: str | None = None


_decode_counts = msgspec.json.Decoder(_Event).decode
_decode_whole = msgspec.json.Decoder(_Whole).decode


def take(result: Result, data: bytes, now: float, exact: bool = True) -> None:
    """Take one event of the stream, without its ``data:``, that was read at ``now``.

    Raises:
        Failed: it is unreadable. With ``exact``, also if the server aborted or continued after the
            end; without, ``result`` records this and its stream goes on.
    """
    try:
        event = _decode_counts(data) if exact else _decode_whole(data)
    except ValueError as error:
        raise Failed("broken_stream", f"unreadable event: {error}: {data[:TEXT]!r}") from error
    meta, abort = event.meta_info, None
    if meta is not None:
        if exact and result.ended:
            raise Failed("broken_stream", "an event after the answer's end")
        _take_generate(result, event, meta, now)
        if (meta.finish_reason or {}).get("type") == "abort":
            abort = (meta.finish_reason or {}).get("message", "aborted")
    elif not event.error and (event.choices is not None or event.usage is not None):
        if _take_openai(result, event, now):
            abort = "the server aborted the request"
    else:
        abort = event.error or data
    if abort is not None:
        text = abort["message"] if isinstance(abort, Mapping) and "message" in abort else abort
        if exact:
            raise Failed("abort", str(text)[:TEXT])
        result.fail("abort", str(text))


def _take_generate(result: Result, event: _Event, meta: _Meta, now: float) -> None:
    if meta.finish_reason is not None:
        result.ended = True
        result.finish_reasons.append(meta.finish_reason)
        if meta.finish_reason.get("type") == "abort":
            return
    if (count := meta.completion_tokens) is None:
        raise Failed("broken_stream", "an event without completion_tokens")
    result.counted = True
    if count > result.completion_tokens:
        result.token_times.append(now)
        result.totals.append(count)
        result.completion_tokens = count
    result.prompt_tokens = meta.prompt_tokens
    if meta.cached_tokens is not None:
        result.cached_told, result.cached_tokens = True, meta.cached_tokens
    if not isinstance(event, _Whole):
        return
    result.drafted_tokens = meta.spec_draft_token_num
    result.accepted_tokens = meta.spec_accept_token_num
    # Cumulative by default; only new tokens with --incremental-streaming-output.
    ids, text = event.output_ids or [], event.text or ""
    if event.output_ids is None or len(ids) >= count:
        result.output_ids, result.text = ids, text
    else:
        result.output_ids += ids
        result.text += text


def _take_openai(result: Result, event: _Event, now: float) -> bool:
    """Take a chunk of OpenAI's endpoints: each piece of text is a token, unless the server counts.
    Return True if the request was aborted."""
    pieces = 0
    for choice in event.choices or ():
        text = choice.text or (
            choice.delta and (choice.delta.content or choice.delta.reasoning_content)
        )
        pieces += bool(text)
        result.text += text or ""
        if choice.finish_reason is not None:
            result.ended = True
            result.finish_reasons.append({"type": choice.finish_reason})
    total = result.completion_tokens + pieces
    if (usage := event.usage) is not None:
        result.prompt_tokens = usage.prompt_tokens
        details = usage.prompt_tokens_details
        if details is not None and details.cached_tokens is not None:
            result.cached_told, result.cached_tokens = True, details.cached_tokens
        result.counted = result.counted or usage.completion_tokens is not None
        total = max(result.completion_tokens, usage.completion_tokens or total)
    if total > result.completion_tokens:
        result.completion_tokens = total
        if pieces or not result.token_times:
            result.token_times.append(now)
            result.totals.append(total)
        else:  # the total arrived at the end: pieces had several tokens
            result.totals[-1] = total
    return any(choice.finish_reason == "abort" for choice in event.choices or ())
