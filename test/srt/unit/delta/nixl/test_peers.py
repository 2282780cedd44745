"""The decode ranks that NIXL knows, from two threads, and their prepared lists."""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from effort import tries
from sglang.srt.disaggregation.delta.metrics import Reason
from sglang.srt.disaggregation.delta.nixl import conn
from sglang.srt.disaggregation.delta.nixl.conn import (
    OURS,
    NixlPeers,
    Peer,
    PreparedLists,
)
from sglang.srt.disaggregation.delta.nixl.descriptors import Heads, Pool
from sglang.srt.disaggregation.delta.prefill.transfer_backend import TransferError
from unit.delta.nixl.fakes import FakeAgent, nixlNotFoundError

#: Instead of seconds that a slow machine may need.
PATIENCE_S = 60.0
POOL = Pool((4096, 8192), (16, 8), 5, 1)


def until(condition: Any) -> None:
    """Wait until another thread has made the condition true."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def info(name: str = "d") -> Any:
    """Return a registration."""
    return SimpleNamespace(agent_name=name, agent_metadata=name.encode())


class Scene:
    """NixlPeers over an agent, with a clock that the test advances."""

    def __init__(self) -> None:
        self.agent = FakeAgent()
        self.table: dict[str, Any] = {}
        self.now = 0.0
        self.peers = NixlPeers(self.agent, self.table, lambda: self.now)

    def use(self, name: str = "d") -> Peer:
        """Hold and release a peer as a worker does for a short transfer."""
        peer = self.peers.hold(name)
        self.peers.release(peer)
        return peer

    def check(self, *names: str) -> None:
        """Assert that these and no other peers are registered and known to NIXL."""
        assert self.agent.misuse == []
        assert sorted(self.agent.peers) == sorted(self.table) == sorted(names)


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    monkeypatch.setattr(conn, "PATIENCE_S", PATIENCE_S)
    return Scene()


class Lives(RuleBasedStateMachine):
    """Two decode ranks register, are held and are forgotten, in any order, against a model of each
    step."""

    names = st.sampled_from("de")
    #: Steps with an effect, over all examples.
    did: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.scene = Scene()
        self.held: list[Peer] = []
        #: By name: the list that was made for the rank's pool since its last registration.
        self.lists: dict[str, Any] = {}

    @rule(name=names)
    def add(self, name: str) -> None:
        """Register the rank; harmless if repeated."""
        calls = self.scene.agent.calls.copy()
        if name not in self.scene.table:
            self.lists.pop(name, None)
        self.scene.peers.add(info(name))
        assert self.scene.agent.calls == calls, "the reader's thread calls NIXL"

    @rule(name=names)
    def forget(self, name: str) -> None:
        """Forget the rank; harmless if repeated, or for an unknown rank."""
        calls = self.scene.agent.calls.copy()
        self.scene.peers.forget(name)
        assert self.scene.agent.calls == calls, "the reader's thread calls NIXL"

    @rule(name=names, error=st.sampled_from([None, None, None, ValueError("another version")]))
    def hold(self, name: str, error: Exception | None) -> None:
        """Begin a transfer as a worker does; NIXL may refuse the peer."""
        agent, is_known = self.scene.agent, name in self.scene.table
        agent.script["add_remote_agent"].append(error)
        asked = agent.calls["add_remote_agent"]
        try:
            peer = self.scene.peers.hold(name)
        except TransferError as caught:
            assert not is_known and caught.reason is Reason.PEER_LOST
            assert f"decode rank {name} is no longer registered" in str(caught)
        except ValueError as caught:
            assert caught is error and is_known
            assert name not in self.scene.table, "the peer is half registered"
            self.did["refused"] += 1
        else:
            assert is_known and name in agent.peers
            self.held.append(peer)
            found = peer.lists.get("VRAM", POOL)
            assert self.lists.setdefault(name, found) is found, "prepared again"
            assert sum(found is each for each in self.lists.values()) == 1
            self.did["again" if agent.calls["add_remote_agent"] == asked else "loaded"] += 1
        agent.script["add_remote_agent"].clear()

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """End a transfer."""
        peer = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.scene.peers.release(peer)

    @invariant()
    def nixl_keeps_who_is_in_use(self) -> None:
        """Assert that NIXL knows the peers in use, and is used correctly."""
        assert {peer.name for peer in self.held} <= set(self.scene.agent.peers)
        assert self.scene.agent.misuse == []

    def teardown(self) -> None:
        """Forget both ranks; the next worker must remove them from NIXL, once."""
        for name in "de":
            self.scene.peers.forget(name)
        for peer in self.held:
            self.scene.peers.release(peer)
        self.scene.peers.add(info("f"))
        self.scene.use("f")
        self.scene.use("f")
        self.scene.check("f")
        calls = self.scene.agent.calls
        self.did["removed"] += calls["remove_remote_agent"]


@pytest.mark.hazard("racing-peer-tables", "peer-lost-for-ever")
@pytest.mark.fuzz
def test_any_order() -> None:
    """Guards against a reader's thread that waits for NIXL, a peer that is removed during a
    transfer, one that is half registered or can never return, one that is loaded over its former
    connection, and lists of that connection."""
    Lives.did.clear()
    run_state_machine_as_test(
        Lives, settings=settings(max_examples=tries(60), stateful_step_count=30, deadline=None)
    )
    least = min(Lives.did[what] for what in ("refused", "again", "loaded", "removed"))
    assert least > tries(60) / 20


def test_nixl_cannot_forget_it(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    """Guards against one peer's error that keeps a worker from the others."""
    for name in ("d", "e", "f"):
        scene.peers.add(info(name))
        scene.use(name)
    scene.agent.script["remove_remote_agent"].append(nixlNotFoundError("d"))
    scene.peers.forget("d")
    scene.peers.forget("e")
    scene.use("f")
    assert "could not remove decode rank d" in caplog.text
    assert list(scene.table) == ["f"] and list(scene.agent.peers) == ["d", "f"]


