"""Who computes a turn's new tokens: this decode server, or its prefill server. Pure.

``Choice`` decides by what both sides are expected to take (``turn_costs``) and by the load, from
numbers that are equal on all ranks, so that no rank takes a turn that another one announces.
All times in seconds, all lengths in tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from sglang.srt.disaggregation.delta.decode.turn_costs import Costs, Limits

if TYPE_CHECKING:
    from sglang.srt.disaggregation.delta.observability import Telemetry
    from sglang.srt.managers.schedule_batch import Req

#: Of the time that turns are expected to take, the part that may be lost to turns that try the side
#: which looks slower; and how many turns lie between two of them at least.
EXPLORING, BETWEEN_EXPLORING = 0.05, 8
#: What a second for which running requests stand still counts beside one for which the turn waits.
OTHERS = 0.2
#: Decode steps after which a local chunk runs, whatever the share says; and after which one runs
#: that does not fit into the bound on inter-token latency, so that 99 gaps in 100 keep it.
MOST_STEPS_BETWEEN, STEPS_BEFORE_BREACH = 64, 100

_PREFILL_ONLY = "only prefill sends what the request asks for, or decode cannot compute it"
#: Why a turn is computed where it is: the label ``reason`` of the metric ``decode_turns``, and what
#: it means. The table in docs/advanced_features/pd_local_turns.md has these rows (a test compares).
REASONS = {
    "cheaper": "this side is expected to be done first",
    "explore": "this side looks slower and is tried",
    "unmeasured": "one of the sides was not measured yet, or not often enough",
    "itl": "no chunk that is worth computing fits into the bound on inter-token latency",
    "always": "`SGLANG_DISAGGREGATION_DECODE_LOCAL_ALWAYS=1`",
    "long": "more new tokens than the flag allows",
    "no_place": "no place in the running batch is free for it: prefill computes it until one is",
    "peer": "the prefill server does not know local turns: it is stock or older, or has pipeline "
    "stages, several tokenizers (`--tokenizer-worker-num`) or gRPC instead of HTTP",
    "not_shared": "the request may share no prefix: a warm-up, or one from before a flush",
    "input_logprobs": _PREFILL_ONLY,
    "hidden_states": _PREFILL_ONLY,
    "routed_experts": _PREFILL_ONLY,
    "embeddings": _PREFILL_ONLY,
    "multimodal": _PREFILL_ONLY,
    "session": _PREFILL_ONLY,
    "no_output": _PREFILL_ONLY,
    "aborted": "the client has left",
    "no_prefill": "its prefill server could not be reached, or was lost before the request was "
    "announced",
    "transfer_failed": "its transfer failed; it was counted before, when it was announced",
}


def only_prefill_can(req: Req) -> str | None:
    """Why this server cannot compute ``req``; None if it can. Fallback prefill asks too: a request
    with such a reason fails where its prefill server is lost (``LocalTurns.may_save``).

    One more reason is a row here, or, where it is a policy that fallback ignores, a line of
    ``LocalTurns.decide``; beside that a row of ``REASONS``, one of the docs, and a case of
    ``test_what_goes_to_prefill``. SGLang 0.5.23 has a list of its own in ``lead/local.py``.
    """
    wants_input_logprobs = req.return_logprob and (
        0 <= req.logprob_start_len < len(req.origin_input_ids)
    )
    holds = {
        "input_logprobs": wants_input_logprobs,
        "hidden_states": req.return_hidden_states,
        "routed_experts": req.return_routed_experts,
        "embeddings": req.input_embeds is not None,
        "multimodal": req.multimodal_inputs is not None,
        "session": req.session is not None,
        "no_output": req.sampling_params.max_new_tokens < 1,
        "aborted": req.to_finish is not None,
    }
    return next((reason for reason, is_so in holds.items() if is_so), None)


class Load(NamedTuple):
    """What a turn meets on this server; equal on all ranks. ``queued``: tokens of local turns ahead
    of it; ``running``: requests whose decode steps alternate with chunks; ``debt``: see ``Pace``;
    ``is_full``: the running batch has no place for the turn; ``chunk``: tokens of the largest chunk
    that fits into the bound on inter-token latency, None where that binds nothing."""

    queued: int = 0
    running: int = 0
    debt: float = 0.0
    is_full: bool = False
    chunk: int | None = None

    def chunks(self, tokens: int, limits: Limits) -> int:
        """How many chunks ``tokens`` take."""
        size = limits.chunk if self.chunk is None else max(self.chunk, limits.least)
        return -(-tokens // size)


class Decision(NamedTuple):
    """Where a turn is computed and why (``REASONS``); when it is expected to be done on either
    side."""

    local: bool
    reason: str
    here: float | None = None
    there: float | None = None

    @property
    def where(self) -> str:
        """The side in a word."""
        return "local" if self.local else "remote"

    @property
    def expected(self) -> float | None:
        """Seconds until its first token, on the side that was chosen."""
        return self.here if self.local else self.there


class Placed(NamedTuple):
    """A turn that is computed here, or was announced to prefill ``address``, on the record of its
    request. ``tokens``: new ones; ``at``: since when, by this rank's clock."""

    decision: Decision
    address: str
    tokens: int
    at: float


