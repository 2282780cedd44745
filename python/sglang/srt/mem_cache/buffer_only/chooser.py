"""Load or recompute, for the hits of one rank: what it has measured, and what it chose."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.mem_cache.buffer_only.fetch import THREADS as SIDE_BY_SIDE
from sglang.srt.mem_cache.buffer_only.settings import pages_of
from sglang.srt.mem_cache.buffer_only.worth import Choice, Hit, Speeds, choose

if TYPE_CHECKING:
    from sglang.srt.mem_cache.buffer_only.fetch import Fetches
    from sglang.srt.mem_cache.buffer_only.pipelines import Context


class Chooser:
    """Decides whether hits are fetched, and counts."""

    def __init__(self, context: Context) -> None:
        self._context = context
        #: Agreed by the ranks.
        self.speeds = Speeds()
        self._slower_in_a_row = 0

    def choose(self, pages: int, fetches: Fetches, tokens_ahead: int) -> Choice:
        """Whether a hit of ``pages`` pages is there before it could be computed.

        Args:
            fetches: that it would be one of.
            tokens_ahead: that those in line before its request will compute.
        """
        context, choice = self._context, Choice.UNMEASURED
        if not context.settings.always_fetch:
            hit = Hit(
                tokens=pages * context.page_size,
                calls=pages_of(pages, fetches.piece_pages),
                call_bytes=min(pages, fetches.piece_pages) * context.page_bytes,
                calls_ahead=fetches.running,
                tokens_ahead=tokens_ahead,
            )
            choice = choose(self.speeds, hit, SIDE_BY_SIDE, self._slower_in_a_row)
        self._slower_in_a_row = self._slower_in_a_row + 1 if choice is Choice.SLOWER else 0
        context.choices[choice] += 1
        return choice
