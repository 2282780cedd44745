"""Settings of the scheduler and of sampling, with local turns and admission.

``test_local_turns`` and ``test_admission`` also run with ``environment.TOGETHER``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any  # Any: tensors of SGLang

import pytest

from current.environment import TOGETHER
from current.test_local_turns import ADMITTED, CHUNK, Peers
from current.texts import text
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

if TYPE_CHECKING:
    from current.decode import Decode

pytestmark = pytest.mark.server(*TOGETHER, tokens=1024, env=ADMITTED)


@pytest.fixture
def releasing(decode: Decode) -> Decode:
    """A decode server whose prefill server releases rooms."""
    decode.scheduler.lead_turns.peers = Peers()
    decode.frames.clear()
    return decode


def released(decode: Decode) -> list[int]:
    """Return the rooms of which prefill was notified that decode computes them, in order."""
    return [int(room) for _, room, *notice in decode.frames if notice == [b"LOCAL"]]


def test_local_turns_are_computed_in_the_order_of_their_priorities(releasing: Decode) -> None:
    """Guards against a later request of a higher priority that waits for earlier ones: SGLang sorts
    its queue after local turns were chosen. One turn of this length fills a chunk."""
    decode = releasing
    prompts = [text(CHUNK - 8, seed) for seed in range(4)]
    answers = decode.learn(prompts, 4)
    decode.frames.clear()
    rids = [decode.ask(prompt, 4, priority=1) for prompt in prompts[:3]]
    decode.until(lambda: len(released(decode)) == 1)
    rids.append(decode.ask(prompts[3], 4, priority=2))
    decode.finish()
    rooms = [decode.requests[rid].bootstrap_room for rid in rids]
    assert released(decode) == [rooms[each] for each in (0, 3, 1, 2)]
    assert [decode.output(rid) for rid in rids] == answers


def test_requests_are_admitted_in_the_order_of_their_priorities(releasing: Decode) -> None:
    """Guards against short turns that take the memory for which a request of a higher priority
    waits, against one of the highest priority that waits behind it, and against a remote request
    that waits for an earlier one of a lower priority."""
    decode = releasing
    prompts = [text(length, length) for length in (600, 580, 80, 64, 560)]
    answers = [decode.learn([prompt], 40)[0] for prompt in prompts]
    running, waiting, low, high, urgent = prompts
    decode.frames.clear()
    decode.scheduler.lead_turns.peers = Peers(known=False)
    rids = [decode.ask(running, 40, priority=0)]
    decode.until(lambda: bool(decode.deliver()) or bool(decode.scheduler.running_batch.reqs))
    rids.append(decode.ask(waiting, 40, priority=2))
    decode.step(6)
    assert not decode.arriving()
    decode.scheduler.lead_turns.peers = Peers()
    rids += [decode.ask(low, 40, priority=1), decode.ask(high, 40, priority=3)]
    decode.step(6)
    assert released(decode) == [decode.requests[rids[3]].bootstrap_room]
    decode.scheduler.lead_turns.peers = Peers(known=False)
    rids.append(decode.ask(urgent, 40, priority=4))
    decode.until(lambda: bool(decode.arriving()))
    assert decode.arriving() == rids[4:]
    decode.finish()
    assert [decode.output(rid) for rid in rids] == answers


class OddTokens(CustomLogitProcessor):
    """Allows odd tokens only."""

    def __call__(self, logits: Any, custom_param_list: Any = None) -> Any:
        logits[:, ::2] = float("-inf")
        return logits


def test_a_custom_logit_processor_applies_to_the_first_token(releasing: Decode) -> None:
    """Guards against a first token of a local turn without the processor, and against a processor
    that another request of the batch gets."""
    decode = releasing
    odd = {"custom_logit_processor": OddTokens.to_str()}
    prompts = [text(80, seed) for seed in range(3)]
    plain = decode.learn(prompts[:2], 8)
    (expected,) = decode.learn(prompts[2:], 8, **odd)
    assert all(token % 2 for token in expected) and any(not token % 2 for token in plain[0])
    decode.frames.clear()
    rids = [decode.ask(prompts[0], 8), decode.ask(prompts[2], 8, **odd)]
    decode.step(4)
    rids.append(decode.ask(prompts[1], 8))
    decode.finish()
    assert [decode.output(rid) for rid in rids] == [plain[0], expected, plain[1]]
    assert len(released(decode)) == 3
