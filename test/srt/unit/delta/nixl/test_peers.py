"""The decode ranks that NIXL knows, from two threads, and what was prepared for them."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from sglang.srt.disaggregation.delta.metrics import Reason
from sglang.srt.disaggregation.delta.nixl.descriptors import Heads, Pool
from sglang.srt.disaggregation.delta.nixl.peers import OURS, Peers, PreparedLists
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
    """Peers over an agent."""

    def __init__(self) -> None:
        self.agent = FakeAgent()
        self.table: dict[str, Any] = {}
        self.peers = Peers(self.agent, self.table)

    def check(self) -> None:
        """What NIXL knows, what is published and what is kept are the same."""
        assert self.agent.misuse == []
        assert set(self.agent.peers) == set(self.table) == set(self.peers._peers)


@pytest.fixture
def scene() -> Scene:
    return Scene()


@pytest.mark.hazard("racing-peer-tables")
def test_published_when_nixl_has_taken_it(scene: Scene) -> None:
    """Guards against a room that starts for a peer which NIXL does not know yet."""
    seen: list[Any] = []
    scene.agent.before["add_remote_agent"] = lambda: seen.append(dict(scene.table))
    theirs = info()
    scene.peers.add(theirs)
    assert seen == [{}] and scene.table == {"d": theirs}
    scene.check()


def test_refused_by_nixl(scene: Scene) -> None:
    """Guards against a peer that is half there, or can never come again."""
    scene.agent.script["add_remote_agent"].append(ValueError("metadata of another version"))
    with pytest.raises(ValueError, match="another version"):
        scene.peers.add(info())
    scene.check()
    assert scene.table == {}
    with pytest.raises(TransferError) as caught:
        scene.peers.hold("d")
    assert caught.value.reason is Reason.PEER_LOST
    scene.peers.add(info())
    assert list(scene.table) == ["d"]
    scene.check()


def test_registered_twice(scene: Scene) -> None:
    """Guards against loading a peer twice, and lists that are prepared again: decode registers for
    every connection that it makes."""
    scene.peers.add(info())
    before = scene.peers.hold("d")
    scene.peers.add(info())
    assert scene.peers.hold("d") is before and before.users == 2
    assert scene.agent.calls["add_remote_agent"] == 1
    scene.check()


@pytest.mark.hazard("racing-peer-tables")
def test_forgotten_while_something_is_under_way(scene: Scene) -> None:
    """Guards against pulling a peer away from under a transfer, and against starting another one
    meanwhile."""
    scene.peers.add(info())
    first, second = scene.peers.hold("d"), scene.peers.hold("d")
    scene.peers.forget("d")
    assert scene.table == {} and list(scene.agent.peers) == ["d"]
    with pytest.raises(TransferError, match="decode rank d is not registered here any more"):
        scene.peers.hold("d")
    scene.peers.release(first)
    assert list(scene.agent.peers) == ["d"]
    scene.peers.release(second)
    scene.check()
    assert scene.agent.peers == {} and scene.agent.calls["remove_remote_agent"] == 1
    scene.peers.forget("d")  # again is harmless
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
    assert scene.agent.calls["add_remote_agent"] == 2
    again = scene.peers.hold("d")
    assert again.lists.get("VRAM", POOL) is not before
    scene.peers.release(held)
    scene.peers.release(again)
    scene.check()
    assert list(scene.table) == ["d"] and again.users == 0
    scene.peers.forget("d")
    scene.check()
    assert scene.agent.peers == {}


def test_refused_when_it_comes_back(scene: Scene) -> None:
    """Guards against publishing a peer that NIXL does not take again."""
    scene.peers.add(info())
    held = scene.peers.hold("d")
    scene.peers.forget("d")
    scene.agent.script["add_remote_agent"].append(ValueError())
    with pytest.raises(ValueError):
        scene.peers.add(info())
    assert scene.table == {}
    with pytest.raises(TransferError):
        scene.peers.hold("d")
    scene.peers.release(held)
    scene.check()
    assert scene.agent.peers == {}


def test_nixl_cannot_forget_it(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    """Guards against one peer's trouble that keeps the reader thread from the others."""
    for name in ("d", "e"):
        scene.peers.add(info(name))
    scene.agent.script["remove_remote_agent"].append(nixlNotFoundError("d"))
    scene.peers.forget("d")
    assert "could not forget decode rank d" in caplog.text
    scene.peers.forget("e")
    assert scene.table == {} and list(scene.agent.peers) == ["d"]


def test_a_stranger(scene: Scene) -> None:
    """Guards against an entry for a name that was only asked for."""
    scene.peers.forget("nobody")
    with pytest.raises(TransferError):
        scene.peers.hold("nobody")
    scene.check()


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
    scene.check()
    assert scene.table == {}


