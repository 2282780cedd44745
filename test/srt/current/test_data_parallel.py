"""Local turns beside another data parallel rank, which the test replaces in each step.

``e2e/test_families.py`` runs two ranks.
"""

from __future__ import annotations

import re
from typing import Any  # Any: batches of SGLang

import pytest

from current.decode import Decode
from current.environment import MOONCAKE
from current.test_local_turns import ADMITTED, LOCAL, Peers, later_turns


class OtherRank:
    """Replaces SGLang's exchange of the ranks' batches; the other rank runs a chunk in each third
    step."""

    def __init__(self) -> None:
        #: For each exchange the rank that runs a chunk: ``E`` this one, ``o`` the other one, ``b``
        #: both, ``d`` none.
        self.steps = ""

    def maybe_prepare_mlp_sync_batch(self, batch: Any) -> Any:
        """Record in ``batch`` whether any rank runs a chunk. Return it."""
        own = batch is not None and batch.forward_mode.is_extend()
        others = len(self.steps) % 3 == 0
        self.steps += "dEob"[own + 2 * others]
        if batch is not None:
            batch.is_extend_in_batch = own or others
        return batch

    def drop_sync_wait_carry(self) -> None:
        """Do nothing: the time between the ranks is not measured."""


@pytest.mark.server(*MOONCAKE, model="deepseek_v3_nextn", env=LOCAL)
def test_each_step_is_exchanged_once(decode: Decode, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a chunk that the other rank does not know of, or a step that is exchanged
    twice: either hangs the server. A chunk after one of the other rank would delay all requests
    twice."""
    scheduler, other = decode.scheduler, OtherRank()
    scheduler.lead_turns.peers = Peers()
    second, expected = later_turns(decode, [40, 3, 400, 17, 90], 16)
    for name, value in (("attn_dp_enabled", True), ("dp_attn_adapter", other)):
        monkeypatch.setattr(scheduler, name, value)
    number = 0

    def count() -> None:
        nonlocal number
        number += 1
        queue()

    queue = scheduler.process_decode_queue
    monkeypatch.setattr(scheduler, "process_decode_queue", count)
    rids = [decode.ask(prompt, 16) for prompt in second]
    decode.finish()
    assert [decode.output(rid) for rid in rids] == expected
    assert len(other.steps) == number and other.steps.count("E") > 2
    assert not re.search("E.*[ob][Eb]", other.steps), other.steps


@pytest.mark.server("--dp-size", "2", env=ADMITTED | {"SGLANG_CPU_OMP_THREADS_BIND": "0|0"})
def test_one_of_two_servers(decode: Decode) -> None:
    """Guards against numbers of a rank that are taken for those of all servers."""
    decode.scheduler.lead_turns.peers = Peers()
    second, expected = later_turns(decode, [40, 300], 16)
    decode.frames.clear()
    rids = [decode.ask(prompt, 16) for prompt in second]
    decode.finish()
    assert [decode.output(rid) for rid in rids] == expected
    assert {tuple(frames[::2]) for frames in decode.frames} == {(b"ABORT", b"LOCAL")}
