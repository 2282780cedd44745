"""The decode ranks that NIXL knows, from two threads, and what was prepared for them."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from sglang.srt.disaggregation.delta.metrics import Reason
from sglang.srt.disaggregation.delta.nixl.descriptors import Heads, Pool
from sglang.srt.disaggregation.delta.nixl.peers import (
    OURS,
    PATIENCE_S,
    Peer,
    Peers,
    PreparedLists,
)
from sglang.srt.disaggregation.delta.peer_messages import MessageReader
from sglang.srt.disaggregation.delta.prefill.transfer_backend import TransferError
from unit.delta.nixl.fakes import FakeAgent, nixlNotFoundError

POOL = Pool((4096, 8192), (16, 8), 5, 1)


def until(condition: Any) -> None:
    """Wait for another thread."""
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def info(name: str = "d") -> Any:
    """A registration."""
    return SimpleNamespace(agent_name=name, agent_metadata=name.encode())


class Scene:
    """Peers over an agent, with a clock that the test turns."""

    def __init__(self) -> None:
        self.agent = FakeAgent()
        self.table: dict[str, Any] = {}
        self.now = 0.0
        self.peers = Peers(self.agent, self.table, lambda: self.now)

    def use(self, name: str = "d") -> Peer:
        """What a worker does for a transfer that is soon over."""
        peer = self.peers.hold(name)
        self.peers.release(peer)
        return peer

    def check(self, *names: str) -> None:
        """These are registered, and NIXL knows them and no others."""
        assert self.agent.misuse == []
        assert sorted(self.agent.peers) == sorted(self.table) == sorted(names)


@pytest.fixture
def scene() -> Scene:
    return Scene()


@pytest.mark.hazard("racing-peer-tables")
def test_nixl_is_told_by_a_worker(scene: Scene) -> None:
    """Guards against the thread that reads messages waiting for NIXL, which waits for posts; and
    against a transfer to a peer that NIXL does not know yet."""
    theirs = info()
    scene.peers.add(theirs)
    assert scene.table == {"d": theirs} and not scene.agent.calls
    scene.use()
    scene.check("d")
    scene.peers.forget("d")
    assert scene.table == {} and not scene.agent.calls["remove_remote_agent"]
    scene.peers.add(info("e"))
    scene.use("e")
    scene.check("e")


def test_refused_by_nixl(scene: Scene) -> None:
    """Guards against a peer that is half there, or can never come again."""
    scene.agent.script["add_remote_agent"].append(ValueError("metadata of another version"))
    scene.peers.add(info())
    with pytest.raises(ValueError, match="another version"):
        scene.peers.hold("d")
    scene.check()
    with pytest.raises(TransferError) as caught:
        scene.peers.hold("d")
    assert caught.value.reason is Reason.PEER_LOST
    scene.peers.add(info())
    scene.use()
    scene.check("d")


def test_registered_twice(scene: Scene) -> None:
    """Guards against loading a peer twice, and lists that are prepared again: decode registers for
    every connection that it makes."""
    scene.peers.add(info())
    before = scene.peers.hold("d")
    scene.peers.add(info())
    assert scene.peers.hold("d") is before and before.users == 2
    assert scene.agent.calls["add_remote_agent"] == 1
    scene.check("d")


@pytest.mark.hazard("racing-peer-tables")
def test_forgotten_while_something_is_under_way(scene: Scene) -> None:
    """Guards against pulling a peer away from under a transfer, and against starting another one
    meanwhile."""
    for name in ("d", "e"):
        scene.peers.add(info(name))
    first, second = scene.peers.hold("d"), scene.peers.hold("d")
    scene.peers.forget("d")
    scene.use("e")
    assert list(scene.table) == ["e"] and list(scene.agent.peers) == ["d", "e"]
    with pytest.raises(TransferError, match="decode rank d is no longer registered"):
        scene.peers.hold("d")
    scene.peers.release(first)
    scene.use("e")
    assert list(scene.agent.peers) == ["d", "e"]
    scene.peers.release(second)
    scene.peers.forget("d")  # again is harmless
    scene.use("e")
    scene.use("e")
    scene.check("e")
    assert scene.agent.calls["remove_remote_agent"] == 1


@pytest.mark.hazard("peer-lost-for-ever")
def test_back_while_something_is_under_way(scene: Scene) -> None:
    """Guards against a peer that is removed as the last word about it, although it is back; and
    against lists of its former connection."""
    scene.peers.add(info())
    held = scene.peers.hold("d")
    before = held.lists.get("VRAM", POOL)
    scene.peers.forget("d")
    scene.peers.add(info())
    again = scene.peers.hold("d")
    assert scene.agent.calls["add_remote_agent"] == 2
    assert again.lists.get("VRAM", POOL) is not before
    scene.peers.release(held)
    scene.peers.release(again)
    assert scene.use() is again
    scene.check("d")
    assert again.users == 0 and not scene.agent.calls["remove_remote_agent"]


@pytest.mark.hazard("peer-lost-for-ever")
def test_back_before_nixl_has_forgotten_it(scene: Scene) -> None:
    """Guards against a peer that is loaded over its former connection, which may be lost: NIXL
    keeps what it has of a name."""
    scene.peers.add(info())
    before = scene.use()
    scene.peers.forget("d")
    scene.peers.add(info())
    calls: list[str] = []
    for name in ("add_remote_agent", "remove_remote_agent"):
        scene.agent.before[name] = partial(calls.append, name)
    assert scene.use() is not before
    assert calls == ["remove_remote_agent", "add_remote_agent"]
    scene.check("d")


def test_refused_when_it_comes_back(scene: Scene) -> None:
    """Guards against using a peer that NIXL does not take again."""
    for name in ("d", "e"):
        scene.peers.add(info(name))
    held = scene.peers.hold("d")
    scene.peers.forget("d")
    scene.agent.script["add_remote_agent"].append(ValueError())
    scene.peers.add(info())
    with pytest.raises(ValueError):
        scene.peers.hold("d")
    assert list(scene.table) == ["e"]
    with pytest.raises(TransferError):
        scene.peers.hold("d")
    scene.peers.release(held)
    scene.use("e")
    scene.check("e")


def test_nixl_cannot_forget_it(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    """Guards against one peer's trouble that keeps a worker from the others."""
    for name in ("d", "e", "f"):
        scene.peers.add(info(name))
        scene.use(name)
    scene.agent.script["remove_remote_agent"].append(nixlNotFoundError("d"))
    scene.peers.forget("d")
    scene.peers.forget("e")
    scene.use("f")
    assert "could not remove decode rank d" in caplog.text
    assert list(scene.table) == ["f"] and list(scene.agent.peers) == ["d", "f"]