def expected_here(tokens: int, load: Load, costs: Costs, limits: Limits) -> float | None:
    """Seconds until a turn of ``tokens`` new tokens is computed locally; None where unknown.

    The step under way ends first; then come the chunks of those ahead and its own, and between two
    of them decode steps as ``Pace`` has them.
    """
    total = load.queued + tokens
    count = load.chunks(total, limits)
    work = costs.chunks(count, total)
    if work is None:
        return None
    if not load.running:
        return work
    step = costs.step or 0.0
    pause = max(step, work / count * (1 - limits.share) / limits.share)
    return step + load.debt * (1 - limits.share) / limits.share + work + (count - 1) * pause


class Choice:
    """Decides for one server; what it keeps is equal on all ranks, as what it reads is."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        #: Seconds that may be lost by trying the side that looks slower; turns since one tried it.
        self._to_lose, self._since = 0.0, 0

    def decide(self, tokens: int, load: Load, costs: Costs, there: float | None) -> Decision:
        """Where a turn of ``tokens`` new tokens, which could be computed locally, is computed."""
        if tokens > self.limits.tokens:
            return Decision(False, "long", None, there)
        here = expected_here(tokens, load, costs, self.limits)
        if self.limits.always:
            return Decision(True, "always", here, there)
        if load.is_full:
            # It would wait for a place and then leave it empty while it is computed.
            return Decision(False, "no_place", here, there)
        if load.chunk is not None and load.chunk < min(load.queued + tokens, self.limits.least):
            return Decision(False, "itl", here, there)
        if here is None or there is None:
            # One at a time: until it is measured nobody knows what a queue of them costs.
            return Decision(here is None and not load.queued, "unmeasured", here, there)
        chunk = costs.chunks(load.chunks(tokens, self.limits), tokens) or 0.0
        lost = here + OTHERS * chunk * load.running - there
        cheaper = lost < 0
        if self._since >= BETWEEN_EXPLORING and self._to_lose >= abs(lost):
            return Decision(not cheaper, "explore", here, there)
        return Decision(cheaper, "cheaper", here, there)

    def without_prefill(self, tokens: int, load: Load, costs: Costs, reason: str) -> Decision:
        """Whether a turn is computed locally that no prefill server computes; ``reason``: why
        none."""
        here = expected_here(tokens, load, costs, self.limits)
        return Decision(tokens <= self.limits.when_lost, reason, here)

    def made(self, decision: Decision) -> None:
        """The turn of ``decision`` was taken or announced."""
        if decision.reason == "explore":
            self._to_lose, self._since = 0.0, 0
        elif decision.reason == "cheaper":
            self._to_lose += EXPLORING * (decision.expected or 0.0)
            self._since += 1


class Pace:
    """When the next chunk may run: never two without a decode step between while requests run, and
    over a while at most ``share`` of the time.

    Time is what the agreed costs say, so that all ranks run the same batch.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self.costs = Costs()
        #: Seconds of chunks that decode steps have not made up for.
        self.debt = 0.0
        self._steps = MOST_STEPS_BETWEEN
        self._is_behind_chunk = False

    def may_run(self, running: int, fits: bool = True) -> bool:
        """Whether a chunk may run now, beside ``running`` requests; ``fits``: into the bound on
        inter-token latency."""
        if not running:
            return True
        if self._is_behind_chunk:
            return False
        if fits and self.debt <= 0:
            return True
        return self._steps >= (MOST_STEPS_BETWEEN if fits else STEPS_BEFORE_BREACH)

    def chunk(self, tokens: int, running: int) -> None:
        """A chunk of ``tokens`` was launched; nobody stood still for it if nothing was running."""
        if running:
            self.debt += self.costs.chunks(1, tokens) or 0.0
        self._steps = 0
        self._is_behind_chunk = True

    def others_chunk(self) -> None:
        """Another data parallel rank launched a chunk: none follows here in the next step. It does
        not count as this rank's, whose turn could starve behind the chunks of several ranks."""
        self._is_behind_chunk = True

    def step(self) -> None:
        """A decode step was launched."""
        self._steps += 1
        self._is_behind_chunk = False
        made_up = (self.costs.step or 0.0) * self._share
        left = self.debt * (1 - self._share) - made_up
        self.debt = left / (1 - self._share) if left > 0 else 0.0


# ---- metrics: where turns were computed and why; how long that was expected to take, and took ----


def count_turn(stats: Telemetry, decision: Decision) -> None:
    """A turn was taken or announced."""
    stats.count("decode_turns", where=decision.where, reason=decision.reason)


def observe_turn(stats: Telemetry, decision: Decision, seconds: float) -> None:
    """A turn's first token is here, so long after its admission."""
    if decision.expected is not None:
        stats.observe("decode_turn_expected_seconds", decision.expected, where=decision.where)
    stats.observe("decode_turn_actual_seconds", seconds, where=decision.where)


def observe_gap(stats: Telemetry, seconds: float, has_chunk: bool, bound: float | None) -> None:
    """Requests waited so long from one decode step to the next; ``bound``: on that."""
    if bound and has_chunk and seconds > bound:
        stats.count("decode_itl_breaches")
    stats.observe("decode_itl_seconds", seconds, chunk=str(has_chunk).lower())
