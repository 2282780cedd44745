"""A NIXL agent that copies between two numpy memories when a test settles a transfer, and reports
misuse. Like the real one it refuses unregistered names, and forgets a lost peer."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

#: (address, length, device)
Range = tuple[int, int, int]


class nixlRemoteDisconnectError(Exception):  # noqa: N801 - it is recognised by the binding's name
    """The peer's process has ended."""


class nixlNotFoundError(Exception):  # noqa: N801
    """The peer, list or registration does not exist."""


class Memory:
    """Bytes from an address on; addresses outside cannot be read or written."""

    def __init__(self, base: int, seed: int, size: int = 1 << 16) -> None:
        self._base = base
        self._bytes = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
        self._used = 0

    def allocate(self, slots: int, item_len: int) -> tuple[int, npt.NDArray[np.uint8]]:
        """Return the address of a buffer, and its bytes as a view (slots, item_len)."""
        start = self._used + 5  # a gap outside all buffers
        self._used = start + slots * item_len
        return self._base + start, self._bytes[start : self._used].reshape(slots, item_len)

    def at(self, address: int, length: int) -> npt.NDArray[np.uint8]:
        """Return a view of these bytes."""
        start = address - self._base
        assert start >= 0 and start + length <= self._used, hex(address)
        return self._bytes[start : start + length]


@dataclass(eq=False)
class List:
    """A prepared list."""

    owner: str
    memory: str
    entries: list[Range]
    #: The loading of the owner's metadata with which the list was prepared.
    loaded: object


@dataclass(eq=False)
class Handle:
    """One transfer, which the test settles; ``state`` may also be an exception to raise."""

    peer: str
    memory: str
    sources: list[Range]
    destinations: list[Range]
    is_prepared: bool
    lists: tuple[List, ...] = ()
    state: str | Exception = "PROC"
    is_posted: bool = False
    releases: int = 0
    #: The transfer's room, if a test sets it.
    room: int | None = None

    @property
    def is_under_way(self) -> bool:
        """True if posted and not settled."""
        return self.is_posted and self.state == "PROC"