@pytest.mark.hazard("racing-peer-tables")
def test_peers_change_between_posts(scene: Scene) -> None:
    """Guards against a change of NIXL's peers that waits for a post inside NIXL, where a release by
    a third thread waits for both with the interpreter's lock; against a post that begins meanwhile;
    and against workers that cannot take or give back a peer in all that time."""
    for name in ("d", "e"):
        scene.peers.add(info(name))
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

    def add() -> None:
        scene.peers.add(info("f"))

    def post_again() -> None:
        with scene.peers.posting():
            order.append("posted again")

    scene.agent.before["add_remote_agent"] = lambda: change("added")
    with ThreadPoolExecutor(4) as threads:
        futures = [threads.submit(post)]
        assert posting.wait(10)
        futures.append(threads.submit(add))
        until(lambda: scene.peers._is_changing)
        futures.append(threads.submit(post_again))
        scene.peers.release(scene.peers.hold("d"))
        scene.peers.add(info("d"))  # known: nothing to wait for
        assert order == []
        posted.set()
        assert changing.wait(10)
        scene.peers.release(scene.peers.hold("d"))
        assert order == ["posted", "added"]
        changed.set()
        for future in futures:
            future.result()
    assert order == ["posted", "added", "posted again"]
    scene.check()
    scene.agent.before.clear()
    removing = threading.Thread(target=scene.peers.forget, args=("e",))
    with scene.peers.posting():
        removing.start()
        until(lambda: scene.peers._is_changing)
        assert "e" in scene.agent.peers and "e" not in scene.table
    removing.join(10)
    scene.check()
    assert sorted(scene.agent.peers) == ["d", "f"]


@pytest.mark.hazard("racing-peer-tables")
def test_a_post_that_hangs() -> None:
    """Guards against a change of NIXL's peers that waits for ever for a post that hangs: it holds
    up the posts of all other workers meanwhile, and the reader thread, on which the watchdog is."""
    scene = Scene()
    scene.peers = Peers(scene.agent, scene.table, patience_s=0.0)
    for name in ("d", "e"):
        scene.peers.add(info(name))

    def post_again() -> None:
        with scene.peers.posting():
            pass

    with ThreadPoolExecutor(1) as threads, scene.peers.posting():
        with pytest.raises(TimeoutError, match="decode rank f cannot be taken"):
            scene.peers.add(info("f"))
        scene.peers.forget("e")
        assert sorted(scene.table) == ["d"] and sorted(scene.agent.peers) == ["d", "e"]
        threads.submit(post_again).result(10)
    scene.peers.add(info("f"))
    assert sorted(scene.table) == ["d", "f"]
    scene.peers.forget("f")
    scene.check()
    assert sorted(scene.agent.peers) == ["d"], "with the one that had to stay"


@pytest.mark.hazard("racing-peer-tables")
def test_a_post_that_hangs_is_waited_for_once(scene: Scene) -> None:
    """All ranks of a decode server register or are lost at a time. Guards against a wait for each
    of them: 35 s of the reader thread for seven, after which all rooms fail; and against changes
    that stay refused once the post has returned."""
    for name in ("d", "e"):
        scene.peers.add(info(name))
    scene.peers._patience_s = 0.0
    with ThreadPoolExecutor(1) as threads:
        with scene.peers.posting():
            with pytest.raises(TimeoutError, match="decode rank f cannot be taken"):
                scene.peers.add(info("f"))
            scene.peers._patience_s = 30.0
            for name in ("g", "h"):
                refused = threads.submit(scene.peers.add, info(name)).exception(10)
                assert f"decode rank {name} cannot be taken" in str(refused)
            threads.submit(scene.peers.forget, "e").result(10)
            assert sorted(scene.table) == ["d"] and sorted(scene.agent.peers) == ["d", "e"]
        scene.peers.add(info("g"))
    scene.peers.forget("g")
    scene.check()
    assert sorted(scene.agent.peers) == ["d"]


def test_lists_go_between_posts(scene: Scene) -> None:
    """Guards against lists of a peer that has left which are released whenever Python likes: NIXL
    waits for the posts of others to do so, with the interpreter's lock."""
    scene.peers.add(info())
    held = scene.peers.hold("d")
    alone: list[bool] = []
    weakref.finalize(held.lists.get("VRAM", POOL), lambda: alone.append(scene.peers._is_changing))
    scene.agent.lists.clear()  # a note of the fake's
    scene.peers.forget("d")
    assert alone == []
    scene.peers.release(held)
    assert alone == [True]
    scene.check()


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
    del peer
    gc.collect()
    assert gone() is None and kept.entries
