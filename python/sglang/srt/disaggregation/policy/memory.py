"""How much KV memory a decode request takes, reserves and needs to finish, in tokens.

Stock reserves ``--num-reserved-decode-tokens`` (512 by default) for every request in sight. With a
pool full of shared prefixes this reserve, and not the KV, limits the number of running requests.
Here a *running* request reserves the tokens that it can still generate, at most that number. A
request that does not run yet reserves half of it, because the requests of a steady stream are
half-way through their answers on average. If too many were admitted, the youngest is retracted: its
KV is copied to the CPU and back, and no work is lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any  # Any: an integer or an int64 array

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


def page_floor(tokens: int, page: int) -> int:
    """Return ``tokens`` rounded down to whole pages."""
    return tokens // page * page


def page_ceil(tokens: Any, page: int) -> Any:
    """Return ``tokens``, an integer or an array, rounded up to whole pages."""
    return -(-tokens // page) * page


def start_length(req: Req) -> int:
    """Return the tokens that need KV before ``req`` runs: all but the last generated one."""
    return len(req.origin_input_ids) + max(len(req.output_ids) - 1, 0)


def final_length(req: Req, step_tokens: int = 0) -> int:
    """Return the largest length that the KV of ``req`` can reach.

    ``step_tokens``: with speculation, the free tokens that its last step needs.
    """
    return len(req.origin_input_ids) + int(req.sampling_params.max_new_tokens) + step_tokens


def expected_length(req: Req, allocated: int, step_tokens: int = 0) -> int:
    """Return the length that the KV of ``req`` is expected to reach, by SGLang's estimate.

    Clients request far more new tokens than are generated, so SGLang expects at most 4,096
    (``SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION``). An answer that is already longer is expected to
    reach the next multiple. ``allocated``: tokens that it holds now.
    """
    from sglang.srt.disaggregation.decode import CLIP_MAX_NEW_TOKEN

    prompt = len(req.origin_input_ids)
    clip = CLIP_MAX_NEW_TOKEN * (1 + max(allocated - prompt, 0) // CLIP_MAX_NEW_TOKEN)
    return int(prompt + min(req.sampling_params.max_new_tokens, clip)) + step_tokens


@dataclass(frozen=True)
class Claim:
    """One request's claim on the pool: ``allocated`` tokens now, ``final`` when it has ended."""

    allocated: int
    final: int


def growth(claim: Claim, cap: int, page: int) -> int:
    """Return the tokens of new pages that the next ``cap`` generated tokens can need."""
    end = min(max(claim.final, claim.allocated), claim.allocated + cap)
    return page_ceil(end, page) - page_ceil(claim.allocated, page)


def entering(claim: Claim, step_tokens: int = 0) -> Claim:
    """Return the claim of a request that does not run yet: half of the tokens that it may still
    generate, but at least ``step_tokens``, which its first speculative step needs free."""
    half = (claim.final - claim.allocated + 1) // 2
    return Claim(claim.allocated, min(claim.allocated + max(half, step_tokens), claim.final))


def entry_cost(prefix: int, claim: Claim, cap: int, page: int) -> int:
    """Return the tokens that one admission takes: its delta pages and its own reserve.

    ``prefix`` tokens are in the tree already, locked by the caller; ``claim.allocated`` tokens are
    needed to start.
    """
    return page_ceil(claim.allocated, page) - prefix + growth(claim, cap, page)
