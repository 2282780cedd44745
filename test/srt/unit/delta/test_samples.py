"""Room numbers of parallel samples: the same on both sides, one for each request that is sent."""

from __future__ import annotations

import asyncio
import copy
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang.srt.disaggregation.delta import unserved
from sglang.srt.disaggregation.delta.unserved import PairTokenizer
from sglang.srt.disaggregation.delta.wire import OURS, STOCK, Capabilities

ROOM = 2**62 + 12345


class Stock:
    """The part of SGLang's tokenizer that sends requests."""

    def __init__(self, mode: str) -> None:
        self.server_args = SimpleNamespace(disaggregation_mode=mode)
        self.rid_to_state: dict[str, Any] = {}
        self.sent: list[Any] = []

    async def _tokenize_one_request(self, obj: Any) -> Any:
        return SimpleNamespace(rid="", bootstrap_room=obj.bootstrap_room)

    def _send_one_request(self, tokenized: Any) -> None:
        assert vars(tokenized).keys() == {"rid", "bootstrap_room"}, "only SGLang's fields are sent"
        self.sent.append(tokenized)


class Tokenizer(PairTokenizer, Stock):  # type: ignore[misc]
    """The class that the replacement table binds."""

    def rooms_of(self, n: int, room: int | None, count: int) -> list[int | None]:
        """Return the rooms of a request's prompt and samples: SGLang tokenizes once, and sends
        copies."""
        obj = SimpleNamespace(
            sampling_params={"n": n}, bootstrap_room=room, bootstrap_host="h", bootstrap_port=1
        )
        tokenized = asyncio.run(self._tokenize_one_request(obj))
        for index in range(count):
            request = copy.copy(tokenized)
            request.rid = str(index)
            self.rid_to_state[request.rid] = SimpleNamespace(obj=copy.copy(obj))
            self._send_one_request(request)
        rooms = [request.bootstrap_room for request in self.sent]
        # Decode's messages use these rooms.
        assert rooms == [state.obj.bootstrap_room for state in self.rid_to_state.values()]
        return rooms


@pytest.mark.hazard("room-number-reused")
@pytest.mark.parametrize(
    ("n", "room", "count", "distinct"),
    [(3, ROOM, 4, 4), (1, ROOM, 2, 1), (3, None, 2, 1)],
    ids=["a prompt and three samples", "one answer", "no room"],
)
def test_prompt_and_samples_have_separate_rooms(
    monkeypatch: pytest.MonkeyPatch, n: int, room: int | None, count: int, distinct: int
) -> None:
    """Guards against one number for several transfers, and against sides that number
    differently."""
    monkeypatch.setattr(unserved, "fetch_capabilities", lambda address: OURS)
    prefill, decode = (Tokenizer(mode).rooms_of(n, room, count) for mode in ("prefill", "decode"))
    assert prefill == decode
    assert decode[0] == room and len(set(decode)) == distinct


@given(st.integers(0, 2**63 - 1), st.integers(0, unserved.MAX_SAMPLES))
def test_a_sample_stays_a_room_on_its_data_parallel_rank(room: int, index: int) -> None:
    """SGLang accepts 63 bits, and chooses the rank by the remainder."""
    sample_room = unserved.room_of_sample(room, index)
    assert 0 <= sample_room < 2**63 and sample_room % 64 == room % 64


@pytest.mark.parametrize(("known", "is_refused"), [(STOCK, True), (None, False)])
def test_a_pair_whose_prefill_server_does_not_number_samples(
    monkeypatch: pytest.MonkeyPatch, known: Capabilities | None, is_refused: bool
) -> None:
    """Guards against samples that wait on decode for rooms that prefill never opens. A server that
    cannot be queried now is queried later."""
    monkeypatch.setattr(unserved, "fetch_capabilities", lambda address: known)
    if is_refused:
        with pytest.raises(ValueError, match="prefill server h:1"):
            Tokenizer("decode").rooms_of(2, ROOM, 3)
    else:
        assert len(set(Tokenizer("decode").rooms_of(2, ROOM, 3))) == 3
