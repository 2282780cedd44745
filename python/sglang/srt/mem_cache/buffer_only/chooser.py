"""Load or recompute, for the hits of one rank: what it has measured, and what it chose."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from sglang.srt.mem_cache.buffer_only.fetch import THREADS as SIDE_BY_SIDE
from sglang.srt.mem_cache.buffer_only.settings import pages_of
from sglang.srt.mem_cache.buffer_only.worth import Choice, Hit, Speeds, choose, full_rounds

if TYPE_CHECKING:
    from sglang.srt.mem_cache.buffer_only.context import Context
    from sglang.srt.mem_cache.buffer_only.fetch import Fetches


class Chooser:
    """Decides whether hits are fetched, and counts."""

    def __init__(self, context: Context) -> None:
        self._context = context
        #: Agreed by the ranks.
        self.speeds = Speeds()
        self._slower_in_a_row = 0

    def rule(
        self, fetches: Fetches, tokens_ahead: int, queries: int = 0
    ) -> Callable[[int], Choice]:
        """Whether a hit of so many pages is there before it could be computed, by what is known
        now; can be asked on any thread.

        Args:
            fetches: that it would be one of.
            tokens_ahead: that those in line before its request will compute.
            queries: one behind the other until it is known.
        """
        page, page_bytes = self._context.page_size, self._context.page_bytes
        piece_pages, running = fetches.piece_pages, fetches.running
        speeds, slower_in_a_row = self.speeds, self._slower_in_a_row
        if self._context.settings.always_fetch:
            return lambda pages: Choice.UNMEASURED

        def rule(pages: int) -> Choice:
            hit = Hit(
                tokens=pages * page,
                calls=pages_of(pages, piece_pages),
                call_bytes=min(pages, piece_pages) * page_bytes,
                calls_ahead=running,
                tokens_ahead=tokens_ahead,
                queries=queries,
            )
            return choose(speeds, hit, SIDE_BY_SIDE, slower_in_a_row)

        return rule

    def best_parts(self, fetches: Fetches, pages: int) -> set[int]:
        """If none of these hits is there before it could be computed, none of at most ``pages``
        pages is."""
        piece = fetches.piece_pages
        calls = full_rounds(pages_of(pages, piece), fetches.running, SIDE_BY_SIDE)
        return {pages} | {min(pages, count * piece) for count in calls}

    def tried(self) -> None:
        """The store is asked for a trial. It may have nothing: those that come meanwhile, and
        then, are no trials too."""
        self._slower_in_a_row = 0

    def chosen(self, choice: Choice) -> Choice:
        """``choice`` was made for a hit."""
        slower = choice in (Choice.SLOWER, Choice.UNASKED)
        self._slower_in_a_row = self._slower_in_a_row + 1 if slower else 0
        self._context.choices[choice] += 1
        return choice