@pytest.mark.hazard("racing-peer-tables")
def test_peers_change_between_posts(scene: Scene) -> None:
    """Guards against a change of NIXL's peers that waits for a post inside NIXL, where a release by
    a third thread waits for both with the interpreter's lock; against a post that begins during the
    change; and against workers that cannot hold or release a peer, and a reader's thread that
    cannot add or forget one, in all that time."""
    for name in ("d", "e"):
        scene.peers.add(info(name))
        scene.use(name)
    posting, posted, order = threading.Event(), threading.Event(), []
    changing, changed = threading.Event(), threading.Event()

    def post() -> None:
        with scene.peers.posting():
            posting.set()
            assert posted.wait(60)
            order.append("posted")

    def change(name: str) -> None:
        order.append(name)
        changing.set()
        assert changed.wait(60)

    def post_again() -> None:
        with scene.peers.posting():
            order.append("posted again")

    scene.agent.before["add_remote_agent"] = lambda: change("added")
    with ThreadPoolExecutor(4) as threads:
        futures = [threads.submit(post)]
        assert posting.wait(60)
        scene.peers.add(info("f"))
        futures.append(threads.submit(scene.use, "f"))
        until(lambda: scene.peers._is_changing)
        futures.append(threads.submit(post_again))
        scene.use()
        assert order == []
        posted.set()
        assert changing.wait(60)
        scene.use()
        scene.peers.add(info("g"))
        scene.peers.forget("g")
        assert order == ["posted", "added"]
        changed.set()
        for future in futures:
            future.result()
    assert order == ["posted", "added", "posted again"]
    scene.check("d", "e", "f")


