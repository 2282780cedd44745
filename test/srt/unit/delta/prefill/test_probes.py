"""Decode ranks without a heartbeat that are gone, and what prefill keeps of them."""

from __future__ import annotations

import socket
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from sglang.srt.disaggregation.delta.prefill import decode_ranks
from sglang.srt.disaggregation.delta.prefill.decode_ranks import DecodeRanks, Probes
from sglang.srt.disaggregation.delta.prefill.room_table import RoomTable
from unit.delta.fakes import Clock, Manager

PATIENCE_S = 120.0


def rank(port: int) -> Any:
    """What a decode rank registered."""
    return SimpleNamespace(endpoint="10.0.0.1", dst_port=port)


class Scene:
    """Ranks at ports, of which some are open."""

    def __init__(self) -> None:
        self.clock, self.open, self.probed = Clock(), {1, 2}, 0
        self.registered: dict[str, Any] = {"old": rank(1), "other": rank(2)}
        self.pinging: set[str] = set()
        self.pending: list[Callable[[], None]] = []
        self.is_slow = False
        self.probes = Probes(PATIENCE_S, self.clock, self._answers, self._start)

    def _answers(self, host: str, port: int) -> bool:
        self.probed += 1
        return port in self.open

    def _start(self, probe: Callable[[], None]) -> None:
        if self.is_slow:
            self.pending.append(probe)
        else:
            probe()

    def run(self, seconds: float) -> list[str]:
        """Time passes, with a tick every second; who was found gone."""
        found = []
        for _ in range(int(seconds)):
            self.clock.now += 1
            found += self.probes.gone(self.registered, self.pinging)
        return found


def test_a_rank_at_whose_port_nobody_listens() -> None:
    """Guards against what a restarted decode server left behind staying for ever, and against one
    that answers being forgotten: it would not register again, and its rooms would wait 300 s."""
    scene = Scene()
    assert scene.run(1000) == []
    scene.open.remove(1)
    assert scene.run(PATIENCE_S - 31) == []
    assert scene.run(62) == ["old"]
    del scene.registered["old"]
    assert scene.run(1000) == [] and list(scene.probes._unanswered) == ["other"]


def test_a_rank_that_never_answered() -> None:
    """NIXL needs no way to that port. Guards against decode ranks behind a firewall that prefill
    forgets, though it reaches their memory."""
    scene = Scene()
    scene.open.clear()
    assert scene.run(1000) == []


def test_one_answer_is_enough() -> None:
    """Guards against a rank that is forgotten for a network that was away for a moment."""
    scene = Scene()
    for _ in range(5):
        scene.open.remove(1)
        assert scene.run(60) == []
        scene.open.add(1)
        assert scene.run(40) == []


def test_a_rank_that_registered_again() -> None:
    """Guards against probes of the rank that had its name before."""
    scene = Scene()
    scene.run(100)
    scene.open.clear()
    assert scene.run(PATIENCE_S - 31) == []
    scene.registered = {"old": rank(1)}
    assert scene.run(1000) == []


def test_ranks_that_ping_are_not_probed() -> None:
    """They have a sign of their own, which says more: the port of a frozen process answers."""
    scene = Scene()
    scene.open.clear()
    scene.pinging = {"old", "other"}
    assert scene.run(1000) == [] and scene.probed == 0


def test_a_process_that_did_not_run() -> None:
    """Guards against everybody being forgotten after a prefill process was stopped for minutes."""
    scene = Scene()
    scene.run(100)
    scene.open.clear()
    scene.clock.now += 10_000
    assert scene.probes.gone(scene.registered, ()) == []
    assert scene.run(60) == []


def test_a_round_that_takes_long() -> None:
    """Guards against a reader thread that waits for addresses that do not answer, and against a
    second round beside the first."""
    scene = Scene()
    scene.is_slow = True
    scene.run(1000)
    assert len(scene.pending) == 1 and scene.probed == 0
    scene.pending.pop()()
    scene.run(31)
    assert len(scene.pending) == 1 and scene.probed == 2


def test_a_real_port() -> None:
    """Guards against a probe that takes an open port for a closed one, or raises."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert decode_ranks._answers("127.0.0.1", port)
    assert not decode_ranks._answers("127.0.0.1", port)
    assert not decode_ranks._answers("no such host.invalid", 1)


def test_prefill_forgets_it() -> None:
    """Guards against a probe whose result nobody uses: its rooms fail, and the backend is told."""
    scene, manager = Scene(), Manager()
    manager.decode_kv_args_table = scene.registered
    manager.rooms = RoomTable(manager, scene.clock)
    ranks = manager.decode_ranks = DecodeRanks(manager, manager.rooms, scene.clock, scene.probes)
    silent: list[str] = []
    for seconds in range(200):
        if seconds == 60:
            scene.open.remove(1)
        scene.clock.now += 1
        for peer in ranks.tick():
            silent.append(peer)
            del scene.registered[peer]
    assert silent == ["old"]