def test_a_stranger(scene: Scene) -> None:
    """Guards against an entry for a name that was only asked for, and against a word to NIXL about
    a peer that it was never told of."""
    scene.peers.forget("nobody")
    with pytest.raises(TransferError):
        scene.peers.hold("nobody")
    scene.peers.add(info("unused"))
    scene.peers.forget("unused")
    scene.peers.add(info())
    scene.use()
    scene.check("d")
    assert scene.agent.calls["remove_remote_agent"] == 0


@pytest.mark.hazard("racing-peer-tables")
@pytest.mark.parametrize("rounds", [300])
def test_threads(scene: Scene, rounds: int) -> None:
    """Guards against a count of users that goes wrong between the reader and the workers: below
    zero, or never back to it."""
    lowest: list[int] = []

    def use() -> None:
        for _ in range(rounds):
            try:
                peer = scene.peers.hold("d")
            except TransferError:
                continue
            lowest.append(scene.peers.share(peer).users)
            scene.peers.release(peer)
            scene.peers.release(peer)
            lowest.append(peer.users)

    def come_and_go() -> None:
        for _ in range(rounds):
            scene.peers.add(info())
            scene.peers.forget("d")

    with ThreadPoolExecutor(6) as threads:
        futures = [threads.submit(use) for _ in range(4)]
        futures += [threads.submit(come_and_go) for _ in range(2)]
        for future in futures:
            future.result()
    assert min(lowest, default=0) >= 0
    scene.peers.add(info("e"))
    scene.use("e")
    scene.check("e")


