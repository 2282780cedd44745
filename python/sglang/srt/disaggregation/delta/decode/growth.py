"""How long requests become, and what that takes of the pool: pure arithmetic, of one and summed.

All results are tokens of whole pages. Stock reserves ``--num-reserved-decode-tokens`` (512 by
default) for every request in sight. With a pool full of shared prefixes that reserve, and not the
KV, decides how many requests run. Here a *running* request reserves what it can still generate, at
most that number. One that does not run yet reserves half of it: the requests of a steady stream are
half-way through their answers on average. If too many were let in, the youngest is retracted: its
KV goes to the CPU and back, and no work is lost.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from sglang.srt.disaggregation.delta.pages import page_ceil

if TYPE_CHECKING:
    from sglang.srt.disaggregation.delta.decode.protocols import Req


def final_length(req: Req, step: int = 0) -> int:
    """The longest that a request's KV can become, in tokens.

    ``step``: with speculation, what its last step wants free (``speculation.step_tokens``).
    """
    return len(req.origin_input_ids) + int(req.sampling_params.max_new_tokens) + step


def expected_length(req: Req, allocated: int, step: int = 0) -> int:
    """How long its KV is taken to become by SGLang's estimate, in tokens; ``step`` as above.

    Clients ask for far more new tokens than come, so SGLang expects 4,096 at most
    (``SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION``). An answer that is longer already is expected to go
    on to the next multiple.
    """
    from sglang.srt.disaggregation.decode import CLIP_MAX_NEW_TOKEN

    prompt = len(req.origin_input_ids)
    clip = CLIP_MAX_NEW_TOKEN * (1 + max(allocated - prompt, 0) // CLIP_MAX_NEW_TOKEN)
    return int(prompt + min(req.sampling_params.max_new_tokens, clip)) + step


@dataclass(frozen=True)
class Claim:
    """One request's claim on the pool: ``allocated`` tokens now, ``final`` when it has ended."""

    allocated: int
    final: int


def growth(claim: Claim, cap: int, page: int) -> int:
    """New pages, in tokens, that the next ``cap`` generated tokens of a request can need."""
    upto = min(max(claim.final, claim.allocated), claim.allocated + cap)
    return page_ceil(upto, page) - page_ceil(claim.allocated, page)


def entering(claim: Claim, step: int = 0) -> Claim:
    """The claim of a request that does not run yet: half of what it may still generate, but all of
    ``step``, what its first step wants free (``speculation.step_tokens``)."""
    half = (claim.final - claim.allocated + 1) // 2
    return Claim(claim.allocated, min(claim.allocated + max(half, step), claim.final))


def entry_cost(prefix: int, claim: Claim, cap: int, page: int) -> int:
    """What admitting one request takes: its delta pages and its own reserve.

    ``prefix`` tokens are held by the tree already (and no longer evictable: the caller holds a
    lease); ``claim.allocated`` tokens must be there to start.
    """
    return page_ceil(claim.allocated, page) - prefix + growth(claim, cap, page)


# ---- summed over requests ----


class Track(NamedTuple):
    """A value that grows by one a step: ``start`` + steps, up to ``limit``."""

    start: int
    limit: int


class CeilSum:
    """The sum of values in whole pages, each of which grows as its ``Track`` says.

    All requests of a decode batch grow by one token a step, so a step needs no look at any of them:
    of those that have filled their last page, each opens a new one, and how many these are was
    counted when they came.
    """

    def __init__(self, page: int) -> None:
        self._page = page
        self._steps = 0
        #: Tokens of whole pages.
        self.total = 0
        #: Of the values that still grow, how many have a start with this remainder.
        self._growing = [0] * page
        #: Those that will have reached their limit after so many steps, likewise.
        self._ending: defaultdict[int, Counter[int]] = defaultdict(Counter)

    def add(self, track: Track) -> None:
        """Count a value from now on."""
        self._count(track, 1)

    def remove(self, track: Track) -> None:
        """Count it no longer."""
        self._count(track, -1)

    def _count(self, track: Track, by: int) -> None:
        start, limit = track
        self.total += by * page_ceil(min(start + self._steps, limit), self._page)
        if start + self._steps < limit:
            remainder, end = start % self._page, limit - start
            self._growing[remainder] += by
            ending = self._ending[end]
            ending[remainder] += by
            # With speculation values are counted anew instead of stepped, and no step drops them.
            if not ending[remainder]:
                del ending[remainder]
                if not ending:
                    del self._ending[end]

    def step(self) -> None:
        """Every value grows."""
        self.total += self._page * self._growing[-self._steps % self._page]
        self._steps += 1
        for remainder, count in self._ending.pop(self._steps, Counter()).items():
            self._growing[remainder] -= count


class GrowthSum:
    """The sum of ``growth`` over running requests, for one ``cap`` and ``page``."""

    def __init__(self, cap: int, page: int) -> None:
        self._cap = cap
        self.steps = 0
        self._now, self._then = CeilSum(page), CeilSum(page)

    @property
    def total(self) -> int:
        """New pages, in tokens, that all of them can need within their next ``cap`` tokens."""
        return self._then.total - self._now.total

    def add(self, allocated: int, final: int) -> Track:
        """Count a request that has ``allocated`` tokens now and ends with ``final``."""
        track = Track(allocated - self.steps, max(final, allocated))
        self._now.add(track)
        self._then.add(self._ahead(track))
        return track

    def remove(self, track: Track) -> None:
        """The request with this track ended."""
        self._now.remove(track)
        self._then.remove(self._ahead(track))

    def step(self) -> None:
        """Every request has one token more."""
        self.steps += 1
        self._now.step()
        self._then.step()

    def _ahead(self, track: Track) -> Track:
        return Track(track.start + self._cap, track.limit)
