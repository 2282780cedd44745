"""Notifications of a NIXL transfer: stock texts and ours, parsed and applied."""

from __future__ import annotations

from collections import defaultdict
from itertools import permutations
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang.srt.disaggregation.nixl_async.notifications import (
    Notification,
    apply,
    failure_text,
    parse,
)


def status() -> SimpleNamespace:
    """The fields of SGLang's ``TransferStatus``; the real one is in the component tests."""
    return SimpleNamespace(
        received_kvs_per_pp=defaultdict(set),
        expected_kvs_per_pp={},
        num_pp_ranks_expected=None,
        received_aux=False,
        received_state_per_pp=set(),
        is_failure=False,
    )


@pytest.mark.parametrize(
    ("raw", "note"),
    [
        (b"5_kv_0_0_0", Notification(5, "kv", chunk=0)),
        (b"5_kv_12_1_3", Notification(5, "kv", chunk=12, is_last=True, pp_rank=3)),
        (b"5_kv_2_1", Notification(5, "kv", chunk=2, is_last=True)),
        (b"18446744073709551615_aux", Notification(2**64 - 1, "aux")),
        (b"5_state_2", Notification(5, "state", pp_rank=2)),
        (b"5_state", Notification(5, "state")),
        (b"5_fail_a b_c", Notification(5, "fail", reason="a b_c")),
        (b"5_fail_", Notification(5, "fail")),
    ],
)
def test_parse(raw: bytes, note: Notification) -> None:
    """Guards against a text of stock SGLang, of any of its forms, that is not understood."""
    assert parse(raw) == note


@pytest.mark.parametrize(
    "raw", [b"", b"5", b"x_kv_0_0_0", b"5_kv", b"5_kv_0", b"5_kv_a_0_0", b"5_other", b"5_state_x",
            b"\xff\xfe", b"_aux"]
)  # fmt: skip
def test_garbage_is_one_kind_of_error(raw: bytes) -> None:
    """Guards against an exception that the reader does not expect, on the scheduler's thread."""
    with pytest.raises(ValueError):
        parse(raw)


@given(room=st.integers(0, 2**64 - 1), reason=st.text(max_size=200))
def test_any_reason_arrives(room: int, reason: str) -> None:
    """Guards against a reason with separators or other alphabets that is cut or refused."""
    note = parse(failure_text(room, reason))
    assert (note.room, note.kind, note.reason) == (room, "fail", reason)


def test_chunks_of_two_writers() -> None:
    """Guards against the first writer's last chunk standing for both."""
    state = status()
    for raw in (b"5_kv_0_0_0", b"5_kv_1_1_0"):
        apply(state, parse(raw), num_writers=2)
    assert state.received_kvs_per_pp == {0: {0, 1}} and state.expected_kvs_per_pp == {0: 2}
    assert state.num_pp_ranks_expected == 2
    apply(state, parse(b"5_kv_0_1_1"), num_writers=2)
    assert state.expected_kvs_per_pp == {0: 2, 1: 1}


def test_order_and_repetition_do_not_matter() -> None:
    """Guards against a status that depends on which of NIXL's notifications came first, or that
    counts one twice."""
    texts = (b"5_kv_0_0_0", b"5_kv_1_1_0", b"5_aux", b"5_state_0")
    results = []
    for order in permutations(texts):
        state = status()
        for raw in (*order, *order):
            apply(state, parse(raw), num_writers=1)
        results.append(vars(state))
    assert all(result == results[0] for result in results)
    assert results[0]["received_kvs_per_pp"] == {0: {0, 1}}


def test_a_failure_stays() -> None:
    """Guards against a late completion that turns a failed room into a finished one."""
    state = status()
    for raw in (b"5_fail_x", b"5_kv_0_1_0", b"5_aux"):
        apply(state, parse(raw), num_writers=1)
    assert state.is_failure
