"""Page arithmetic of a delta transfer: pure functions over token counts.

A prompt of ``length`` tokens lies in ``page_count(length)`` pages, of which only the last may be
partly filled. The decode server holds the first ``prefix`` tokens, a whole number of pages, so
that both sides cut the prompt at the same place; the *delta* is every page after it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


def page_floor(tokens: int, page: int) -> int:
    """The largest whole number of pages within ``tokens``, in tokens."""
    return tokens // page * page


def page_ceil(tokens: int, page: int) -> int:
    """``tokens`` rounded up to whole pages, in tokens."""
    return -(-tokens // page) * page


def page_count(tokens: int, page: int) -> int:
    """How many pages ``tokens`` touch."""
    return -(-tokens // page)


def chunk_end(computed: int, page: int, last: bool) -> int:
    """The token up to which a prefill chunk can be sent.

    ``computed`` tokens are in the pool. The partly filled last page waits for the next chunk,
    unless there is none.
    """
    return computed if last else page_floor(computed, page)


class DeltaMismatch(ValueError):
    """What decode announced does not fit the prompt that prefill holds. Fails the room."""


class Announced(Protocol):
    """The part of a destination's announcement that the plan needs."""

    @property
    def decode_prefix_len(self) -> int:
        """Tokens that the destination already holds."""

    @property
    def num_pages(self) -> int:
        """Destination pages that it listed."""


@dataclass(frozen=True)
class DeltaPlan:
    """What a room sends: ``num_pages`` pages, from token ``prefix_len`` on."""

    prefix_len: int
    num_pages: int


def plan_delta(
    room: int, announced: Iterable[Announced], prompt_pages: int, page: int
) -> DeltaPlan:
    """Check what the real (non-dummy) destinations of ``room`` announced, and derive the plan.

    ``prompt_pages`` is the number of pages of the whole prompt on the prefill server.

    Raises:
        DeltaMismatch: destinations disagree about the prefix, or the prefix is negative, not a
            whole number of pages or longer than the prompt, or the number of listed pages is not
            the number that is left. Nothing is ever truncated to fit.
    """
    destinations = list(announced)
    prefixes = sorted({d.decode_prefix_len for d in destinations})
    if len(prefixes) > 1:
        raise DeltaMismatch(
            f"room {room}: decode ranks announced different prefix lengths {prefixes}"
        )
    prefix = prefixes[0] if prefixes else 0
    if prefix < 0 or prefix % page:
        raise DeltaMismatch(
            f"room {room}: decode_prefix_len {prefix} is no whole number of pages of {page} tokens"
        )
    left = prompt_pages - prefix // page
    if left < 0:
        raise DeltaMismatch(
            f"room {room}: decode_prefix_len {prefix} is longer than the prompt's {prompt_pages} "
            f"pages of {page} tokens"
        )
    for destination in destinations:
        if destination.num_pages != left:
            raise DeltaMismatch(
                f"room {room}: decode listed {destination.num_pages} destination pages, but "
                f"{left} of the prompt's {prompt_pages} pages are left after its prefix of "
                f"{prefix} tokens"
            )
    return DeltaPlan(prefix, left)
