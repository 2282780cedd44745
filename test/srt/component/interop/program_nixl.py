"""Our side of a NIXL transfer with the later release, which runs in a process of its own; prints
one line for each scenario. Run by ``test_later_release.py``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import later_release
from component import programs
from component.interop.frames import RELEASE
from component.nixl.pair import Pair, Side
from component.transfer.pair import ADDRESS, pages, until
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.delta import capability
from sglang.srt.disaggregation.nixl import conn
from sglang.srt.disaggregation.utils import DisaggregationMode


class Later:
    """The other process."""

    def __init__(self, role: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("program_later_nixl.py")), role],
            env=os.environ | later_release.environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        hello = self.hear()
        assert hello["version"] == RELEASE
        self.port = hello["port"]

    def say(self, **what: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                heard: dict[str, Any] = json.loads(line)
                return heard
        raise EOFError(f"the later release ended with {self._process.wait()}")


def later_decode() -> None:
    """Partial hits, a full hit, and a room without a prefix, from our prefill rank."""
    prefill = Side("prefill", DisaggregationMode.PREFILL)
    for layer, tensor in enumerate(prefill.kv):
        tensor += 1.0 + 1000 * layer
        for page in range(len(tensor)):
            tensor[page] += page
    prefill.manager._start_bootstrap_thread()
    later = Later("decode")
    rooms = [
        {"room": 301, "pages": [20, 9, 11], "slot": 5, "prefix": 8},
        {"room": 302, "pages": [], "slot": 6, "prefix": 20},
        {"room": 303, "pages": [1, 2, 3, 4, 5], "slot": 7, "prefix": 0},
    ]
    later.say(prefill_port=prefill.manager.rank_port, rooms=rooms)
    for wanted, sources in zip(rooms, ([30, 31, 2], [], [40, 7, 8, 9, 41]), strict=True):
        sender = conn.NixlKVSender(prefill.manager, ADDRESS, wanted["room"], [0], 0)
        until(lambda made=sender: made.poll() == KVPoll.WaitingForInput, "announcement")
        prefill.aux[3] = wanted["room"]
        sender.init(5, 3)  # the whole prompt has 5 pages of 4 tokens
        assert sender.decode_prefix_len == wanted["prefix"]
        assert sender.num_kv_indices == len(sources)
        for chunk in (sources[:2], sources[2:]) if sources else ([],):
            sender.send(pages(*chunk))
        until(lambda made=sender: made.poll() in (KVPoll.Success, KVPoll.Failed), "delivered")
        heard = later.hear()
        assert sender.poll() == KVPoll.Success and heard["state"] == KVPoll.Success, heard
        expected = [[float(layer[page, 0]) for page in sources] for layer in prefill.kv]
        assert heard["arrived"] == expected and heard["metadata"] == wanted["room"], heard
        sender.clear()


class Ours(Pair):
    """Our decode rank before the other process's prefill rank."""

    def __init__(self, port: int) -> None:
        self.decode = Side("decode", DisaggregationMode.DECODE)
        self.prefill = type("Later", (), {"manager": type("M", (), {"rank_port": port})})
        manager = self.decode.manager
        manager.servers._capabilities[ADDRESS] = capability.STOCK
        manager.servers._epochs[ADDRESS] = 1
        self.connect()


def later_prefill() -> None:
    """Whole prompts from its prefill rank, told in SGLang's own words."""
    later = Later("prefill")
    ours = Ours(later.port)
    rooms = [{"room": 401, "pages": [30, 31, 2], "slot": 3}, {"room": 402, "pages": [7], "slot": 4}]
    later.say(rooms=rooms)
    for at, (wanted, targets) in enumerate(zip(rooms, ([20, 9, 11], [13]), strict=True)):
        receiver = ours.receiver(wanted["room"])
        if not at:
            receiver._register_kv_args()
        assert not ours.decode.manager.peer_takes_delta(ADDRESS)
        receiver.send_metadata(pages(*targets), 5, None)
        until(lambda made=receiver: made.poll() in (KVPoll.Success, KVPoll.Failed), "arrived")
        assert receiver.poll() == KVPoll.Success
        assert later.hear() == {"state": KVPoll.Success, "prefix": 0}
        for layer, tensor in enumerate(ours.decode.kv):
            expected = [page + 1 + 1000 * layer for page in wanted["pages"]]
            assert [float(tensor[page, 0]) for page in targets] == expected
        assert int(ours.decode.aux[5, 0]) == 77
        receiver.clear()


programs.run_scenarios({each.__name__: each for each in (later_decode, later_prefill)})
