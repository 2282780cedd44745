"""Token ids made from hash ids."""

from __future__ import annotations

from benchmark.traces.prompts import Prompts
from benchmark.traces.record import Record

VOCABULARY = range(16, 688)


def test_prompts_share_exactly_what_their_ids_share() -> None:
    """Otherwise the hit rate would be that of another trace."""
    prompts = Prompts(VOCABULARY, block_tokens=16)
    a = prompts.prompt(Record(0, 48, 1, (0, 1, 2)))
    b = prompts.prompt(Record(0, 40, 1, (0, 1, 3)))
    assert (len(a), len(b)) == (48, 40)
    assert a[:32] == b[:32]
    assert a[32:40] != b[32:]
    assert set(a) <= set(VOCABULARY)


def test_the_same_in_every_process() -> None:
    """Both arms of a comparison, and a later run, must ask the same, so that nothing may
    depend on the process."""
    record = Record(0, 4, 1, (123_456,))
    assert Prompts(VOCABULARY, 4).prompt(record) == [339, 115, 606, 136]
    assert Prompts(VOCABULARY, 4, seed=1).prompt(record) != Prompts(VOCABULARY, 4).prompt(record)
