"""Which server computes a turn's new tokens: this decode server or its prefill server.

Decode computes every turn of at most the configured number of new tokens that has a place in the
running batch, with chunks that keep the bound on inter-token latency. The inputs are equal on all
ranks. All lengths are in tokens.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, NamedTuple  # Any: SGLang's requests of either release

from sglang.srt.disaggregation.policy.pace import Limits

if TYPE_CHECKING:
    from sglang.srt.disaggregation.delta.observability import Telemetry

logger = logging.getLogger(__name__)


def prefill_only_reason(req: Any) -> str | None:
    """Return why decode cannot compute ``req``, or None if it can.

    Fallback prefill asks too: a request with such a reason fails if its prefill server is lost.
    To add a reason, add a row here (or a branch of ``choose``, if fallback prefill ignores it), a
    row of ``metrics.REASONS``, one of the docs, and a case of ``test_what_goes_to_prefill``.
    """
    wants_input_logprobs = req.return_logprob and (
        0 <= req.logprob_start_len < len(req.origin_input_ids)
    )

    def newer(name: str) -> Any:
        """Return an attribute that only SGLang 0.5.23 has."""
        return getattr(req, name, None)

    holds = {
        "input_logprobs": wants_input_logprobs,
        "hidden_states": req.return_hidden_states,
        "routed_experts": req.return_routed_experts or newer("return_indexer_topk"),
        "embeddings": req.input_embeds is not None
        or newer("positional_embed_overrides") is not None,
        "multimodal": req.multimodal_inputs is not None,
        "session": req.session is not None or newer("beam_group") is not None,
        "no_output": req.sampling_params.max_new_tokens < 1,
        "aborted": req.to_finish is not None,
    }
    return next((reason for reason, is_so in holds.items() if is_so), None)


class Decision(NamedTuple):
    """The server that computes a turn's new ``tokens``, and the reason (``metrics.REASONS``)."""

    local: bool
    reason: str
    tokens: int = 0

    @property
    def where(self) -> str:
        """Name of the side."""
        return "local" if self.local else "remote"


def choose(tokens: int, limits: Limits, *, is_full: bool, fits: bool) -> Decision:
    """Return the side for a turn of ``tokens`` new tokens that both sides could compute.

    ``is_full``: the running batch has no place for it; ``fits``: a chunk of it and of the turns
    ahead keeps the bound on inter-token latency. Both are equal on all ranks.
    """
    if tokens > limits.tokens:
        return Decision(False, "long", tokens)
    if is_full:
        # Locally it would wait for a place, and keep that place empty during its chunks.
        return Decision(False, "no_place", tokens)
    if not fits:
        return Decision(False, "itl", tokens)
    return Decision(True, "short", tokens)


def choose_without_prefill(tokens: int, limits: Limits, reason: str) -> Decision:
    """Return whether fallback prefill computes a turn; ``reason``: why it has no prefill server."""
    return Decision(tokens <= limits.when_lost, reason, tokens)


def record_choice(stats: Telemetry, req: Any, decision: Decision) -> None:
    """Count and log a turn that decode has taken or announced to prefill."""
    stats.count("decode_turns", where=decision.where, reason=decision.reason)
    logger.debug(
        "request %s (bootstrap_room=%s): %s new tokens are computed %s (%s)",
        req.rid,
        req.bootstrap_room,
        decision.tokens,
        decision.where,
        decision.reason,
    )
