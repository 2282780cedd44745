"""Prefill reads what a decode server of a later release announces."""

from __future__ import annotations

import logging
import struct
from typing import Any

import pytest

from component.interop.frames import ANNOUNCED, PAGE, REGISTERED, ROOM
from component.transfer.messages import DIALECTS, NIXL, Dialect
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.delta.metrics import Reason


class Prefill:
    """A prefill rank with one request, to which a decode server of a later release is known."""

    def __init__(self, say: Dialect, **fields: Any) -> None:
        self._say = say
        self.manager, self.reader = say.listener()
        self.manager.kv_args.page_size = PAGE
        self.manager.__dict__.update(fields)
        self.reader.handle(REGISTERED[say.backend])

    def announced(self, what: str) -> Any:
        """Its announcement arrives; what the manager keeps of it."""
        self.reader.handle(ANNOUNCED[self._say.backend][what])
        (info,) = self.manager.rooms.destinations(ROOM)
        return info

    def sender(self, prompt_pages: int) -> Any:
        """The request comes, and leaves the bootstrap queue."""
        sender = self._say.sender(self.manager, "10.0.0.1:8998", ROOM, [0], 0)
        assert sender.poll() == KVPoll.WaitingForInput
        sender.init(prompt_pages, 0)
        return sender


both = pytest.mark.parametrize("say", DIALECTS, ids=repr)


@both
@pytest.mark.parametrize(
    ("what", "prompt_pages", "prefix", "pages"),
    [("all", 2, 0, 2), ("rest", 4, 16, 2), ("full hit", 3, 24, 0)],
)
def test_a_prefix_of_a_later_release(
    say: Dialect, what: str, prompt_pages: int, prefix: int, pages: int
) -> None:
    """Guards against a partial hit that fails for its number of pages, and against a full hit that
    counts as a rank to which nothing goes: decode would wait 300 s for its metadata."""
    prefill = Prefill(say)
    assert not say.is_dummy(prefill.announced(what))
    sender = prefill.sender(prompt_pages)
    assert prefill.manager.failure_records == {}
    assert (sender.decode_prefix_len, sender.num_kv_indices) == (prefix, pages)


@both
def test_a_prefix_that_does_not_fit(say: Dialect) -> None:
    """Guards against a wrong part of the prompt in silence; and against words of ours to a decode
    rank that cannot read them, which would end the thread that reads (Mooncake)."""
    prefill = Prefill(say)
    prefill.announced("rest")
    prefill.sender(prompt_pages=5)
    assert "2 destination pages" in prefill.manager.failure_records[ROOM]
    prefill.manager.rooms.fail(ROOM, Reason.MISMATCH, "again")
    assert prefill.manager.decode_ranks._sockets.sent == []


@both
@pytest.mark.parametrize("what", ["nothing", "nothing after a prefix"])
def test_a_rank_to_which_nothing_goes(say: Dialect, what: str) -> None:
    """Of latent KV one prefill rank sends all. Guards against another that writes metadata too, and
    that fails the room because it was listed no pages. Over NIXL both look like a full hit."""
    prefill = Prefill(say, is_mla_backend=True, attn_tp_size=2, attn_tp_rank=1)
    assert say.is_dummy(prefill.announced(what))
    prefill.sender(prompt_pages=4)
    assert prefill.manager.failure_records == {}


def test_the_rank_that_sends_latent_kv() -> None:
    """Guards against a full hit taken for such a rank where one prefill rank does send."""
    prefill = Prefill(NIXL, is_mla_backend=True, attn_tp_size=2, attn_tp_rank=0)
    assert not NIXL.is_dummy(prefill.announced("full hit"))


@both
@pytest.mark.parametrize("frame", [b"x", b"-16", b"\xff", b"1" * 30])
def test_a_ninth_frame_that_is_no_length(
    say: Dialect, frame: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """A release after those we know may say something else there. Guards against its being served
    as if it had said nothing."""
    prefill = Prefill(say)
    with caplog.at_level(logging.ERROR):
        prefill.reader.handle([*ANNOUNCED[say.backend]["all"][:-1], frame])
    assert prefill.manager.rooms.destinations(ROOM) == [] and "prefix length" in caplog.text


@both
def test_state_that_is_packed_in_another_way(
    say: Dialect, caplog: pytest.LogCaptureFixture
) -> None:
    """Later releases list the state of hybrid models (Mamba, SWA, NSA) by component. Guards against
    their lengths read as addresses, and written to."""
    prefill = Prefill(say)
    at = 8 if say is NIXL else 6
    two_components = struct.pack("<3I2Q", 2, 8, 8, 1000, 2000)
    pointers = struct.pack("<2I2Q", 1, 16, 1000, 2000)
    for packed in (two_components, pointers):
        registered = list(REGISTERED[say.backend])
        registered[at] = packed
        if say is NIXL:
            registered[4] = b"E"
        else:
            registered[3] = b"10.0.0.2:6000"
        with caplog.at_level(logging.ERROR):
            prefill.reader.handle(registered)
        assert len(prefill.manager.decode_kv_args_table) == 1
