"""A room on a prefill rank of each backend, in every order of possible events; and a room on two
ranks that share its pages."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from sglang.srt.disaggregation.base.conn import KVPoll
from unit.delta.nixl.prefill_rank import TRANSFER_TIMEOUT_S
from unit.delta.transfer.ranks import RANKS
from unit.delta.transfer.steps import BROKEN, arrived, failure_of, pages, started

ENDS = (KVPoll.Success, KVPoll.Failed)
CAUSES: dict[str, Callable[[Any, Any], Any]] = {
    "broken": lambda rank, sender: rank.settle(BROKEN),
    "error": lambda rank, sender: rank.settle("ERR"),
    "abort": lambda rank, sender: sender.abort(),
    "withdrawn": lambda rank, sender: rank.withdraw(sender.bootstrap_room),
    "lost": lambda rank, sender: rank.lose(),
    "overdue": lambda rank, sender: rank.tick(TRANSFER_TIMEOUT_S),
}


def orders(causes: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yield every order of these with two chunks, two steps of the worker, and settling all
    writes."""
    steps = ("chunk", "chunk", "work", "work", "settle", *causes)
    yield from sorted(set(itertools.permutations(steps)))


def live(rank: Any, room: int, order: tuple[str, ...]) -> None:
    """Run one room in one order of events."""
    memory_before = rank.decode["decode"].snapshot()
    sender, left, states = started(rank, room), iter((5, 6)), [KVPoll.WaitingForInput]

    def check() -> None:
        state, heard = sender.poll(), rank.heard(room)
        assert states[-1] not in ENDS or state == states[-1], f"{states[-1]} became {state}"
        if state == KVPoll.Success:
            assert heard[:1] == ["complete"] and {write.state for write in rank.writes} == {"DONE"}
            assert arrived(rank, memory_before, 10, 11)
        assert heard.count("complete") == (state == KVPoll.Success)
        assert "stopped" not in heard or not rank.under_way()
        states.append(state)

    for event in order:
        if event == "chunk":
            sender.send(pages(next(left)))
        elif event == "work":
            rank.tick(0.25)
        elif event == "settle":
            rank.settle()
        else:
            CAUSES[event](rank, sender)
        check()
    rank.finish()
    check()
    assert states[-1] in ENDS, "it never ends"
    if states[-1] == KVPoll.Failed:
        messages = rank.heard(room)
        assert "stopped" in messages and (messages.count("stopped") == 1 or "withdrawn" in order)
        text, error = rank.manager.failure_records[room], failure_of(sender)
        assert str(error).endswith(text), "another cause"
        was_raised = any(what in text for what in ("the transport: ", "be posted: "))
        assert (error.__cause__ is not None) == was_raised
    else:
        sender.clear()
    rank.check()
    rank.register("decode")
    rank.writes.clear()
    for (_, target), before in zip(rank.decode["decode"].kv, memory_before, strict=False):
        target[:] = before


@pytest.mark.hazard("poll-raises", "late-word-revives-room")
@pytest.mark.parametrize(
    "causes",
    [(), *((cause,) for cause in CAUSES), *itertools.combinations(CAUSES, 2)],
    ids="-".join,
)
def test_every_order(rank: Any, causes: tuple[str, ...]) -> None:
    """Guards against an order of chunks, failures and endings in which a request ends while its
    pages are read, reverts its state, waits for ever, loses its cause or leaves a table entry; and
    against a second cause that replaces the first."""
    for room, order in enumerate(list(orders(causes))[:: 23 if len(causes) == 2 else 3], start=1):
        try:
            live(rank, room, order)
        except AssertionError as error:
            raise AssertionError(order) from error


@pytest.mark.hazard("bad-kv-in-tree")
@pytest.mark.parametrize("backend", RANKS)
def test_each_page_is_sent_by_one_rank_of_a_context_parallel_group(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against pages that no rank sends: each rank reports that it is done, and decode shares
    the pages' old content. SGLang's own function assumes that a chunk's pages are contiguous."""
    chunks = [[30, 31, 7, 9], [3, 20, 4]]  # as a used tree allocates them
    arrived_at: list[int] = []
    for number in range(2):
        rank = RANKS[backend](monkeypatch)
        rank.manager.attn_cp_size, rank.manager.attn_cp_rank = 2, number
        rank.manager.enable_all_cp_ranks_for_transfer = True
        sender = started(rank, count=7)
        for chunk in chunks:
            sender.send(pages(*chunk))
        rank.finish()
        assert sender.poll() == KVPoll.Success
        (_, source), (_, target) = rank.side.kv[0], rank.decode["decode"].kv[0]
        for index, page in enumerate([*chunks[0], *chunks[1]]):
            arrived_at += [index] * np.array_equal(target[10 + index], source[page])
        rank.clear(sender)
        rank.close()
    assert sorted(arrived_at) == list(range(7))
