"""Which requests wait for a prefix that is just arriving."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang.srt.disaggregation.delta.decode import candidates
from sglang.srt.disaggregation.delta.decode.admission import Limits
from sglang.srt.disaggregation.delta.decode.candidates import Candidate
from sglang.srt.disaggregation.delta.decode.record import ArrivingPrefix, DecodeRecord

WINDOW_ENV = "SGLANG_DISAGGREGATION_DECODE_PREFIX_WAIT_TOKENS"
WAIT_ENV = "SGLANG_DISAGGREGATION_DECODE_PREFIX_WAIT_TIMEOUT"


def candidate(ids: list[int], extra_key: str | None = None, port: int = 1) -> Candidate:
    """A request in line that may share."""
    req = SimpleNamespace(
        origin_input_ids=ids,
        output_ids=[],
        extra_key=extra_key,
        bootstrap_host="p",
        bootstrap_port=port,
        is_retracted=False,
    )
    return Candidate(SimpleNamespace(), req, shares=True)  # type: ignore[arg-type]


def brought(ids: list[int], prefix: int = 0, window: int = 8) -> ArrivingPrefix | None:
    """What a request with a match of ``prefix`` tokens brings."""
    leader = candidate(ids)
    leader.lease = SimpleNamespace(length=prefix)  # type: ignore[assignment]
    return leader.brings(window)


def test_a_common_continuation_is_awaited() -> None:
    """Guards against followers of one prefix that are not recognised."""
    leader = brought([5, 5, *range(8)], prefix=2)
    assert leader is not None
    assert candidate([5, 5, *range(8), 99]).awaits({leader: None}) is leader


@pytest.mark.parametrize("extra_key", [None, "tenant"])
@pytest.mark.parametrize("port", [1, 2])
@pytest.mark.parametrize("text", [[*range(20)], [0, 9, *range(2, 20)], [*range(12), 9], [0]])
def test_what_differs(text: list[int], port: int, extra_key: str | None) -> None:
    """Guards against waiting for KV of another server, tenant, prefix or text: it never helps."""
    leader = brought(list(range(20)), prefix=8)
    assert leader is not None
    same = (text, port, extra_key) == ([*range(20)], 1, None)
    assert (candidate(text, extra_key, port).awaits({leader: None}) is leader) == same


@pytest.mark.parametrize(("length", "prefix", "window"), [(7, 0, 8), (12, 5, 8), (8, 8, 8)])
def test_too_little_to_wait_for(length: int, prefix: int, window: int) -> None:
    """Guards against waiting where moving the tokens is cheaper."""
    assert brought(list(range(length)), prefix=prefix, window=window) is None


def test_window_of_zero_is_off() -> None:
    """Guards against "off" that makes every request wait for every other one."""
    assert brought(list(range(8)), window=0) is None


@pytest.mark.parametrize(
    ("text", "page", "tokens"), [(None, 16, 256), ("0", 16, 0), ("1", 16, 16), ("100", 64, 128)]
)
def test_window_is_whole_pages(
    monkeypatch: pytest.MonkeyPatch, text: str | None, page: int, tokens: int
) -> None:
    """Guards against a window that ends within a page: only whole pages enter the tree."""
    monkeypatch.delenv(WINDOW_ENV, raising=False)
    if text is not None:
        monkeypatch.setenv(WINDOW_ENV, text)
    assert Limits.read(page).window == tokens


def test_arriving() -> None:
    """Guards against requests without a key (short, warm-up, stock peer) counting as a prefix."""
    first, second = brought(list(range(8))), brought(list(range(9)))
    queue = [
        SimpleNamespace(delta=DecodeRecord(arriving=first)),  # type: ignore[arg-type]
        SimpleNamespace(delta=DecodeRecord(arriving=None)),
        SimpleNamespace(),
        SimpleNamespace(delta=DecodeRecord(arriving=second)),  # type: ignore[arg-type]
    ]
    assert list(candidates.arriving(queue)) == [first, second]  # type: ignore[arg-type]