@pytest.mark.hazard("racing-peer-tables")
def test_a_post_that_hangs(scene: Scene) -> None:
    """Guards against a change of NIXL's peers that waits for a hanging post, again for each rank of
    a decode server, which blocks the posts of all other workers; and against changes that stay
    refused once the post has returned."""
    for name in ("d", "e"):
        scene.peers.add(info(name))
        scene.use(name)

    def post_again() -> None:
        with scene.peers.posting():
            pass

    with ThreadPoolExecutor(1) as threads:
        with scene.peers.posting():
            scene.now += PATIENCE_S
            for name in ("f", "g"):
                scene.peers.add(info(name))
                refused = threads.submit(scene.use, name).exception(0.9 * PATIENCE_S)
                assert isinstance(refused, TransferError)
                assert f"decode rank {name} cannot be registered" in str(refused)
            scene.peers.forget("e")
            threads.submit(scene.use, "d").result(0.9 * PATIENCE_S)
            assert sorted(scene.agent.peers) == ["d", "e"]
            threads.submit(post_again).result(60)
        scene.use("f")
    assert sorted(scene.agent.peers) == ["d", "f"], "the removed peer has gone"
    scene.use("g")
    scene.check("d", "f", "g")
    scene.peers.forget("f")
    scene.use("d")
    scene.check("d", "g")


def test_lists_go_with_their_peer(scene: Scene) -> None:
    """Guards against lists that stay in NIXL for every decode server that ever registered, because
    their selections keep them; and against lists that Python releases at any time: NIXL waits for
    other posts during a release, with the interpreter's lock."""
    for name in ("d", "e"):
        scene.peers.add(info(name))
    held, order = scene.peers.hold("d"), list[str]()
    kept = held.lists.get("VRAM", POOL)
    weakref.finalize(held.lists.get("DRAM", POOL), order.append, "released")
    scene.agent.before["remove_remote_agent"] = lambda: order.append("removed")
    scene.agent.lists.clear()  # only the fake's record of them
    scene.peers.forget("d")
    scene.peers.release(held)
    del held
    assert order == []
    scene.use("e")  # changes peers between posts
    assert order == ["released", "removed"] and kept.entries
    scene.check("e")


# ---- prepared lists ----


def test_lists_that_cannot_be_prepared(caplog: pytest.LogCaptureFixture) -> None:
    """Guards against a new attempt for every chunk, a complaint each time, a list of gigabytes that
    no selector can name, and a failure although ranges would work."""
    agent = FakeAgent(peers={"d": object()})
    agent.script["prep_xfer_dlist"].append(RuntimeError("no memory"))
    lists = PreparedLists(agent, "d")
    assert [lists.get("VRAM", POOL) for _ in range(3)] == [None] * 3
    assert lists.get("DRAM", Pool((0, 0), (1, 1), 2**31, 0)) is None
    assert agent.calls["prep_xfer_dlist"] == 1
    assert caplog.text.count("could not prepare 2 buffers of decode rank d") == 2


@pytest.mark.hazard("foreign-geometry")
def test_a_list_for_each_choice_of_heads() -> None:
    """Guards against selecting from a list of another pool; against decode ranks of which only the
    first gets prepared lists of this rank; against a list for each of several decode ranks that get
    the same heads; and against a peer that causes new lists with each of its announcements."""
    agent = FakeAgent()
    lists = PreparedLists(agent, OURS)
    halves = [Pool((first, 99), (3, 3), 8, 1, Heads(first, 3, 4, (6, 6))) for first in (0, 3)]
    found = [lists.get("VRAM", pool) for pool in (POOL, *halves) * 2]
    assert None not in found and found[:3] == found[3:] and len({*map(id, found)}) == 3
    for slots in (4, 6):
        assert lists.get("VRAM", Pool(POOL.bases, POOL.item_lens, slots, 1)) is None
    assert lists.get("VRAM", Pool(halves[0].bases, (3, 3), 12, 1, halves[0].heads)) is None
    assert agent.calls["prep_xfer_dlist"] == 3
