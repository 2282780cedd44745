"""How long a request may wait, for what, and what is said about it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from sglang.srt.disaggregation.delta.decode.admission import Limits
from sglang.srt.disaggregation.delta.decode.candidates import Candidate
from sglang.srt.disaggregation.delta.decode.record import DecodeRecord, Refusal, Wait
from sglang.srt.disaggregation.delta.decode.waiting import missing
from sglang.srt.disaggregation.delta.manager import check_deadlines
from sglang.srt.patchset import environment as env

LIMITS = (env.ADMISSION_TIMEOUT, env.PREFIX_WAIT_TIMEOUT, env.WAIT_LOG, env.PREFIX_WAIT_TOKENS)
DEADLINES = (
    env.QUARANTINE_TIMEOUT, env.TRANSFER_TIMEOUT, env.CLAIM_TIMEOUT, env.PEER_TIMEOUT,
    env.HANDSHAKE_TIMEOUT,
)  # fmt: skip


def read_limits() -> Limits:
    """Those of a decode server with pages of 16 tokens."""
    return Limits.read(16)


@pytest.mark.parametrize(
    ("read", "name"),
    [
        *((read_limits, each.name) for each in LIMITS),
        *((check_deadlines, each.name) for each in DEADLINES),
    ],
)
def test_wrong_settings_name_themselves(
    monkeypatch: pytest.MonkeyPatch, read: Callable[[], object], name: str
) -> None:
    """Guards against a server that starts with a limit it does not understand: a typing error that
    is found hours later, when the limit first counts."""
    read()
    monkeypatch.setenv(name, "soon")
    with pytest.raises(ValueError, match=name):
        read()


def test_each_limit_has_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against two limits that read each other's variable."""
    for number, variable in enumerate(LIMITS):
        monkeypatch.setenv(variable.name, str(16 * number))
    assert Limits.read(16) == (0.0, 16.0, 32.0, 48)


@pytest.mark.parametrize(
    ("text", "page", "tokens"), [(None, 16, 256), ("0", 16, 0), ("1", 16, 16), ("100", 64, 128)]
)
def test_window_is_whole_pages(
    monkeypatch: pytest.MonkeyPatch, text: str | None, page: int, tokens: int
) -> None:
    """Guards against a window that ends within a page: only whole pages enter the tree."""
    monkeypatch.delenv(env.PREFIX_WAIT_TOKENS.name, raising=False)
    if text is not None:
        monkeypatch.setenv(env.PREFIX_WAIT_TOKENS.name, text)
    assert Limits.read(page).window == tokens


# ---- prefixes that are arriving ----

WINDOW = 8
TEXT = [*range(20)]


def candidate(ids: list[int], extra_key: str | None = None, port: int = 1) -> Any:
    """A request in line that may share."""
    req = SimpleNamespace(
        origin_input_ids=ids, output_ids=[], extra_key=extra_key, bootstrap_host="p",
        bootstrap_port=port, is_retracted=False,
    )  # fmt: skip
    return Candidate(SimpleNamespace(), req, shares=True)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "extra_key", "port", "awaits"),
    [
        pytest.param(TEXT, None, 1, True, id="the same"),
        pytest.param([*TEXT, 99], None, 1, True, id="longer"),
        pytest.param([*TEXT[:16], 99, 99], None, 1, True, id="the same in the window"),
        pytest.param(TEXT, "tenant", 1, False, id="another tenant"),
        pytest.param(TEXT, None, 2, False, id="another server"),
        pytest.param([0, 9, *TEXT[2:]], None, 1, False, id="another prefix"),
        pytest.param([*TEXT[:12], 9], None, 1, False, id="another text"),
        pytest.param([0], None, 1, False, id="shorter"),
    ],
)
def test_who_waits_for_a_prefix(
    text: list[int], extra_key: str | None, port: int, awaits: bool
) -> None:
    """Guards against waiting for KV of another server, tenant, prefix or text: it never helps; and
    against followers of one prefix that are not recognised."""
    leader = candidate(TEXT)
    leader.lease = SimpleNamespace(length=8)
    brought = leader.brings(WINDOW)
    assert brought is not None
    assert candidate(text, extra_key, port).awaits({brought: None}) is (brought if awaits else None)


@pytest.mark.parametrize(
    ("length", "prefix", "window", "brings"),
    [(8, 0, 8, True), (7, 0, 8, False), (12, 5, 8, False), (8, 8, 8, False), (8, 0, 0, False)],
)
def test_too_little_to_wait_for(length: int, prefix: int, window: int, brings: bool) -> None:
    """Guards against waiting where moving the tokens is cheaper, and against "off" (a window of 0)
    that makes every request wait for every other one."""
    leader = candidate(TEXT[:length])
    leader.lease = SimpleNamespace(length=prefix)
    assert (leader.brings(window) is not None) is brings


# ---- what is said ----


@pytest.mark.parametrize(
    ("own", "head", "text"),
    [
        (None, None, "its admission was not attempted yet; it needs 96 tokens, P"),
        (
            Refusal("no_tokens", 48),
            Refusal("no_tokens", 9),
            "not enough free KV tokens; it needs 48 tokens, P",
        ),
        (
            None,
            Refusal("no_tokens", 9),
            "request b ahead of it does not fit: not enough free KV tokens; it needs 96 tokens, P",
        ),
        (Refusal("no_metadata_slot"), None, "no free metadata slot; it needs 96 tokens, P"),
    ],
)
def test_what_is_missing(own: Refusal | None, head: Refusal | None, text: str) -> None:
    """Guards against a message that blames the wrong request, or gives another one's numbers."""

    def waiting_request(rid: str, refusal: Refusal | None) -> Any:
        return SimpleNamespace(rid=rid, delta=DecodeRecord(wait=Wait(refusal=refusal)))

    ahead = waiting_request("b", head) if head is not None else None
    assert missing(waiting_request("a", own), ahead, 96, "P") == text