@dataclass
class FakeAgent:
    """``memories``: this rank's under "", and each peer's under its name."""

    memories: dict[str, Memory] = field(default_factory=dict)
    handles: list[Handle] = field(default_factory=list)
    #: Peers that are loaded, by name.
    peers: dict[str, object] = field(default_factory=dict)
    #: Peers whose connection broke after they were loaded.
    lost: set[str] = field(default_factory=set)
    #: Sent notifications, by peer.
    notes: defaultdict[str, list[bytes]] = field(default_factory=lambda: defaultdict(list))
    calls: Counter[str] = field(default_factory=Counter)
    #: Tests must assert that it is empty, because the workers swallow errors.
    misuse: list[str] = field(default_factory=list)
    #: Exceptions of the next calls, by call; None: the call succeeds.
    script: defaultdict[str, deque[Exception | None]] = field(
        default_factory=lambda: defaultdict(deque)
    )
    #: Functions that run at the start of each call, by call.
    before: dict[str, Any] = field(default_factory=dict)
    lists: list[List] = field(default_factory=list)
    _in_peers: threading.Lock = field(default_factory=threading.Lock)

    # ---- peers ----

    def add_remote_agent(self, metadata: bytes) -> str:
        with self._changing_peers():
            self._call("add_remote_agent")
            name = metadata.decode()
            if name not in self.peers or name in self.lost:
                self.peers[name] = object()
            self.lost.discard(name)
            return name

    def remove_remote_agent(self, name: str) -> None:
        with self._changing_peers():
            self._call("remove_remote_agent")
            if self.under_way(name):
                self.misuse.append(f"{name} is removed while a transfer to it is in flight")
            self.lost.discard(name)
            if self.peers.pop(name, None) is None:
                self.misuse.append(f"{name} is removed, which is not known")
                raise nixlNotFoundError(name)

    @contextmanager
    def _changing_peers(self) -> Iterator[None]:
        if not self._in_peers.acquire(blocking=False):
            self.misuse.append("two threads change peers at the same time")
            self._in_peers.acquire()
        try:
            yield
        finally:
            self._in_peers.release()

    # ---- transfers ----

    def get_xfer_descs(self, rows: npt.NDArray[np.uint64], memory: str) -> Any:
        self._call("get_xfer_descs")
        return memory, self._ranges(rows)

    def prep_xfer_dlist(self, name: str, rows: npt.NDArray[np.uint64], memory: str) -> List:
        self._call("prep_xfer_dlist")
        is_ours = name == "NIXL_INIT_AGENT"
        loaded = None if is_ours else self._loaded(name)
        self.lists.append(List("" if is_ours else name, memory, self._ranges(rows), loaded))
        return self.lists[-1]

    def initialize_xfer(self, op: str, ours: Any, theirs: Any, peer: str) -> Handle:
        self._call("initialize_xfer")
        self._loaded(peer)
        if op != "WRITE" or ours[0] != theirs[0]:
            self.misuse.append(f"{op} from {ours[0]} to {theirs[0]}")
        return self._make(Handle(peer, ours[0], ours[1], theirs[1], False))

    def make_prepped_xfer(
        self, op: str, ours: List, our_picks: Any, theirs: List, their_picks: Any
    ) -> Handle:
        self._call("make_prepped_xfer")
        if op != "WRITE" or ours.memory != theirs.memory or ours.owner:
            self.misuse.append(f"{op} from {ours} to {theirs}")
        self._check_list(theirs)
        if our_picks.dtype != np.int32 or their_picks.dtype != np.int32:
            self.misuse.append("selectors are not int32")
        sources = [ours.entries[pick] for pick in our_picks.tolist()]
        destinations = [theirs.entries[pick] for pick in their_picks.tolist()]
        return self._make(
            Handle(theirs.owner, ours.memory, sources, destinations, True, (ours, theirs))
        )  # fmt: skip

    def _make(self, handle: Handle) -> Handle:
        if len(handle.sources) != len(handle.destinations) or not handle.sources:
            self.misuse.append(f"{handle}: {len(handle.sources)} ranges")
        self.handles.append(handle)
        return handle

    def transfer(self, handle: Handle) -> str:
        if handle.is_posted or handle.releases:
            self.misuse.append(f"{handle} is posted again, or after its release")
        self._call("transfer")
        self._loaded(handle.peer)
        if handle.peer in self.lost:
            raise nixlRemoteDisconnectError(handle.peer)
        for each in handle.lists:
            if each.owner:
                self._check_list(each)
        handle.is_posted = True
        return str(handle.state)

    def send_notif(self, peer: str, note: bytes) -> None:
        self._call("send_notif")
        self._loaded(peer)
        self.notes[peer].append(note)

    def check_xfer_state(self, handle: Handle) -> str:
        self._call("check_xfer_state")
        if handle.releases:
            self.misuse.append(f"{handle} is checked after its release")
        if isinstance(handle.state, Exception):
            raise handle.state
        if not handle.is_posted:
            raise RuntimeError("not posted")
        return handle.state

    def release_xfer_handle(self, handle: Handle) -> None:
        handle.releases += 1
        if handle.releases > 1 or handle.is_under_way:
            self.misuse.append(f"{handle}: release {handle.releases} in {handle.state}")
        self._call("release_xfer_handle")

    # ---- for tests ----

    def settle(self, handle: Handle, state: str | Exception = "DONE") -> None:
        """End the transfer; its bytes arrive if ``state`` is DONE."""
        handle.state = state
        if state != "DONE":
            return
        for (source, length, _), (to, their_length, _) in zip(
            handle.sources, handle.destinations, strict=True
        ):
            assert length == their_length
            if self.memories:
                target = self.memories[handle.peer].at(to, length)
                target[:] = self.memories[""].at(source, length)

    def under_way(self, peer: str | None = None, room: int | None = None) -> list[Handle]:
        """Return the transfers that are posted and not settled."""
        return [
            handle
            for handle in list(self.handles)
            if handle.is_under_way and peer in (None, handle.peer) and room in (None, handle.room)
        ]

    def disconnect(self, peer: str) -> None:
        """Break the connection to a peer. As with NIXL, transfers can still be made but not posted,
        and prepared lists are invalid once the peer is loaded again."""
        for handle in self.under_way(peer):
            handle.state = nixlRemoteDisconnectError(peer)
        if peer in self.peers:
            self.lost.add(peer)

    def check(self) -> None:
        """Assert that there was no misuse, and that every handle was released once."""
        assert self.misuse == []
        assert [handle for handle in self.handles if handle.releases != 1] == []

    def _loaded(self, peer: str) -> object:
        if peer not in self.peers:
            raise nixlNotFoundError(peer)
        return self.peers[peer]

    def _check_list(self, prepared: List) -> None:
        if self._loaded(prepared.owner) is not prepared.loaded:
            self.misuse.append(f"a list of {prepared.owner} is used after NIXL dropped it")

    def _ranges(self, rows: npt.NDArray[np.uint64]) -> list[Range]:
        if rows.dtype != np.uint64 or not rows.flags.c_contiguous or rows.shape[1] not in (3, 5):
            self.misuse.append(f"rows of {rows.dtype} {rows.shape}")
        found = []
        for address, length, device, *strided in rows.tolist():
            stride, count = strided or (0, 1)
            found += [(address + index * stride, length, device) for index in range(count)]
        return found

    def _call(self, name: str) -> None:
        self.calls[name] += 1
        if name in self.before:
            self.before[name]()
        error = self.script[name].popleft() if self.script[name] else None
        if error is not None:
            raise error
