"""Announcements of a decode server of SGLang 0.5.12.post1, parsed by our prefill rank. On request,
the real release sends them again, and parses our announcements."""

from __future__ import annotations

import json
import logging
import os
import struct
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import cpu_standin
import later_release
from component.transfer import bare
from component.transfer.bare import decode
from component.transfer.messages import DIALECTS, NIXL, Dialect
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.delta.peer_messages import find_frame
from sglang.srt.disaggregation.delta.wire import DeltaFrame
from sglang.srt.disaggregation.mooncake.conn import MooncakeKVReceiver
from sglang.srt.disaggregation.nixl.conn import NixlKVReceiver

ROOM = 7
PAGE = 8
_PAGES = b"\x04\x00\x00\x00\x05\x00\x00\x00"
_KV = b"\x00\x00\x00\x00\x00\x00\x00\x00\x01\x00\x00\x00\x00\x00\x00\x00"
_METADATA = b"\x09\x00\x00\x00\x00\x00\x00\x00"
_NIXL = [b"NixlMsgGuard", b"7", b"10.0.0.2", b"4000", b"D"]
_MOONCAKE = [b"7", b"10.0.0.2", b"4000", b"10.0.0.2:5000"]

#: By backend and kind of announcement: pages 4 and 5 in metadata slot 3, after a prefix of 0 or 16
#: tokens; no pages (a full hit of 24 tokens); nothing from this rank (latent KV, which one prefill
#: rank of several sends).
ANNOUNCED: dict[str, dict[str, list[bytes]]] = {
    "nixl": {
        "all": [*_NIXL, _PAGES, b"3", b"1", b"", b"0"],
        "rest": [*_NIXL, _PAGES, b"3", b"1", b"", b"16"],
        "full hit": [*_NIXL, b"", b"3", b"1", b"", b"24"],
        "nothing": [*_NIXL, b"", b"3", b"1", b"", b"0"],
        "nothing after a prefix": [*_NIXL, b"", b"3", b"1", b"", b"16"],
    },
    "mooncake": {
        "all": [*_MOONCAKE, _PAGES, b"3", b"", b"1", b"0"],
        "rest": [*_MOONCAKE, _PAGES, b"3", b"", b"1", b"16"],
        "full hit": [*_MOONCAKE, b"", b"3", b"", b"1", b"24"],
        "nothing": [*_MOONCAKE, b"", b"", b"", b"1", b"0"],
        "nothing after a prefix": [*_MOONCAKE, b"", b"", b"", b"1", b"16"],
    },
}

#: Two buffers of KV with pages of 64 bytes and one of metadata, tensor parallel size 1.
REGISTERED: dict[str, list[bytes]] = {
    "nixl": [
        *[b"NixlMsgGuard", b"None", b"10.0.0.2", b"4000", b"D", b"metadata", _KV, _METADATA],
        *[b"", b"0", b"1", b"0", b"64", b"", b"", b"", b""],
    ],
    "mooncake": [
        *[b"None", b"10.0.0.2", b"4000", b"10.0.0.2:5000", _KV, _METADATA],
        *[b"", b"0", b"1", b"64", b"", b"", b"0", b"", b""],
    ],
}


class Prefill:
    """A prefill rank with one request and a registered decode server of a later release."""

    def __init__(self, say: Dialect, **fields: Any) -> None:
        self._say = say
        self.manager, self.reader = say.listener(**fields)
        self.manager.kv_args.page_size = PAGE
        self.reader.handle(REGISTERED[say.backend])

    def announced(self, kind: str) -> Any:
        """Receive an announcement; return the manager's record of it."""
        self.reader.handle(ANNOUNCED[self._say.backend][kind])
        (info,) = bare.destinations(self.manager, ROOM)
        return info

    def sender(self, prompt_pages: int) -> Any:
        """Return the sender of the request, past the bootstrap queue."""
        sender = self._say.sender(self.manager, "10.0.0.1:8998", ROOM, [0], 0)
        assert sender.poll() == KVPoll.WaitingForInput
        sender.init(prompt_pages, 0)
        return sender


