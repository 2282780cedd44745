"""The real SGLang 0.5.12.post1 and this release, message by message, in both directions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import later_release
from component import programs
from component.interop.frames import ANNOUNCED, REGISTERED, RELEASE
from component.transfer.bare import decode
from sglang.srt.disaggregation.mooncake.conn import MooncakeKVReceiver
from sglang.srt.disaggregation.nixl.conn import NixlKVReceiver

pytestmark = later_release.ON_REQUEST
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
        receiver.announce(pages, 3, 16)
    else:
        receiver.send_metadata(pages, 3, None)
    (frames,) = sent
    return frames[1:] if backend == "nixl" else frames


@pytest.fixture(scope="module")
def said() -> list[dict[str, Any]]:
    """What the real release sends, and what it understands of ours."""
    environment = later_release.environment() | {"SGLANG_CPU_STANDIN": "1"}
    ours = {
        backend: {
            name: [frame.hex() for frame in announced_by_us(backend, with_frame)]
            for name, with_frame in (("whole prompt", False), ("with our frame", True))
        }
        for backend in KINDS
    }
    found = subprocess.run(
        [sys.executable, str(PROGRAM), json.dumps(ours)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-3000:]
    lines = [json.loads(line) for line in found.stdout.splitlines() if line.startswith("{")]
    assert lines[0] == {"version": RELEASE}
    return lines


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


@pytest.mark.parametrize("backend", KINDS)
def test_it_reads_a_whole_prompt(said: list[dict[str, Any]], backend: str) -> None:
    """What a prefill server that does not say that it takes a prefix is sent. Guards against a
    message that the later release cannot read."""
    (line,) = [x for x in said if x.get("backend") == backend and x.get("reads") == "whole prompt"]
    assert (line["room"], line["pages"], line["prefix"]) == (7, [4, 5], None)


@pytest.mark.parametrize("backend", KINDS)
def test_our_frame_is_not_for_it(said: list[dict[str, Any]], backend: str) -> None:
    """It raises where it reads the ninth frame as a number, on the thread that reads all messages:
    why it must never be sent one. If it stops to, a prefix may be sent in another way."""
    (line,) = [x for x in said if x.get("backend") == backend and x.get("reads") != "whole prompt"
               and "reads" in x]  # fmt: skip
    assert line["error"] in ("ValueError", "UnicodeDecodeError")


@pytest.fixture(scope="module")
def transfers() -> str:
    """What the transfers over NIXL between the two releases printed."""
    later_release.installed()
    return programs.run(__file__, "program_nixl.py")


@pytest.mark.parametrize("scenario", ["later_decode", "later_prefill"])
def test_pages_over_nixl(transfers: str, scenario: str) -> None:
    """Guards against bytes in the wrong pages, and against notifications that the other release
    does not understand: partial and full hits and whole prompts, in both directions."""
    programs.passed(transfers, scenario)
