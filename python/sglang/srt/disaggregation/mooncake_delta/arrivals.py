"""What has arrived for a room on a decode rank, writer by writer."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class RoomProgress:
    """Mooncake's writers say one thing each: that all they had to send has arrived."""

    #: Prefill ranks that delivered everything.
    delivered: set[int] = field(default_factory=set)
    #: Prefill ranks that said that they write no more, whatever they have written.
    stopped: set[int] = field(default_factory=set)
    #: The metadata slot that was announced; None before that.
    slot: int | None = None

    def deliver(self, writer: int) -> int:
        """All that ``writer`` had to send has arrived; returns how many writers that holds for."""
        self.delivered.add(writer)
        return len(self.delivered)

    # ---- delta/watch.py: Progress ----

    def stop(self, writer: int) -> None:
        """The rank ``writer`` said that it writes no more."""
        self.stopped.add(writer)

    def is_quiet(self, writers: int) -> bool:
        """Whether each of ``writers`` ranks has delivered everything or stopped."""
        return len(self.delivered | self.stopped) >= writers
