"""What routing learns from an answer, streamed or whole, of any of the three routes."""

from __future__ import annotations

from contextlib import suppress

from benchmark.harness.stream import Failed, Result, take


class Answer:
    """Collects what the events of one answer say."""

    def __init__(self) -> None:
        self._got = Result("", 0.0)
        self.done = False
        """Whether a stream's last event has come."""

    @property
    def output_ids(self) -> list[int]:
        return self._got.output_ids

    @property
    def text(self) -> str:
        return self._got.text

    @property
    def error(self) -> str | None:
        """What the server said went wrong."""
        return self._got.error

    @property
    def held_share(self) -> float | None:
        """Share of the prompt that the server had in its cache, where it says so. With a PD pair
        that is prefill's cache, in decode's answer too."""
        known = self._got.cached_told and self._got.prompt_tokens
        return self._got.cached_tokens / self._got.prompt_tokens if known else None

    def take_stream(self, events: bytes) -> None:
        """Whole server-sent events."""
        for line in events.split(b"\n"):
            if line.startswith(b"data:"):
                data = line[5:].strip()
                if data == b"[DONE]":
                    self.done = True
                else:
                    self.take(data)

    def take(self, data: bytes) -> None:
        """One JSON object: an event, or an answer that was not streamed. What cannot be read is
        passed on all the same."""
        with suppress(Failed):
            take(self._got, data, 0.0, exact=False)
