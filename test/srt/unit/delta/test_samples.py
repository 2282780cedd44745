"""Room numbers of parallel samples: the same on both sides, one for each request that is sent."""

from __future__ import annotations

import asyncio
import copy
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang.srt.disaggregation.delta import samples
from sglang.srt.disaggregation.delta.capability import OURS, STOCK
from sglang.srt.disaggregation.delta.unserved import PairTokenizer

ROOM = 2**62 + 12345


class Stock:
    """SGLang's tokenizer, as far as it sends requests."""

    def __init__(self, mode: str) -> None:
        self.server_args = SimpleNamespace(disaggregation_mode=mode)
        self.rid_to_state: dict[str, Any] = {}
        self.sent: list[Any] = []

    async def _tokenize_one_request(self, obj: Any) -> Any:
        return SimpleNamespace(rid="", bootstrap_room=obj.bootstrap_room)

    def _send_one_request(self, tokenized: Any) -> None:
        self.sent.append(tokenized)


class Tokenizer(PairTokenizer, Stock):  # type: ignore[misc]
    """As the replacement table binds it."""


def request(n: int, room: int | None = ROOM) -> Any:
    return SimpleNamespace(
        sampling_params={"n": n}, bootstrap_room=room, bootstrap_host="h", bootstrap_port=1
    )


def send_all(tokenizer: Tokenizer, obj: Any, count: int) -> list[Any]:
    """As SGLang does: one request is tokenized once, and copies of it are sent."""
    tokenized = asyncio.run(tokenizer._tokenize_one_request(obj))
    for index in range(count):
        sent = copy.copy(tokenized)
        sent.rid = str(index)
        tokenizer.rid_to_state[sent.rid] = SimpleNamespace(obj=copy.copy(obj))
        tokenizer._send_one_request(sent)
    return tokenizer.sent


@pytest.mark.hazard("room-number-reused")
def test_prompt_and_samples_have_rooms_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against one number for several transfers, and against sides that number otherwise."""
    prefill = send_all(Tokenizer("prefill"), request(3), 4)
    tokenizer = Tokenizer("decode")
    monkeypatch.setattr(samples, "fetch_capabilities", lambda address: OURS)
    decode = send_all(tokenizer, request(3), 4)
    rooms = [each.bootstrap_room for each in decode]
    assert rooms == [each.bootstrap_room for each in prefill]
    assert rooms[0] == ROOM and len(set(rooms)) == 4
    states = tokenizer.rid_to_state.values()
    assert rooms == [state.obj.bootstrap_room for state in states]  # where decode's messages look
    assert all(vars(each).keys() == {"rid", "bootstrap_room"} for each in decode)


@given(st.integers(0, 2**63 - 1), st.integers(0, samples.MOST_SAMPLES))
def test_a_sample_stays_a_room_on_its_data_parallel_rank(room: int, index: int) -> None:
    """SGLang takes 63 bits, and chooses the rank by the remainder."""
    found = samples.room_of_sample(room, index)
    assert 0 <= found < 2**63 and found % 64 == room % 64


@pytest.mark.parametrize("n, room", [(1, ROOM), (3, None)])
def test_others_keep_their_number(n: int, room: int | None) -> None:
    sent = send_all(Tokenizer("prefill"), request(n, room), 2)
    assert [each.bootstrap_room for each in sent] == [room, room]


def test_a_pair_whose_prefill_server_does_not_number_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against samples that wait on decode for rooms that prefill never opens."""
    monkeypatch.setattr(samples, "fetch_capabilities", lambda address: STOCK)
    with pytest.raises(ValueError, match="prefill server h:1"):
        asyncio.run(Tokenizer("decode")._tokenize_one_request(request(2)))
    monkeypatch.setattr(samples, "fetch_capabilities", lambda address: None)
    assert asyncio.run(Tokenizer("decode")._tokenize_one_request(request(2)))  # asked later
