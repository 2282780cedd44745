"""Print the files of the package that one request passes through, on decode and on prefill.

The script runs one request with a prefix hit through the scenes of the component tests, and traces
every call: a decode scheduler with its queues, tree and pool, a prefill scheduler, and one room
over two real NIXL agents between them. One-time work is not counted: connecting two servers, and
reading variables.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

os.environ.setdefault("UCX_TLS", "tcp,self")
ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "python/sglang/srt"
sys.path[:0] = [str(ROOT), str(ROOT / "test/srt"), str(ROOT / "test/srt/standin")]
import cpu_standin  # noqa: E402

cpu_standin.install()

#: Not in a request's path: a thread's occasional work for a server.
ELSEWHERE = "disaggregation/delta/decode/heartbeat.py"
#: Listed apart, because every part uses them and a reader of one request need not open them:
#: counters and log lines, arithmetic of pages, SGLang's status of a room, the reduction over ranks,
#: variables.
UTILITIES = {
    "disaggregation/delta/observability.py",
    "disaggregation/delta/pages.py",
    "disaggregation/delta/rank.py",
    "disaggregation/delta/rank_agreement.py",
    "patchset/environment.py",
}


class Trace:
    """The files of the package in which a function was called, by side."""

    def __init__(self, package: Path) -> None:
        """``package``: the folder ``sglang/srt`` with the installed package. In a wheel it also has
        SGLang's files, which do not count."""
        self.files: dict[str, set[str]] = {"decode": set(), "prefill": set()}
        self._package = f"{package}{os.sep}"
        self._ours = {str(path.relative_to(SOURCES)) for path in SOURCES.rglob("*.py")}
        self._side = ""
        self._recording = False
        self._owners: dict[str, str] = {}
        start = threading.Thread.start

        def owned(thread: threading.Thread) -> None:
            thread.__dict__["side"] = _owner(sys._getframe(1))
            start(thread)

        threading.Thread.start = owned  # type: ignore[method-assign]
        threading.setprofile(self._called)
        sys.setprofile(self._called)

    @contextmanager
    def on(self, side: str) -> Iterator[None]:
        """Count calls of this thread within the context for ``side``."""
        before, self._side = self._side, side
        try:
            yield
        finally:
            self._side = before

    @contextmanager
    def threads(self) -> Iterator[None]:
        """Count calls of the servers' own threads within the context."""
        self._recording = True
        try:
            yield
        finally:
            self._recording = False

    def _called(self, frame: Any, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if event != "call" or not name.startswith(self._package):
            return
        thread = threading.current_thread()
        is_main = thread is threading.main_thread()
        side = self._side if is_main else self._recording and thread.__dict__.get("side")
        name = name[len(self._package) :]
        if side and name in self._ours and not name.startswith(ELSEWHERE):
            self.files[side].add(name)


def _owner(frame: Any) -> str:
    """Return the side of the transfer manager or scheduler that starts a thread in ``frame``."""
    while frame is not None:
        mode = getattr(frame.f_locals.get("self"), "disaggregation_mode", None)
        if mode is not None:
            return str(mode.value)
        frame = frame.f_back
    return ""


def decode(trace: Trace) -> None:
    """Run admission, commit, decoding and the end, with a prefix of an earlier request."""
    from component.decode.decoder import Decoder

    decoder = Decoder(4, 256)
    decoder.submit([*range(32)], new=1)
    decoder.drain()
    with trace.on("decode"):
        decoder.submit([*range(32), *range(20)], new=2)
        decoder.drain()


def prefill(trace: Trace) -> None:
    """Run the chunk of a computed request, its transfer and its end."""
    import pytest

    from component.prefill.prefiller import Prefiller
    from sglang.srt.disaggregation.delta import wire

    encode = wire.encode_frame

    def encode_frame(frame: Any) -> bytes:
        with trace.on("decode"):  # the scene encodes frames that a decode rank sends
            return encode(frame)

    wire.encode_frame = encode_frame
    with pytest.MonkeyPatch.context() as patch:
        prefiller = Prefiller(patch)

        def serve(room: int, slot: int) -> None:
            prefiller.prefill(room, 10, [4, 5, 6], slot)
            prefiller.rank.finish()
            assert prefiller.turn() == [room]

        serve(6, 0)  # the first room of a decode rank also describes its pools
        with trace.on("prefill"):
            serve(7, 1)


def transfer(trace: Trace) -> None:
    """Run a room between two managers, from its announcement to its end on both sides."""
    from component.nixl.pair import Pair
    from component.transfer.pair import frame, pages, until
    from sglang.srt.disaggregation.base.conn import KVPoll

    pair = Pair()

    def move(on: Callable[[str], AbstractContextManager[None]]) -> None:
        room = pair.next_room()
        with on("decode"):
            receiver = pair.receiver(room)
            receiver.announce(frame(8), pages(20, 9, 11), 5)
        with on("prefill"):
            sender = pair.sender(room)
            pair.announced(sender)
            sender.init(5, 3)
            sender.send(pages(30, 31, 2))
            until(lambda: sender.poll() == KVPoll.Success, "sent")
            sender.clear()
        with on("decode"):
            until(lambda: receiver.poll() == KVPoll.Success, "arrived")
            receiver.clear()

    move(lambda side: nullcontext())  # the process's first room includes one-time reads
    with trace.threads():
        move(trace.on)


def main() -> int:
    """Print one line a side."""
    # Import before tracing starts, because a traced call takes several times as long.
    import component.decode.decoder
    import component.nixl.pair
    import component.prefill.prefiller  # noqa: F401
    from component.one_rank import one_rank
    from sglang.srt import patchset

    trace = Trace(Path(patchset.__file__).parents[1])
    with one_rank():
        transfer(trace)
        decode(trace)
        prefill(trace)
    lists = {side: files - UTILITIES for side, files in trace.files.items()}
    lists["utilities"] = set().union(*trace.files.values()) & UTILITIES
    for name, files in lists.items():
        print(f"{name}: {len(files)} files: {', '.join(sorted(files))}", flush=True)
    os._exit(0)  # NIXL may crash an interpreter at its exit where there is no GPU driver


if __name__ == "__main__":
    sys.exit(main())