@pytest.mark.hazard("racing-peer-tables")
def test_peers_change_between_posts(scene: Scene) -> None:
    """Guards against a change of NIXL's peers that waits for a post inside NIXL, where a release by
    a third thread waits for both with the interpreter's lock; against a post that begins meanwhile;
    and against workers that cannot take or give back a peer, and a reader thread that cannot add or
    forget one, in all that time."""
    for name in ("d", "e"):
        scene.peers.add(info(name))
        scene.use(name)
    posting, posted, order = threading.Event(), threading.Event(), []
    changing, changed = threading.Event(), threading.Event()

    def post() -> None:
        with scene.peers.posting():
            posting.set()
            assert posted.wait(10)
            order.append("posted")

    def change(name: str) -> None:
        order.append(name)
        changing.set()
        assert changed.wait(10)

    def post_again() -> None:
        with scene.peers.posting():
            order.append("posted again")

    scene.agent.before["add_remote_agent"] = lambda: change("added")
    with ThreadPoolExecutor(4) as threads:
        futures = [threads.submit(post)]
        assert posting.wait(10)
        scene.peers.add(info("f"))
        futures.append(threads.submit(scene.use, "f"))
        until(lambda: scene.peers._is_changing)
        futures.append(threads.submit(post_again))
        scene.use()
        assert order == []
        posted.set()
        assert changing.wait(10)
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
    """Guards against a change of NIXL's peers that waits for a post that hangs, and for each rank
    of a decode server anew: it holds up the posts of all other workers. And against changes that
    stay refused once the post has returned."""
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
                refused = threads.submit(scene.use, name).exception(PATIENCE_S / 2)
                assert isinstance(refused, TransferError)
                assert f"decode rank {name} cannot be registered" in str(refused)
            scene.peers.forget("e")
            threads.submit(scene.use, "d").result(PATIENCE_S / 2)
            assert sorted(scene.agent.peers) == ["d", "e"]
            threads.submit(post_again).result(10)
        scene.use("f")
    assert sorted(scene.agent.peers) == ["d", "f"], "without the one that had to stay"
    scene.use("g")
    scene.check("d", "f", "g")


@pytest.mark.hazard("racing-peer-tables")
def test_nothing_on_the_reader_thread_waits_for_nixl(scene: Scene) -> None:
    """A worker hangs in a call that tells NIXL of a rank. Guards against a thread that then reads
    no messages: no rank is answered, nothing is withdrawn, and at last every room fails."""
    hangs, goes_on = threading.Event(), threading.Event()

    def hang() -> None:
        hangs.set()
        assert goes_on.wait(20)

    def register(frames: list[bytes]) -> None:
        scene.peers.add(info(frames[0].decode()))
        scene.peers.forget("e")

    scene.peers.add(info("e"))
    scene.use("e")
    scene.agent.before["add_remote_agent"] = hang
    reader = MessageReader(lambda message: None, register)
    with ThreadPoolExecutor(2) as threads:
        reader.handle([b"d"])
        held = threads.submit(scene.use)
        assert hangs.wait(10)
        try:
            threads.submit(reader.handle, [b"f"]).result(10)
            assert list(scene.table) == ["d", "f"]
        finally:
            goes_on.set()
        held.result(10)
    scene.use("f")
    scene.check("d", "f")


def test_lists_go_between_posts(scene: Scene) -> None:
    """Guards against lists of a peer that has left which are released whenever Python likes: NIXL
    waits for the posts of others to do so, with the interpreter's lock."""
    for name in ("d", "e"):
        scene.peers.add(info(name))
    held = scene.peers.hold("d")
    alone: list[bool] = []
    weakref.finalize(held.lists.get("VRAM", POOL), lambda: alone.append(scene.peers._is_changing))
    scene.agent.lists.clear()  # a note of the fake's
    scene.peers.forget("d")
    scene.peers.release(held)
    del held
    assert alone == []
    scene.use("e")
    assert alone == [True]
    scene.check("e")


# ---- prepared lists ----


def test_prepared_once_by_whoever_comes_first() -> None:
    """Guards against preparing a list for every worker: that takes a second for a large pool."""
    agent = FakeAgent(peers={"d": object()})
    lists = PreparedLists(agent, "d")
    all_here, second = threading.Barrier(8), threading.Event()

    def prepare() -> None:
        """It takes so long that a second one would begin meanwhile."""
        if agent.calls["prep_xfer_dlist"] == 1:
            second.wait(0.1)
        else:
            second.set()

    agent.before["prep_xfer_dlist"] = prepare

    def get(_: int) -> Any:
        all_here.wait()
        return lists.get("VRAM", POOL)

    with ThreadPoolExecutor(8) as threads:
        found = set(map(id, threads.map(get, range(8))))
    assert len(found) == 1 and agent.calls["prep_xfer_dlist"] == 1
    assert lists.get("DRAM", POOL) is not lists.get("VRAM", POOL)
    assert agent.calls["prep_xfer_dlist"] == 2


