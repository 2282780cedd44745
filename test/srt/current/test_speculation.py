"""Local turns with a draft model, in addition to ``test_local_turns`` and ``test_admission``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any  # Any: requests of SGLang

import pytest

from current.environment import DRAFTS
from current.test_local_turns import ADMITTED, LOCAL, Peers
from current.texts import text

if TYPE_CHECKING:
    from current.decode import Decode


@pytest.mark.server(*DRAFTS, "--num-reserved-decode-tokens", "16", tokens=384, env=ADMITTED)
def test_a_local_turn_that_was_retracted_resumes(decode: Decode) -> None:
    """Guards against a request without the input of its first draft: SGLang takes that from the
    metadata of the request's transfer, and a local turn has none."""
    decode.scheduler.lead_turns.peers = Peers()
    prompts = [text(80, seed) for seed in range(3)]
    expected = [decode.learn([prompt], 48)[0] for prompt in prompts]
    rids = [decode.ask(prompt, 48) for prompt in prompts]
    decode.finish()
    assert [decode.output(rid) for rid in rids] == expected
    assert {frames[-1] for frames in decode.frames} == {b"LOCAL"}, "all were computed here"
    assert sum(decode.requests[rid].retraction_count for rid in rids) > 0


@pytest.mark.server(*DRAFTS, model="arithmetic", env=LOCAL)
def test_a_local_turn_has_the_drafts_of_an_aggregated_server(decode: Decode) -> None:
    """Guards against draft KV that is not computed here: no answer would change, but fewer drafts
    would be accepted."""
    decode.scheduler.lead_turns.peers = Peers()
    prompt = text(200, 1)
    (answer,) = decode.learn([prompt], 40)
    second = [*prompt, *answer, *text(30, 2)]
    (expected,) = decode.learn([second], 40)
    aggregated = accepted(list(decode.requests.values())[-1])
    decode.finish(decode.ask(prompt, 40))
    rid = decode.ask(second, 40)
    decode.finish()
    assert decode.output(rid) == expected
    assert accepted(decode.requests[rid]) >= 0.9 * aggregated > 1.5


def accepted(req: Any) -> float:
    """Return the average number of accepted drafts in a step, of three."""
    return float(req.spec_num_correct_drafts / req.spec_verify_ct)
