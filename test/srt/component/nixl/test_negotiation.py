"""What a decode rank learns of a prefill server, and a room's status, which fails for good."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common import conn
from sglang.srt.disaggregation.delta import capability
from sglang.srt.disaggregation.utils import DisaggregationMode

LATE = (KVPoll.WaitingForInput, KVPoll.Transferring, KVPoll.Success)


def manager(*, wants_delta: bool = True, moves_deltas: bool = True, **fields: Any) -> Any:
    """A manager without a backend."""
    made = object.__new__(conn.CommonKVManager)
    made.__dict__.update(
        server_args=SimpleNamespace(disaggregation_decode_enable_radix_cache=wants_delta),
        moves_deltas=moves_deltas,
        connection_lock=threading.Lock(),
        connection_pool={},
        prefill_info_table={},
        request_status={},
        failure_records={},
        failure_lock=threading.Lock(),
        **fields,
    )
    made.start_delta(DisaggregationMode.DECODE, made.server_args)
    return made


def ask(made: Any, address: str = "p:1") -> bool:
    """Ask as the scheduler does, until the question in the background is answered."""
    known = bool(made.try_ensure_parallel_info(address))
    if not known and made.servers is not None and made.servers.is_asking(address):
        made.servers._asked[address].exception(timeout=60)
        known = bool(made.try_ensure_parallel_info(address))
    return known


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What the prefill server says, in turn; topology is always found."""
    queue: list[Any] = []
    monkeypatch.setattr(capability, "fetch_capabilities", lambda address: queue.pop(0))

    def found(self: Any, address: str) -> bool:
        self.prefill_info_table[address] = object()
        return True

    base = next(cls for cls in conn.CommonKVManager.__mro__[1:] if cls.__module__ == conn.__name__)
    monkeypatch.setattr(base, "try_ensure_parallel_info", found)
    yield queue
    assert queue == []


@pytest.mark.hazard("peer-ignores-prefix")
def test_asked_until_it_answers_and_after_it_was_lost(answers: list[Any]) -> None:
    """Guards against a prefill server that is just starting and counts as stock for ever, and
    against a prefix for a stock server that replaced a patched one at its address."""
    made = manager()
    answers += [None, capability.OURS, capability.STOCK]
    assert not ask(made)
    assert not made.peer_takes_delta("p:1") and made.prefill_info_table == {}
    assert ask(made)
    assert made.peer_takes_delta("p:1") and not made.peer_takes_delta("p:2")
    assert ask(made), "known: not asked again"
    made.prefill_info_table.clear()  # what SGLang does when a prefill server dies
    assert ask(made) and not made.peer_takes_delta("p:1")


def test_without_the_flag_nobody_is_asked(answers: list[Any]) -> None:
    """Guards against requests that a stock server would not make."""
    made = manager(wants_delta=False)
    assert ask(made) and not made.peer_takes_delta("p:1")


@pytest.mark.parametrize(
    ("theirs", "ours", "warned"),
    [("none", "EAGLE", 1), ("EAGLE", "EAGLE", 0), (None, "EAGLE", 0), ("none", None, 0)],
)
def test_prompts_without_draft_kv_are_said_once(
    answers: list[Any],
    caplog: pytest.LogCaptureFixture,
    theirs: str | None,
    ours: str | None,
    warned: int,
) -> None:
    """Guards against drafts that are rejected behind every prompt, and no line that says why; and
    against one for each handshake."""
    made = manager()
    made.server_args.speculative_algorithm = ours
    says = msgspec.structs.replace(capability.OURS, incarnation="a", speculative=theirs)
    answers += [says, says]
    for _ in range(2):
        made.prefill_info_table.clear()
        ask(made)
    assert caplog.text.count("prompts arrive without draft KV") == warned


def test_a_draft_behind_the_target() -> None:
    """Guards against values in the draft model's buffers, where decode has a draft of as many
    layers as the target and prefill has none: stock looks for pipeline stages there."""
    made = manager(pp_size=1)
    made.kv_args = SimpleNamespace(prefill_start_layer=0)
    ours, theirs = [1, 2, 3, 4], [11, 12, 13, 14, 21, 22, 23, 24]
    assert made.get_mha_kv_ptrs_with_pp(ours, theirs) == ([1, 2], [3, 4], [11, 12], [13, 14], 2)
    made.pp_size = 2
    *_, values, layers = made.get_mha_kv_ptrs_with_pp(ours, theirs)
    assert (values, layers) == ([21, 22], 2)


@pytest.mark.parametrize("flag", [False, True])
def test_sockets_are_bounded_as_in_stock_without_the_flag(
    flag: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against queues that grow without end where nobody looks whether the peer is alive, and
    against a scheduler that waits for a dead peer where somebody does."""
    monkeypatch.setattr(conn.CommonKVReceiver, "drops_dead_sockets", False)
    monkeypatch.setattr(conn.CommonKVReceiver, "_socket_cache", {})
    manager(wants_delta=flag)
    made, _ = conn.CommonKVReceiver._connect("tcp://127.0.0.1:9")
    assert (made.getsockopt(zmq.SNDHWM) == 0) == flag
    made.close(linger=0)


@pytest.mark.hazard("late-word-revives-room")
@pytest.mark.parametrize(
    ("ours", "statuses", "last"),
    [
        *((True, (KVPoll.Transferring, KVPoll.Failed, late), KVPoll.Failed) for late in LATE),
        (True, (KVPoll.Transferring, KVPoll.WaitingForInput), KVPoll.Transferring),
        # A backend that this patch set has nothing to do with.
        (False, (KVPoll.Transferring, KVPoll.Failed, KVPoll.Success), KVPoll.Success),
    ],
)
def test_the_status_of_a_room(
    ours: bool, statuses: tuple[int, ...], last: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a late message that brings a failed room back to life; other states advance,
    as SGLang's."""
    if not ours:
        monkeypatch.setenv("SGLANG_DISAGGREGATION_CLAIM_TIMEOUT", "not read here")
    made = manager(moves_deltas=ours)
    made.start_delta(DisaggregationMode.PREFILL, made.server_args)
    for status in statuses:
        made.update_status(1, status)
    assert made.request_status == {1: last}
