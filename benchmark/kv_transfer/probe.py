"""Timing wrappers around a library's calls, the same in every arm.

A NIXL transfer is described (``get_xfer_descs``, ``initialize_xfer``, ``make_prepped_xfer``),
posted (``transfer``) and looked at (``check_xfer_state``). What a thread does between beginning to
work and the post is *build*: SGLang's own arithmetic and the describing calls. A thread begins when
``send`` is called on it, or when a worker of ours takes a chunk from its queue.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from typing import Any

from benchmark.kv_transfer.records import Transfer

_ROOM = re.compile(rb"(\d+)_([a-z]+)")


class Probe:
    """Collects the transfers of one process. Called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._here = threading.local()
        self._transfers: list[Transfer] = []
        #: By id of the handle; removed when it is seen done.
        self._open: dict[int, tuple[Transfer, float]] = {}
        self._caller = threading.get_ident()

    def take(self) -> list[Transfer]:
        """The transfers since the last call. Those still open stay what they are."""
        with self._lock:
            taken, self._transfers = self._transfers, []
        return taken

    def begin(self, queued_s: float | None = None) -> None:
        """This thread begins to work on a chunk, which waited so long in a queue."""
        self._here.since = time.perf_counter()
        self._here.describe_s = 0.0
        self._here.queue_s = queued_s

    # ---- NIXL ----

    def watch_nixl(self, agent: Any) -> None:
        """Wrap the calls of one agent."""
        agent.get_xfer_descs = self._describing(agent.get_xfer_descs)
        agent.initialize_xfer = self._making(agent.initialize_xfer, _ranges, notif_at=4)
        agent.make_prepped_xfer = self._making(agent.make_prepped_xfer, _selected, notif_at=5)
        agent.transfer = self._posting(agent.transfer)
        agent.check_xfer_state = self._looking(agent.check_xfer_state)

    def _describing(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self._add_description(time.perf_counter() - began)

        return timed

    def _making(
        self, call: Callable[..., Any], count: Callable[..., int], notif_at: int
    ) -> Callable[..., Any]:
        describing = self._describing(call)

        def timed(*args: Any, **kwargs: Any) -> Any:
            handle = describing(*args, **kwargs)
            text = kwargs.get("notif_msg", args[notif_at] if len(args) > notif_at else b"")
            room, is_metadata = _room_of(text)
            transfer = Transfer(
                room, is_metadata, count(*args), getattr(self._here, "describe_s", 0.0), None
            )
            self._here.describe_s = 0.0
            with self._lock:
                self._open[id(handle)] = (transfer, 0.0)
            return handle

        return timed

    def _posting(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(handle: Any, *args: Any, **kwargs: Any) -> Any:
            here = self._here
            began = time.perf_counter()
            state = call(handle, *args, **kwargs)
            ended = time.perf_counter()
            with self._lock:
                transfer = self._open.pop(id(handle), (None, 0.0))[0]
                if transfer is None:  # posted a second time, or made before the wrappers
                    transfer = Transfer(None, False, 0, 0.0, None)
                since = getattr(here, "since", None)
                transfer.build_s = None if since is None else began - since
                transfer.queue_s, here.queue_s = getattr(here, "queue_s", None), None
                transfer.post_s = ended - began
                transfer.on_caller = threading.get_ident() == self._caller
                self._transfers.append(transfer)
                if state == "DONE":
                    transfer.wire_s = 0.0
                else:
                    self._open[id(handle)] = (transfer, ended)
            if since is not None:
                here.since = ended
            return state

        return timed

    def _looking(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(handle: Any) -> Any:
            state = call(handle)
            if state == "DONE" and id(handle) in self._open:
                now = time.perf_counter()
                with self._lock:
                    transfer, posted = self._open.pop(id(handle), (None, 0.0))
                if transfer is not None:
                    transfer.wire_s = now - posted
            return state

        return timed

    def _add_description(self, seconds: float) -> None:
        self._here.describe_s = getattr(self._here, "describe_s", 0.0) + seconds

    # ---- Mooncake ----

    def watch_mooncake(self, engine: Any, is_kv: Callable[[int], bool]) -> None:
        """Wrap SGLang's engine: its one call posts and waits, so that all of it is wire. ``is_kv``:
        whether an address is one of the pool's."""
        call = engine.batch_transfer_sync

        def timed(session: Any, sources: Any, destinations: Any, lengths: Any) -> Any:
            began = time.perf_counter()
            state = call(session, sources, destinations, lengths)
            wire_s = time.perf_counter() - began
            is_metadata = not is_kv(sources[0])
            moved = Transfer(None, is_metadata, len(lengths), 0.0, None, None, wire_s)
            with self._lock:
                self._transfers.append(moved)
            return state

        engine.batch_transfer_sync = timed

    # ---- our workers ----

    def watch_workers(self) -> None:
        """Hear when a worker of ours takes a chunk from its queue; nothing where the patch set is
        off."""
        try:
            from sglang.srt.disaggregation.delta.observability import AsyncTransferStats
        except ImportError:
            return
        queued = AsyncTransferStats.queued

        def heard(stats: Any, seconds: float) -> Any:
            self.begin(seconds)
            return queued(stats, seconds)

        AsyncTransferStats.queued = heard


def _room_of(text: Any) -> tuple[int | None, bool]:
    raw = text.encode() if isinstance(text, str) else text
    found = _ROOM.match(raw)
    return (int(found[1]), found[2] == b"aux") if found else (None, False)


def _ranges(_operation: Any, local: Any, *_: Any) -> int:
    return int(local.descCount())


def _selected(_operation: Any, _local: Any, indices: Any, *_: Any) -> int:
    return len(indices)
