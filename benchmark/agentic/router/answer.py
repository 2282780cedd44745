"""What routing learns from an answer, streamed or whole, of any of the three routes."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec


class _Reason(msgspec.Struct):
    type: str | None = None
    message: str | None = None


class _Meta(msgspec.Struct):
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    completion_tokens: int = 0
    finish_reason: _Reason | None = None


class _Piece(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Piece | None = None
    message: _Piece | None = None
    text: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Event(msgspec.Struct):
    output_ids: list[int] | None = None
    text: str | None = None
    meta_info: _Meta | None = None
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: msgspec.Raw = msgspec.Raw(b"")


_decoder = msgspec.json.Decoder(_Event)


class Answer:
    """Collects what the events of one answer say."""

    def __init__(self) -> None:
        self.output_ids: list[int] = []
        self.text = ""
        self.held_share: float | None = None
        """Share of the prompt that the server had in its cache, where it says so. With a PD pair
        that is prefill's cache, in decode's answer too."""
        self.error: str | None = None
        """What the server said went wrong."""
        self.done = False
        """Whether a stream's last event has come."""
        self.unreadable = 0
        """Events that are no JSON object as we know it; they are passed on all the same."""

    def take_stream(self, events: bytes) -> None:
        """Whole server-sent events."""
        for data in _data(events):
            if data == b"[DONE]":
                self.done = True
            else:
                self.take(data)

    def take(self, data: bytes) -> None:
        """One JSON object: an event, or an answer that was not streamed."""
        try:
            event = _decoder.decode(data)
        except msgspec.DecodeError:
            self.unreadable += 1
            return
        if event.error and event.error != b"null":
            self.error = bytes(event.error).decode(errors="replace")
        if event.meta_info is not None:
            self._take_generate(event, event.meta_info)
        for choice in event.choices or ():
            piece = choice.delta or choice.message
            self.text += (piece.content if piece else choice.text) or ""
        if event.usage is not None and event.usage.prompt_tokens_details is not None:
            self._held(event.usage.prompt_tokens_details.cached_tokens, event.usage.prompt_tokens)

    def _take_generate(self, event: _Event, meta: _Meta) -> None:
        ids = event.output_ids or []
        # Cumulative by default; only the new ones with --incremental-streaming-output.
        if event.output_ids is None or len(ids) >= meta.completion_tokens:
            self.output_ids, self.text = ids, event.text or ""
        else:
            self.output_ids += ids
            self.text += event.text or ""
        self._held(meta.cached_tokens, meta.prompt_tokens)
        if meta.finish_reason is not None and meta.finish_reason.type == "abort":
            self.error = meta.finish_reason.message or "aborted"

    def _held(self, cached: int | None, prompt: int) -> None:
        if cached is not None and prompt > 0:
            self.held_share = cached / prompt


def _data(events: bytes) -> Iterator[bytes]:
    for line in events.split(b"\n"):
        if line.startswith(b"data:"):
            yield line[5:].strip()