@pytest.mark.parametrize("owner", [OURS, "d"])
@pytest.mark.parametrize("error", [ValueError(), TypeError()])
def test_an_older_nixl(owner: str, error: Exception) -> None:
    """Guards against losing prepared lists, or a list of other memory, where the short form is not
    known."""
    agent, older = (FakeAgent(peers={"d": object()}) for _ in range(2))
    older.script["prep_xfer_dlist"].append(error)
    new, old = (PreparedLists(each, owner).get("VRAM", POOL) for each in (agent, older))
    assert new is not None and old is not None
    assert new.entries == old.entries and len(old.entries) == 10
    assert (new.owner, new.memory) == (old.owner, old.memory) == (owner.strip(OURS), "VRAM")


@pytest.mark.parametrize("memory", ["VRAM", "DRAM"])
def test_lists_that_cannot_be_prepared(memory: str, caplog: pytest.LogCaptureFixture) -> None:
    """Guards against asking again for every chunk, and a complaint each time."""
    agent = FakeAgent(peers={"d": object()})
    agent.script["prep_xfer_dlist"].extend([RuntimeError("no memory")])
    lists = PreparedLists(agent, "d")
    assert [lists.get(memory, POOL) for _ in range(3)] == [None] * 3
    assert agent.calls["prep_xfer_dlist"] == 1
    assert caplog.text.count("could not prepare 2 buffers of decode rank d") == 1


def test_pools_that_selectors_cannot_name() -> None:
    """Guards against a list of gigabytes, and against a failure where ranges would do."""
    agent = FakeAgent(peers={"d": object()})
    assert PreparedLists(agent, "d").get("VRAM", Pool((0, 0), (1, 1), 2**31, 0)) is None
    assert agent.calls["prep_xfer_dlist"] == 0


@pytest.mark.hazard("foreign-geometry")
def test_a_second_pool_of_one_kind() -> None:
    """Guards against selecting from a list of another pool, and against a peer that has new lists
    made for each of its announcements."""
    agent = FakeAgent(peers={"d": object()})
    lists = PreparedLists(agent, "d")
    first = lists.get("VRAM", POOL)
    for slots in (4, 6):
        assert lists.get("VRAM", Pool(POOL.bases, POOL.item_lens, slots, 1)) is None
    assert lists.get("VRAM", Pool(POOL.bases, POOL.item_lens, 5, 1)) is first
    assert agent.calls["prep_xfer_dlist"] == 1


def test_each_choice_of_heads_has_its_list() -> None:
    """Guards against decode ranks of which only the first gets prepared lists of this rank, and
    against a list for each of those that are sent the same heads."""
    agent = FakeAgent()
    lists = PreparedLists(agent, OURS)
    halves = [Pool((first, 99), (3, 3), 8, 1, Heads(first, 3, 4, (6, 6))) for first in (0, 3)]
    found = [lists.get("VRAM", pool) for pool in (POOL, *halves, *halves)]
    assert None not in found and found[1:3] == found[3:] and len({*map(id, found)}) == 3
    assert agent.calls["prep_xfer_dlist"] == 3
    more = Pool(halves[0].bases, (3, 3), 12, 1, halves[0].heads)
    assert lists.get("VRAM", more) is None and agent.calls["prep_xfer_dlist"] == 3


def test_lists_go_with_their_peer(scene: Scene) -> None:
    """Guards against lists that stay in NIXL for every decode server that ever was; but what is
    selected from them keeps them."""
    scene.peers.add(info())
    peer = scene.peers.hold("d")
    kept = peer.lists.get("VRAM", POOL)
    gone = weakref.ref(peer.lists.get("DRAM", POOL))
    scene.agent.lists.clear()
    scene.peers.release(peer)
    scene.peers.forget("d")
    scene.peers.add(info("e"))
    scene.use("e")
    del peer
    gc.collect()
    assert gone() is None and kept.entries
