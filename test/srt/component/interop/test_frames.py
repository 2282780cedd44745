"""What a decode server of SGLang 0.5.12.post1 announces, read by our prefill rank; on request, the
real release says it again, and reads what ours announces."""

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
from sglang.srt.disaggregation.mooncake.conn import MooncakeKVReceiver
from sglang.srt.disaggregation.nixl.conn import NixlKVReceiver

ROOM, PAGE = 7, 8
_PAGES = b"\x04\x00\x00\x00\x05\x00\x00\x00"
_KV = b"\x00\x00\x00\x00\x00\x00\x00\x00\x01\x00\x00\x00\x00\x00\x00\x00"
_METADATA = b"\x09\x00\x00\x00\x00\x00\x00\x00"
_NIXL = [b"NixlMsgGuard", b"7", b"10.0.0.2", b"4000", b"D"]
_MOONCAKE = [b"7", b"10.0.0.2", b"4000", b"10.0.0.2:5000"]

#: By backend and by what is announced: two pages 4 and 5 in metadata slot 3, after a prefix of so
#: many tokens; no pages (a full hit of 24 tokens); nothing to this rank (latent KV, of which one
#: prefill rank of several sends all).
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
    """A prefill rank with one request, to which a decode server of a later release is known."""

    def __init__(self, say: Dialect, **fields: Any) -> None:
        self._say = say
        self.manager, self.reader = say.listener(**fields)
        self.manager.kv_args.page_size = PAGE
        self.reader.handle(REGISTERED[say.backend])

    def announced(self, what: str) -> Any:
        """Its announcement arrives; what the manager keeps of it."""
        self.reader.handle(ANNOUNCED[self._say.backend][what])
        (info,) = bare.destinations(self.manager, ROOM)
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
    prefill.manager.rooms.withdraw(ROOM, "again")
    assert prefill.manager.sockets.sent == []


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
    assert bare.destinations(prefill.manager, ROOM) == [] and "prefix length" in caplog.text


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


# ---- the release itself ----

PROGRAM = Path(__file__).with_name("program_later.py")
KINDS: dict[str, Any] = {"nixl": NixlKVReceiver, "mooncake": MooncakeKVReceiver}


def announced_by_us(backend: str, with_frame: bool) -> list[bytes]:
    """What our decode side says of room 7 with pages 4 and 5, to a prefill server that takes a
    prefix or to another one; without NIXL's guard, which prefill takes off."""
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
        receiver.announce(pages, 3, 16, prompt_tokens=33)
    else:
        receiver.send_metadata(pages, 3, None)
    (frames,) = sent
    return frames[1:] if backend == "nixl" else frames


@pytest.mark.parametrize("backend", KINDS)
def test_our_frame_has_the_length_of_the_prompt(backend: str) -> None:
    """Guards against a comparison of lengths that prefill never makes."""
    frame = find_frame(announced_by_us(backend, with_frame=True))
    assert frame is not None and frame.prompt_tokens == 33


@pytest.fixture(scope="module")
def said() -> list[dict[str, Any]]:
    """What the real release sends, and what it understands of ours."""
    ours = {
        backend: {
            name: [frame.hex() for frame in announced_by_us(backend, with_frame)]
            for name, with_frame in (("whole prompt", False), ("with our frame", True))
        }
        for backend in KINDS
    }
    found = subprocess.run(
        [sys.executable, str(PROGRAM), json.dumps(ours)],
        env=cpu_standin.environment(os.environ | later_release.environment()),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-3000:]
    lines = [json.loads(line) for line in found.stdout.splitlines() if line.startswith("{")]
    assert lines[0] == {"version": later_release.RELEASE}
    return lines


@later_release.ON_REQUEST
@pytest.mark.parametrize("backend", KINDS)
def test_it_sends_what_our_tests_say(said: list[dict[str, Any]], backend: str) -> None:
    """Guards against frames in our tests that the release never sends."""
    sent = {
        line["sends"]: [bytes.fromhex(frame) for frame in line["frames"]]
        for line in said
        if line.get("backend") == backend and "sends" in line
    }
    assert sent.pop("registration") == REGISTERED[backend]
    assert sent == ANNOUNCED[backend]


@later_release.ON_REQUEST
@pytest.mark.parametrize("backend", KINDS)
def test_it_reads_a_whole_prompt(said: list[dict[str, Any]], backend: str) -> None:
    """What a prefill server that does not say that it takes a prefix is sent. Guards against a
    message that the later release cannot read."""
    (line,) = [x for x in said if x.get("backend") == backend and x.get("reads") == "whole prompt"]
    assert (line["room"], line["pages"], line["prefix"]) == (7, [4, 5], None)


@later_release.ON_REQUEST
@pytest.mark.parametrize("backend", KINDS)
def test_our_frame_is_not_for_it(said: list[dict[str, Any]], backend: str) -> None:
    """It raises where it reads the ninth frame as a number, on the thread that reads all messages:
    why it must never be sent one. If it stops to, a prefix may be sent in another way."""
    (line,) = [x for x in said if x.get("backend") == backend and x.get("reads") != "whole prompt"
               and "reads" in x]  # fmt: skip
    assert line["error"] in ("ValueError", "UnicodeDecodeError")