both = pytest.mark.parametrize("say", DIALECTS, ids=repr)


@both
@pytest.mark.parametrize(
    ("kind", "prompt_pages", "prefix", "pages"),
    [("all", 2, 0, 2), ("rest", 4, 16, 2), ("full hit", 3, 24, 0)],
)
def test_a_prefix_of_a_later_release(
    say: Dialect, kind: str, prompt_pages: int, prefix: int, pages: int
) -> None:
    """Guards against a partial hit that fails because of its number of pages, and against a full
    hit that counts as nothing to send: decode would wait 300 s for its metadata."""
    prefill = Prefill(say)
    assert not say.is_dummy(prefill.announced(kind))
    sender = prefill.sender(prompt_pages)
    assert prefill.manager.failure_records == {}
    assert (sender.decode_prefix_len, sender.num_kv_indices) == (prefix, pages)


@both
def test_a_prefix_of_another_length_than_the_pages(say: Dialect) -> None:
    """Guards against a wrong part of the prompt without an error, and against our own messages to a
    decode rank that cannot parse them, which would end its reader thread (Mooncake)."""
    prefill = Prefill(say)
    prefill.announced("rest")
    prefill.sender(prompt_pages=5)
    assert "2 destination pages" in prefill.manager.failure_records[ROOM]
    prefill.manager.rooms.withdraw(ROOM, "again")
    assert prefill.manager.sockets.sent == []


@both
@pytest.mark.parametrize("kind", ["nothing", "nothing after a prefix"])
def test_a_rank_that_sends_nothing(say: Dialect, kind: str) -> None:
    """Guards against a second rank that also writes metadata, or that fails the room because no
    pages are listed for it: one prefill rank sends all latent KV. Over NIXL both look like a full
    hit."""
    prefill = Prefill(say, is_mla_backend=True, attn_tp_size=2, attn_tp_rank=1)
    assert say.is_dummy(prefill.announced(kind))
    prefill.sender(prompt_pages=4)
    assert prefill.manager.failure_records == {}


def test_the_rank_that_sends_latent_kv() -> None:
    """Guards against a full hit that counts as nothing to send, on the rank that sends."""
    prefill = Prefill(NIXL, is_mla_backend=True, attn_tp_size=2, attn_tp_rank=0)
    assert not NIXL.is_dummy(prefill.announced("full hit"))


