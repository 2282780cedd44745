"""Which requests wait for a prefix that is just arriving."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang.srt.disaggregation.delta.decode import candidates
from sglang.srt.disaggregation.delta.decode.admission import Limits
from sglang.srt.disaggregation.delta.decode.record import DecodeRecord

WINDOW_ENV = "SGLANG_DISAGGREGATION_DECODE_PREFIX_WAIT_TOKENS"
WAIT_ENV = "SGLANG_DISAGGREGATION_DECODE_PREFIX_WAIT_TIMEOUT"
NODE = SimpleNamespace(id=7)


def request(ids: list[int], extra_key: str | None = None) -> SimpleNamespace:
    """The part of a request that a key is made of."""
    return SimpleNamespace(origin_input_ids=ids, extra_key=extra_key)


def key(ids: list[int], prefix: int = 0, window: int = 8, **changes: object) -> object:
    """A key, with defaults."""
    node = changes.get("node", NODE)
    req = request(ids, changes.get("extra_key"))  # type: ignore[arg-type]
    return candidates.prefix_key(str(changes.get("prefill", "p:1")), req, node, prefix, window)


def test_common_continuation_is_one_key() -> None:
    """Guards against followers of one prefix that do not recognise each other."""
    assert key(list(range(8))) == key([*range(8), 99, 100])
    assert key([5, 5, *range(8)], prefix=2) == key([6, 6, *range(8), 1], prefix=2)


@pytest.mark.parametrize(
    "changes",
    [
        {"prefill": "p:2"},
        {"extra_key": "tenant"},
        {"node": SimpleNamespace(id=8)},
        {"ids": [9, *range(1, 8)]},
    ],
)
def test_what_differs(changes: dict[str, object]) -> None:
    """Guards against waiting for KV of another server, tenant, prefix or text: it never helps."""
    other = dict(changes)
    ids = other.pop("ids", list(range(8)))
    assert key(ids, **other) != key(list(range(8)))  # type: ignore[arg-type]


@pytest.mark.parametrize(("length", "prefix", "window"), [(7, 0, 8), (12, 5, 8), (8, 8, 8)])
def test_too_little_to_wait_for(length: int, prefix: int, window: int) -> None:
    """Guards against waiting where moving the tokens is cheaper."""
    assert key(list(range(length)), prefix=prefix, window=window) is None


def test_window_of_zero_is_off() -> None:
    """Guards against "off" that makes every request wait for every other one."""
    assert key(list(range(8)), window=0) is None


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
    first = key(list(range(8)))
    queue = [
        SimpleNamespace(delta=DecodeRecord(arriving=first)),  # type: ignore[arg-type]
        SimpleNamespace(delta=DecodeRecord(arriving=None)),
        SimpleNamespace(),
        SimpleNamespace(delta=DecodeRecord(arriving=first)),  # type: ignore[arg-type]
    ]
    assert candidates.arriving(queue) == {first}  # type: ignore[arg-type]
