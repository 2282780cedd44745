"""Models with sliding windows, which have a pool of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from current.environment import GPT_OSS, MOONCAKE, SMALL
from current.test_local_turns import ADMITTED, Peers
from current.texts import text
from sglang.srt.disaggregation.delta.observability import Telemetry

if TYPE_CHECKING:
    from current.decode import Decode

#: Room for 368 tokens in windows of 64.
SHORT = (*GPT_OSS, "--swa-full-tokens-ratio", "0.092", *SMALL)


@pytest.mark.server(*SHORT, *MOONCAKE, model="gpt_oss", tokens=4000, env=ADMITTED)
@pytest.mark.parametrize("local", [True, False])
def test_little_room_for_windows(decode: Decode, local: bool) -> None:
    """Guards against a chunk for which there is no room for its windows, which would end the
    server, and against a resumed request with the windows of another one."""
    turns = decode.scheduler.lead_turns
    turns.peers, turns.telemetry = Peers(known=local), Telemetry()
    prompts = [text(60 + 41 * i, seed=i) for i in range(7)]
    answers = decode.learn(prompts, 60)
    rids = [decode.ask(prompt, 60) for prompt in prompts]
    decode.finish()
    assert [decode.output(rid) for rid in rids] == answers
    counts = turns.telemetry.by("decode_turns")
    assert (("local", "short") in counts) == (("remote", "no_memory") in counts) == local, counts
    assert any(decode.requests[rid].retraction_count for rid in rids)
