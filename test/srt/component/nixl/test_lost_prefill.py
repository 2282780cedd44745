"""A decode server without the radix flag, whose prefill server dies: SGLang's own heartbeat."""

from __future__ import annotations

import time
from typing import Any

import pytest

from component.transfer import bare
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.delta.wire import parse
from sglang.srt.disaggregation.nixl.conn import NixlKVReceiver

ROOM = 5


class Scene:
    """One room in transfer, and a scheduler that polls it while the heartbeat gives it up."""

    def __init__(self) -> None:
        self.manager = bare.decode("nixl", ROOM)
        self.manager.servers = None
        self.manager.waiting_timeout = 300.0
        self.receiver: Any = NixlKVReceiver.__new__(NixlKVReceiver)
        self.receiver.__dict__.update(
            kv_mgr=self.manager,
            bootstrap_addr=bare.ADDRESS,
            bootstrap_room=ROOM,
            conclude_state=None,
            started_transfer=True,
            init_time=time.time(),
        )
        self.polls: list[Any] = []

    def arrive(self, *texts: bytes) -> None:
        """Prefill's notifications of the room."""
        for text in texts:
            self.manager.transfer_statuses[ROOM].take(parse(text), 1)

    def lose(self) -> None:
        """The heartbeat gives prefill up; the scheduler's poll comes in between, after the room's
        record says that it failed, and before its status does."""
        update = self.manager.update_status

        def poll_first(room: int, status: Any) -> None:
            self.manager.update_status = update
            self.polls.append(self.receiver.poll())
            update(room, status)

        self.manager.update_status = poll_first
        self.manager._handle_node_failure(bare.ADDRESS)
        self.polls.append(self.receiver.poll())


@pytest.fixture
def scene() -> Scene:
    return Scene()


@pytest.mark.hazard("dead-peer-leftovers")
@pytest.mark.parametrize("arrived", [(), (b"5_kv_0_0_0", b"5_aux_0")], ids=["nothing", "a part"])
def test_a_poll_between_the_two_words_of_a_heartbeat(
    scene: Scene, arrived: tuple[bytes, ...]
) -> None:
    """Guards against a dead prefill server whose rooms decode reports as delivered: the client
    would get tokens computed from whatever its pages held."""
    scene.arrive(*arrived)
    scene.lose()
    assert KVPoll.Success not in scene.polls and scene.polls[-1] == KVPoll.Failed


def test_everything_had_arrived(scene: Scene) -> None:
    """Guards against a room that is complete and fails because its server died afterwards, in the
    same moment."""
    scene.arrive(b"5_kv_0_1_0", b"5_aux_0")
    scene.lose()
    assert scene.polls == [KVPoll.Success] * 2
