"""LoRA adapters on a decode server that computes turns itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from current.environment import MOONCAKE, SMALL
from current.test_local_turns import ADMITTED, Peers
from current.texts import text

if TYPE_CHECKING:
    from current.decode import Decode

LORA = (
    *("--lora-paths", "one=@adapter1", "two=@adapter2", "--lora-backend", "torch_native"),
    *("--max-loras-per-batch", "2"),
)


@pytest.mark.server(*LORA, *SMALL, *MOONCAKE, tokens=512, env=ADMITTED)
def test_adapters(decode: Decode) -> None:
    """Guards against KV of another adapter, or of none, under a chunk or an answer; against a batch
    with more adapters than the server can load, which would end it; and against a retracted request
    that resumes with another one. The first prompt is the same for all."""
    decode.scheduler.lead_turns.peers = Peers()
    names = [None, *decode.scheduler.tp_worker.model_runner.lora_manager.lora_refs]
    first, second = text(60, 1), [text(60, seed, text(60, 1)) for seed in (2, 3)]
    answers = [decode.learn([first], 8, lora_id=name)[0] for name in names]
    expected = [answer for name in names for answer in decode.learn(second, 32, lora_id=name)]
    assert len({*map(tuple, answers)}) == 3, "the adapters change nothing"
    rids = [decode.ask(first, 8, lora_id=name) for name in names]
    decode.finish()
    assert [decode.output(rid) for rid in rids] == answers
    rids = [decode.ask(prompt, 32, lora_id=name) for name in names for prompt in second]
    decode.step()
    at_once: list[set[str]] = []
    decode.until(lambda: bool(at_once.append(running(decode))) or decode.ended(*rids))
    assert [decode.output(rid) for rid in rids] == expected
    assert {frames[-1] for frames in decode.frames} == {b"LOCAL"}, "all were computed here"
    assert max(map(len, at_once)) == 2, "of three"
    assert sum(decode.requests[rid].cached_tokens for rid in rids) >= 4 * 48
    assert sum(decode.requests[rid].retraction_count for rid in rids) > 0


def running(decode: Decode) -> set[str]:
    """Return the adapters of the running batch."""
    return {req.lora_id for req in decode.scheduler.running_batch.reqs}