@both
@pytest.mark.parametrize("frame", [b"x", b"-16", b"\xff", b"1" * 30])
def test_a_ninth_frame_that_is_not_a_length(
    say: Dialect, frame: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against a room that is served as if it had no ninth frame: a later release may put
    something else there."""
    prefill = Prefill(say)
    with caplog.at_level(logging.ERROR):
        prefill.reader.handle([*ANNOUNCED[say.backend]["all"][:-1], frame])
    assert bare.destinations(prefill.manager, ROOM) == [] and "prefix length" in caplog.text


@both
def test_state_in_another_format(say: Dialect, caplog: pytest.LogCaptureFixture) -> None:
    """Guards against lengths that are parsed as addresses, and written to: later releases list the
    state of hybrid models (Mamba, SWA, NSA) by component."""
    prefill = Prefill(say)
    index = 8 if say is NIXL else 6
    two_components = struct.pack("<3I2Q", 2, 8, 8, 1000, 2000)
    pointers = struct.pack("<2I2Q", 1, 16, 1000, 2000)
    for packed in (two_components, pointers):
        registered = list(REGISTERED[say.backend])
        registered[index] = packed
        if say is NIXL:
            registered[4] = b"E"
        else:
            registered[3] = b"10.0.0.2:6000"
        with caplog.at_level(logging.ERROR):
            prefill.reader.handle(registered)
        assert len(prefill.manager.decode_kv_args_table) == 1


# ---- the release itself ----

PROGRAM = Path(__file__).with_name("program_later.py")
KINDS: dict[str, Any] = {"nixl": NixlKVReceiver, "mooncake": MooncakeKVReceiver}


def announced_by_us(backend: str, with_frame: bool) -> list[bytes]:
    """Return our announcement of room 7 with pages 4 and 5, for a prefill server that accepts a
    prefix or for another one; without NIXL's guard, which prefill removes."""
    kind = KINDS[backend]
    sent: list[list[bytes]] = []
    socket = SimpleNamespace(send_multipart=sent.append)
    receiver = kind.__new__(kind)
    manager = decode(backend, 7)
    manager.__dict__.update(local_ip="10.0.0.2", rank_port=4000)
    manager.kv_args.__dict__.update(engine_rank=0, kv_data_lens=[640, 640], aux_data_lens=[640])
    receiver.__dict__.update(
        kv_mgr=manager,
        bootstrap_room=7,
        bootstrap_addr="10.0.0.1:8998",
        session_id="10.0.0.2:5000",
        required_dst_info_num=1,
        required_prefill_response_num=1,
        bootstrap_infos=[{"rank_ip": "10.0.0.1", "rank_port": 1, "is_dummy": False}],
        conclude_state=None,
        _connect_to_bootstrap_server=lambda info: (socket, threading.Lock()),
    )
    pages = np.array([4, 5], np.int32)
    if with_frame:
        receiver.announce(DeltaFrame(decode_prefix_len=16, prompt_tokens=33), pages, 3)
    else:
        receiver.send_metadata(pages, 3, None)
    (frames,) = sent
    return frames[1:] if backend == "nixl" else frames


@pytest.mark.parametrize("backend", KINDS)
def test_our_frame_has_the_length_of_the_prompt(backend: str) -> None:
    """Guards against a frame without the prompt's length, which prefill could then not compare."""
    frame = find_frame(announced_by_us(backend, with_frame=True))
    assert frame is not None and frame.prompt_tokens == 33


@pytest.fixture(scope="module")
def messages() -> list[dict[str, Any]]:
    """Messages of the real release, and its parsing of ours."""
    ours = {
        backend: {
            name: [frame.hex() for frame in announced_by_us(backend, with_frame)]
            for name, with_frame in (("whole prompt", False), ("with our frame", True))
        }
        for backend in KINDS
    }
    result = subprocess.run(
        [sys.executable, str(PROGRAM), json.dumps(ours)],
        env=cpu_standin.environment(os.environ | later_release.environment()),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    lines = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    assert lines[0] == {"version": later_release.RELEASE}
    return lines


@later_release.ON_REQUEST
@pytest.mark.parametrize("backend", KINDS)
def test_the_release_sends_the_frames_of_these_tests(
    messages: list[dict[str, Any]], backend: str
) -> None:
    """Guards against frames in our tests that the release never sends."""
    sent = {
        line["sends"]: [bytes.fromhex(frame) for frame in line["frames"]]
        for line in messages
        if line.get("backend") == backend and "sends" in line
    }
    assert sent.pop("registration") == REGISTERED[backend]
    assert sent == ANNOUNCED[backend]


@later_release.ON_REQUEST
@pytest.mark.parametrize("backend", KINDS)
def test_the_release_parses_a_whole_prompt(messages: list[dict[str, Any]], backend: str) -> None:
    """Guards against a message that the later release cannot parse: the one for a prefill server
    that does not announce support of a prefix."""
    (line,) = [
        x for x in messages if x.get("backend") == backend and x.get("reads") == "whole prompt"
    ]
    assert (line["room"], line["pages"], line["prefix"]) == (7, [4, 5], None)


@later_release.ON_REQUEST
@pytest.mark.parametrize("backend", KINDS)
def test_the_release_cannot_parse_our_frame(messages: list[dict[str, Any]], backend: str) -> None:
    """Guards the reason why the release must never get our frame: parsing it as a number raises on
    the thread that reads all messages. If that changes, a prefix may be sent in another way."""
    (line,) = [x for x in messages if x.get("backend") == backend
               and x.get("reads") != "whole prompt" and "reads" in x]  # fmt: skip
    assert line["error"] in ("ValueError", "UnicodeDecodeError")
